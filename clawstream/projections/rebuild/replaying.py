"""Reads the log again up to fixed offsets: while one part is being stored, the lines of the next are made."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from typing import Protocol, TypeVar

from clawstream.projections.rebuild.makers import Make, num_processes
from clawstream.projections.write.lines import LeftOut, RawBatch, TableLines, row_records
from clawstream.stream.log import Arrived, PartitionId, Raw

T = TypeVar("T")

RECORDS_AT_ONCE = 4000
BYTES_AT_ONCE = 16_000_000

Tell = Callable[[str, int, int], None]  # the work's name, how much is done, of how much
Take = Callable[[Sequence[RawBatch], TableLines | None], None]


class ReplayedLog(Protocol):
    """The part of a log that reading again needs."""

    def replay(self, ranges: Mapping[PartitionId, tuple[int, int]]) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records from the first offset up to but not including the second, in order."""

    def replay_raw(self, ranges: Mapping[PartitionId, tuple[int, int]]) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes of what `replay` yields."""

    async def begin_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        """Return the oldest offset that each partition still has."""

    async def end_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        """Return the offset that each partition's next record will have."""


async def read_again(
    log: ReplayedLog,
    ranges: Mapping[PartitionId, tuple[int, int]],
    take: Take,
    tell: Callable[[int], None],
    *,
    make: Make | None,
    left_out: LeftOut,
) -> int:
    """Give all records of the ranges to `take`, on a thread and in order per partition; return their number.

    With `make`, `take` gets their lines too, except of records left out. `tell` gets the number taken so far.
    """
    taken = 0
    wanted = {place: range_ for place, range_ in ranges.items() if range_[0] < range_[1]}
    making: deque[tuple[Sequence[RawBatch], asyncio.Task[TableLines | None]]] = deque()

    async def take_first() -> None:
        nonlocal taken
        batches, task = making[0]
        made = await task
        await asyncio.to_thread(take, batches, made)
        making.popleft()
        taken += sum(len(batch.records) for batch in batches)
        tell(taken)

    try:
        async with aclosing(log.replay_raw(wanted)) as arriving, aclosing(_gathered(arriving)) as gathered:
            async for raws in gathered:
                batches = batches_of(raws)
                making.append((batches, asyncio.create_task(_made(batches, make, left_out))))
                if len(making) > num_processes() + 1:
                    await take_first()
            while making:
                await take_first()
    finally:
        for _, task in making:
            task.cancel()
        await asyncio.gather(*(task for _, task in making), return_exceptions=True)
    return taken


@asynccontextmanager
async def on_a_thread(blocking: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context that blocks."""
    value = await asyncio.to_thread(blocking.__enter__)
    try:
        yield value
    except BaseException as error:
        if not await asyncio.to_thread(blocking.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(blocking.__exit__, None, None, None)


def batches_of(raws: Sequence[Raw]) -> list[RawBatch]:
    """Return the records by partition."""
    placed: defaultdict[PartitionId, list[Raw]] = defaultdict(list)
    for raw in raws:
        placed[PartitionId(raw.topic, raw.partition)].append(raw)
    return [RawBatch(place=place, records=some) for place, some in placed.items()]


async def _made(batches: Sequence[RawBatch], make: Make | None, left_out: LeftOut) -> TableLines | None:
    return None if make is None else await make(row_records(batches, left_out))


async def _gathered(arriving: AsyncGenerator[Sequence[Raw], None]) -> AsyncGenerator[list[Raw], None]:
    waiting: list[Raw] = []
    num_bytes = 0
    async for raws in arriving:
        waiting += raws
        num_bytes += sum(len(raw.value or b"") for raw in raws)
        if len(waiting) >= RECORDS_AT_ONCE or num_bytes >= BYTES_AT_ONCE:
            yield waiting
            waiting, num_bytes = [], 0
    if waiting:
        yield waiting
