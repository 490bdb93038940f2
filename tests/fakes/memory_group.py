"""Consumer groups in memory, and connections that end in the middle of something.

For tests of what survives.

The operation under way never returns, and no later operation has any effect.

A partition has one reader at a time. A rebalance ends when every member has let go.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, Self

from clawstream.stream.avro import codec
from clawstream.stream.log import Arrived, Commit, Listener, PartitionId, Raw, arrived


class ConnectionCut:
    """Ends a connection at its n-th operation: before the operation has taken effect, or right after."""

    def __init__(self, *, operations: int | None, takes_effect: bool) -> None:
        self._left = operations
        self._takes_effect = takes_effect
        self.happened = asyncio.Event()

    @classmethod
    def never(cls) -> Self:
        """Return a cut that never happens."""
        return cls(operations=None, takes_effect=False)

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        """Run the block as one operation, unless the connection is cut."""
        await asyncio.sleep(0)
        now = self._counted()
        if self.happened.is_set() and not (now and self._takes_effect):
            await self._for_ever()
        yield
        if now:
            await self._for_ever()
        await asyncio.sleep(0)

    def _counted(self) -> bool:
        if self.happened.is_set() or self._left is None:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self.happened.set()
        return True

    async def _for_ever(self) -> None:
        await asyncio.get_running_loop().create_future()


class Partitions(Protocol):
    """The part of a broker that groups need."""

    def records(self, place: PartitionId) -> Sequence[Raw]:
        """Return all records of a partition."""

    def places(self, topics: Iterable[str]) -> list[PartitionId]:
        """Return the partitions of the topics."""

    def notify(self) -> None:
        """Something changed."""

    async def changed(self, timeout_s: float | None = None) -> None:
        """Return when something changed since now, or after `timeout_s`."""


class MemoryGroup:
    """Members in the order in which they joined, and what they committed."""

    def __init__(self, broker: Partitions) -> None:
        self._broker = broker
        self.members: list[MemoryMember] = []
        self.generation = 0
        self.committed: dict[PartitionId, Commit] = {}

    def change(self, members: "list[MemoryMember]") -> None:
        """Change the members; all of them let go of their partitions and are given new ones."""
        self.members = members
        self.generation += 1
        self._broker.notify()

    def share_of(self, member: "MemoryMember", topics: Iterable[str]) -> frozenset[PartitionId]:
        """Return the member's range of each topic's partitions."""
        rank, num_members = self.members.index(member), len(self.members)
        share: set[PartitionId] = set()
        for topic in topics:
            places = self._broker.places([topic])
            quotient, rest = divmod(len(places), num_members)
            first = rank * quotient + min(rank, rest)
            share.update(places[first : first + quotient + (rank < rest)])
        return frozenset(share)


class MemoryMember:
    """One reader of a group."""

    def __init__(
        self, broker: Partitions, group: MemoryGroup, topics: Sequence[str], listener: Listener, cut: ConnectionCut
    ) -> None:
        self._broker = broker
        self._group = group
        self._topics = topics
        self._listener = listener
        self._cut = cut
        self._positions: dict[PartitionId, int] = {}
        self._paused: set[PartitionId] = set()
        self.let_go = 0  # the newest generation for which all earlier partitions were let go
        self._generation = 0  # the generation whose share this member has
        group.change([*group.members, self])

    async def poll(self, *, max_records: int, timeout_s: float) -> Mapping[PartitionId, Sequence[Arrived]]:
        """Return what arrived, waiting for the first record at most `timeout_s`."""
        if self._generation != self._group.generation:
            await self._rejoin()
        async with self._cut.around():
            found = self._fetch(max_records)
            if not found and timeout_s > 0:
                await self._broker.changed(timeout_s)
                found = self._fetch(max_records) if self._generation == self._group.generation else {}
        return found

    async def commit(self, commits: Mapping[PartitionId, Commit]) -> bool:
        """Commit the offsets; False where some of the partitions are not ours any more."""
        async with self._cut.around():
            if not commits.keys() <= self._positions.keys():
                return False
            self._group.committed |= commits
            self._broker.notify()
        return True

    def pause(self, places: Iterable[PartitionId]) -> None:
        """Fetch no more from these partitions until `resume`."""
        self._paused.update(places)

    def resume(self, places: Iterable[PartitionId]) -> None:
        """Fetch from these partitions again."""
        self._paused.difference_update(places)
        self._broker.notify()

    def caught_up(self, place: PartitionId) -> bool:
        """Return whether every record on the partition has been polled."""
        if place not in self._positions or place in self._paused:
            return False
        return self._positions[place] >= len(self._broker.records(place))

    def leave(self) -> None:
        """Leave the group."""
        self._positions.clear()
        self._group.change([member for member in self._group.members if member is not self])

    async def _rejoin(self) -> None:
        while self._generation != self._group.generation:
            generation = self._group.generation
            if self._positions:
                await self._listener.revoked(frozenset(self._positions))
                self._positions.clear()
                self._paused.clear()
            self.let_go = generation
            self._broker.notify()
            while generation == self._group.generation and any(
                member.let_go != generation for member in self._group.members
            ):
                await self._broker.changed()
            if generation == self._group.generation:
                await self._begin(self._group.share_of(self, self._topics))
                self._generation = generation

    async def _begin(self, places: frozenset[PartitionId]) -> None:
        committed = {place: self._group.committed.get(place) for place in sorted(places)}
        starts = await self._listener.assigned(committed)
        self._positions = dict(starts)
        self._broker.notify()

    def _fetch(self, max_records: int) -> dict[PartitionId, Sequence[Arrived]]:
        found: dict[PartitionId, Sequence[Arrived]] = {}
        for place, position in self._positions.items():
            if place in self._paused or max_records <= 0:
                continue
            raws = self._broker.records(place)[position : position + max_records]
            if raws:
                found[place] = [arrived(raw, codec()) for raw in raws]
                self._positions[place] += len(raws)
                max_records -= len(raws)
        return found
