"""Writes events to Kafka, in the order in which they were given, acknowledged by all replicas.

The one rule: events of one key are written in the order of the calls, also while the broker is away. So records enter
the producer one call at a time, and a producer whose state is uncertain is replaced by a new one.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, KafkaTimeoutError, MessageSizeTooLargeError, RecordListTooLargeError
from aiokafka.structs import RecordMetadata

from clawstream.errors import TryLater, UnusableEvent
from clawstream.stream.avro import Codec, headers_of, key_bytes
from clawstream.stream.kafka.client import MAX_RECORD_BYTES, Broker, describe, to_its_end
from clawstream.stream.log import Outgoing, PartitionId, Sealed
from clawstream.stream.topics import topic_of

log = logging.getLogger(__name__)

FLUSH_WITHIN_S = 10.0
LOOK_EVERY_S = 1.0  # how soon a broker that went away is noticed
_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)


class EncodedRecord(NamedTuple):
    """A record to write, its topic without the installation's prefix."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    what: str  # for messages


class Appender:
    """A producer, which is replaced when it fails, and a task that asks every second whether the broker answers."""

    def __init__(self, broker: Broker, codec: Codec) -> None:
        self._broker = broker
        self._codec = codec
        self._source = f"/clawstream/{broker.client_id}"
        self._sending = asyncio.Lock()  # held while a call's records enter the producer, or the producer is replaced
        self._batch_locks: defaultdict[PartitionId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._producer: AIOKafkaProducer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._healthy = True

    async def __aenter__(self) -> Self:
        await self._ready()
        self._watch = asyncio.create_task(self._look_after())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._watch is not None, "left before it was entered"
        self._watch.cancel()
        await to_its_end(self._shut_down(self._watch))

    @property
    def healthy(self) -> bool:
        """Whether the broker answered when it was last asked, at most some seconds ago."""
        return self._healthy

    async def partitions_of(self, topic: str) -> set[int]:
        """Return the numbers of a topic's partitions."""
        async with self._sending:
            producer = await self._ready()
        partitions: set[int] = await producer.partitions_for(self._broker.prefix + topic)
        return partitions

    def sealed(self, outgoing: Outgoing) -> Sealed:
        """Return the event as a record; raises UnusableEvent where it can't be encoded or is too large."""
        event = outgoing.event
        now_ms = int(time.time() * 1000)
        headers = headers_of(event, source=self._source, now_ms=now_ms, traceparent=outgoing.traceparent)
        made = Sealed(topic_of(type(event)), key_bytes(event.key), self._codec.encode(event), tuple(headers))
        _refuse_oversize(self.opened(made))
        return made

    def opened(self, sealed: Sealed) -> EncodedRecord:
        """Return the record in the form that `append` takes."""
        about = dict(sealed.headers)
        what = f"{about['ce_type'].decode().rpartition('.')[2]} {about['ce_id'].decode()}"
        return EncodedRecord(*sealed, what=what)

    async def append(self, records: Sequence[EncodedRecord]) -> None:
        """Write the records and return when all are acknowledged.

        Raises UnusableEvent for a record that is too large, TryLater where some may not be acknowledged.
        """
        for record in records:
            _refuse_oversize(record)
        async with self._sending:
            sent = [await self._enter(record) for record in records]
        if not sent:
            return
        # `wait`, unlike `gather`, cancels no send when the caller is cancelled.
        await asyncio.wait([acknowledged for acknowledged, _, _ in sent])
        for acknowledged, record, producer in sent:
            error = acknowledged.exception()
            if error is not None:
                raise await self._failed(error, record, producer) from error
        self._healthy = True

    async def append_batches(self, batches: Mapping[PartitionId, Sequence[EncodedRecord]]) -> None:
        """Write the records, each partition's in order, and return when all are acknowledged; fast for many records.

        Raises what `append` raises. Where it raises, some may be written.
        """
        for record in (record for records in batches.values() for record in records):
            _refuse_oversize(record)
        async with self._sending:
            producer = await self._ready()
        sent = [self._fill(producer, place, records) for place, records in batches.items()]
        errors = [error for error in await asyncio.gather(*sent, return_exceptions=True) if error is not None]
        for error in errors:
            raise await self._failed(error, next(iter(batches.values()))[0], producer) from error
        self._healthy = True

    async def _fill(self, producer: AIOKafkaProducer, place: PartitionId, records: Sequence[EncodedRecord]) -> None:
        waiting = list(reversed(records))
        while waiting:
            batch = producer.create_batch()
            while waiting:
                record = waiting[-1]
                headers = list(record.headers)
                if batch.append(key=record.key, value=record.value, timestamp=None, headers=headers) is None:
                    break
                waiting.pop()
            batch.close()
            topic = _looked_after(producer, self._broker.prefix + place.topic)
            # One batch of a partition at a time: the producer's time limit would also run for batches that wait.
            async with self._batch_locks[place]:
                acknowledged = await producer.send_batch(batch, topic, partition=place.partition)
            await acknowledged

    async def _enter(
        self, record: EncodedRecord
    ) -> "tuple[asyncio.Future[RecordMetadata], EncodedRecord, AIOKafkaProducer]":
        producer = await self._ready()
        topic = _looked_after(producer, self._broker.prefix + record.topic)
        try:
            acknowledged = await producer.send(topic, record.value, key=record.key, headers=list(record.headers))
        except KafkaError as error:
            if _uncertain(error):
                await self._drop()
            raise self._error_of(error, record) from error
        return acknowledged, record, producer

    async def _failed(self, error: BaseException, record: EncodedRecord, producer: AIOKafkaProducer) -> Exception:
        """Return the error to raise; a producer that may have lost its place is replaced before the next record."""
        if not isinstance(error, KafkaError):
            raise error
        if _uncertain(error):
            async with self._sending:
                if self._producer is producer:
                    await self._drop()
        return self._error_of(error, record)

    def _error_of(self, error: KafkaError, record: EncodedRecord) -> Exception:
        topic = self._broker.prefix + record.topic
        if isinstance(error, _TOO_LARGE):
            return UnusableEvent(f"{record.what} is larger than {topic} takes ({error}); it is not written")
        return TryLater(f"Kafka did not acknowledge {record.what} on {topic}: {describe(error)}")

    async def _ready(self) -> AIOKafkaProducer:
        """Return the producer; connect a new one where there is none."""
        if self._producer is None:
            producer = self._broker.producer()
            try:
                await producer.start()
                self._producer = producer
            except (KafkaError, OSError) as error:
                raise TryLater(f"no Kafka broker answers at {self._broker.bootstrap} ({describe(error)})") from error
            finally:
                if self._producer is None:
                    await to_its_end(_closed(producer))
        return self._producer

    async def _drop(self) -> None:
        """Close the producer; what it still holds is sent if the broker answers."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await to_its_end(_closed(producer))

    async def _shut_down(self, watch: asyncio.Task[None]) -> None:
        await asyncio.wait([watch])
        async with self._sending:
            await self._drop()

    async def _look_after(self) -> None:
        while True:
            producer = self._producer
            if producer is not None:
                answered = False
                with contextlib.suppress(TimeoutError, KafkaError):
                    async with asyncio.timeout(2 * LOOK_EVERY_S):
                        answered = bool(await producer.client.force_metadata_update())
                if answered != self._healthy:
                    log.log(logging.INFO if answered else logging.WARNING, "kafka=%s", "back" if answered else "away")
                self._healthy = answered
            await asyncio.sleep(LOOK_EVERY_S)


def _looked_after(producer: AIOKafkaProducer, topic: str) -> str:
    """Return the topic; from now on the producer asks the broker about it.

    A producer that starts knows all topics. Once it meets a new one it asks about those that it was told of alone, and
    finds no leader for records to others that wait: it would give them up after 40 s.
    """
    producer.client.add_topic(topic)
    return topic


async def _closed(producer: AIOKafkaProducer) -> None:
    try:
        async with asyncio.timeout(FLUSH_WITHIN_S):
            await producer.stop()
    except TimeoutError:
        log.warning("producer=dropped reason=no_answer_within_%gs", FLUSH_WITHIN_S)
        # The producer's own `stop` would wait for the broker for ever; these two end its tasks and connections.
        await producer._sender.close()  # noqa: SLF001
        await producer.client.close()
    except KafkaError as error:
        log.warning("producer=dropped reason=%s", describe(error))


def _refuse_oversize(record: EncodedRecord) -> None:
    num_bytes = len(record.key or b"") + len(record.value or b"")
    if num_bytes > MAX_RECORD_BYTES - 2**16:
        raise UnusableEvent(
            f"{record.what} is not written: it has {num_bytes} bytes, and {MAX_RECORD_BYTES - 2**16} is the limit"
        )


def _uncertain(error: KafkaError) -> bool:
    """Return whether the producer may have lost its place in a partition's sequence."""
    return not isinstance(error, (*_TOO_LARGE, KafkaTimeoutError))
