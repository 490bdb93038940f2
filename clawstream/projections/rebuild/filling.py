"""Fills empty tables as fast as Postgres takes it: copies rows without keys or indexes, which are made at the end.

The result is what `merge` makes of the same records, bit for bit and in whatever order it had them: the first row of
each event, and sessions that count each exchange once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import psycopg
from psycopg import sql
from sqlalchemy import Engine, Table

from clawstream.projections.tables import FACTS, metadata
from clawstream.projections.write.chain import ChainBlock, Link, blocks, seed
from clawstream.projections.write.rows import RawBatch, TableLines
from clawstream.projections.write.writer import column_names
from clawstream.stream.log import PartitionId, digest_of


def copy(cursor: psycopg.Cursor, lines: TableLines) -> None:
    """Add rows, to tables that have no key yet."""
    for name, data in sorted(lines.by_table.items()):
        table = metadata.tables[name]
        with cursor.copy(_COPY.format(table=sql.Identifier(name), columns=column_names(table))) as copying:
            copying.write(data)


def keep_the_first(cursor: psycopg.Cursor, table: Table) -> None:
    """Delete every row of an event but the one of its first record."""
    cursor.execute(_KEEP_THE_FIRST.format(table=sql.Identifier(table.name)))


def links_of(batch: RawBatch) -> list[Link]:
    """Return the records' links for the chain."""
    return [Link(raw.offset, digest_of(raw)) for raw in batch.records]


class Chaining:
    """The chains of partitions that are read from their beginning, and the blocks that are not written yet."""

    def __init__(self) -> None:
        self._open: dict[PartitionId, ChainBlock] = {}  # the last block of each
        self._whole: list[tuple[PartitionId, ChainBlock]] = []
        self._begins: dict[PartitionId, int] = {}

    def tell(self, batches: Iterable[RawBatch]) -> None:
        """Take the next records of some partitions."""
        for batch in batches:
            place = batch.place
            before = self._open.get(place)
            self._begins.setdefault(place, batch.records[0].offset)
            for block in blocks(before.chain if before else seed(place), links_of(batch)):
                if before is not None and before.number == block.number:
                    before = replace(block, marks=before.marks + block.marks)
                    continue
                if before is not None:
                    self._whole.append((place, before))
                before = block
            assert before is not None, "a batch has records"
            self._open[place] = before

    def write(self, cursor: psycopg.Cursor, *, rest: bool) -> None:
        """Write the blocks that are whole; with `rest`, also those that are not."""
        found = self._whole + (list(self._open.items()) if rest else [])
        self._whole = []
        with cursor.copy(
            "COPY chain_blocks (topic, partition, block, next_offset, chain, marks) FROM STDIN"
        ) as copying:
            for place, block in found:
                copying.write_row((*place, block.number, block.next_offset, block.chain, block.marks))

    def write_progress(self, cursor: psycopg.Cursor, ends: Mapping[PartitionId, int]) -> None:
        """Record that the partitions were read up to `ends`."""
        cursor.executemany(
            _BOOK,
            [
                (*place, end, self._open[place].chain if place in self._open else None, self._begins.get(place))
                for place, end in ends.items()
            ],
        )


class Filling:
    """One transaction that fills the tables of a new schema; a table that is emptied in it needs no write-ahead log."""

    def __init__(self, cursor: psycopg.Cursor) -> None:
        self._cursor = cursor
        self._chaining = Chaining()
        self.num_unread = 0
        cursor.execute(sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(sql.Identifier(one.name) for one in FACTS)))

    def take(self, batches: Sequence[RawBatch], lines: TableLines | None) -> None:
        """Add the rows of the next records of some partitions, and their links for the chain."""
        assert lines is not None, "rows are made of every record"
        copy(self._cursor, lines)
        self.num_unread += len(lines.unread)
        self._chaining.tell(batches)
        self._chaining.write(self._cursor, rest=False)

    def finish(self, ends: Mapping[PartitionId, int]) -> None:
        """Record that all was read up to `ends`."""
        self._chaining.write(self._cursor, rest=True)
        self._chaining.write_progress(self._cursor, ends)


@contextmanager
def filling(building: Engine) -> Iterator[Filling]:
    """Yield a `Filling`; the tables hold its rows once the block ends without an error."""
    connection = building.raw_connection()
    try:
        driver = connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        with driver.transaction():
            yield Filling(driver.cursor())
    finally:
        connection.invalidate()


_BOOK = """
    INSERT INTO offsets (topic, partition, next_offset, epoch, chain, chain_from) VALUES (%s, %s, %s, 0, %s, %s)
"""
_COPY = sql.SQL("COPY {table} ({columns}) FROM STDIN")
_KEEP_THE_FIRST = sql.SQL("""
    DELETE FROM {table} AS later USING (
        SELECT ctid AS at, row_number() OVER (PARTITION BY event_id ORDER BY source_partition, source_offset) AS number
        FROM {table}
    ) AS numbered
    WHERE later.ctid = numbered.at AND numbered.number > 1
""")
