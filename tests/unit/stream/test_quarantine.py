"""The order in which a worker writes to its dead-letter queues."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from clawstream.errors import ParkedRecord, TryLater
from clawstream.stream.dead_letters.records import EXPIRED, DeadLetterId, DeadLetterMark, Fate
from clawstream.stream.log import Arrived, PartitionId
from clawstream.stream.runner.hosting import WorkerProgress
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.unit.stream import queues, toys


class _SlowCopies(MemoryLog):
    """A log that acknowledges the copy of a parked record once it may."""

    def __init__(self, like: MemoryLog) -> None:
        super().__init__(like.broker)
        self.may = asyncio.Event()
        self.copying = asyncio.Event()
        self.marked: list[DeadLetterMark] = []

    async def set_aside(
        self,
        dead_letter_id: DeadLetterId,
        *,
        error: Exception,
        attempt: int = 1,
        rebuild_offsets: Mapping[str, int] | None = None,
    ) -> None:
        if isinstance(error, ParkedRecord):
            self.copying.set()
            await self.may.wait()
        await super().set_aside(dead_letter_id, error=error, attempt=attempt, rebuild_offsets=rebuild_offsets)

    async def mark(self, marks: Sequence[DeadLetterMark]) -> None:
        self.marked += marks
        await super().mark(marks)


class _Expired(MemoryLog):
    """A log that has lost its first records, on which nobody can read or copy them."""

    begin = 0

    async def begin_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        return dict.fromkeys(await super().begin_offsets(topics), self.begin)

    async def replay(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        async for records in super().replay(ranges, key=key, digest=digest):
            yield [record for record in records if record.offset >= self.begin]

    async def set_aside(
        self,
        dead_letter_id: DeadLetterId,
        *,
        error: Exception,
        attempt: int = 1,
        rebuild_offsets: Mapping[str, int] | None = None,
    ) -> None:
        if dead_letter_id.offset < self.begin:
            raise TryLater("the offset is out of range")
        await super().set_aside(dead_letter_id, error=error, attempt=attempt, rebuild_offsets=rebuild_offsets)


async def test_a_replayed_letter_whose_record_is_past_its_retention_is_discarded_and_the_rest_is_used() -> None:
    log = _Expired(MemoryBroker(partitions=1))
    bad = {("a", 1)}
    await log.append([toys.done("a", number) for number in range(4)])
    async with toys.running(queues.chain(bad), log):
        await toys.settled(log, "chain")
        log.begin = 2
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await toys.until(queues.closed(log))
    fates = [
        (dead_letter.id.offset, dead_letter.fate, dead_letter.because) for dead_letter in await queues.dead_letters(log)
    ]
    assert fates == [(1, Fate.DISCARDED, EXPIRED), (2, Fate.REPLAYED, None), (3, Fate.REPLAYED, None)]
    assert await queues.chained(log) == {"a": [2]}


async def test_nothing_is_said_of_a_letter_in_its_queue_before_its_copy_stands_there() -> None:
    log, bad = MemoryLog(), {("a", 1)}
    slow = _SlowCopies(log)
    progress: list[WorkerProgress] = []

    async def is_used() -> bool:
        return await queues.chained(log) == {"a": [0, 1]}

    await log.append([toys.done("a", number) for number in range(3)])
    async with toys.running(queues.chain(bad), slow, progress=progress):
        await slow.copying.wait()
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await toys.until(is_used)
        before = len(progress)

        async def went_on() -> bool:
            return len(progress) > before + 1

        await toys.until(went_on)
        assert slow.marked == []
        slow.may.set()
        await toys.until(queues.closed(log))
    assert {dead_letter.fate for dead_letter in await queues.dead_letters(log)} == {Fate.REPLAYED}
