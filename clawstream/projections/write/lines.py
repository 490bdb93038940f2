"""The lines that COPY reads, made from the bytes of the log. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clawstream.projections.write.rows import row
from clawstream.stream.codec.avro import codec
from clawstream.stream.log import PartitionId, Raw, Undecodable
from clawstream.stream.records import arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class RawBatch:
    """Bytes of one partition, in order."""

    place: PartitionId
    records: Sequence[Raw]


class RowRecord(NamedTuple):
    """The part of a record that a row needs; headers are left out, since it goes to another process."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


RowRecords = Sequence[tuple[PartitionId, Sequence[RowRecord]]]
LeftOut = Mapping[PartitionId, frozenset[int]]  # offsets of records that have no row, being set aside


class Unread(NamedTuple):
    """A record that can't be read, which has no row."""

    place: PartitionId
    offset: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLines:
    """The rows of some records, in order per table."""

    by_table: Mapping[str, bytes]
    unread: Sequence[Unread]


def row_records(batches: Iterable[RawBatch], left_out: LeftOut) -> RowRecords:
    """Return the batches' records in the form that `lines` needs, without those left out."""
    return [
        (
            batch.place,
            [
                RowRecord(raw.offset, raw.timestamp_ms, raw.key, raw.value)
                for raw in batch.records
                if raw.offset not in left_out.get(batch.place, ())
            ],
        )
        for batch in batches
    ]


def lines(told: RowRecords) -> TableLines:
    """Return the rows of the records."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    unread = []
    reading = codec()
    for place, records in told:
        topic, partition = place
        for offset, timestamp_ms, key, value in records:
            raw = Raw(
                topic=topic, partition=partition, offset=offset, timestamp_ms=timestamp_ms,
                key=key, value=value, headers=(),
            )  # fmt: skip
            record = arrived(raw, reading, digest=False)
            if isinstance(record, Undecodable):
                unread.append(Unread(place, offset, record.reason))
            elif (made := row(record)) is not None:
                found[made.table].append(made.line)
    return TableLines(by_table={table: "".join(some).encode() for table, some in found.items()}, unread=unread)
