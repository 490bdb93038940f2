"""A worker killed anywhere: its events are those of a worker that was never killed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import TryLater
from clawstream.events import Event, SessionDone
from clawstream.stream.runner.hosting import run
from clawstream.stream.stage import Stage
from tests.examples import examples
from tests.fakes.memory_group import ConnectionCut
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.unit.stream import toys

CUTS = st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=4)
SESSIONS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=30)
SEEDS = st.integers(0, 2**32)
HURRY = replace(toys.HASTE, poll_s=0.002)
PARTITIONS = st.sampled_from([1, 3])


def numbered(sessions: Sequence[str]) -> list[SessionDone]:
    counters = {session: count() for session in "abcd"}
    return [toys.done(session, next(counters[session])) for session in sessions]


async def survive(
    stage: Stage[Any, Any], broker: MemoryBroker, feeds: Sequence[Sequence[Event]], cuts: Sequence[tuple[int, bool]]
) -> None:
    """Feed the log in pieces; let a worker die at each cut and another go on; the last one finishes."""
    log = MemoryLog(broker)
    for feed, (operations, takes_effect) in zip(feeds, [*cuts, (0, False)], strict=False):
        await log.append(feed)
        if operations:
            cut = ConnectionCut(operations=operations, takes_effect=takes_effect)
            worker = asyncio.create_task(run(stage, MemoryLog(broker, cut=cut), stop=asyncio.Event(), pace=HURRY))
            dead = asyncio.create_task(cut.happened.wait())
            await asyncio.wait([worker, dead], return_when=asyncio.FIRST_COMPLETED)
            worker.cancel()
            await asyncio.wait([worker, dead])
    for feed in feeds[len(cuts) + 1 :]:
        await log.append(feed)
    async with toys.running(stage, log, pace=HURRY):
        await toys.settled(log, stage.name)


def pieces(events: Sequence[Event], num_pieces: int) -> list[list[Event]]:
    size = -(-len(events) // num_pieces)
    return [list(events[at : at + size]) for at in range(0, num_pieces * size, size)]


@examples(0.6)
@given(SESSIONS, CUTS, PARTITIONS)
def test_no_pair_is_lost_and_none_invented(sessions: list[str], cuts: list[tuple[int, bool]], partitions: int) -> None:
    async def scenario() -> set[str]:
        broker = MemoryBroker(partitions=partitions)
        await survive(toys.pairs(), broker, pieces(numbered(sessions), len(cuts) + 1), cuts)
        return await toys.written(MemoryLog(broker), toys.TURNS)

    expected = [toys.paired(s, n) for s in set(sessions) for n in range(sessions.count(s) - 1)]
    assert asyncio.run(scenario()) == toys.ids(expected)


@examples(0.4)
@given(SESSIONS, CUTS, PARTITIONS, st.integers(0, 4))
def test_sessions_that_closed_while_others_are_open_stay_closed(
    sessions: list[str], cuts: list[tuple[int, bool]], partitions: int, last: int
) -> None:
    async def scenario() -> set[str]:
        broker = MemoryBroker(partitions=partitions)
        await survive(toys.pairs(last=last), broker, pieces(numbered(sessions), len(cuts) + 1), cuts)
        return await toys.written(MemoryLog(broker), toys.TURNS)

    expected = [toys.paired(s, n) for s in set(sessions) for n in range(sessions.count(s) - 1) if n != last]
    assert asyncio.run(scenario()) == toys.ids(expected)


@examples(0.4)
@given(SESSIONS, CUTS, PARTITIONS, SEEDS)
def test_a_join_of_two_topics_finds_every_match_once(
    sessions: list[str], cuts: list[tuple[int, bool]], partitions: int, seed: int
) -> None:
    exchanges = numbered(sessions)
    both: list[Event] = [*exchanges, *(toys.paired(one.session_id, toys.number_of(one)) for one in exchanges)]
    Random(seed).shuffle(both)

    async def scenario() -> list[str]:
        broker = MemoryBroker(partitions=partitions)
        await survive(toys.joins(), broker, pieces(both, len(cuts) + 1), cuts)
        return [record.event.event_id for record in await toys.read(MemoryLog(broker), toys.HINTS)]

    found = asyncio.run(scenario())
    assert set(found) == toys.ids(toys.joined(one.session_id, toys.number_of(one)) for one in exchanges)
    assert cuts or len(found) == len(set(found))


@examples(0.4)
@given(SESSIONS, CUTS, PARTITIONS, SEEDS)
def test_no_call_is_lost_however_calls_end(
    sessions: list[str], cuts: list[tuple[int, bool]], partitions: int, seed: int
) -> None:
    exchanges = numbered(sessions)
    random = Random(seed)

    async def perform(call: SessionDone) -> list[Event]:
        for _ in range(random.randrange(20)):
            await asyncio.sleep(0)
        if random.random() < 0.2:
            raise TryLater("busy", retry_after_s=0.0)
        return await toys.answered(call)

    async def scenario() -> set[str]:
        broker = MemoryBroker(partitions=partitions)
        await survive(toys.asks(perform), broker, pieces(exchanges, len(cuts) + 1), cuts)
        return await toys.written(MemoryLog(broker), toys.VOTES)

    assert asyncio.run(scenario()) == toys.ids(toys.vote(one.session_id, toys.number_of(one)) for one in exchanges)
