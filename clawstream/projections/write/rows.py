"""Turns records into rows; records that can't become rows are set aside. Pure.

A record becomes one row of one table, whatever was read before it. A cell is in COPY's text format, where a backslash
escapes what would end the cell. Text and JSON are stored as clawstream/projections/text.py says.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_type_hints

import orjson
from sqlalchemy import Table, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from clawstream.events import Event
from clawstream.projections.tables import FACTS
from clawstream.projections.text import ESCAPE, escape, storable_json
from clawstream.stream.dead_letters import DeadLetter, expired
from clawstream.stream.log import Arrived, DeadLetterId, DeadLetterMark, Fate, Undecodable
from clawstream.stream.quarantine import readable
from clawstream.stream.stage import Record

ToCell = Callable[[Any], str]

NULL = "\\N"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_ID_BYTES = 600  # an index takes 2704 for all of its columns
_KEPT_ID_CHARACTERS = 100
_CELL_ENDS = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_SOURCE = ("event_id", "source_topic", "source_partition", "source_offset", "log_time")
_NO_FIELD = ("IDENTITY", False)  # read in place of a field that the event lacks; the value is not used
GROUP = "project"


def to_cell(name: str, kind: object, *, enum: bool) -> ToCell:
    """Return the function that makes a cell from a value other than None, for a column of this name and type."""
    if enum:
        return attrgetter("value")  # one of our own words, so nothing in it has to be escaped
    if isinstance(kind, JSONB):
        return _json
    if isinstance(kind, ARRAY):
        return _texts if isinstance(kind.item_type, Text) else _numbers
    if isinstance(kind, Text):
        return _id if name.endswith("_id") else _text
    return str


def indexable(text: str) -> str:
    """Return an id as it is stored: unchanged but for escapes, or its start and hash if it is too long for an index."""
    stored = escape(text)
    if len(stored) <= _KEPT_ID_CHARACTERS or len(stored.encode()) <= _MAX_ID_BYTES:
        return stored
    return f"{stored[:_KEPT_ID_CHARACTERS]}{ESCAPE}{hashlib.sha256(stored.encode()).hexdigest()}"


@lru_cache(1024)  # the broker gives all records of a batch one time
def time_cell(timestamp_ms: int) -> str:
    """Return the cell of a time, which is given in ms since the epoch."""
    return (_EPOCH + timedelta(milliseconds=timestamp_ms)).isoformat()


def _id(text: str) -> str:
    if len(text) <= _KEPT_ID_CHARACTERS and _is_plain(text):
        return text
    return indexable(text).translate(_CELL_ENDS)


def _text(text: str) -> str:
    return text if _is_plain(text) else escape(text).translate(_CELL_ENDS)


def _is_plain(text: str) -> bool:
    """Return whether the text can be a cell unchanged, as most texts can; these tests are the quickest."""
    return text.isascii() and text.isprintable() and "\\" not in text


def _numbers(values: tuple[float | None, ...]) -> str:
    fast = orjson.dumps(values).decode()
    if "null" not in fast:
        return "{" + fast[1:-1] + "}"
    if fast.count("null") == values.count(None):
        return "{" + fast[1:-1].replace("null", "NULL") + "}"
    return "{" + ",".join("NULL" if item is None else str(item) for item in values) + "}"  # some are infinite or NaN


def _texts(values: tuple[str, ...]) -> str:
    quoted = (indexable(item).replace("\\", "\\\\").replace('"', '\\"') for item in values)
    return ("{" + ",".join(f'"{item}"' for item in quoted) + "}").translate(_CELL_ENDS)


def _json(value: object) -> str:
    if isinstance(value, bytes):
        stored = storable_json(value)
    elif isinstance(value, tuple) and all(isinstance(item, bytes) for item in value):
        stored = "[" + ",".join(map(storable_json, value)) + "]"
    else:
        stored = storable_json(_DUMP(value).encode())
    return stored.translate(_CELL_ENDS)


def _fields(value: object) -> dict[str, object]:
    assert is_dataclass(value), value
    return {field.name: getattr(value, field.name) for field in fields(value)}


_DUMP = json.JSONEncoder(default=_fields).encode  # gives ASCII, in which a lone surrogate is an escape too


TABLE_OF: Mapping[type[Event], tuple[Table, str | None]] = {
    event: (table, kind) for table in FACTS for event, kind in table.info["events"].items()
}


class TableRow(NamedTuple):
    """A row to insert: its table's name, and a cell for each of that table's `columns`, as COPY takes them."""

    table: str
    cells: tuple[str, ...]

    @property
    def source(self) -> tuple[str, int, int]:
        """Topic, partition and offset of its record."""
        _, topic, partition, offset, *_ = self.cells
        return topic, int(partition), int(offset)

    @property
    def line(self) -> str:
        """The row as COPY reads it, with the newline at its end."""
        return "\t".join(self.cells) + "\n"


@cache
def columns(table: Table) -> tuple[str, ...]:
    """Return the names of the columns that are written, in order; the database derives the others."""
    return tuple(column.name for column in table.columns if column.computed is None)


def row(record: Record) -> TableRow | None:
    """Return the record's row; None for an event that no table holds."""
    make = _MAKERS.get(type(record.event))
    return None if make is None else make(record)


def _maker(event: type[Event]) -> Callable[[Record], TableRow]:
    """Return the function that makes the rows of an event."""
    table, kind = TABLE_OF[event]
    names = columns(table)
    assert names[: len(_SOURCE)] == _SOURCE, f"{table.name} begins with other columns"
    paths = _field_paths(event, frozenset(names))
    in_row = [paths.get(name, _NO_FIELD) for name in names[len(_SOURCE) :]]
    read = attrgetter(*(path for path, _ in in_row))
    to_cells: tuple[ToCell, ...] = tuple(
        to_cell(name, table.columns[name].type, enum=enum)
        if name in paths
        else _always(kind if name == "kind" and kind else NULL)
        for name, (_, enum) in zip(names[len(_SOURCE) :], in_row, strict=True)
    )

    def make(record: Record) -> TableRow:
        event = record.event
        return TableRow(
            table.name,
            (
                event.event_id,
                record.topic,
                str(record.partition),
                str(record.offset),
                time_cell(record.timestamp_ms),
                *[
                    NULL if value is None else convert(value)
                    for convert, value in zip(to_cells, read(event), strict=True)
                ],
            ),
        )

    return make


def _field_paths(kind: type, names: frozenset[str]) -> dict[str, tuple[str, bool]]:
    """Return the path of each of these fields, in the dataclass or in one that it holds, and whether it is an enum."""
    found: dict[str, tuple[str, bool]] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if field.name in names:
            found[field.name] = (field.name, any(_is_enum(part) for part in (hint, *get_args(hint))))
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            found |= {name: (f"{field.name}.{path}", enum) for name, (path, enum) in _field_paths(hint, names).items()}
    return found


def _is_enum(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _always(cell: str) -> ToCell:
    return lambda _: cell


_MAKERS: Mapping[type[Event], Callable[[Record], TableRow]] = {event: _maker(event) for event in TABLE_OF}


class UnusableRecords(Exception):
    """Records of a batch that can't become rows; nothing of the batch was written."""

    def __init__(self, errors: Mapping[DeadLetterId, Exception]) -> None:
        super().__init__("; ".join(f"{at}: {error}" for at, error in errors.items()))
        self.errors = errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The outcome for dead letters of one key and partition: those ruled about, and those that waited behind them."""

    rows: Sequence[TableRow]
    closed: Sequence[DeadLetterMark] = ()
    again: tuple[DeadLetter, Exception] | None = None  # one that can't be used after all; later ones go on waiting


def rows_of(records: Iterable[Arrived]) -> list[TableRow]:
    """Return the rows of the records; a record that can't be decoded has none.

    Raises UnusableRecords where some records can't become rows.
    """
    found: list[TableRow] = []
    errors: dict[DeadLetterId, Exception] = {}
    for record in records:
        if not isinstance(record, Undecodable):
            try:
                made = row(record)
            except Exception as error:  # noqa: BLE001  # otherwise the record would end every projector that reads it
                errors[DeadLetterId(GROUP, record.topic, record.partition, record.offset)] = error
            else:
                found += [] if made is None else [made]
    if errors:
        raise UnusableRecords(errors)
    return found


def released(
    ready: Sequence[DeadLetter],
    records: Mapping[DeadLetterId, Arrived],
    unusable: Mapping[DeadLetterId, Exception],
) -> Release:
    """Return the outcome for dead letters of one key and partition, taken in order."""
    rows: list[TableRow] = []
    closed: list[DeadLetterMark] = []
    for dead_letter in (one if one.id in records else expired(one) for one in ready):
        if dead_letter.fate is not Fate.DISCARD:
            try:
                if dead_letter.id in unusable:
                    raise unusable[dead_letter.id]  # noqa: TRY301
                made = row(readable(records[dead_letter.id]))
            except Exception as error:  # noqa: BLE001  # as in `rows_of`
                return Release(rows=rows, closed=closed, again=(dead_letter.again(error), error))
            rows += [] if made is None else [made]
        closed.append(dead_letter.closed)
    return Release(rows=rows, closed=closed)
