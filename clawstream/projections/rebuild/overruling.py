"""Recorded offsets that a rebuild does not follow, since a person trusts the log; the old values are kept."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg.rows import dict_row

from clawstream.projections.write.progress import PartitionProgress
from clawstream.projections.write.writer import PartitionClaim
from clawstream.stream.log import PartitionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Overruled:
    """What the recorded offsets said of a partition, and what replaced them."""

    place: PartitionId
    at: datetime
    next_offset: int
    chain: bytes | None
    made_next_offset: int
    made_chain: bytes | None
    kept_schema: str  # where the old tables were left

    def as_dict(self) -> dict[str, object]:
        """Return it as plain values."""
        return {
            "place": f"{self.place.topic}-{self.place.partition}",
            "at": self.at.isoformat(),
            "next_offset": self.next_offset,
            "made_next_offset": self.made_next_offset,
            "chain_differed": self.made_chain != self.chain,
            "kept_schema": self.kept_schema,
        }


def overrule(
    cursor: psycopg.Cursor,
    progress_of: Mapping[PartitionId, PartitionProgress],
    made: Mapping[PartitionId, PartitionClaim],
    kept_schema: str,
) -> None:
    """Replace these recorded offsets by those of the rebuilt tables, and note the old ones."""
    for place, progress in progress_of.items():
        end, chain = made[place].next_offset, made[place].chain
        cursor.execute(_NOTED, (*place, progress.next_offset, progress.chain, end, chain, kept_schema))
        # Other records will take these offsets, with rows and commits of their own.
        cursor.execute(_UNCOMMITTED, (*place, end))
        cursor.execute(_NOT_SET_ASIDE, (*place, end))
        cursor.execute(_SET, (end, *place))


def fence(cursor: psycopg.Cursor, places: Iterable[PartitionId]) -> None:
    """Keep projectors that go on from the old chain from writing these partitions; they claim them again first."""
    cursor.executemany("UPDATE offsets SET epoch = epoch + 1 WHERE topic = %s AND partition = %s", list(places))


def overruled_of(cursor: psycopg.Cursor) -> list[Overruled]:
    """Return every entry that was ever overruled, the oldest first."""
    with cursor.connection.cursor(row_factory=dict_row) as by_name:
        return [
            Overruled(place=PartitionId(row.pop("topic"), row.pop("partition")), **row)
            for row in by_name.execute(_FOUND)
        ]


_NOTED = """
    INSERT INTO overruled
        (topic, partition, overruled_at, next_offset, chain, made_next_offset, made_chain, kept_schema)
    VALUES (%s, %s, now(), %s, %s, %s, %s, %s)
"""
_UNCOMMITTED = "DELETE FROM commits WHERE topic = %s AND partition = %s AND next_offset > %s"
_NOT_SET_ASIDE = "DELETE FROM set_aside WHERE topic = %s AND partition = %s AND source_offset >= %s"
_SET = "UPDATE offsets SET next_offset = %s WHERE topic = %s AND partition = %s"
_FOUND = """
    SELECT topic, partition, overruled_at AS at, next_offset, chain, made_next_offset, made_chain, kept_schema
    FROM overruled ORDER BY overruled_at, topic, partition
"""
