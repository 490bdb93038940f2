"""Sessions behind a record that no row can be made of: how they come about, and what the tables say of them."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from hypothesis import strategies as st
from sqlalchemy import Engine, text

from clawstream.events import ExchangeCompleted
from clawstream.projections.write import rows as row_module
from clawstream.projections.write import stage
from clawstream.projections.write.rows import GROUP, TableRow, row
from clawstream.projections.write.stage import project
from clawstream.stream import topics
from clawstream.stream.dead_letters import Reason
from clawstream.stream.log import DeadLetterMark, Fate, PartitionId
from clawstream.stream.stage import Record
from tests.fakes.memory_group import ConnectionCut
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.projections import one_session
from tests.parts.projections.reading import empty
from tests.parts.projections.write.test_stage import projecting
from tests.parts.stream.raw import append_bytes
from tests.unit.stream import queues, toys

NONSENSE = -1
Told = tuple[str, int]  # a session, and the number of one of its exchanges, or NONSENSE
TOLD = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=16)
CUTS = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=3)


def exchange(session: str, number: int) -> ExchangeCompleted:
    return replace(one_session.EXCHANGES[0], session_id=session, exchange_id=f"{session}{number}")


@contextmanager
def breaking_on(bad: set[Told]) -> Iterator[None]:
    """No row can be made of these while the block lasts."""

    def made(record: Record) -> TableRow | None:
        event = record.event
        assert isinstance(event, ExchangeCompleted)
        if (event.session_id, int(event.exchange_id[1:])) in bad:
            raise ValueError("bad")
        return row(record)

    with patch.object(row_module, "row", made), patch.object(stage, "POLL_S", 0.005):
        yield


async def tell(log: MemoryLog, told: Sequence[Told]) -> None:
    for session, number in told:
        if number == NONSENSE:
            await append_bytes(log, topics.EXCHANGES, session.encode(), b"nonsense", [])
        else:
            await log.append([exchange(session, number)])


async def survive(url: str, broker: MemoryBroker, told: Sequence[Told], cuts: Sequence[tuple[int, bool]]) -> None:
    """Tell the log in pieces; let a projector die at each cut and another go on; the last one has read all."""
    size = -(-len(told) // (len(cuts) + 1))
    for number, (operations, takes_effect) in enumerate(cuts):
        await tell(MemoryLog(broker), told[number * size : (number + 1) * size])
        cut = ConnectionCut(operations=operations, takes_effect=takes_effect)
        working = asyncio.create_task(project(url, MemoryLog(broker, cut=cut), stop=asyncio.Event()))
        dead = asyncio.create_task(cut.happened.wait())
        await asyncio.wait([working, dead], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        await asyncio.wait([working, dead])
    await tell(MemoryLog(broker), told[len(cuts) * size :])
    async with projecting(url, MemoryLog(broker)):
        await toys.settled(MemoryLog(broker), GROUP)


async def ruled_and_closed(url: str, broker: MemoryBroker, discard: bool) -> None:
    """Rule until nothing waits: what is nonsense is discarded, other things too with `discard`."""
    log = MemoryLog(broker)
    async with projecting(url, log):
        await toys.settled(log, GROUP)
        while not await queues.closed(log)():
            await rule(log, discard)
            await asyncio.sleep(0.005)


async def rule(log: MemoryLog, discard: bool) -> None:
    marks = [
        DeadLetterMark(
            id=dead_letter.id,
            key=dead_letter.key,
            attempt=dead_letter.attempt,
            fate=Fate.DISCARD if discard or dead_letter.reason is Reason.UNDECODABLE else Fate.REPLAY,
        )
        for dead_letter in await queues.dead_letters(log)
        if dead_letter.fate is Fate.OPEN and dead_letter.reason is not Reason.PARKED
    ]
    await log.mark(marks)


def rows(engine: Engine) -> dict[str, list[int]]:
    """By session, the offsets of the records that its rows are of."""
    with engine.connect() as connection:
        found: dict[str, list[int]] = {}
        query = "SELECT session_id, source_offset FROM exchanges ORDER BY source_offset"
        for session, offset in connection.execute(text(query)):
            found.setdefault(session, []).append(offset)
        return found


def fates(engine: Engine) -> dict[int, str]:
    """By offset, what became of the records that the tables say are set aside."""
    with engine.connect() as connection:
        found = connection.execute(text("SELECT source_offset, fate FROM set_aside"))
        return {int(offset): str(fate) for offset, fate in found}


async def begun_again(engine: Engine, url: str, broker: MemoryBroker) -> None:
    """Let a projector fill the tables, emptied, from the beginning; the queues are as they were."""
    empty(engine)
    broker.group(GROUP).committed.clear()
    await survive(url, broker, [], [])


def expected(
    broker: MemoryBroker, told: Sequence[Told], left_out: set[int], *, until: set[Told]
) -> dict[str, list[int]]:
    """What a log without the records at these places in `told` gives, of each session up to what is in `until`."""
    found: dict[str, list[int]] = {}
    counts: dict[int, int] = {}
    seen: set[Told] = set()
    ended: set[str] = set()
    for at, (session, number) in enumerate(told):
        place = broker_place(broker, session)
        offset = counts.get(place, 0)
        counts[place] = offset + 1
        if (session, number) in until:
            ended.add(session)
        if number != NONSENSE and at not in left_out and session not in ended and (session, number) not in seen:
            seen.add((session, number))
            found.setdefault(session, []).append(offset)
    return found


def broker_place(broker: MemoryBroker, session: str) -> int:
    [partition] = [
        place.partition for place in broker.places([topics.EXCHANGES]) if any(
            raw.key == session.encode() for raw in broker.records(place)
        )
    ]  # fmt: skip
    return partition


def heads(told: Sequence[Told], bad: set[Told]) -> set[int]:
    """Where in `told` the first record of each session stands that no row can be made of."""
    firsts: dict[str, int] = {}
    for at, (session, number) in enumerate(told):
        if number == NONSENSE or (session, number) in bad:
            firsts.setdefault(session, at)
    return set(firsts.values())


def exchanges(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT exchange_id FROM exchanges ORDER BY 1")).scalars())


PLACE = PartitionId(topics.EXCHANGES, 0)
