"""Reads from the tables how far the projector has come on each partition, in the caller's transaction."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import psycopg
from psycopg.rows import dict_row

from clawstream.errors import DatabaseMismatch
from clawstream.projections.write.chain import ChainBlock
from clawstream.stream.dead_letters import DeadLetter, Reason
from clawstream.stream.log import DeadLetterId, Fate, PartitionId, past_the_end

LeftOut = Mapping[PartitionId, frozenset[int]]  # offsets of records that have no row, as they are set aside


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProgress:
    """How far a partition was read, which claim may write it, and its chain."""

    next_offset: int
    epoch: int
    chain: bytes | None
    chain_from: int | None


def partition_progress(cursor: psycopg.Cursor) -> dict[PartitionId, PartitionProgress]:
    """Return the progress on every partition that was ever claimed."""
    with cursor.connection.cursor(row_factory=dict_row) as by_name:
        found = by_name.execute("SELECT topic, partition, next_offset, epoch, chain, chain_from FROM offsets")
        return {PartitionId(row.pop("topic"), row.pop("partition")): PartitionProgress(**row) for row in found}


def blocks_of(cursor: psycopg.Cursor) -> dict[PartitionId, list[ChainBlock]]:
    """Return the chain's blocks of every partition, ascending."""
    made: dict[PartitionId, list[ChainBlock]] = {}
    query = "SELECT topic, partition, block, next_offset, chain, marks FROM chain_blocks ORDER BY 1, 2, 3"
    for topic, partition, number, next_offset, chain, marks in cursor.execute(query):
        block = ChainBlock(number=number, next_offset=next_offset, chain=chain, marks=marks)
        made.setdefault(PartitionId(topic, partition), []).append(block)
    return made


def left_out(cursor: psycopg.Cursor) -> LeftOut:
    """Return the offsets of records that were read but have no row, as they are set aside or discarded."""
    found: defaultdict[PartitionId, set[int]] = defaultdict(set)
    for topic, partition, offset in cursor.execute("SELECT topic, partition, source_offset FROM set_aside"):
        found[PartitionId(topic, partition)].add(offset)
    return {place: frozenset(offsets) for place, offsets in found.items()}


def waiting(cursor: psycopg.Cursor, group: str) -> list[DeadLetter]:
    """Return the waiting dead letters, in order per partition."""
    return [
        DeadLetter(
            id=DeadLetterId(group, topic, partition, offset),
            key=key,
            timestamp_ms=log_time_ms,
            reason=Reason(reason),
            error=error,
            attempt=attempt,
            rebuild_offsets={},
            set_aside_at_ms=log_time_ms,
        )
        for topic, partition, offset, log_time_ms, key, reason, error, attempt in cursor.execute(_WAITING, (Fate.OPEN,))
    ]


_WAITING = """
    SELECT topic, partition, source_offset, log_time_ms, record_key, reason, error, attempt
    FROM set_aside WHERE fate = %s ORDER BY topic, partition, source_offset
"""


def refuse_another_log(offsets: Mapping[PartitionId, int], ends: Mapping[PartitionId, int]) -> None:
    """Raise DatabaseMismatch where the database has read further than the log goes."""
    for place in past_the_end(offsets, ends):
        raise DatabaseMismatch(
            f"the database has read {place.topic} partition {place.partition} up to offset {offsets[place]}, but this "
            f"log ends at {ends.get(place, 0)}: it is not the log that the database was filled from, or it has lost "
            "its end. Nothing was written: name the right broker and prefix, or an empty database. If this log is the "
            "right one, `clawstream projection rebuild --trust-log` makes new tables from it, keeps the old ones, and "
            "puts back the stages that have read beyond its end"
        )
