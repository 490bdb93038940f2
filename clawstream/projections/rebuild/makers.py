"""Processes that make lines: decoding is most of the work of reading a log again, and uses every core here.

The one rule: a process that ends before it is told to ends the whole work, and nothing of it is kept.
"""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

from clawstream.errors import PartUnavailable
from clawstream.projections.write.lines import RowRecords, TableLines, lines

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
