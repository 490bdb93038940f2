"""Reads the log again up to fixed offsets: while one part is being stored, processes make the lines of the next.

A process that ends before it is told to ends the whole work, and nothing of it is kept.
"""

import asyncio
import gc
import os
import signal
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from clawstream.errors import PartUnavailable
from clawstream.projections.write.rows import LeftOut, RawBatch, RowRecords, TableLines, lines, row_records
from clawstream.stream.log import Arrived, PartitionId, Raw

Make = Callable[[RowRecords], Awaitable[TableLines]]

FEW_RECORDS = 20_000  # a process takes longer to start than to make the lines of so few records
MOST_PROCESSES = 4  # more would wait for the process that reads the log for them
_JOIN_S = 10.0


def num_processes() -> int:
    """Return how many processes are worth while: one for each core that this one may use, up to MOST_PROCESSES."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Makers:
    """The function that makes lines, and how many processes it uses."""

    make: Make
    processes: int


@asynccontextmanager
async def makers(num_records: int) -> AsyncIterator[Makers]:
    """Yield the function that makes lines of about `num_records` records: in processes, or for few records on a thread.

    That function raises PartUnavailable where a process ended before its work was done.
    """
    if num_records < FEW_RECORDS:
        yield Makers(make=lambda told: asyncio.to_thread(lines, told), processes=0)
        return
    all_of_them = [_Maker() for _ in range(num_processes())]
    idle: asyncio.Queue[_Maker] = asyncio.Queue()
    for maker in all_of_them:
        idle.put_nowait(maker)

    async def make(told: RowRecords) -> TableLines:
        maker = await idle.get()
        try:
            return await asyncio.to_thread(maker.make, told)
        finally:
            idle.put_nowait(maker)

    try:
        yield Makers(make=make, processes=len(all_of_them))
    finally:
        for maker in all_of_them:
            await asyncio.to_thread(maker.end)


class _Maker:
    """A process from now until `end`, or until this process is gone."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def make(self, told: RowRecords) -> TableLines:
        """Return the lines; blocks."""
        try:
            self._ours.send(told)
            made = self._ours.recv()
        except (EOFError, OSError) as error:
            self._process.join(_JOIN_S)
            raise PartUnavailable(
                f"a process that reads the log ended with status {self._process.exitcode} before its work was done "
                "(-9: it was killed, as when memory is short). The tables are as they were: do the same again"
            ) from error
        assert isinstance(made, TableLines), made
        return made

    def end(self) -> None:
        """End it, in the middle of its work too."""
        self._process.terminate()
        self._process.join(_JOIN_S)
        self._ours.close()


def _serve(told: "Connection[TableLines, RowRecords]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the process that started this one, which ends it
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # rows are trees of tuples and texts; next to nothing is a cycle
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the process that started this one is gone
        while True:
            told.send(lines(told.recv()))


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
