"""A log whose topics are read once for all that follow them in this process.

Each follower gets every record from its own start on, in order per partition, as if it read alone. A follower that
starts before what the shared reading has reached reads the records up to there by itself. Records are handed to one
follower after the other: one that falls behind holds up the others, so that no records pile up.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from clawstream.stream.log import Arrived, Log, PartitionId, Start

_WAITING = 4  # batches of records handed to a follower that it has not taken yet

Records = Sequence[Arrived]


class SharedLog:
    """A log whose `follow` shares readings, save with `until_end`; all other methods are those of `log`."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._readings: dict[tuple[str, ...], _Reading] = {}

    @classmethod
    def of(cls, log: Log) -> Log:
        """Return the log, with shared readings."""
        return cast("Log", cls(log))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncIterator[Records]:
        """Yield the records as `Log.follow` does; with `until_end` by a reading of its own."""
        return self._log.follow(topics, start, until_end=True) if until_end else self._shared(topics, start)

    async def _shared(self, topics: Sequence[str], start: Start) -> AsyncGenerator[Records, None]:
        starts = await self._log.offsets_at(topics, start)
        reading = self._readings.get(tuple(topics))
        if reading is None:
            reading = self._readings[tuple(topics)] = _Reading(self._log, topics, starts)
        follower, missed = reading.join(starts)
        try:
            if missed:
                async with aclosing(self._log.replay(missed)) as before:
                    async for earlier in before:
                        yield earlier
            while True:
                records = await follower.get()
                if isinstance(records, BaseException):
                    raise records
                if fresh := [
                    one for one in records if one.offset >= starts.get(PartitionId(one.topic, one.partition), 0)
                ]:
                    yield fresh
        finally:
            if not reading.leave(follower) and self._readings.get(tuple(topics)) is reading:
                del self._readings[tuple(topics)]


_Follower = asyncio.Queue[Records | BaseException]


class _Reading:
    """One reading of some topics, and its followers."""

    def __init__(self, log: Log, topics: Sequence[str], starts: Mapping[PartitionId, int]) -> None:
        self._log, self._topics = log, topics
        self._next = dict(starts)  # by partition: the offset after what was handed over
        self._followers: list[_Follower] = []
        self._failed: BaseException | None = None
        self._task = asyncio.create_task(self._read({(p.topic, p.partition): offset for p, offset in starts.items()}))

    def join(self, starts: Mapping[PartitionId, int]) -> tuple[_Follower, dict[PartitionId, tuple[int, int]]]:
        """Return a follower that gets all records from now on, and the ranges that it has missed by then."""
        follower = _Follower(_WAITING)
        self._followers.append(follower)
        if self._failed is not None:
            follower.put_nowait(self._failed)
        missed = {place: (starts[place], end) for place, end in self._next.items() if starts[place] < end}
        return follower, missed

    def leave(self, follower: _Follower) -> bool:
        """Hand nothing more to the follower; return whether there is another. Without followers the reading ends."""
        self._followers.remove(follower)
        while not follower.empty():
            follower.get_nowait()  # so that a hand-over which waits for room in this queue goes on
        if not self._followers:
            self._task.cancel()
        return bool(self._followers)

    async def _read(self, starts: Start) -> None:
        try:
            async for records in self._log.follow(self._topics, starts):
                for one in records:
                    self._next[PartitionId(one.topic, one.partition)] = one.offset + 1
                await self._hand_over(records)
        except Exception as error:  # noqa: BLE001  # it is each follower's to handle, as if it had read alone
            self._failed = error
            await self._hand_over(error)

    async def _hand_over(self, what: Records | BaseException) -> None:
        for follower in tuple(self._followers):
            if follower in self._followers:
                await follower.put(what)
