"""Followers that share a reading: each gets what it would get alone, wherever and whenever it begins."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import TryLater
from clawstream.stream.log import Arrived, Log, Start
from clawstream.stream.shared import SharedLog
from clawstream.stream.stage import Record
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.unit.stream import toys
from tests.unit.stream.toys import EXCHANGES

Place = tuple[int, int]  # partition and offset


class Counting(MemoryLog):
    """Counts the readings that go on, and fails them when told."""

    num_readings = 0
    fails = False

    async def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        if until_end:
            async for records in super().follow(topics, start, until_end=True):
                yield records
            return
        self.num_readings += 1
        try:
            async for records in super().follow(topics, start):
                if self.fails:
                    raise TryLater("the broker is away")
                yield records
        finally:
            self.num_readings -= 1


async def followed(log: Log, start: Start, into: list[Place]) -> None:
    async with aclosing(log.follow([EXCHANGES], start)) as reading:  # type: ignore[type-var]
        async for records in reading:
            into += [(one.partition, one.offset) for one in records]
            await asyncio.sleep(0)


async def settled(seen: Sequence[list[Place]], expected: Sequence[int]) -> None:
    async with asyncio.timeout(10):
        while any(len(found) < number for found, number in zip(seen, expected, strict=True)):
            await asyncio.sleep(0.001)


@given(
    st.lists(
        st.one_of(
            st.integers(1, 30).map(lambda number: ("write", number)),
            st.sampled_from(["earliest", "latest"]).map(lambda start: ("follow", start)),
            st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).map(lambda at: ("follow", at)),
            st.integers(0, 3).map(lambda number: ("leave", number)),
        ),
        max_size=14,
    )
)
def test_each_follower_gets_every_record_from_its_start_on_once_and_in_order(deeds: list[tuple[str, Any]]) -> None:
    asyncio.run(_each_gets_all(deeds))


async def _each_gets_all(deeds: list[tuple[str, Any]]) -> None:
    broker = MemoryBroker(partitions=3)
    plain = Counting(broker)
    log = SharedLog.of(plain)
    number, followers = 0, list[tuple[asyncio.Task[None], list[Place], dict[int, int]]]()
    for deed, what in deeds:
        if deed == "write":
            await plain.append([toys.done(f"session {one % 7}", one) for one in range(number, number + what)])
            number += what
        elif deed == "follow":
            ends = await plain.end_offsets([EXCHANGES])
            start: Start = what
            if isinstance(what, tuple):
                start = {(p.topic, p.partition): min(what[p.partition], end) for p, end in ends.items()}
            begins = {p.partition: offset for p, offset in (await plain.offsets_at([EXCHANGES], start)).items()}
            found: list[Place] = []
            followers.append((asyncio.create_task(followed(log, start, found)), found, begins))
        elif what < len(followers):
            task, *_ = followers.pop(what)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
    stop = {p.partition: end for p, end in (await plain.end_offsets([EXCHANGES])).items()}
    wanted = [{p: list(range(begins[p], stop[p])) for p in stop} for *_, begins in followers]
    try:
        await settled([found for _, found, _ in followers], [sum(map(len, one.values())) for one in wanted])
        for (_, found, _), expected in zip(followers, wanted, strict=True):
            assert {p: [offset for q, offset in found if q == p] for p in stop} == expected
        assert plain.num_readings <= 1
    finally:
        for task, *_ in followers:
            task.cancel()
        await asyncio.gather(*(task for task, *_ in followers), return_exceptions=True)


async def test_the_topics_are_read_once_for_all_and_not_at_all_when_nobody_follows() -> None:
    plain = Counting(MemoryBroker(partitions=3))
    log = SharedLog.of(plain)
    await plain.append([toys.done("a", number) for number in range(5)])
    seen: list[list[Place]] = [[], [], []]
    tasks = [asyncio.create_task(followed(log, "earliest", found)) for found in seen]
    await settled(seen, [5, 5, 5])
    assert plain.num_readings == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert plain.num_readings == 0
    again: list[Place] = []
    task = asyncio.create_task(followed(log, "earliest", again))
    await settled([again], [5])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_reading_that_fails_fails_for_each_follower_also_for_one_that_comes_later() -> None:
    plain = Counting(MemoryBroker(partitions=3))
    log = SharedLog.of(plain)
    tasks = [asyncio.create_task(followed(log, "earliest", [])) for _ in range(2)]
    await asyncio.sleep(0.01)
    plain.fails = True
    await plain.append([toys.done("a", 0)])
    late = asyncio.create_task(followed(log, "latest", []))
    for task in (*tasks, late):
        async with asyncio.timeout(5):
            with pytest.raises(TryLater, match="away"):
                await task
        if task is tasks[-1]:
            await plain.append([toys.done("a", 1)])


async def test_a_reading_to_the_end_is_a_reader_of_its_own() -> None:
    plain = Counting(MemoryBroker(partitions=3))
    log = SharedLog.of(plain)
    await plain.append([toys.done("a", number) for number in range(3)])
    found = [one async for records in log.follow([EXCHANGES], until_end=True) for one in records]
    assert all(isinstance(one, Record) for one in found)
    assert len(found) == 3


async def test_one_that_begins_at_the_end_gets_nothing_of_what_was_read_for_others_after_it_came() -> None:
    plain = Counting(MemoryBroker(partitions=3))
    log = SharedLog.of(plain)
    await plain.append([toys.done("a", number) for number in range(5)])
    seen: list[list[Place]] = [[], []]
    tasks = [
        asyncio.create_task(followed(log, "earliest", seen[0])),
        asyncio.create_task(followed(log, "latest", seen[1])),
    ]
    await settled(seen, [5, 0])
    await plain.append([toys.done("a", 5)])
    await settled(seen, [6, 1])
    assert seen[1] == seen[0][5:]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_that_takes_nothing_and_leaves_holds_up_no_other() -> None:
    plain = Counting(MemoryBroker(partitions=3))
    log = SharedLog.of(plain)
    idle = log.follow([EXCHANGES])
    await plain.append([toys.done("a", 0)])
    assert len(await anext(idle)) == 1
    found: list[Place] = []
    other = asyncio.create_task(followed(log, "earliest", found))
    for number in range(1, 12):
        await plain.append([toys.done("a", number)])
        await asyncio.sleep(0.01)
    assert len(found) < 12, "the reading waits for the one that takes nothing"
    await idle.aclose()  # type: ignore[attr-defined]
    await settled([found], [12])
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
