"""A group's share of some topics for a reader that keeps its offsets itself.

The one rule: the reader's own offsets say where it starts. The group's offsets are only for people who look at its lag.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from clawstream.errors import TryLater
from clawstream.stream.log import Commit, Log, Member, PartitionId, RecordBatch, StartAt

COMMIT_EVERY_S = 0.5
POLL_RECORDS = 500
POLL_S = 0.2


async def subscription(
    log: Log,
    topics: Sequence[str],
    group: str,
    *,
    start: StartAt,
    revoked: Callable[[frozenset[PartitionId]], Awaitable[None]] | None,
    instance_id: str | None,
) -> AsyncIterator[RecordBatch]:
    """Yield the records of this member's share; see KafkaLog.subscribe."""
    assignment = _Assignment(start, revoked)
    async with log.join(group, topics, assignment, instance_id=instance_id) as member:
        while True:
            found = await member.poll(max_records=POLL_RECORDS, timeout_s=POLL_S)
            for place, records in found.items():
                if place in assignment.places:
                    next_offset = records[-1].offset + 1
                    yield RecordBatch(place=place, records=records, next_offset=next_offset)
                    assignment.took(place, next_offset)
            await assignment.note(member, at_once=not found)


class _Assignment:
    """The partitions of this member, and how far each was taken."""

    def __init__(self, start: StartAt, revoked: Callable[[frozenset[PartitionId]], Awaitable[None]] | None) -> None:
        self._start = start
        self._revoked = revoked
        self._taken: dict[PartitionId, Commit] = {}
        self._noted_at_s = 0.0
        self.places: frozenset[PartitionId] = frozenset()

    async def assigned(self, committed: Mapping[PartitionId, Commit | None]) -> Mapping[PartitionId, int]:
        starts = await self._start(frozenset(committed))
        self.places = frozenset(committed)
        self._taken = {place: Commit(offset) for place, offset in starts.items()}
        return starts

    async def revoked(self, places: frozenset[PartitionId]) -> None:
        self.places = frozenset()
        self._taken.clear()
        if self._revoked is not None:
            await self._revoked(places)

    def took(self, place: PartitionId, next_offset: int) -> None:
        if place in self.places:
            self._taken[place] = Commit(next_offset)

    async def note(self, member: Member, *, at_once: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._taken or not (at_once or now_s - self._noted_at_s > COMMIT_EVERY_S):
            return
        taken, self._taken = self._taken, {}
        try:
            await member.commit(taken)
        except TryLater:
            self._taken = taken | self._taken
        self._noted_at_s = now_s
