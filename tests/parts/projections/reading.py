"""What the tables hold, in a form that can be compared."""

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Engine, text

from clawstream.projections.tables import metadata
from clawstream.projections.write import projector
from clawstream.projections.write.writer import PartitionClaim, PartitionRows, TableWriter
from clawstream.stream.log import PartitionId, RecordBatch
from clawstream.stream.stage import Record

OWN_BOOKS = {"offsets", "commits", "overruled"}  # say when and by whom, which is not in the log


def empty(engine: Engine) -> None:
    """Delete every row."""
    with engine.begin() as connection:
        connection.execute(text("; ".join(f"DELETE FROM {name}" for name in metadata.tables)))


def contents(engine: Engine) -> dict[str, list[str]]:
    """Every row of every table that is made of the log, as text, sorted; and how far it was read."""
    with engine.connect() as connection:
        found = {
            name: sorted(connection.execute(text(f'SELECT "{name}"::text FROM "{name}"')).scalars())
            for name in metadata.tables
            if name not in OWN_BOOKS
        }
        read = connection.execute(text("SELECT topic, partition, next_offset FROM offsets WHERE next_offset > 0"))
        return found | {"offsets": sorted(map(str, read))}


def partition_rows(place: PartitionId, claim: PartitionClaim, records: Sequence[Record]) -> PartitionRows:
    """What a reader hands over that has read `records` since `claim`."""
    next_offset = records[-1].offset + 1 if records else claim.next_offset
    return projector.partition_rows(RecordBatch(place=place, records=records, next_offset=next_offset), claim)


def write_all(engine: Engine, placed: Mapping[PartitionId, Sequence[Record]]) -> None:
    """Write everything that is not in the tables yet, in one batch."""
    writer = TableWriter(engine)
    claims = writer.claim(placed)
    lost = writer.write([partition_rows(place, claims[place], rest(placed[place], claims[place])) for place in placed])
    assert not lost


def rest(records: Iterable[Record], claim: PartitionClaim) -> list[Record]:
    """The records that a reader gets who starts where the claim says."""
    return [record for record in records if record.offset >= claim.next_offset]
