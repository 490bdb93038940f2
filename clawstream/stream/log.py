"""The interface of a log, which stages, gateway, projector and trainer use. One log is on Kafka, another in memory.

Both pass the tests in tests/parts/stream/contract. Bytes that can't be decoded are a value, not an exception; the
reader decides what becomes of them. A reader goes on from the offset where it stopped, but only on the log that it read
before. On another log, or on one that lost its end, new records may stand below that offset, and the reader would skip
them silently.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from enum import StrEnum
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

from clawstream.errors import TryLater, UndecodableRecord
from clawstream.events import Event, PolicyEvent, is_ours
from clawstream.stream.avro import Codec, ReadHeaders, key_bytes, traceparent_of
from clawstream.stream.stage import Record

DIGEST_BYTES = 16
COMMIT_EVERY_S = 0.5
POLL_RECORDS = 500
POLL_S = 0.2


class PartitionId(NamedTuple):
    """A partition; its topic is without the installation's prefix. It equals the plain pair (topic, partition)."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A record as bytes, before it is decoded."""

    topic: str  # without the installation's prefix
    partition: int
    offset: int
    timestamp_ms: int  # when the broker appended it, since the epoch, UTC
    key: bytes | None
    value: bytes | None
    headers: ReadHeaders


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecodable(Raw):
    """A record whose bytes no schema of ours can decode."""

    reason: str


Arrived = Record | Undecodable


def key_of(record: Arrived) -> bytes | None:
    """Return the record's key in bytes, as the log has it."""
    return record.key if isinstance(record, Undecodable) else key_bytes(record.key)


Start = Mapping[tuple[str, int], int] | Literal["earliest", "latest"] | int


class Outgoing(NamedTuple):
    """An event to write, and the trace that it belongs to."""

    event: Event
    traceparent: str | None = None


class Sealed(NamedTuple):
    """An event encoded as a record: the same bytes wherever and however often it is written."""

    topic: str  # without the installation's prefix
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


class Fate(StrEnum):
    """What became of a dead letter."""

    OPEN = "open"
    REPLAY = "replay"  # a replay was asked for and is not done yet
    DISCARD = "discard"  # a discard was asked for and is not done yet
    REPLAYED = "replayed"
    DISCARDED = "discarded"


class DeadLetterId(NamedTuple):
    """A record's place on the log, and the stage that set it aside."""

    group: str
    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @property
    def place(self) -> PartitionId:
        """The record's partition."""
        return PartitionId(self.topic, self.partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterMark:
    """A record of the queue that states the fate of a dead letter."""

    id: DeadLetterId
    key: bytes | None
    attempt: int
    fate: Fate
    because: str | None = None


class Commit(NamedTuple):
    """The next offset that a group will read of a partition, and a note that the group keeps beside it."""

    offset: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBatch:
    """Records that were read of one partition, in order."""

    place: PartitionId
    records: Sequence[Arrived]
    next_offset: int  # the offset after the last record


class Listener(Protocol):
    """Is told which partitions a member of a group has."""

    async def assigned(self, committed: Mapping[PartitionId, Commit | None]) -> Mapping[PartitionId, int]:
        """Return where to start reading each partition; none of them is read before this returns."""

    async def revoked(self, places: frozenset[PartitionId]) -> None:
        """Finish with the partitions: they go to another member once this returns."""


class Member(Protocol):
    """One reader of a group."""

    async def poll(self, *, max_records: int, timeout_s: float) -> Mapping[PartitionId, Sequence[Arrived]]:
        """Return what arrived, waiting for the first record at most `timeout_s`; must not be cancelled."""

    async def commit(self, commits: Mapping[PartitionId, Commit]) -> bool:
        """Commit the offsets; return False, committing none, where a partition is not this member's any more."""

    def pause(self, places: Iterable[PartitionId]) -> None:
        """Fetch no more from these partitions until `resume`."""

    def resume(self, places: Iterable[PartitionId]) -> None:
        """Fetch from these partitions again."""

    def caught_up(self, place: PartitionId) -> bool:
        """Return whether every record that the partition had at the last fetch has been polled."""


class EventLog(Protocol):
    """The part of a log that writes events and reads them in the order of their partitions."""

    async def append(self, events: Sequence[Event]) -> None: ...
    def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]: ...


class Log(EventLog, Protocol):
    """What runner, projector, trainer, gateway, replays and `tail` need of a log."""

    async def write(self, outgoing: Sequence[Outgoing]) -> None:
        """Write the events and return when all are acknowledged; events of one key keep their order.

        Raises UnusableEvent, before anything is written, for an event that can't be written; TryLater where some may be
        written and all may be tried again.
        """

    async def set_aside(
        self,
        dead_letter_id: DeadLetterId,
        *,
        error: Exception,
        attempt: int = 1,
        rebuild_offsets: Mapping[str, int] | None = None,
    ) -> None:
        """Copy the record to its topic's dead-letter queue and await the acknowledgement; see dead_letters.py."""

    async def mark(self, marks: Sequence[DeadLetterMark]) -> None:
        """Write marks into the dead letters' queues and await the acknowledgements."""

    def follow_raw(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the records on the topics as bytes, then those that arrive; see KafkaLog.follow."""

    async def put(self, records: Sequence[Sealed], partition: int) -> None:
        """Write the records to this partition of their topics, in order, and return when all are acknowledged.

        Raises TryLater where some may be missing.
        """

    async def end_offsets(self, topics: Sequence[str]) -> Mapping[PartitionId, int]:
        """Return the offset that each partition's next record will have."""

    async def begin_offsets(self, topics: Sequence[str]) -> Mapping[PartitionId, int]:
        """Return the oldest offset that each partition still has."""

    async def offsets_at(self, topics: Sequence[str], start: Start) -> Mapping[PartitionId, int]:
        """Return the offset of each partition's first record from `start` on; its end offset if it has none."""

    def replay(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records from the first offset up to but not including the second, in order.

        With a `key`, yield only its records; the others are not decoded. Without `digest`, records are not hashed.
        """

    def replay_raw(self, ranges: Mapping[PartitionId, tuple[int, int]]) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes of what `replay` yields."""

    def join(
        self, group: str, topics: Sequence[str], listener: Listener, *, instance_id: str | None = None
    ) -> AbstractAsyncContextManager[Member]:
        """Be a member of `group` until the block ends."""

    async def committed(self, group: str, topics: Sequence[str] | None = None) -> dict[PartitionId, Commit]:
        """Return the group's commits; a partition of which it has read nothing is missing."""

    async def put_back(self, group: str, commits: Mapping[PartitionId, Commit]) -> None:
        """Let the group go on from these commits; raises PartUnavailable while somebody reads in it."""


StartAt = Callable[[frozenset[PartitionId]], Awaitable[Mapping[PartitionId, int]]]
"""Returns the next offset to read of each partition; called each time this member is given partitions."""


def of_policy(records: Iterable[Arrived], policy_id: str) -> list[PolicyEvent]:
    """Return the events of one policy among the records."""
    events = [record.event for record in records if isinstance(record, Record)]
    return [event for event in events if isinstance(event, PolicyEvent) and event.policy_id == policy_id]


async def policy_events(log: EventLog, topic: str, policy_id: str, *, by_key: bool = False) -> list[PolicyEvent]:
    """Return the events of one policy that are on the topic now; with `by_key` those of keys' policies too."""
    batches = log.follow([topic], "earliest", until_end=True)
    events = [record.event async for records in batches for record in records if isinstance(record, Record)]
    return [one for one in events if isinstance(one, PolicyEvent) and is_ours(one.policy_id, policy_id, by_key=by_key)]


def past_the_end(offsets: Mapping[PartitionId, int], ends: Mapping[PartitionId, int]) -> list[PartitionId]:
    """Return the partitions that were read further than the log now reaches."""
    return [place for place, offset in offsets.items() if offset > ends.get(place, 0)]


def arrived(raw: Raw, codec: Codec, *, digest: bool = True) -> Arrived:
    """Return the record with its event (and with its hash, where `digest` is set), or why it has no event."""
    try:
        event = codec.decode(raw.value)
    except UndecodableRecord as error:
        return undecodable(raw, str(error))
    if raw.key != key_bytes(event.key):
        reason = f"{type(event).__name__} {event.event_id} has the key {event.key!r}, its record {raw.key!r}"
        return undecodable(raw, reason)
    return Record(
        topic=raw.topic,
        partition=raw.partition,
        offset=raw.offset,
        timestamp_ms=raw.timestamp_ms,
        key=event.key,
        event=event,
        traceparent=traceparent_of(raw.headers),
        digest=digest_of(raw) if digest else None,
    )


def undecodable(raw: Raw, reason: str) -> Undecodable:
    """Return the record as one that has no event, and why."""
    return Undecodable(**{field.name: getattr(raw, field.name) for field in fields(Raw)}, reason=reason)


def digest_of(raw: Raw) -> bytes:
    """Return a hash of key, headers and value, with the length of each so that none can pass for part of another."""
    parts = [raw.key, raw.value]
    for name, value in raw.headers:
        parts += (name.encode(), value)
    lengths = ",".join(["none" if part is None else str(len(part)) for part in parts])
    return blake2b(b"".join((lengths.encode(), b":", *filter(None, parts))), digest_size=DIGEST_BYTES).digest()


def digest_in(record: Arrived) -> bytes | None:
    """Return the record's hash; None: it was read without one."""
    return digest_of(record) if isinstance(record, Undecodable) else record.digest


async def subscription(
    log: Log,
    topics: Sequence[str],
    group: str,
    *,
    start: StartAt,
    revoked: Callable[[frozenset[PartitionId]], Awaitable[None]] | None,
    instance_id: str | None,
) -> AsyncIterator[RecordBatch]:
    """Yield the records of this member's partitions; see KafkaLog.subscribe."""
    assignment = _Assignment(start, revoked)
    async with log.join(group, topics, assignment, instance_id=instance_id) as member:
        while True:
            found = await member.poll(max_records=POLL_RECORDS, timeout_s=POLL_S)
            for place, records in found.items():
                if place in assignment.places:
                    next_offset = records[-1].offset + 1
                    yield RecordBatch(place=place, records=records, next_offset=next_offset)
                    assignment.took(place, next_offset)
            await assignment.commit(member, at_once=not found)


class _Assignment:
    """The partitions of this member, and how far the caller has taken each."""

    def __init__(self, start: StartAt, revoked: Callable[[frozenset[PartitionId]], Awaitable[None]] | None) -> None:
        self._start = start
        self._revoked = revoked
        self._taken: dict[PartitionId, Commit] = {}
        self._committed_at_s = 0.0
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

    async def commit(self, member: Member, *, at_once: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._taken or not (at_once or now_s - self._committed_at_s > COMMIT_EVERY_S):
            return
        taken, self._taken = self._taken, {}
        try:
            await member.commit(taken)
        except TryLater:
            self._taken = taken | self._taken
        self._committed_at_s = now_s
