"""Makes the tables again from the log, beside the existing ones, in a transaction that leaves nothing behind.

The existing tables are seen as they are at one moment. Meanwhile the projector writes on; a rebuild can't swap tables.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import Table
from sqlalchemy.exc import OperationalError

from clawstream.errors import OperatorError
from clawstream.projections import database, tables
from clawstream.projections.accounts import driver_of
from clawstream.projections.write.rows import TableRow
from clawstream.projections.write.writer import merge, staging
from clawstream.stream import topics
from clawstream.stream.log import PartitionId

COMPARED = (*tables.FACTS, tables.sessions)
MAX_NAMED = 20  # of the differing rows of a table
_SHOWN = 80  # characters of a value
_SCRATCH_MEMORY = "128MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A row of a table that differs from what the log gives."""

    table: str
    key: str
    what: str  # missing, extra, different
    column: str | None = None  # the first column that differs; None: none, or its row is missing or extra
    expected: str | None = None  # the value that the log gives, cut short; None is NULL
    found: str | None = None  # the value in the table, cut short; None is NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The result for one table: how many rows were compared, how many differ, and the first differing ones."""

    num_rows: int
    num_different: int
    named: Sequence[Difference]


class Scratch:
    """Empty tables like those of the projection; `compare` says how the rows put into them differ from its rows."""

    def __init__(self, cursor: psycopg.Cursor, schema: str) -> None:
        self.cursor = cursor  # before `begin`, plain table names mean the projection's tables
        self._schema = schema

    def begin(self, begins: Mapping[PartitionId, int]) -> None:
        """Make the tables; rows of records before `begins` are not compared, as the log has lost those records."""
        cursor = self.cursor
        for table in COMPARED:
            cursor.execute(_LIKE.format(name=sql.Identifier(table.name), live=self._live(table), key=_key(table)))
        cursor.execute("CREATE TEMPORARY TABLE reach (topic text, partition integer, begin bigint) ON COMMIT DROP")
        reach = [(*place, offset) for place, offset in begins.items()]
        cursor.executemany("INSERT INTO reach VALUES (%s, %s, %s)", reach)
        cursor.execute("SET LOCAL search_path = pg_temp")  # `merge` names tables without a schema

    def put(self, rows: Sequence[TableRow]) -> None:
        """Add rows to the tables, as the projector adds them to its own."""
        merge(self.cursor, rows)
        for name in {row.table for row in rows}:
            self.cursor.execute(sql.SQL("TRUNCATE {}").format(staging(name)))

    def keys(self) -> set[str]:
        """Return the record keys that the projection's rows have."""
        parts = [
            sql.SQL("SELECT {} FROM {}").format(sql.Identifier(key_column(table)), self._live(table))
            for table in COMPARED
        ]
        return {key for (key,) in self.cursor.execute(sql.SQL(" UNION ").join(parts))}

    def without_outcome(self) -> tuple[int, list[str]]:
        """Return how many main answers have no turn although a later answer or a day came; and the first ids."""
        query = _WITHOUT_OUTCOME.format(
            exchanges=self._live(tables.exchanges),
            turns=self._live(tables.turns),
            settlements=self._live(tables.settlements),
        )
        found = [exchange_id for (exchange_id,) in self.cursor.execute(query)]
        return len(found), found[:MAX_NAMED]

    def compare(self, table: Table, only: Collection[str] | None) -> Differences:
        """Compare every row, in both directions; with `only`, just the rows of records with these keys (as stored)."""
        parts = {
            "key": _key(table),
            "live": self._live(table),
            "made": sql.SQL("pg_temp.{}").format(sql.Identifier(table.name)),
            "wanted": sql.SQL("true") if only is None else sql.SQL("{} = ANY(%(only)s)").format(_record_key(table)),
            "offset": sql.Identifier("first_offset" if table is tables.sessions else "source_offset"),
            "topic": sql.Literal(topics.EXCHANGES if table is tables.sessions else table.info["topic"]),
            "columns": sql.SQL(", ").join(_compared(column.name) for column in table.columns),
        }
        arguments = {"only": None if only is None else list(only), "shown": _SHOWN}
        self.cursor.execute(sql.SQL("ANALYZE {made}").format(**parts))
        count = self.cursor.execute(_COUNT.format(**parts), arguments).fetchone()
        assert count is not None, "a count is a row"
        different = 0
        named: list[Difference] = []
        for found in self.cursor.stream(_DIFFERENT.format(**parts), arguments):
            different += 1
            if len(named) < MAX_NAMED:
                named.append(_difference(table, found))
        return Differences(num_rows=count[0], num_different=different, named=tuple(named))

    def _live(self, table: Table) -> sql.Composed:
        return sql.SQL("{}.{}").format(sql.Identifier(self._schema), sql.Identifier(table.name))


@contextmanager
def scratch(url: str) -> Iterator[Scratch]:
    """Yield a scratch beside the projection as it is now. Raises DatabaseMismatch, PartUnavailable, OperatorError."""
    engine = database.connect(url, application="clawstream audit")
    try:
        database.check(engine)
        with engine.connect() as connection:
            driver = driver_of(connection)
            driver.rollback()  # end the transaction of the pool's first query
            driver.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            cursor = driver.cursor()
            try:
                cursor.execute(f"SET LOCAL temp_buffers = '{_SCRATCH_MEMORY}'")
                names = sql.SQL(", ").join(sql.Identifier(name) for name in tables.metadata.tables)
                # Locked before the moment is chosen, so that no rebuild swaps in other tables in between.
                cursor.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(names))
                yield Scratch(cursor, live_schema(cursor))
            finally:
                driver.rollback()
    except OperationalError as error:
        raise database.unreachable(engine, error) from error
    except psycopg.Error as error:
        raise OperatorError(f"Postgres did not let the tables be compared: {error}. Nothing was changed") from error
    finally:
        engine.dispose()


def live_schema(cursor: psycopg.Cursor) -> str:
    """Return the schema of the projection's tables."""
    query = (
        "SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = 'offsets'::regclass"
    )
    found = cursor.execute(query).fetchone()
    assert found is not None, "the revision was checked"
    return str(found[0])


def key_column(table: Table) -> str:
    """Return the column that holds the keys of the rows' records."""
    columns = table.columns
    if "replay" in columns and "policy_id" not in columns:
        return "replay"
    return "session_id" if "session_id" in columns else "policy_id"


def _key(table: Table) -> sql.Identifier:
    [column] = table.primary_key.columns
    return sql.Identifier(column.name)


def _record_key(table: Table) -> sql.Identifier:
    return sql.Identifier(key_column(table))


_LIKE = sql.SQL("CREATE TEMPORARY TABLE {name} (LIKE {live} INCLUDING GENERATED, PRIMARY KEY ({key})) ON COMMIT DROP")
# A session's last answer may still wait for its next state. The turns stage settles it once the session is silent, and
# forgets it after a day.
_WITHOUT_OUTCOME = sql.SQL("""
    SELECT exchange_id FROM {exchanges} e
    WHERE kind = 'completed' AND turn_type = 'main'
      AND NOT EXISTS (SELECT FROM {turns} t WHERE t.turn_id = e.exchange_id)
      AND (EXISTS (SELECT FROM {exchanges} n
                   WHERE n.session_id = e.session_id AND n.source_partition = e.source_partition
                     AND n.source_offset > e.source_offset AND n.kind = 'completed' AND n.turn_type = 'main'
                     AND n.exchange_id <> e.exchange_id
                     AND (e.choice_of IS NULL OR n.choice_of IS DISTINCT FROM e.choice_of))
           OR (e.log_time < (SELECT max(log_time) FROM {exchanges}) - interval '1 day'
               AND NOT EXISTS (SELECT FROM {settlements} s
                               WHERE s.session_id = e.session_id AND s.log_time >= e.log_time)))
    ORDER BY source_partition, source_offset
""")

_COUNT = sql.SQL("SELECT count(*) FROM {made} WHERE {wanted}")
# *<> compares the stored bytes, and treats NULL as a value.
_DIFFERENT = sql.SQL("""
    SELECT coalesce(l.{key}, m.{key})::text, l.{key} IS NULL, m.{key} IS NULL, {columns}
    FROM (SELECT * FROM {live} WHERE {wanted}) AS l
    FULL JOIN (SELECT * FROM {made} WHERE {wanted}) AS m ON m.{key} = l.{key}
    LEFT JOIN pg_temp.reach AS r ON r.topic = {topic} AND r.partition = l.source_partition AND l.{offset} < r.begin
    WHERE r.topic IS NULL AND (l.{key} IS NULL OR m.{key} IS NULL OR l *<> m)
""")


def _compared(name: str) -> sql.Composed:
    """Whether a column differs, and its two values."""
    return sql.SQL("l.{0} IS DISTINCT FROM m.{0}, left(m.{0}::text, %(shown)s), left(l.{0}::text, %(shown)s)").format(
        sql.Identifier(name)
    )


def _difference(table: Table, found: Sequence[Any]) -> Difference:
    key, missing, extra, *columns = found
    what = "missing" if missing else "extra" if extra else "different"
    named = Difference(table=table.name, key=str(key), what=what)
    if missing or extra:
        return named
    for n, column in enumerate(table.columns):
        differs, expected, there = columns[3 * n : 3 * n + 3]
        if differs:
            return replace(named, column=column.name, expected=expected, found=there)
    return named  # the bytes differ, but the values are equal
