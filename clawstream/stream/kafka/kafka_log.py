"""The log on Kafka.

An acknowledged event is not lost, and events of one key stay in the order in which they were written. Callers name
topics and groups without the installation's prefix.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import OffsetOutOfRangeError

from clawstream.config import KafkaSettings
from clawstream.errors import TopicMismatch, TryLater
from clawstream.events import Event
from clawstream.stream.avro import Codec, codec
from clawstream.stream.dead_letters import dead_letter_headers, mark_headers, needed_queue
from clawstream.stream.kafka.admin import set_group
from clawstream.stream.kafka.appending import Appender, EncodedRecord
from clawstream.stream.kafka.client import BATCH_BYTES, CONNECT_WITHIN_S, Broker, kafka_errors, started
from clawstream.stream.kafka.member import GroupPatience, KafkaMember
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
from clawstream.stream.schemas import all_schemas
from clawstream.stream.topics import SCHEMAS

_POLL_MS = 500
_POLL_RECORDS = 500


class KafkaLog:
    """The log of one installation; `connect` yields it, connected until the block ends."""

    def __init__(
        self,
        broker: Broker,
        codec: Codec,
        *,
        appender: Appender,
        admin: AIOKafkaAdminClient,
        patience: GroupPatience,
        cluster_id: str | None,
    ) -> None:
        self.cluster_id = cluster_id  # the id that the broker gave its data; None: it has none
        self._broker = broker
        self._patience = patience
        self._codec = codec
        self._appender = appender
        self._admin = admin
        self._consumers: set[AIOKafkaConsumer] = set()

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        bootstrap: str,
        *,
        prefix: str = "",
        client_id: str = "clawstream",
        security: KafkaSettings | None = None,
        written_by: Codec | None = None,
        patience: GroupPatience | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> "AsyncIterator[KafkaLog]":
        """Yield the log; raises PartUnavailable where no broker answers.

        `batch_bytes` limits how much of a partition goes into one request; each node gets one request at a time.
        """
        broker = Broker(
            bootstrap=bootstrap, client_id=client_id, security=security, prefix=prefix, batch_bytes=batch_bytes
        )
        used = written_by or codec()
        async with AsyncExitStack() as stack:
            with broker.connecting():
                async with asyncio.timeout(CONNECT_WITHIN_S):
                    admin = await stack.enter_async_context(broker.admin())
                    cluster_id = (await admin.describe_cluster())["cluster_id"]
                    appender = await stack.enter_async_context(Appender(broker, used))
            log = cls(
                broker,
                used,
                appender=appender,
                admin=admin,
                patience=patience or GroupPatience(),
                cluster_id=cluster_id,
            )
            stack.push_async_callback(log._close_readers)
            yield log

    def healthy(self) -> bool:
        """Return whether the broker answered when it was last asked, at most some seconds ago."""
        return self._appender.healthy

    async def append(
        self, events: Sequence[Event], traceparent: str | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Write the events and return when all are acknowledged; events of one key keep the order of the calls.

        Raises UnusableEvent, before anything is written, for an event that can't be written; TryLater where some may be
        written. Without `timeout_s` it waits while the broker is away. After `timeout_s`, events that are not
        acknowledged may still reach the log.
        """
        await self.append_sealed([self.seal(event, traceparent) for event in events], timeout_s=timeout_s)

    async def write(self, outgoing: Sequence[Outgoing]) -> None:
        """Do as `append` does, with a trace for each event."""
        await self.append_sealed([self._appender.sealed(one) for one in outgoing])

    def seal(self, event: Event, traceparent: str | None = None) -> Sealed:
        """Return the event as a record; raises UnusableEvent for an event that can't be encoded."""
        return self._appender.sealed(Outgoing(event, traceparent))

    def unseal(self, sealed: Sealed) -> Event:
        """Return the record's event; raises UndecodableRecord where it has none."""
        return self._codec.decode(sealed.value)

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Do as `append` does, with sealed records."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._appender.append([self._appender.opened(record) for record in records])
        except TimeoutError as error:
            raise TryLater(
                f"Kafka at {self._broker.bootstrap} did not acknowledge {len(records)} events within {timeout_s:g} s; "
                "they may still be written"
            ) from error

    async def put(self, records: Sequence[Sealed], partition: int) -> None:
        """Write the records, in order, until all are acknowledged. Raises TryLater where some may be missing."""
        batches: dict[PartitionId, list[EncodedRecord]] = {}
        for record in records:
            encoded = EncodedRecord(*record, what=f"a record of {record.topic}")
            batches.setdefault(PartitionId(record.topic, partition), []).append(encoded)
        await self._appender.append_batches(batches)

    async def publish_schemas(self) -> None:
        """Write every schema to the topic for schemas, so that other programs can read the data."""
        await self._appender.append(
            [
                EncodedRecord(
                    topic=SCHEMAS,
                    key=schema.fingerprint.hex().encode(),
                    value=schema.text.encode(),
                    headers=[("content-type", b"application/json")],
                    what=f"the schema of {schema.event.__name__} v{schema.version}",
                )
                for schema in all_schemas()
            ]
        )

    async def set_aside(
        self,
        dead_letter_id: DeadLetterId,
        *,
        error: Exception,
        attempt: int = 1,
        rebuild_offsets: Mapping[str, int] | None = None,
    ) -> None:
        """Copy the record to its topic's dead-letter queue, byte for byte, and await the acknowledgement."""
        queue = needed_queue(dead_letter_id)
        raw = await self._fetch(dead_letter_id.place, dead_letter_id.offset)
        why = dead_letter_headers(
            dead_letter_id, raw.timestamp_ms, error=error, attempt=attempt, rebuild_offsets=rebuild_offsets or {}
        )
        what = f"the copy of {dead_letter_id.topic}-{dead_letter_id.partition} offset {dead_letter_id.offset}"
        headers = [*raw.headers, *why]
        await self._appender.append([EncodedRecord(queue, raw.key, raw.value, headers, what)])

    async def mark(self, marks: Sequence[DeadLetterMark]) -> None:
        """Write marks into the dead letters' queues and await the acknowledgements."""
        await self._appender.append(
            [
                EncodedRecord(needed_queue(mark.id), mark.key, None, mark_headers(mark), f"the mark of {mark.id}")
                for mark in marks
            ]
        )

    async def follow_raw(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield records as bytes from `start` on, then those that arrive, in order per partition; see `follow`."""
        async with self._reader() as consumer:
            places = await self._places(topics)
            starts = await self._starts(consumer, places, start)
            ends = await self._offsets(consumer.end_offsets, places) if until_end else None
            async for raws in self._read(consumer, starts, ends):
                yield raws

    async def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]:
        """Yield the records on the topics, then those that arrive, in order per partition, without a group.

        `start` is "earliest", "latest", a time in ms since the epoch, or a map from (topic, partition) to offset. A
        partition that the map lacks begins at its oldest record. With `until_end`, reading ends where the topics ended
        at the call.
        """
        async with aclosing(self.follow_raw(topics, start, until_end=until_end)) as reading:
            async for raws in reading:
                yield [arrived(raw, self._codec) for raw in raws]

    async def replay(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records from the first offset up to but not including the second, in order."""
        async with aclosing(self.replay_raw(ranges, key=key)) as reading:
            async for raws in reading:
                yield [arrived(raw, self._codec, digest=digest) for raw in raws]

    async def replay_raw(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None
    ) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield as bytes the records that `replay` yields."""
        async with self._reader() as consumer:
            begins = await self._offsets(consumer.beginning_offsets, list(ranges))
            starts = {place: max(first, begins[place]) for place, (first, _) in ranges.items()}
            ends = {place: end for place, (_, end) in ranges.items()}
            async for raws in self._read(consumer, starts, ends):
                found = [raw for raw in raws if key in (None, raw.key)]
                if found:
                    yield found

    @asynccontextmanager
    async def join(
        self, group: str, topics: Sequence[str], listener: Listener, *, instance_id: str | None = None
    ) -> AsyncIterator[KafkaMember]:
        """Be a member of `group` until the block ends."""
        consumer = self._broker.consumer(
            group_id=self._broker.prefix + group, group_instance_id=instance_id, **self._patience.arguments()
        )
        member = KafkaMember(
            consumer, listener, self._broker, self._admin, group, lambda record: arrived(self._raw(record), self._codec)
        )
        async with self._started(consumer):
            consumer.subscribe(topics=[self._broker.prefix + topic for topic in topics], listener=member)
            yield member

    async def subscribe(
        self,
        topics: Sequence[str],
        group: str,
        *,
        start: StartAt,
        revoked: Callable[[frozenset[PartitionId]], Awaitable[None]] | None = None,
        instance_id: str | None = None,
    ) -> AsyncIterator[RecordBatch]:
        """Yield the records of this member's partitions. `start` says where each begins: the caller keeps offsets.

        A batch counts as taken when the next one is asked for. The group's commits are only for people who look at the
        lag. `revoked` is awaited before partitions go to another member.
        """
        async for batch in subscription(self, topics, group, start=start, revoked=revoked, instance_id=instance_id):
            yield batch

    async def end_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        """Return the offset that each partition's next record will have."""
        return await self.offsets_at(topics, "latest")

    async def begin_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        """Return the oldest offset that each partition still has."""
        return await self.offsets_at(topics, "earliest")

    async def offsets_at(self, topics: Sequence[str], start: Start) -> dict[PartitionId, int]:
        """Return the offset of each partition's first record from `start` on (see `follow`); its end if it has none."""
        async with self._reader() as consumer:
            return await self._starts(consumer, await self._places(topics), start)

    async def committed(self, group: str, topics: Sequence[str] | None = None) -> dict[PartitionId, Commit]:
        """Return the group's commits (`topics` None: on all topics), without partitions that it has never read."""
        commits = await self._broker.committed(self._admin, group)
        return {place: commit for place, commit in commits.items() if topics is None or place.topic in topics}

    async def put_back(self, group: str, commits: Mapping[PartitionId, Commit]) -> None:
        """Let the group go on from these commits; raises PartUnavailable while somebody reads in it."""
        await set_group(self._broker, group, commits)

    async def lag(self, group: str) -> int | None:
        """Return how many records the group has not committed yet; None: it has never committed any."""
        committed = await self.committed(group)
        if not committed:
            return None
        ends = await self.end_offsets(sorted({place.topic for place in committed}))
        return sum(max(0, ends[place] - commit.offset) for place, commit in committed.items())

    async def _fetch(self, place: PartitionId, offset: int) -> Raw:
        async with self._reader() as consumer:
            at = self._broker.at(place)
            consumer.assign([at])
            consumer.seek(at, offset)
            with kafka_errors(f"read {place.topic}-{place.partition} at offset {offset}"):
                found: ConsumerRecord[Any, Any] = await consumer.getone(at)
            return self._raw(found)

    def _reader(self) -> "AbstractAsyncContextManager[AIOKafkaConsumer]":
        return self._started(self._broker.consumer(max_poll_records=_POLL_RECORDS))

    @asynccontextmanager
    async def _started(self, consumer: AIOKafkaConsumer) -> AsyncIterator[AIOKafkaConsumer]:
        self._consumers.add(consumer)
        try:
            async with started(consumer, "read"):
                yield consumer
        finally:
            self._consumers.discard(consumer)

    async def _close_readers(self) -> None:
        """Stop consumers of readers that were left before their end, without waiting for the garbage collector."""
        for consumer in list(self._consumers):
            await consumer.stop()

    async def _read(
        self, consumer: AIOKafkaConsumer, starts: Mapping[PartitionId, int], ends: Mapping[PartitionId, int] | None
    ) -> AsyncIterator[Sequence[Raw]]:
        starts = {place: start for place, start in starts.items() if ends is None or start < ends[place]}
        left = set(map(self._broker.at, starts))
        consumer.assign(list(left))
        for place, offset in starts.items():
            consumer.seek(self._broker.at(place), offset)
        while left:
            try:
                with kafka_errors("read"):
                    found = await consumer.getmany(timeout_ms=_POLL_MS)
            except OffsetOutOfRangeError as error:
                raise TopicMismatch(
                    f"records that are to be read are not there any more ({error}): they are past their topic's "
                    "retention, the topic was created again, or the log lost its end"
                ) from error
            read = [self._raw(record) for records in found.values() for record in records]
            if ends is not None:
                read = [record for record in read if record.offset < ends[PartitionId(record.topic, record.partition)]]
                for at in list(left):
                    if await consumer.position(at) >= ends[self._broker.place(at)]:
                        left.discard(at)
                        consumer.pause(at)
            if read:
                yield read

    async def _starts(
        self, consumer: AIOKafkaConsumer, places: Sequence[PartitionId], start: Start
    ) -> dict[PartitionId, int]:
        if start == "latest":
            return await self._offsets(consumer.end_offsets, places)
        if isinstance(start, int):
            ends = await self._offsets(consumer.end_offsets, places)
            with kafka_errors("find records by time"):
                found = await consumer.offsets_for_times({self._broker.at(place): start for place in places})
            return ends | {self._broker.place(at): there.offset for at, there in found.items() if there is not None}
        begins = await self._offsets(consumer.beginning_offsets, places)
        given = start if isinstance(start, Mapping) else {}
        return {place: given.get(place, begin) for place, begin in begins.items()}

    async def _offsets(
        self,
        ask: Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, int]]],
        places: Iterable[PartitionId],
    ) -> dict[PartitionId, int]:
        with kafka_errors("ask for offsets"):
            found = await ask([self._broker.at(place) for place in places])
        return {self._broker.place(at): offset for at, offset in found.items()}

    async def _places(self, topics: Sequence[str]) -> list[PartitionId]:
        with kafka_errors("ask for partitions"):
            return [
                PartitionId(topic, partition)
                for topic in topics
                for partition in sorted(await self._appender.partitions_of(topic))
            ]

    def _raw(self, record: "ConsumerRecord[Any, Any]") -> Raw:
        return Raw(
            topic=record.topic.removeprefix(self._broker.prefix),
            partition=record.partition,
            offset=record.offset,
            timestamp_ms=record.timestamp,
            key=record.key,
            value=record.value,
            headers=tuple(record.headers),
        )
