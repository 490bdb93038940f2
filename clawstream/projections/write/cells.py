"""Values as the cells of a line that COPY reads. Pure.

A cell is in COPY's text format: a backslash stands before what would end it. Text and JSON are stored as
clawstream/projections/text.py says.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any

import orjson
from sqlalchemy import Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from clawstream.projections.text import ESCAPE, escape, storable_json

ToCell = Callable[[Any], str]

NULL = "\\N"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_ID_BYTES = 600  # of the 2704 that an index takes
_KEPT_ID_CHARACTERS = 100
_CELL_ENDS = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def to_cell(name: str, kind: object, *, enum: bool) -> ToCell:
    """Return the function that makes a cell of a value other than None, for a column of this name and type."""
    if enum:
        return attrgetter("value")  # a word of ours
    if isinstance(kind, JSONB):
        return _json
    if isinstance(kind, ARRAY):
        return _texts if isinstance(kind.item_type, Text) else _numbers
    if isinstance(kind, Text):
        return _id if name.endswith("_id") else _text
    return str


def indexable(text: str) -> str:
    """Return an id in stored form: itself, or its start and its hash where it is too long for an index."""
    stored = escape(text)
    if len(stored) <= _KEPT_ID_CHARACTERS or len(stored.encode()) <= _MAX_ID_BYTES:
        return stored
    return f"{stored[:_KEPT_ID_CHARACTERS]}{ESCAPE}{hashlib.sha256(stored.encode()).hexdigest()}"


@lru_cache(1024)  # the broker gives a batch of records one time
def time_cell(timestamp_ms: int) -> str:
    """Return a time in ms since the epoch."""
    return (_EPOCH + timedelta(milliseconds=timestamp_ms)).isoformat()


def _id(text: str) -> str:
    if len(text) <= _KEPT_ID_CHARACTERS and _is_plain(text):
        return text
    return indexable(text).translate(_CELL_ENDS)


def _text(text: str) -> str:
    return text if _is_plain(text) else escape(text).translate(_CELL_ENDS)


def _is_plain(text: str) -> bool:
    """Return whether the text is its own cell, as most texts are; these are the quickest tests for that."""
    return text.isascii() and text.isprintable() and "\\" not in text


def _numbers(values: tuple[float | None, ...]) -> str:
    fast = orjson.dumps(values).decode()
    if "null" not in fast:
        return "{" + fast[1:-1] + "}"
    if fast.count("null") == values.count(None):
        return "{" + fast[1:-1].replace("null", "NULL") + "}"
    return "{" + ",".join("NULL" if item is None else str(item) for item in values) + "}"  # infinite, or not a number


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


_DUMP = json.JSONEncoder(default=_fields).encode  # in ASCII, where a lone surrogate is an escape like any other
