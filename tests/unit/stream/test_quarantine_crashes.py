"""Workers killed anywhere, records that are bad for a while, rulings at any time: in the end, what would have been."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import SessionDone
from clawstream.stream.log import Fate
from tests.examples import examples
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.unit.stream import queues, toys
from tests.unit.stream.test_crashes import CUTS, HURRY, PARTITIONS, SESSIONS, numbered, pieces, survive

BAD = st.sets(st.tuples(st.sampled_from("abcd"), st.integers(0, 8)), max_size=4)
FATES = st.sampled_from([Fate.REPLAY, Fate.DISCARD])


def joined_without(sessions: Sequence[str], left_out: set[tuple[str, int]]) -> dict[str, list[int]]:
    """What a log without these records would have given."""
    found: dict[str, list[int]] = {}
    for session in sorted(set(sessions)):
        used = [number for number in range(sessions.count(session)) if (session, number) not in left_out]
        if used[:-1]:
            found[session] = used[:-1]
    return found


async def ruled_and_closed(log: MemoryLog, fate: Fate, bad: set[tuple[str, int]]) -> None:
    """Rule about whatever is open until nothing waits."""
    async with toys.running(queues.chain(bad), log, pace=HURRY):
        await toys.settled(log, "chain")
        while not await queues.closed(log)():
            await queues.rule_if_any(log, fate)
            await asyncio.sleep(0.002)


@examples(0.6)
@given(SESSIONS, BAD, CUTS, CUTS, PARTITIONS, FATES)
def test_after_all_is_ruled_about_each_session_is_as_if_it_had_never_waited(
    sessions: list[str],
    bad: set[tuple[str, int]],
    cuts: list[tuple[int, bool]],
    later_cuts: list[tuple[int, bool]],
    partitions: int,
    fate: Fate,
) -> None:
    async def scenario() -> dict[str, list[int]]:
        broker = MemoryBroker(partitions=partitions)
        log = MemoryLog(broker)
        events: list[SessionDone] = numbered(sessions)
        half = len(events) // 2
        await survive(queues.chain(bad), broker, pieces(events[:half] or events, len(cuts) + 1), cuts)
        still_bad = bad if fate is Fate.DISCARD else set()
        await queues.rule_if_any(log, fate)
        # The worker that does what was ruled may die too, while the rest of the sessions comes in.
        rest = events[half:] if events[:half] else []
        await survive(
            queues.chain(still_bad),
            broker,
            pieces(rest, len(later_cuts) + 1) if rest else [[]] * (len(later_cuts) + 1),
            later_cuts,
        )
        await ruled_and_closed(log, fate, still_bad)
        return await queues.chained(log)

    left_out = bad if fate is Fate.DISCARD else set()
    assert asyncio.run(scenario()) == joined_without(sessions, left_out)
