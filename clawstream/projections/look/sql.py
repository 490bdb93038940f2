"""`clawstream sql`: one query that only reads, all at one moment, printed as a table, as CSV or as JSON.

Strangers wrote what stands in the cells. So no output has characters that a terminal obeys, and no cell of the CSV is a
formula to a spreadsheet. The JSON has the database's values; numerics become floats, NaN null.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from itertools import islice
from typing import Any, TextIO

import orjson
import psycopg
from psycopg.adapt import Buffer, Loader
from psycopg.pq import ExecStatus
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clawstream.errors import OperatorError
from clawstream.layout import show
from clawstream.projections import accounts, database
from clawstream.projections.look.summaries import printable, printable_json


class Json(str):
    """The text of JSON, not parsed: it may be nested too deep for parsers, and the text is enough for printing."""

    __slots__ = ()


class _JsonLoader(Loader):
    def load(self, data: Buffer) -> Json:
        """Return the JSON's text unchanged."""
        return Json(bytes(data).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """A query's result: its columns, known before the first row, and the rows as they arrive."""

    names: tuple[str, ...]  # made unique where two columns have one name
    type_oids: tuple[int, ...]
    rows: Iterator[tuple[object, ...]]


@contextmanager
def ask(cursor: psycopg.Cursor, query: str) -> Iterator[QueryResult]:
    """Run one statement, whose rows can be read until the block ends; Postgres refuses more than one statement."""
    server = cursor.connection.pgconn
    prepared = server.prepare(b"", query.encode())
    if prepared.status != ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(prepared)
    columns = server.describe_prepared(b"")
    numbers = range(columns.nfields)
    seen: Counter[str] = Counter()
    names = []
    for name in ((columns.fname(n) or b"").decode() for n in numbers):
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    # The stream holds the connection's lock until it is closed: without `closing` a rollback after an error would hang.
    rows = cursor.stream(query.encode())
    assert isinstance(rows, Generator)
    with closing(rows):
        yield QueryResult(names=tuple(names), type_oids=tuple(map(columns.ftype, numbers)), rows=rows)


@contextmanager
def snapshot(url: str, *, timeout_s: float) -> Iterator[psycopg.Cursor]:
    """Yield a cursor of the read-only account that sees the tables at one moment; a statement may take `timeout_s`.

    Raises what `database.looking` raises, and OperatorError with Postgres's own words where a statement fails.
    """
    try:
        with database.looking(url) as engine, engine.connect() as connection:
            driver = accounts.driver_of(connection)
            driver.rollback()  # ends the transaction of the pool's own first query
            driver.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            driver.read_only = True
            cursor = driver.cursor()
            # Locked before the moment is chosen, so that a rebuild does not swap the tables until this has ended.
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


TIMEOUT_S = 60.0
MAX_TABLE_ROWS = 1000
_OF_FORMULAS = tuple("=+-@\t\n\uff1d\uff0b\uff0d\uff20")  # the last four are the first four in full width
_NUMBER = re.compile(r"[+-]?[0-9]{1,300}(?:\.[0-9]{0,300})?(?:[eE][+-]?[0-9]{1,3})?")


class RowFormat(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"  # one array, a line per row


def print_query(url: str, query: str, *, form: RowFormat, out: TextIO, timeout_s: float = TIMEOUT_S) -> None:
    """Print the result of `query`; raises what `snapshot` raises."""
    with snapshot(url, timeout_s=timeout_s) as cursor, ask(cursor, query) as answer:
        _PRINT[form](answer, out)


def rows_of(url: str, query: str, *, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    """Return the rows of `query` as dicts by column, with JSON as text; raises what `snapshot` raises."""
    with snapshot(url, timeout_s=timeout_s) as cursor, ask(cursor, query) as answer:
        return [dict(zip(answer.names, row, strict=True)) for row in answer.rows]


def json_of(value: object) -> str:
    """Return a cell, or a row as a dict by column, as JSON."""
    return orjson.dumps(value, default=_known_to_orjson, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()


def _known_to_orjson(value: object) -> object:
    if isinstance(value, Json):
        return orjson.Fragment(value.encode())
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)


def _print_csv(answer: QueryResult, out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_csv_cell, answer.names))
    for row in answer.rows:
        writer.writerow(map(_csv_cell, row))


def _print_json(answer: QueryResult, out: TextIO) -> None:
    before = "[\n"
    for row in answer.rows:
        out.write(before + printable_json(json_of(dict(zip(answer.names, row, strict=True)))))
        before = ",\n"
    out.write("[]\n" if before == "[\n" else "\n]\n")


def _print_table(answer: QueryResult, out: TextIO) -> None:
    table = Table()
    for name in answer.names:
        table.add_column(Text(printable(name)))
    for row in islice(answer.rows, MAX_TABLE_ROWS):
        table.add_row(*(Text(printable(_short(value) or "", kept="\n")) for value in row))
    if next(answer.rows, None) is not None:
        table.caption = f"the first {MAX_TABLE_ROWS} rows; --csv and --json print all"
    show(Console(file=out), table)


_PRINT: Mapping[RowFormat, Callable[[QueryResult, TextIO], None]] = {
    RowFormat.TABLE: _print_table,
    RowFormat.CSV: _print_csv,
    RowFormat.JSON: _print_json,
}


def _short(value: object) -> str | None:
    """Return a cell of the printed table: a number with four digits, a time in whole seconds."""
    if isinstance(value, float | Decimal):
        return f"{float(value):.4g}"
    if isinstance(value, datetime):
        return value.isoformat(" ", timespec="seconds")
    return _cell(value)


def _csv_cell(value: object) -> str | None:
    """Return a cell of the CSV: one that a spreadsheet would take for a formula gets an apostrophe in front."""
    cell = _cell(value)
    if cell is None:
        return None
    shown = printable(cell, kept="\n\t")
    is_formula = isinstance(value, str) and shown.startswith(_OF_FORMULAS) and not _NUMBER.fullmatch(shown)
    return f"'{shown}" if is_formula else shown


def _cell(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json_of(value) if isinstance(value, list | dict) else str(value)
