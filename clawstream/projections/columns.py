"""The columns of a table that holds events, from the annotations of the events' fields. Pure.

Each field is a column of the same name; the fields of a request stand beside those of its exchange. A column may be
NULL where its field may be None, or where one of the table's events lacks the field.
"""

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, SmallInteger, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, REAL
from sqlalchemy.types import TypeEngine

from clawstream.events import Event, Packed, RequestDelta

_PLAIN = MappingProxyType({str: Text, int: BigInteger, float: Double, bool: Boolean})
_PACKED = MappingProxyType({Packed.INT32: Integer, Packed.FLOAT32: REAL, Packed.INT8: SmallInteger})
_ITEMS = MappingProxyType({str: Text, int: Integer, float: Double})


def columns_of(events: Collection[type[Event]]) -> list[Column[Any]]:
    """Return a column for each field of these events, in their order."""
    said = [_fields(event) for event in events]
    return [
        Column(name, _type(hint), nullable=not all(name in one and not _may_be_none(one[name]) for one in said))
        for name, hint in {name: hint for one in reversed(said) for name, hint in one.items()}.items()
    ]


def _fields(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        found |= _fields(hint) if hint is RequestDelta else {field.name: hint}
    return found


def _may_be_none(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _type(hint: Any) -> TypeEngine[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return ARRAY(_PACKED[arguments[1]])
    if origin in (UnionType, Union):
        [other] = (part for part in arguments if part is not NoneType)
        return _type(other)
    if origin is tuple:
        return ARRAY(_ITEMS[arguments[0]]) if arguments[0] in _ITEMS else JSONB()
    if hint is bytes or is_dataclass(hint):  # bytes are JSON
        return JSONB()
    return Text() if issubclass(hint, Enum) else _PLAIN[hint]()
