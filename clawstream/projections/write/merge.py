"""Merges many rows into a table that may hold some of them: copied beside it, then merged; an event's first row stays.

`sessions` grows by the rows that were new, so that a redelivered exchange counts once.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import LiteralString

import psycopg
from psycopg import sql
from sqlalchemy import Table

from clawstream.projections import tables
from clawstream.projections.write.rows import TableRow, columns


def merge(cursor: psycopg.Cursor, table: Table, rows: Sequence[TableRow]) -> None:
    """Insert the rows (in log order) of events that the table does not hold; part of the caller's transaction."""
    statements = _statements(table)
    cursor.execute(statements[0])
    with cursor.copy(statements[1]) as copy:
        copy.write("".join(row.line for row in rows))
    cursor.execute(statements[2])


def count_sessions(cursor: psycopg.Cursor) -> None:
    """Fill the empty table `sessions` from rows that were copied, not merged."""
    for name, counted in sorted(_COUNTED.items()):
        every_row = sql.SQL("SELECT * FROM {}").format(sql.Identifier(name))
        cursor.execute(sql.SQL(counted + _ADDED).format(fresh=every_row, sessions=column_names(tables.sessions)))


def column_names(table: Table) -> sql.Composed:
    """Return the names of the written columns, in the form that COPY and INSERT take."""
    return sql.SQL(", ").join(map(sql.Identifier, columns(table)))


@cache
def _statements(table: Table) -> tuple[sql.Composed, sql.Composed, sql.Composed]:
    """Return the statements that make the temporary table, copy into it, and merge it."""
    names = {
        "table": sql.Identifier(table.name),
        "staging": sql.Identifier(f"staged_{table.name}"),
        "columns": column_names(table),
    }
    make, copy, insert = (sql.SQL(statement).format(**names) for statement in (_MAKE, _COPY, _INSERT))
    counted = _COUNTED.get(table.name)
    if counted is None:
        return make, copy, insert
    fresh = insert + sql.SQL(" RETURNING *")
    return make, copy, sql.SQL(counted + _ADDED).format(fresh=fresh, sessions=column_names(tables.sessions))


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
