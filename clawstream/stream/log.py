"""What a log is: the surface that stages, gateway, projector and trainer use, on Kafka and in memory alike.

Both logs pass the tests in tests/parts/stream/contract, so whatever holds on one holds on the other.
"""

from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from clawstream.events import Event
from clawstream.stream.codec.headers import ReadHeaders, key_bytes
from clawstream.stream.stage import Record

if TYPE_CHECKING:
    from clawstream.stream.dead_letters.records import DeadLetterId, DeadLetterMark


class PartitionId(NamedTuple):
    """A partition of a topic, without the installation's prefix; any (topic, partition) pair equals it."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A record as bytes."""

    topic: str  # without the installation's prefix
    partition: int
    offset: int
    timestamp_ms: int  # when the broker appended it, since the epoch, UTC
    key: bytes | None
    value: bytes | None
    headers: ReadHeaders


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecodable:
    """A record whose bytes no schema of ours can decode."""

    raw: Raw
    reason: str

    @property
    def topic(self) -> str:
        """Where it stands."""
        return self.raw.topic

    @property
    def partition(self) -> int:
        """Where it stands."""
        return self.raw.partition

    @property
    def offset(self) -> int:
        """Where it stands."""
        return self.raw.offset

    @property
    def timestamp_ms(self) -> int:
        """When the broker appended it."""
        return self.raw.timestamp_ms


Arrived = Record | Undecodable


def key_of(record: Arrived) -> bytes | None:
    """Return the record's key in bytes, as the log has it."""
    return record.raw.key if isinstance(record, Undecodable) else key_bytes(record.key)


Start = Mapping[tuple[str, int], int] | Literal["earliest", "latest"] | int


class Outgoing(NamedTuple):
    """An event to write, and the trace that it belongs to."""

    event: Event
    traceparent: str | None = None


class Sealed(NamedTuple):
    """An event encoded as a record, which stays the same wherever and however often it is written."""

    topic: str  # without the installation's prefix
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


class PlacedRecord(NamedTuple):
    """A record for a partition that the writer chose."""

    place: PartitionId
    key: bytes
    value: bytes
    headers: Sequence[tuple[str, bytes]]


class Commit(NamedTuple):
    """The next offset that a group will read of a partition, and what it noted beside it."""

    offset: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBatch:
    """What was read of one partition, in order."""

    place: PartitionId
    records: Sequence[Arrived]
    next_offset: int  # the offset after the last record


class Listener(Protocol):
    """Learns which partitions a member of a group has."""

    async def assigned(self, committed: Mapping[PartitionId, Commit | None]) -> Mapping[PartitionId, int]:
        """Return where to start reading each partition; none of them is read before this returns."""

    async def revoked(self, places: frozenset[PartitionId]) -> None:
        """The partitions go to another member once this returns."""


class Member(Protocol):
    """One reader of a group."""

    async def poll(self, *, max_records: int, timeout_s: float) -> Mapping[PartitionId, Sequence[Arrived]]:
        """Return what arrived, waiting for the first record at most `timeout_s`; never cancelled."""

    async def commit(self, commits: Mapping[PartitionId, Commit]) -> bool:
        """Commit the offsets; False where some of the partitions are not ours any more."""

    def pause(self, places: Iterable[PartitionId]) -> None:
        """Fetch no more from these partitions until `resume`."""

    def resume(self, places: Iterable[PartitionId]) -> None:
        """Fetch from these partitions again."""

    def caught_up(self, place: PartitionId) -> bool:
        """Return whether every record that the partition had at the last fetch has been polled."""


class Log(Protocol):
    """What the runner needs of a log."""

    async def write(self, outgoing: Sequence[Outgoing]) -> None:
        """Return when all are acknowledged, in this order per key.

        Raises UnusableEvent, before anything is written, for an event that can't be written; TryLater where a part may
        be written and the whole may be tried again.
        """

    async def set_aside(
        self,
        dead_letter_id: "DeadLetterId",
        *,
        error: Exception,
        attempt: int = 1,
        rebuild_offsets: Mapping[str, int] | None = None,
    ) -> None:
        """Copy the record to its topic's dead-letter queue, acknowledged; see dead_letters/records.py."""

    async def mark(self, marks: "Sequence[DeadLetterMark]") -> None:
        """Write marks into the dead letters' queues, acknowledged."""

    def follow_raw(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes on the topics, then what arrives; see KafkaLog.follow."""

    async def end_offsets(self, topics: Sequence[str]) -> Mapping[PartitionId, int]:
        """Return the offset that each partition's next record will have."""

    async def begin_offsets(self, topics: Sequence[str]) -> Mapping[PartitionId, int]:
        """Return the oldest offset that each partition still has."""

    def replay(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records from the first offset up to but not including the second, in order.

        With a `key`, yield only its records; the others are not decoded. Without `digest`, records are not hashed.
        """

    def join(
        self, group: str, topics: Sequence[str], listener: Listener, *, instance_id: str | None = None
    ) -> AbstractAsyncContextManager[Member]:
        """Be a member of `group` for the length of the block."""


class StartAt(Protocol):
    """Says where to read partitions from; called each time this member is given some."""

    def __call__(self, places: frozenset[PartitionId]) -> Awaitable[Mapping[PartitionId, int]]:
        """Return the next offset to read of each partition."""
