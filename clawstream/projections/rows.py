"""What a record of the log is as a row. Pure.

A record is one row of one table, whatever was read before it. A column has the name of the event's field; a request's
own fields stand beside the exchange's. Values are what COPY takes: jsonb as its text, arrays as Postgres writes them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import get_type_hints

import orjson
from sqlalchemy import BigInteger, Table, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from clawstream.events import (
    BatchPlanned,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    HintAbsent,
    HintFound,
    PolicyActivated,
    PolicyPublished,
    PolicyRejected,
    ReplayEnded,
    ReplayStarted,
    SampleAssembled,
    SampleRefused,
    SamplesPromoted,
    SessionDone,
    SessionIdle,
    StepTaken,
    TurnOrphaned,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
    VoteCast,
)
from clawstream.projections import tables
from clawstream.projections.text import ESCAPE, escape, storable_json
from clawstream.stream.stage import Record

Value = str | int | float | bool | datetime | None

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_ID_BYTES = 600  # of the 2704 that an index takes
_KEPT_ID_CHARACTERS = 100

TABLE_OF: Mapping[type[Event], tuple[Table, str | None]] = MappingProxyType(
    {
        ExchangeCompleted: (tables.exchanges, "completed"),
        ExchangeFailed: (tables.exchanges, "failed"),
        SessionDone: (tables.session_ends, "done"),
        SessionIdle: (tables.session_ends, "idle"),
        TurnPaired: (tables.turns, "paired"),
        TurnOrphaned: (tables.turns, "orphaned"),
        TurnsSettled: (tables.settlements, None),
        VoteCast: (tables.votes, None),
        VerdictReached: (tables.verdicts, None),
        HintFound: (tables.hints, "found"),
        HintAbsent: (tables.hints, "absent"),
        FeedbackGiven: (tables.feedback, None),
        SampleAssembled: (tables.samples, None),
        SampleRefused: (tables.refusals, None),
        BatchPlanned: (tables.batches, None),
        StepTaken: (tables.steps, None),
        PolicyPublished: (tables.policies, None),
        PolicyActivated: (tables.activations, None),
        PolicyRejected: (tables.rejections, None),
        ReplayStarted: (tables.replays, None),
        ReplayEnded: (tables.replay_ends, None),
        SamplesPromoted: (tables.promotions, None),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row to be: its table's name, and a value for each of that table's `columns`."""

    table: str
    values: tuple[Value, ...]


@cache
def columns(table: Table) -> tuple[str, ...]:
    """Return the names of the columns that are written, in order; the database derives the others."""
    return tuple(column.name for column in table.columns if column.computed is None)


def row(record: Record) -> Row | None:
    """Return the record's row; None for an event that no table holds."""
    found = TABLE_OF.get(type(record.event))
    if found is None:
        return None
    table, _ = found
    return Row(table=table.name, values=tuple([value_of(record) for value_of in _MAKERS[type(record.event)]]))


def indexable(text: str) -> str:
    """Return an id as it is stored: itself, or its start and its hash where it is too long for an index."""
    stored = escape(text)
    if len(stored) <= _KEPT_ID_CHARACTERS or len(stored.encode()) <= _MAX_ID_BYTES:
        return stored
    return f"{stored[:_KEPT_ID_CHARACTERS]}{ESCAPE}{hashlib.sha256(stored.encode()).hexdigest()}"


_PLACE: Mapping[str, Callable[[Record], Value]] = MappingProxyType(
    {
        "event_id": lambda record: record.event.event_id,
        "source_topic": lambda record: record.topic,
        "source_partition": lambda record: record.partition,
        "source_offset": lambda record: record.offset,
        "log_time": lambda record: _EPOCH + timedelta(milliseconds=record.timestamp_ms),
    }
)


def _makers(event: type[Event]) -> tuple[Callable[[Record], Value], ...]:
    """Return what makes each column of an event's row."""
    table, kind = TABLE_OF[event]
    paths = _paths(event, frozenset(columns(table)))
    return tuple(
        _of_field(paths[name], _converter(name, table.columns[name].type))
        if name in paths
        else _PLACE.get(name) or _always(kind if name == "kind" else None)
        for name in columns(table)
    )


def _paths(kind: type, names: frozenset[str]) -> dict[str, str]:
    """Return where the fields with these names are, in the dataclass or in one that it holds."""
    found: dict[str, str] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name in names:
            found[field.name] = field.name
        elif is_dataclass(held := hints[field.name]):
            assert isinstance(held, type)
            found |= {name: f"{field.name}.{path}" for name, path in _paths(held, names).items()}
    return found


def _of_field(path: str, convert: Callable[[object], Value]) -> Callable[[Record], Value]:
    value_at = attrgetter(f"event.{path}")

    def value_of(record: Record) -> Value:
        item = value_at(record)
        return None if item is None else convert(item)

    return value_of


def _always(value: Value) -> Callable[[Record], Value]:
    return lambda _: value


def _converter(name: str, kind: object) -> Callable[[object], Value]:
    if isinstance(kind, JSONB):
        return _json
    if isinstance(kind, ARRAY):
        return _texts if isinstance(kind.item_type, Text) else _numbers
    if isinstance(kind, Text):
        return _id if name.endswith("_id") else _text
    return _integer if isinstance(kind, BigInteger) else _number


def _id(value: object) -> str:
    return indexable(_text_of(value))


def _text(value: object) -> str:
    return escape(_text_of(value))


def _text_of(value: object) -> str:
    assert isinstance(value, str), value
    return str(value.value) if isinstance(value, Enum) else value


def _integer(value: object) -> int:
    assert isinstance(value, int), value
    return value


def _number(value: object) -> float:
    assert isinstance(value, int | float), value
    return value


def _numbers(value: object) -> str:
    assert isinstance(value, tuple), value
    fast = orjson.dumps(value).decode()
    if fast.count("null") == value.count(None):
        return "{" + fast[1:-1].replace("null", "NULL") + "}"
    return "{" + ",".join("NULL" if item is None else str(item) for item in value) + "}"  # infinite, or not a number


def _texts(value: object) -> str:
    assert isinstance(value, tuple), value
    quoted = (indexable(item).replace("\\", "\\\\").replace('"', '\\"') for item in value)
    return "{" + ",".join(f'"{item}"' for item in quoted) + "}"


def _json(value: object) -> str:
    if isinstance(value, bytes):
        return storable_json(value)
    if isinstance(value, tuple) and all(isinstance(item, bytes) for item in value):
        return "[" + ",".join(map(storable_json, value)) + "]"
    return storable_json(_dump(value))


def _dump(value: object) -> bytes:
    """Return a value of ours as JSON in ASCII, where a lone surrogate is an escape like any other."""
    return json.dumps(value, default=_fields).encode()


def _fields(value: object) -> dict[str, object]:
    assert is_dataclass(value), value
    return {field.name: getattr(value, field.name) for field in fields(value)}


_MAKERS: Mapping[type[Event], tuple[Callable[[Record], Value], ...]] = MappingProxyType(
    {event: _makers(event) for event in TABLE_OF}
)
