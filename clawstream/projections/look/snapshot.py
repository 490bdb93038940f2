"""Reads the tables as of one moment, without being able to change anything."""

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import psycopg
from psycopg.adapt import Buffer, Loader
from psycopg.pq import ExecStatus

from clawstream.errors import OperatorError
from clawstream.projections import database
from clawstream.projections.look.summaries import printable


class Json(str):
    """JSON as its text: it may be nested too deep for parsers, and the text is enough for printing."""

    __slots__ = ()


class _JsonLoader(Loader):
    def load(self, data: Buffer) -> Json:
        """Return the JSON's text unchanged."""
        return Json(bytes(data).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """A query's result: its columns, known before the first row, and the rows as they arrive."""

    names: tuple[str, ...]  # made unique where two are alike
    type_oids: tuple[int, ...]
    rows: Iterator[tuple[object, ...]]


@contextmanager
def ask(cursor: psycopg.Cursor, query: str) -> Iterator[QueryResult]:
    """Run one statement for the length of the block; Postgres refuses more than one."""
    server = cursor.connection.pgconn
    prepared = server.prepare(b"", query.encode())
    if prepared.status != ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(prepared)
    columns = server.describe_prepared(b"")
    seen: Counter[str] = Counter()
    names = []
    for n in range(columns.nfields):
        name = (columns.fname(n) or b"").decode()
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    oids = tuple(columns.ftype(n) for n in range(columns.nfields))
    # The stream holds the connection's lock until it is closed: an error half-way through would wait for itself.
    rows = cursor.stream(query.encode())
    assert isinstance(rows, Generator)
    with closing(rows):
        yield QueryResult(names=tuple(names), type_oids=oids, rows=rows)


@contextmanager
def snapshot(url: str, *, timeout_s: float) -> Iterator[psycopg.Cursor]:
    """Yield a cursor of the read-only account, which sees one moment; each statement may take `timeout_s`.

    The errors are those of `database.looking`, and OperatorError with Postgres's own words where a statement fails.
    """
    try:
        with database.looking(url) as engine, engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, psycopg.Connection)
            driver.rollback()  # what the pool asked first
            driver.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            driver.read_only = True
            cursor = driver.cursor()
            # Locked before the moment is chosen: a rebuild then waits with its swap until this has ended.
            cursor.execute("LOCK TABLE offsets IN ACCESS SHARE MODE")
            for name in ("json", "jsonb"):
                cursor.adapters.register_loader(name, _JsonLoader)
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", (f"{round(timeout_s * 1000)}ms",))
            yield cursor
    except psycopg.Error as error:
        raise OperatorError(f"Postgres refused the query: {_words(error)}. Nothing was changed") from error


def _words(error: psycopg.Error) -> str:
    parts = [error.diag.message_primary or str(error).strip(), error.diag.message_detail, error.diag.message_hint]
    where = error.diag.statement_position
    return printable("; ".join(part for part in parts if part)) + (f" (at character {where})" if where else "")
