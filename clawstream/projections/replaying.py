"""The log read again, up to offsets that are fixed, by something that blocks; while it takes a batch the next comes."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from typing import Protocol, TypeVar

from clawstream.stream.log import Arrived, Batch, Place

T = TypeVar("T")

RECORDS_AT_ONCE = 5000

Tell = Callable[[str, int, int], None]  # what is done, how much of it, of how much


class ReplayedLog(Protocol):
    """What reading again needs of a log."""

    def replay(self, ranges: Mapping[Place, tuple[int, int]]) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records from the first offset up to and without the second, in order."""

    async def begin_offsets(self, topics: Sequence[str]) -> dict[Place, int]:
        """Return the oldest offset that each partition still has."""

    async def end_offsets(self, topics: Sequence[str]) -> dict[Place, int]:
        """Return the offset that each partition's next record will have."""


async def read_again(
    log: ReplayedLog,
    ranges: Mapping[Place, tuple[int, int]],
    take: Callable[[Sequence[Batch]], None],
    tell: Callable[[int], None],
) -> int:
    """Give all records of the ranges to `take`, on a thread and in order per partition; return how many there are.

    `tell` is told how many were taken so far.
    """
    taken = 0
    wanted = {place: range_ for place, range_ in ranges.items() if range_[0] < range_[1]}
    taking: asyncio.Task[None] | None = None
    try:
        async with aclosing(log.replay(wanted)) as arriving:
            async for records in _gathered(arriving):
                if taking is not None:
                    await taking
                    tell(taken)
                taking = asyncio.create_task(asyncio.to_thread(take, _batches(records)))
                taken += len(records)
    finally:
        if taking is not None:
            await taking
    tell(taken)
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


async def _gathered(arriving: AsyncGenerator[Sequence[Arrived], None]) -> AsyncGenerator[list[Arrived], None]:
    waiting: list[Arrived] = []
    async for records in arriving:
        waiting += records
        if len(waiting) >= RECORDS_AT_ONCE:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _batches(records: Sequence[Arrived]) -> list[Batch]:
    placed: defaultdict[Place, list[Arrived]] = defaultdict(list)
    for record in records:
        placed[Place(record.topic, record.partition)].append(record)
    return [Batch(place=place, records=some, next_offset=some[-1].offset + 1) for place, some in placed.items()]
