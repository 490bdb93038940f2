"""What reading the log again up to fixed offsets needs, for a rebuild and an audit."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Protocol, TypeVar

from clawstream.stream.log import Log, PartitionId, Raw

T = TypeVar("T")

Tell = Callable[[str, int, int], None]  # the work's name, how much is done, of how much


class ReplayedLog(Log, Protocol):
    """What reading again needs of a log."""

    def replay_raw(self, ranges: Mapping[PartitionId, tuple[int, int]]) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes of what `replay` yields."""


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
