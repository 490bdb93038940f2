"""Writes rows, and how far their partitions were read, in one transaction.

The table `offsets` says how far each partition was read and which claim owns it. A writer claims a partition by raising
its epoch, and writes only if `offsets` still has the values that it last read there. So of two writers that think they
own a partition only one writes, and a batch is in the tables either once and whole, or not at all. The table `sessions`
counts only rows that were new, so an exchange that was written twice counts once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import LiteralString

import psycopg
from psycopg import sql
from sqlalchemy import Engine, Table
from sqlalchemy.exc import OperationalError

from clawstream.errors import TryLater, UnusableEvent
from clawstream.projections import tables
from clawstream.projections.tables import metadata
from clawstream.projections.text import escape
from clawstream.projections.write.chain import ChainBlock
from clawstream.projections.write.progress import PartitionProgress, partition_progress, waiting
from clawstream.projections.write.rows import GROUP, Release, TableRow, UnusableRecords, columns
from clawstream.stream.dead_letters import MESSAGE_CHARACTERS, DeadLetter
from clawstream.stream.log import DeadLetterId, Fate, PartitionId


def merge(cursor: psycopg.Cursor, rows: Iterable[TableRow]) -> None:
    """Insert those rows, in log order, whose events the tables do not hold yet; part of the caller's transaction."""
    by_table: defaultdict[str, list[TableRow]] = defaultdict(list)
    for row in rows:
        by_table[row.table].append(row)
    for name, some in sorted(by_table.items()):
        make, copy, insert = _statements(metadata.tables[name])
        cursor.execute(make)
        with cursor.copy(copy) as copying:
            copying.write("".join(row.line for row in some))
        cursor.execute(insert)


def staging(name: str) -> sql.Identifier:
    """Return the temporary table into which a table's rows are copied first; it is emptied when a transaction ends."""
    return sql.Identifier(f"staged_{name}")


def _column_names(table: Table) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns(table)))


@cache
def _statements(table: Table) -> tuple[sql.Composed, sql.Composed, sql.Composed]:
    """Return the statements that make the temporary table, copy into it, and merge it."""
    names = {"table": sql.Identifier(table.name), "staging": staging(table.name), "columns": _column_names(table)}
    make, copy, insert = (sql.SQL(statement).format(**names) for statement in (_MAKE, _COPY, _INSERT))
    counted = _COUNTED.get(table.name)
    if counted is None:
        return make, copy, insert
    fresh = insert + sql.SQL(" RETURNING *")
    return make, copy, sql.SQL(counted + _ADDED).format(fresh=fresh, sessions=_column_names(tables.sessions))


_MAKE = """
    CREATE TEMPORARY TABLE IF NOT EXISTS {staging} ON COMMIT DELETE ROWS
    AS SELECT {columns} FROM {table} WITH NO DATA
"""
_COPY = "COPY {staging} ({columns}) FROM STDIN"
_INSERT = """
    INSERT INTO {table} ({columns})
    SELECT {columns} FROM {staging} ORDER BY source_partition, source_offset
    ON CONFLICT (event_id) DO NOTHING
"""
_COUNTED: Mapping[str, LiteralString] = {
    "exchanges": """
        WITH fresh AS ({fresh})
        INSERT INTO sessions AS s ({sessions})
        SELECT
            session_id, min(source_partition), min(source_offset), min(log_time), max(source_offset), max(log_time),
            (array_agg(client ORDER BY source_offset))[1],
            (array_agg(model ORDER BY source_offset))[1],
            count(*) FILTER (WHERE kind = 'completed' AND turn_type = 'main'),
            count(*) FILTER (WHERE kind = 'completed' AND turn_type = 'side'),
            count(*) FILTER (WHERE kind = 'failed'),
            NULL::timestamptz, NULL::timestamptz
        FROM fresh
        GROUP BY session_id
    """,
    "session_ends": """
        WITH fresh AS ({fresh})
        INSERT INTO sessions AS s ({sessions})
        SELECT
            session_id, min(source_partition), min(source_offset), min(log_time), max(source_offset), max(log_time),
            NULL, NULL, 0, 0, 0,
            min(log_time) FILTER (WHERE kind = 'done'), max(log_time) FILTER (WHERE kind = 'idle')
        FROM fresh
        GROUP BY session_id
    """,
}
_ADDED = """
    ON CONFLICT (session_id) DO UPDATE SET
        first_offset = least(s.first_offset, excluded.first_offset),
        first_at = least(s.first_at, excluded.first_at),
        last_offset = greatest(s.last_offset, excluded.last_offset),
        last_at = greatest(s.last_at, excluded.last_at),
        client = coalesce(s.client, excluded.client),
        model = coalesce(s.model, excluded.model),
        num_main = s.num_main + excluded.num_main,
        num_side = s.num_side + excluded.num_side,
        num_failed = s.num_failed + excluded.num_failed,
        done_at = least(s.done_at, excluded.done_at),
        idle_at = greatest(s.idle_at, excluded.idle_at)
"""


STATEMENT_TIMEOUT_MS = 60_000
KEEP_COMMITS = "30 days"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionClaim:
    """Our claim of a partition under `epoch`, and the first offset that the tables lack."""

    next_offset: int
    epoch: int
    chain: bytes | None = None  # over the records read so far; None: none was read


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRows:
    """What to write of a partition's records from the claim's offset up to `next_offset`: rows and chain blocks."""

    place: PartitionId
    claim: PartitionClaim
    next_offset: int
    rows: Sequence[TableRow]
    blocks: Sequence[ChainBlock]  # the blocks that the records add to the chain
    first_offset: int | None  # of the first record; None: there is no record
    set_aside: Sequence[DeadLetter] = ()  # of the records that are to have no row

    @property
    def chain(self) -> bytes | None:
        """The chain after the last record."""
        return self.blocks[-1].chain if self.blocks else self.claim.chain


class TableWriter:
    """Writes batches, on one connection at a time. Its methods block, so they are called on another thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def claim(self, places: Iterable[PartitionId]) -> dict[PartitionId, PartitionClaim]:
        """Claim these partitions: from now on their former owners can't write them.

        Raises TryLater while the database is away.
        """
        with _transaction(self._engine) as cursor:
            claims = {place: _claim(cursor, place) for place in sorted(places)}
            cursor.execute("DELETE FROM commits WHERE committed_at < now() - %s::interval", (KEEP_COMMITS,))
            return claims

    def write(self, batch: Sequence[PartitionRows]) -> frozenset[PartitionId]:
        """Write all of the batch and return an empty set, or write none of it and return the partitions that were lost.

        Raises TryLater while the database is away; writing the same batch again is always safe. Raises UnusableRecords,
        with nothing written, for rows that the database refuses.
        """
        with self._refusals([row for part in batch for row in part.rows]), _transaction(self._engine) as cursor:
            states = {part.place: _advance(cursor, part) for part in sorted(batch, key=lambda part: part.place)}
            lost = frozenset(place for place, state in states.items() if state is _WriteState.LOST)
            if lost:
                cursor.connection.rollback()
                return lost
            fresh = [part for part in batch if states[part.place] is _WriteState.ADVANCED]
            merge(cursor, [row for part in fresh for row in part.rows])
            cursor.executemany(_SET_ASIDE, [_noted(dead_letter) for part in fresh for dead_letter in part.set_aside])
            cursor.executemany(_LINKED, [_linked(part.place, block) for part in fresh for block in part.blocks])
            cursor.executemany(_COMMITTED, [(*part.place, part.next_offset, part.claim.next_offset) for part in fresh])
        return lost

    def overtaken(self, claims: Mapping[PartitionId, PartitionClaim]) -> frozenset[PartitionId]:
        """Return the partitions lost to a rebuild: it has recorded another chain, or a lower offset.

        Another projector that claims a partition changes neither until it writes. Raises TryLater while the database
        is away.
        """
        with _transaction(self._engine) as cursor:
            found = partition_progress(cursor)
        return frozenset(place for place, claim in claims.items() if _is_overtaken(claim, found.get(place)))

    def waiting(self) -> list[DeadLetter]:
        """Return the waiting dead letters; raises TryLater while the database is away."""
        with _transaction(self._engine) as cursor:
            return waiting(cursor, GROUP)

    def release(self, place: PartitionId, claim: PartitionClaim, release: Release) -> bool:
        """Write the outcome for dead letters of the partition; False: it is not ours any more, and nothing is written.

        Raises what `write` raises, and can be repeated as safely.
        """
        with self._refusals(release.rows), _transaction(self._engine) as cursor:
            # This statement updates `offsets`, so it waits while a rebuild swaps the tables.
            cursor.execute(_HELD, (*place, claim.epoch))
            if cursor.rowcount != 1:
                return False
            merge(cursor, release.rows)
            for query, fate in ((_USED, Fate.REPLAYED), (_DISCARDED, Fate.DISCARDED)):
                cursor.execute(query, (*place, [mark.id.offset for mark in release.closed if mark.fate is fate]))
            if release.again is not None:
                cursor.execute(_SET_ASIDE, _noted(release.again[0]))
            return True

    @contextmanager
    def _refusals(self, rows: Sequence[TableRow]) -> Iterator[None]:
        """Raise UnusableRecords, which names the records, if the database refuses the contents of some rows."""
        try:
            yield
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            found = self._refused(rows)
            if not found:
                raise
            raise UnusableRecords(found) from error

    def _refused(self, rows: Sequence[TableRow]) -> dict[DeadLetterId, Exception]:
        found: dict[DeadLetterId, Exception] = {}
        with _transaction(self._engine) as cursor:
            for row in rows:
                try:
                    with cursor.connection.transaction():
                        merge(cursor, [row])
                        raise psycopg.Rollback
                except (psycopg.DataError, psycopg.IntegrityError) as error:
                    found[DeadLetterId(GROUP, *row.source)] = UnusableEvent(f"Postgres refuses its row: {_what(error)}")
        return found


class _WriteState(Enum):
    ADVANCED = "advanced"
    WRITTEN = "written"  # by this very batch, whose commit got no answer
    LOST = "lost"


_CLAIMED = """
    INSERT INTO offsets AS o (topic, partition, next_offset, epoch) VALUES (%s, %s, 0, 1)
    ON CONFLICT (topic, partition) DO UPDATE SET epoch = o.epoch + 1
    RETURNING next_offset, epoch, chain
"""
_ADVANCED = """
    UPDATE offsets SET next_offset = %s, chain = %s, chain_from = coalesce(chain_from, %s)
    WHERE topic = %s AND partition = %s AND next_offset = %s AND epoch = %s
"""
_RECORDED = "SELECT next_offset, epoch FROM offsets WHERE topic = %s AND partition = %s"
_LINKED = """
    INSERT INTO chain_blocks AS b (topic, partition, block, next_offset, chain, marks) VALUES (%s, %s, %s, %s, %s, %s)
    ON CONFLICT (topic, partition, block) DO UPDATE
    SET next_offset = excluded.next_offset, chain = excluded.chain, marks = b.marks || excluded.marks
"""
_SET_ASIDE = """
    INSERT INTO set_aside
        (topic, partition, source_offset, log_time_ms, record_key, reason, error, attempt, fate)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (topic, partition, source_offset) DO UPDATE
    SET reason = excluded.reason, error = excluded.error, attempt = excluded.attempt, fate = excluded.fate
"""
_HELD = "UPDATE offsets SET epoch = epoch WHERE topic = %s AND partition = %s AND epoch = %s"
_USED = "DELETE FROM set_aside WHERE topic = %s AND partition = %s AND source_offset = ANY(%s)"
_DISCARDED = "UPDATE set_aside SET fate = 'discarded' WHERE topic = %s AND partition = %s AND source_offset = ANY(%s)"
_COMMITTED = """
    INSERT INTO commits (topic, partition, next_offset, first_offset, committed_at)
    VALUES (%s, %s, %s, %s, clock_timestamp())
"""


def _claim(cursor: psycopg.Cursor, place: PartitionId) -> PartitionClaim:
    found = cursor.execute(_CLAIMED, place).fetchone()
    assert found is not None, "RETURNING gives a row"
    next_offset, epoch, chain = found
    return PartitionClaim(next_offset=next_offset, epoch=epoch, chain=chain)


def _is_overtaken(claim: PartitionClaim, progress: PartitionProgress | None) -> bool:
    if progress is None or progress.next_offset != claim.next_offset:
        return progress is None or progress.next_offset < claim.next_offset
    return progress.chain != claim.chain


def _linked(place: PartitionId, block: ChainBlock) -> tuple[str, int, int, int, bytes, bytes]:
    return (*place, block.number, block.next_offset, block.chain, block.marks)


def _advance(cursor: psycopg.Cursor, part: PartitionRows) -> _WriteState:
    """Move the recorded offset on; its row in `offsets` stays locked until the transaction ends."""
    advance = (part.next_offset, part.chain, part.first_offset)
    cursor.execute(_ADVANCED, (*advance, *part.place, part.claim.next_offset, part.claim.epoch))
    if cursor.rowcount == 1:
        return _WriteState.ADVANCED
    recorded = cursor.execute(_RECORDED, part.place).fetchone()
    return _WriteState.WRITTEN if recorded == (part.next_offset, part.claim.epoch) else _WriteState.LOST


def _what(error: psycopg.Error) -> str:
    """Return what a refusal is about, without Postgres's own message, which quotes the row."""
    about = error.diag.constraint_name or error.diag.column_name
    return f"{type(error).__name__}{f' ({about})' if about else ''}"


def _noted(dead_letter: DeadLetter) -> tuple[object, ...]:
    """Return the dead letter's row for `set_aside`; a ruling that is not done yet stands only in the queue."""
    fate = Fate.DISCARDED if dead_letter.fate is Fate.DISCARDED else Fate.OPEN
    error = escape(dead_letter.error[:MESSAGE_CHARACTERS])
    _, *at = dead_letter.id
    return (*at, dead_letter.timestamp_ms, dead_letter.key, dead_letter.reason, error, dead_letter.attempt, fate)


@contextmanager
def _transaction(engine: Engine) -> Iterator[psycopg.Cursor]:
    """Commit at the end. Raises TryLater where the database is away, restarting, out of space or ends a deadlock."""
    try:
        connection = engine.raw_connection()
    except (psycopg.OperationalError, OperationalError) as error:
        raise TryLater(f"Postgres can't be reached: {str(error).partition(chr(10))[0]}") from error
    try:
        driver = connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        cursor = driver.cursor()
        cursor.execute(f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_MS}")
        yield cursor
        driver.commit()
    except psycopg.OperationalError as error:
        connection.invalidate()
        raise TryLater(f"Postgres did not take the transaction: {str(error).partition(chr(10))[0]}") from error
    finally:
        connection.close()
