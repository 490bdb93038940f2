"""A record of the log as a row. Pure.

A record is one row of one table, whatever was read before it. A column has the name of the event's field; the fields of
a request stand beside those of its exchange.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, get_args, get_type_hints

from sqlalchemy import Table

from clawstream.events import Event
from clawstream.projections.tables import FACTS
from clawstream.projections.write.cells import NULL, ToCell, time_cell, to_cell
from clawstream.stream.stage import Record

TABLE_OF: Mapping[type[Event], tuple[Table, str | None]] = MappingProxyType(
    {event: (table, kind) for table in FACTS for event, kind in table.info["events"].items()}
)


class TableRow(NamedTuple):
    """A future row: its table's name, and a cell for each of that table's `columns`, as COPY takes them."""

    table: str
    cells: tuple[str, ...]

    @property
    def source(self) -> tuple[str, int, int]:
        """Topic, partition and offset of its record."""
        _, topic, partition, offset, *_ = self.cells
        return topic, int(partition), int(offset)

    @property
    def line(self) -> str:
        """The row as COPY reads it, its end included."""
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
    assert names[: len(_PLACE)] == _PLACE, f"{table.name} begins with other columns"
    said = _said(event, frozenset(names))
    in_row = [said.get(name, _SAYS_NOTHING) for name in names[len(_PLACE) :]]
    read = attrgetter(*(path for path, _ in in_row))
    to_cells: tuple[ToCell, ...] = tuple(
        to_cell(name, table.columns[name].type, enum=enum)
        if name in said
        else _always(kind if name == "kind" and kind else NULL)
        for name, (_, enum) in zip(names[len(_PLACE) :], in_row, strict=True)
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


_PLACE = ("event_id", "source_topic", "source_partition", "source_offset", "log_time")
_SAYS_NOTHING = ("IDENTITY", False)  # any existing attribute will do: the column does not depend on it


def _said(kind: type, names: frozenset[str]) -> dict[str, tuple[str, bool]]:
    """Return where these fields are, in the dataclass or in one that it holds, and which are enums."""
    found: dict[str, tuple[str, bool]] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if field.name in names:
            found[field.name] = (field.name, any(_is_enum(part) for part in (hint, *get_args(hint))))
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            found |= {name: (f"{field.name}.{path}", enum) for name, (path, enum) in _said(hint, names).items()}
    return found


def _is_enum(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _always(cell: str) -> ToCell:
    return lambda _: cell


_MAKERS: Mapping[type[Event], Callable[[Record], TableRow]] = MappingProxyType(
    {event: _maker(event) for event in TABLE_OF}
)
