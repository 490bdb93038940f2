"""The tables in use and the rebuilt ones, in two schemas of a database; and recorded offsets that a rebuild overruled.

The tables in use are in the schema whose `offsets` a plain name finds. A swap moves tables between schemas, not rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from sqlalchemy import Engine

from clawstream.projections.accounts import driver_of
from clawstream.projections.rebuild.comparing import live_schema
from clawstream.projections.tables import metadata
from clawstream.projections.write.progress import PartitionProgress
from clawstream.projections.write.writer import PartitionClaim
from clawstream.stream.log import PartitionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Overruled:
    """What the progress tables said of a partition before a rebuild overruled them, and what they say since."""

    place: PartitionId
    at: datetime
    next_offset: int
    chain: bytes | None
    made_next_offset: int
    made_chain: bytes | None
    kept_schema: str  # the schema in which the old tables were left

    def as_dict(self) -> dict[str, object]:
        """Return the fields that are shown, as plain values."""
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
    """Replace these recorded offsets by those of the rebuilt tables, and note the old ones in `overruled`."""
    for place, progress in progress_of.items():
        end, chain = made[place].next_offset, made[place].chain
        cursor.execute(_NOTED, (*place, progress.next_offset, progress.chain, end, chain, kept_schema))
        # Other records will get the offsets from `end` on, with rows and commits of their own.
        cursor.execute(_UNCOMMITTED, (*place, end))
        cursor.execute(_NOT_SET_ASIDE, (*place, end))
        cursor.execute(_SET, (end, *place))


def fence(cursor: psycopg.Cursor, places: Iterable[PartitionId]) -> None:
    """Make projectors claim these partitions again before they write, so that none goes on from the old chain."""
    cursor.executemany("UPDATE offsets SET epoch = epoch + 1 WHERE topic = %s AND partition = %s", list(places))


def overruled_of(cursor: psycopg.Cursor) -> list[Overruled]:
    """Return all entries of `overruled`, the oldest first."""
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


BUILDING = "clawstream_rebuild"
HOLD_WITHIN_MS = 10_000  # longer than a batch of the projector takes
# The longest that readers wait for a swap. Postgres looks for deadlocks after a second, so the swap gives up well
# before Postgres could end a reader that holds one table and waits for another, which the swap holds: on a busy machine
# a timeout is heard of late.
SWAP_WITHIN_MS = 400
DROP_WITHIN_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _DatabaseObject:
    """A table, view or function of one of the schemas."""

    kind: str  # as ALTER and DROP name it
    name: sql.Composable  # a function's with its arguments

    def at(self, schema: str) -> sql.Composed:
        """Return its name with that schema."""
        return sql.SQL("{}.{}").format(sql.Identifier(schema), self.name)


@contextmanager
def session(engine: Engine) -> Iterator[psycopg.Cursor]:
    """Yield a cursor on which each statement is a transaction of its own."""
    with engine.connect() as connection:
        driver = driver_of(connection)
        driver.rollback()  # ends the transaction of the pool's own first query
        driver.autocommit = True
        try:
            yield driver.cursor()
        finally:
            connection.invalidate()  # locks and settings end with the session


def make_building(engine: Engine) -> None:
    """Make the empty schema to build in; the remains of an interrupted rebuild are dropped."""
    with session(engine) as cursor:
        cursor.execute(f"DROP SCHEMA IF EXISTS {BUILDING} CASCADE")
        cursor.execute(f"CREATE SCHEMA {BUILDING}")


def analyze(building: Engine) -> None:
    """Let Postgres gather the statistics of the tables, by which it plans queries."""
    with session(building) as cursor:
        cursor.execute(sql.SQL("ANALYZE {}").format(sql.SQL(", ").join(map(sql.Identifier, metadata.tables))))


@contextmanager
def projector_held(engine: Engine) -> Iterator[psycopg.Cursor]:
    """Yield a cursor in a transaction during which no projector writes or moves its offsets; readers go on.

    Its changes are committed if the block ends without an error, else undone. LockNotAvailable: a projector holds on.
    """
    with session(engine) as cursor, cursor.connection.transaction():
        cursor.execute(f"SET LOCAL lock_timeout = {HOLD_WITHIN_MS}")
        cursor.execute("LOCK TABLE offsets IN SHARE ROW EXCLUSIVE MODE")
        yield cursor


def swap(cursor: psycopg.Cursor, old: str) -> None:
    """Move the tables in use to the schema `old`, and the built ones into their place, with the same grants.

    The recorded offsets stay as they are. Raises QueryCanceled where a query does not release a table in time.
    """
    live = live_schema(cursor)
    names = {"live": sql.Identifier(live), "new": sql.Identifier(BUILDING), "old": sql.Identifier(old)}
    for statement in _COPIES:
        cursor.execute(statement.format(**names))
    objects = _objects(cursor, BUILDING)
    _grant_alike(cursor, live, [one for one in objects if one.kind != "FUNCTION"])
    cursor.execute(sql.SQL("CREATE SCHEMA {old}").format(**names))
    cursor.execute(f"SET LOCAL statement_timeout = {SWAP_WITHIN_MS}")
    # One statement locks all, so that few readers hold some of them; `offsets` first, as readers of many tables begin
    # with it.
    taken = sql.SQL(", ").join(one.at(live) for one in objects if one.kind != "FUNCTION")
    cursor.execute(sql.SQL("LOCK TABLE {live}.offsets, {} IN ACCESS EXCLUSIVE MODE").format(taken, **names))
    for source, target in ((live, old), (BUILDING, live)):
        for one in objects:
            cursor.execute(_MOVE.format(sql.SQL(one.kind), one.at(source), sql.Identifier(target)))
    cursor.execute(sql.SQL("DROP SCHEMA {new}").format(**names))


def dropped(engine: Engine, old: str) -> str | None:
    """Drop the old tables and return None; or leave them and return why, say because a view of somebody uses them."""
    with session(engine) as cursor:
        cursor.execute(f"SET lock_timeout = {DROP_WITHIN_MS}")
        objects = _objects(cursor, old)
        try:
            with cursor.connection.transaction():
                for kind in ("VIEW", "TABLE", "FUNCTION"):
                    names = sql.SQL(", ").join(one.at(old) for one in objects if one.kind == kind)
                    cursor.execute(sql.SQL("DROP {} {}").format(sql.SQL(kind), names))
                cursor.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(old)))
        except (psycopg.errors.DependentObjectsStillExist, psycopg.errors.LockNotAvailable) as error:
            return f"{error.diag.message_primary}: {error.diag.message_detail or ''}".rstrip(": ")
    return None


# These rows are copied, as they can't be made from the log: it does not say when a row was committed, for example.
_COPIES = (
    sql.SQL("TRUNCATE {new}.commits, {new}.set_aside"),
    sql.SQL("INSERT INTO {new}.set_aside SELECT * FROM {live}.set_aside"),
    sql.SQL("INSERT INTO {new}.commits SELECT * FROM {live}.commits"),
    sql.SQL("INSERT INTO {new}.overruled SELECT * FROM {live}.overruled"),
    sql.SQL("""
        INSERT INTO {new}.offsets (topic, partition, next_offset, epoch)
        SELECT topic, partition, next_offset, epoch FROM {live}.offsets
        ON CONFLICT (topic, partition) DO UPDATE SET next_offset = excluded.next_offset, epoch = excluded.epoch
    """),
)
_MOVE = sql.SQL("ALTER {} {} SET SCHEMA {}")
# Views before their tables, in the order in which queries lock them.
_OBJECTS = """
    SELECT CASE relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, relname, '', oid
    FROM pg_class WHERE relnamespace = %(schema)s::regnamespace AND relkind IN ('r', 'v')
    UNION ALL
    SELECT 'FUNCTION', proname, format('(%%s)', pg_get_function_identity_arguments(oid)), oid
    FROM pg_proc WHERE pronamespace = %(schema)s::regnamespace
    ORDER BY 1 DESC, 4 DESC
"""
_GRANTS = """
    SELECT privilege_type, is_grantable, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END
    FROM pg_class, aclexplode(relacl) WHERE oid = %s::regclass AND grantee <> relowner
"""


def _objects(cursor: psycopg.Cursor, schema: str) -> list[_DatabaseObject]:
    return [
        _DatabaseObject(kind=kind, name=sql.Identifier(name) + sql.SQL(arguments))
        for kind, name, arguments, _ in cursor.execute(_OBJECTS, {"schema": schema}).fetchall()
    ]


def _grant_alike(cursor: psycopg.Cursor, live: str, objects: Sequence[_DatabaseObject]) -> None:
    for one in objects:
        whole = one.at(live).as_string(cursor)
        for privilege, grantable, grantee in cursor.execute(_GRANTS, (whole,)).fetchall():
            option = " WITH GRANT OPTION" if grantable else ""
            to = sql.SQL(f" TO {grantee}{option}")
            cursor.execute(sql.SQL(f"GRANT {privilege} ON {{}}").format(one.at(BUILDING)) + to)
