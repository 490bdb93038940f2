"""Connections to Postgres, and the check that its tables are the ones that this version reads and writes.

Only `upgrade` changes the schema; readers and writers first call `check`, which refuses another revision. A new
database is made from tables.py and migrations/views.sql as they are now. In an older database `upgrade` runs the
revisions, then adds missing tables and columns, so only other changes need a revision.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import sql
from sqlalchemy import Column, Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.schema import CreateColumn

from clawstream.errors import ConfigError, DatabaseMismatch, PartUnavailable
from clawstream.projections import accounts
from clawstream.projections.accounts import driver_of
from clawstream.projections.tables import RELATION_MEANINGS, RELATIONS, meaning, metadata
from clawstream.resources import folder

CONNECT_TIMEOUT_S = 5
_UPGRADE_LOCK = 0x636C6177  # an arbitrary lock number that no other program on this database uses
_COLUMNS = """
    SELECT relname, attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
    WHERE relkind = 'r' AND pg_table_is_visible(attrelid) AND attnum > 0 AND NOT attisdropped
"""
_POSTGRES_NAMES = ("postgres", "postgresql", "postgresql+psycopg")
_KINDS = {"r": "TABLE", "v": "VIEW"}
_FOUND = text("""
    SELECT relname, relkind::text, obj_description(c.oid, 'pg_class'),
        attname, format_type(atttypid, atttypmod), col_description(c.oid, attnum)
    FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
    WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'v') AND relname = ANY(:relations)
        AND attnum > 0 AND NOT attisdropped
    ORDER BY relkind DESC, relname, attnum
""")
_HEAD = """# Data dictionary

What stands in the database. The same words are comments there, so that SQL tools show them (`\\d+ exchanges` in psql).
How to get in: [inspect.md](inspect.md#with-other-tools). NULL is a value of its own, never a zero. Texts and JSON are
stored with U+241B, a small u and four hex digits for the few characters that Postgres can't hold.

Printed by `clawstream db dictionary`.
"""


def connect(url: str, *, application: str = "clawstream", schema: str | None = None) -> Engine:
    """Return an engine for `url`; nothing connects before it is used. Dispose of it when done.

    With `schema` the engine sees only that schema, and a commit may return before it is on disk: this is for tables
    that are being built beside those in use.
    """
    try:
        address = make_url(url)
    except ArgumentError as error:
        raise ConfigError("postgres.url is not a URL; expected postgresql+psycopg://user:password@host/name") from error
    if address.drivername not in _POSTGRES_NAMES:
        raise ConfigError(
            f"postgres.url names {address.drivername}; expected postgresql+psycopg://user:password@host/name"
        )
    arguments = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": application}
    if schema is not None:
        arguments["options"] = f"-csearch_path={schema} -csynchronous_commit=off"
    return create_engine(address.set(drivername="postgresql+psycopg"), pool_pre_ping=True, connect_args=arguments)


def upgrade(url: str, *, schema: str | None = None) -> str:
    """Bring the database to this version's revision and return it; safe while another process does the same.

    The read-only account gets access to all of it, where the account of `url` may make accounts. With `schema` the
    tables are made in that schema, whatever others hold, and no other account gets access.
    """
    engine = connect(url, schema=schema)
    try:
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
            found, expected = _revision_of(connection), expected_revision()
            if found is not None and found not in _known_revisions():
                raise _mismatch(engine, found, expected)
            config = _config()
            config.attributes["connection"] = connection
            if found is None:
                command.stamp(config, "head")
            else:
                command.upgrade(config, "head")
            if _add_missing(connection) or found != expected:
                connection.connection.cursor().execute((folder("migrations") / "views.sql").read_text())
            _describe(connection)
            if schema is None:
                accounts.make(connection, url)
            return expected
    except OperationalError as error:
        raise unreachable(engine, error) from error
    finally:
        engine.dispose()


def check(engine: Engine) -> None:
    """Raise DatabaseMismatch unless the database is at this version's revision and has all its columns."""
    try:
        with engine.connect() as connection:
            found, absent = _revision_of(connection), _missing_columns(connection)
    except OperationalError as error:
        raise unreachable(engine, error) from error
    if found != expected_revision() or absent:
        raise _mismatch(engine, found, expected_revision(), absent)


def expected_revision() -> str:
    """Return the revision that this version reads and writes."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None, "migrations/ holds no revision"
    return revision


@contextmanager
def looking(url: str) -> Iterator[Engine]:
    """Yield an engine that can read the tables and do nothing else on the server.

    Raises DatabaseMismatch for another revision, PartUnavailable without a database, OperatorError where there is no
    account but one with power over the server.
    """
    with _reader_and_writer(url) as (reader, writer):
        try:
            yield accounts.reading(reader, writer)
        except OperationalError as error:
            raise unreachable(writer, error) from error


def reader_url(url: str) -> str:
    """Return the read-only account's URL. A missing account is made, or the failure to make it is logged."""
    with _reader_and_writer(url) as (reader, writer):
        accounts.is_there(reader, writer)
    return for_tools(reader.url.render_as_string(hide_password=False))


@contextmanager
def _reader_and_writer(url: str) -> Iterator[tuple[Engine, Engine]]:
    """Check the database's revision, and yield the engines of the read-only and of the writing account."""
    reader, writer = connect(accounts.address(url).render_as_string(hide_password=False)), connect(url)
    try:
        check(writer)
        yield reader, writer
    finally:
        reader.dispose()
        writer.dispose()


def for_tools(url: str) -> str:
    """Return `url` in the form that psql and other tools read, password included."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False).replace(" ", "%20")


def dictionary_page(url: str) -> str:
    """Return the data dictionary of the database; raises what `looking` raises."""
    with looking(url) as engine, engine.connect() as connection:
        return _page(connection)


def unreachable(engine: Engine, error: OperationalError) -> PartUnavailable:
    """Return the error for a database that can't be used."""
    reason = str(error.orig).strip().splitlines()
    return PartUnavailable(
        f"Postgres at {_place(engine)} does not answer: {reason[0] if reason else error}. Nothing was changed. "
        "Start it, or set postgres.url (CLAWSTREAM_POSTGRES) to one that runs"
    )


def _mismatch(engine: Engine, found: str | None, expected: str, absent: Sequence[Column[Any]] = ()) -> DatabaseMismatch:
    remedy = "run `clawstream db upgrade`"
    if found is None:
        state = "has no tables of clawstream"
    elif found == expected:
        state = f"lacks the columns {', '.join(map(str, absent))}"
    elif found in _known_revisions():
        state = f"is at revision {found}"
    else:
        state = f"is at revision {found}, which this version does not know"
        remedy = (
            "use the newer clawstream that made it; or, if it is from before the first release, let postgres.url name "
            "an empty database"
        )
    return DatabaseMismatch(
        f"database {_place(engine)} {state}; revision {expected} is expected. Nothing was read or written: {remedy}"
    )


def _revision_of(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _add_missing(connection: Connection) -> bool:
    """Add missing tables and columns; return whether columns were missing. In these, existing rows have NULL."""
    metadata.create_all(connection)
    absent = _missing_columns(connection)
    for column in absent:
        made = CreateColumn(column).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {made}")
    return bool(absent)


def _missing_columns(connection: Connection) -> list[Column[Any]]:
    there = {(table, column) for table, column in connection.exec_driver_sql(_COLUMNS)}
    return [
        column
        for table in metadata.tables.values()
        for column in table.columns
        if (table.name, column.name) not in there
    ]


def _known_revisions() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def _place(engine: Engine) -> str:
    return f"{engine.url.host or 'the local socket'}:{engine.url.port or 5432}/{engine.url.database}"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@dataclass(frozen=True, slots=True)
class _Column:
    relation: str
    kind: str
    relation_comment: str | None
    name: str
    type: str
    comment: str | None


def _describe(connection: Connection) -> None:
    """Set the comment of each table, view and column of the current schema."""
    statements = []
    for relation, columns in groupby(_columns(connection), lambda column: column.relation):
        found = list(columns)
        words, kind = RELATION_MEANINGS.get(relation), _KINDS[found[0].kind]
        if found[0].relation_comment != words:
            name = sql.Identifier(relation)
            statements.append(sql.SQL(f"COMMENT ON {kind} {{}} IS {{}}").format(name, sql.Literal(words)))
        for column in found:
            words = meaning(relation, column.name)
            if column.comment != words:
                name = sql.Identifier(relation, column.name)
                statements.append(sql.SQL("COMMENT ON COLUMN {} IS {}").format(name, sql.Literal(words)))
    if statements:
        driver_of(connection).execute(sql.SQL("; ").join(statements))


def _page(connection: Connection) -> str:
    """Return a page, in Markdown, of the current schema with its comments."""
    parts = [_HEAD]
    for kind, title in (("v", "Views"), ("r", "Tables")):
        parts.append(f"\n## {title}\n")
        of_kind = [column for column in _columns(connection) if column.kind == kind]
        for relation, columns in groupby(of_kind, lambda column: column.relation):
            found = list(columns)
            parts.append(f"\n### `{relation}`\n\nA row is {found[0].relation_comment or '(not said)'}.\n\n")
            parts.append("| column | type | |\n|---|---|---|\n")
            parts += [f"| `{column.name}` | {column.type} | {column.comment or ''} |\n" for column in found]
    return "".join(parts)


def _columns(connection: Connection) -> list[_Column]:
    return [_Column(*row) for row in connection.execute(_FOUND, {"relations": list(RELATIONS)})]
