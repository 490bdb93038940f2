"""The log in this process's memory: the same surface as the log on Kafka, for tests, replays and tools.

It keeps bytes, by the same codec, in partitions, and its groups hand partitions over as a broker's do, so a test is not
easier here than on Kafka. A `ConnectionCut` takes the log away in the middle of any operation, as a killed process sees
it.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from zlib import crc32

from clawstream.errors import PartUnavailable, TryLater
from clawstream.events import Event
from clawstream.stream.avro import codec, headers_of, key_bytes
from clawstream.stream.dead_letters import dead_letter_headers, mark_headers, needed_queue
from clawstream.stream.log import (
    Arrived,
    Commit,
    DeadLetterId,
    DeadLetterMark,
    Listener,
    Outgoing,
    PartitionId,
    Raw,
    RecordBatch,
    Sealed,
    Start,
    StartAt,
    arrived,
    subscription,
)
from clawstream.stream.topics import Topic, all_topics, count_of, topic_of
from tests.fakes.memory_group import ConnectionCut, MemoryGroup, MemoryMember


class MemoryBroker:
    """Partitions and groups; several logs may be connected to one broker, as processes are."""

    def __init__(self, *, partitions: int = 3, clock_ms: Callable[[], int] | None = None) -> None:
        self.cluster_id = uuid.uuid4().hex
        self._clock_ms = clock_ms or (lambda: int(time.time() * 1000))
        self._partitions: dict[PartitionId, list[Raw]] = {
            PartitionId(topic.name, number): []
            for topic in all_topics()
            for number in range(count_of(topic, partitions))
        }
        self._counts = {topic.name: count_of(topic, partitions) for topic in all_topics()}
        self._groups: dict[str, MemoryGroup] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    def write(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]
    ) -> PartitionId:
        """Append a record to the partition of its key."""
        place = PartitionId(topic, crc32(key or b"") % self._counts[topic])
        self.put(place, key, value, headers)
        return place

    def put(
        self, place: PartitionId, key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]
    ) -> None:
        """Append a record to a partition."""
        records = self._partitions[place]
        now_ms = self._clock_ms()
        raw = Raw(
            topic=place.topic,
            partition=place.partition,
            offset=len(records),
            timestamp_ms=now_ms,
            key=key,
            value=value,
            headers=tuple(headers),
        )
        records.append(raw)
        self.notify()

    def create(self, topics: Iterable[Topic]) -> None:
        """Create the missing topics, with as many partitions as they say; existing ones stay as they are."""
        for topic in topics:
            self._counts.setdefault(topic.name, topic.partitions)
            for number in range(self._counts[topic.name]):
                self._partitions.setdefault(PartitionId(topic.name, number), [])

    def records(self, place: PartitionId) -> Sequence[Raw]:
        """Return all records of a partition; its first offset is 0, and there are no holes."""
        return self._partitions[place]

    def places(self, topics: Iterable[str]) -> list[PartitionId]:
        """Return the partitions of the topics."""
        return [PartitionId(topic, number) for topic in topics for number in range(self._counts[topic])]

    def group(self, name: str) -> MemoryGroup:
        """Return the group; it is created when first asked for."""
        return self._groups.setdefault(name, MemoryGroup(self))

    def notify(self) -> None:
        """Something changed: let everybody who waits look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def changed(self, timeout_s: float | None = None) -> None:
        """Return when something changed since now, or after `timeout_s`."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        await asyncio.wait([waiting], timeout=timeout_s)
        self._waiting.discard(waiting)


class MemoryLog:
    """One connection to a broker in memory."""

    def __init__(self, broker: MemoryBroker | None = None, *, cut: ConnectionCut | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self.cluster_id: str | None = self.broker.cluster_id
        self._cut = cut or ConnectionCut.never()

    def healthy(self) -> bool:
        """Return whether the connection stands."""
        return not self._cut.happened.is_set()

    async def append(
        self, events: Sequence[Event], traceparent: str | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Return when all events are on the log; see KafkaLog.append."""
        await self.append_sealed([self.seal(event, traceparent) for event in events], timeout_s=timeout_s)

    async def write(self, outgoing: Sequence[Outgoing]) -> None:
        """Do as `append` does, with a trace for each event."""
        await self.append_sealed([self.seal(event, traceparent) for event, traceparent in outgoing])

    def seal(self, event: Event, traceparent: str | None = None) -> Sealed:
        """Return the event as a record; raises UnusableEvent for an event that can't be encoded."""
        now_ms = int(time.time() * 1000)
        headers = headers_of(event, source="/clawstream/memory", now_ms=now_ms, traceparent=traceparent)
        return Sealed(topic_of(type(event)), key_bytes(event.key), codec().encode(event), tuple(headers))

    def unseal(self, sealed: Sealed) -> Event:
        """Return the record's event; raises UndecodableRecord."""
        return codec().decode(sealed.value)

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Do as `append` does, with sealed records."""
        try:
            async with asyncio.timeout(timeout_s), self._cut.around():
                for topic, key, value, headers in records:
                    self.broker.write(topic, key, value, list(headers))
        except TimeoutError as error:
            raise TryLater(f"{len(records)} events were not acknowledged within {timeout_s:g} s") from error

    async def put(self, records: Sequence[Sealed], partition: int) -> None:
        """Return when all are on the log; see KafkaLog.put."""
        async with self._cut.around():
            for topic, key, value, headers in records:
                self.broker.put(PartitionId(topic, partition), key, value, headers)

    async def set_aside(
        self,
        dead_letter_id: DeadLetterId,
        *,
        error: Exception,
        attempt: int = 1,
        rebuild_offsets: Mapping[str, int] | None = None,
    ) -> None:
        """Copy the record to its topic's dead-letter queue, byte for byte."""
        raw = self.broker.records(dead_letter_id.place)[dead_letter_id.offset]
        why = dead_letter_headers(
            dead_letter_id, raw.timestamp_ms, error=error, attempt=attempt, rebuild_offsets=rebuild_offsets or {}
        )
        async with self._cut.around():
            self.broker.write(needed_queue(dead_letter_id), raw.key, raw.value, [*raw.headers, *why])

    async def mark(self, marks: Sequence[DeadLetterMark]) -> None:
        """Write marks into the dead letters' queues."""
        async with self._cut.around():
            for mark in marks:
                self.broker.write(needed_queue(mark.id), mark.key, None, mark_headers(mark))

    async def follow_raw(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes on the topics, then what arrives; see KafkaLog.follow."""
        async for raws in self._follow(topics, start, until_end=until_end):
            yield raws

    async def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield the records on the topics, then what arrives, in order per partition; see KafkaLog.follow."""
        async for raws in self._follow(topics, start, until_end=until_end):
            yield [arrived(raw, codec()) for raw in raws]

    async def _follow(
        self, topics: Sequence[str], start: Start, *, until_end: bool
    ) -> AsyncGenerator[Sequence[Raw], None]:
        ends = await self.end_offsets(topics)
        positions = {place: self._start(place, start) for place in ends}
        while True:
            found: list[Raw] = []
            for place, position in positions.items():
                end = ends[place] if until_end else None
                raws = self.broker.records(place)[position:end]
                positions[place] += len(raws)
                found += raws
            if found:
                yield found
            elif until_end:
                return
            else:
                await self.broker.changed()

    async def replay(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records from the first offset up to but not including the second, in order."""
        async with aclosing(self.replay_raw(ranges, key=key)) as reading:
            async for raws in reading:
                yield [arrived(raw, codec(), digest=digest) for raw in raws]

    async def replay_raw(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None
    ) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes of what `replay` yields."""
        for place, (first, end) in ranges.items():
            async with self._cut.around():
                raws = self.broker.records(place)[first:end]
            found = [raw for raw in raws if key in (None, raw.key)]
            if found:
                yield found

    @asynccontextmanager
    async def join(
        self, group: str, topics: Sequence[str], listener: Listener, *, instance_id: str | None = None
    ) -> AsyncIterator[MemoryMember]:
        """Be a member of `group` for the length of the block; `instance_id` makes no difference here."""
        del instance_id
        member = MemoryMember(self.broker, self.broker.group(group), topics, listener, self._cut)
        try:
            yield member
        finally:
            member.leave()

    async def subscribe(
        self,
        topics: Sequence[str],
        group: str,
        *,
        start: StartAt,
        revoked: Callable[[frozenset[PartitionId]], Awaitable[None]] | None = None,
        instance_id: str | None = None,
    ) -> AsyncGenerator[RecordBatch, None]:
        """Yield the records of this member's share of the topics; see KafkaLog.subscribe."""
        async for batch in subscription(self, topics, group, start=start, revoked=revoked, instance_id=instance_id):
            yield batch

    async def end_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        """Return the offset that each partition's next record will have."""
        return {place: len(self.broker.records(place)) for place in self.broker.places(topics)}

    async def begin_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        """Return the oldest offset that each partition still has."""
        return dict.fromkeys(self.broker.places(topics), 0)

    async def offsets_at(self, topics: Sequence[str], start: Start) -> dict[PartitionId, int]:
        """Return the first offset of each partition at `start`; see KafkaLog.offsets_at."""
        return {place: self._start(place, start) for place in self.broker.places(topics)}

    async def committed(self, group: str, topics: Sequence[str] | None = None) -> dict[PartitionId, Commit]:
        """Return how far the group has come where it has read anything; `topics` None: on all of its topics."""
        commits = self.broker.group(group).committed
        return {place: commit for place, commit in commits.items() if topics is None or place.topic in topics}

    async def put_back(self, group: str, commits: Mapping[PartitionId, Commit]) -> None:
        """Let the group go on from these commits; raises PartUnavailable while somebody reads in it."""
        found = self.broker.group(group)
        if found.members:
            raise PartUnavailable(f"the consumer group {group} has {len(found.members)} members; stop them")
        found.committed |= commits

    async def lag(self, group: str) -> int | None:
        """Return how many records the group has not done yet; None: it has never read."""
        commits = self.broker.group(group).committed
        if not commits:
            return None
        return sum(len(self.broker.records(place)) - commit.offset for place, commit in commits.items())

    def _start(self, place: PartitionId, start: Start) -> int:
        raws = self.broker.records(place)
        if isinstance(start, Mapping):
            return start.get(place, 0)
        if isinstance(start, int):
            return next((raw.offset for raw in raws if raw.timestamp_ms >= start), len(raws))
        return len(raws) if start == "latest" else 0
