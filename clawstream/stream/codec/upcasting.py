"""Turns the fields of a record of version n into the fields of version n + 1. Pure.

The one rule: the log is never rewritten. A field that an older record lacks gets the default that the schema gives it,
at any depth; `UPCASTERS` holds a conversion where that default is not what the record meant. A meaning that an older
record does not hold needs another event, not a new version.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from clawstream.events import Event

Plain = Mapping[str, Any]  # a record's fields as Avro has them
Upcast = Callable[[Plain], Plain]
Upcasters = Mapping[tuple[type[Event], int], Upcast]  # by the record's event and version

UPCASTERS: Upcasters = MappingProxyType({})


def with_defaults(schema: Any) -> Upcast:
    """Return the function that gives a record of the version before `schema` (JSON) exactly the fields of `schema`."""
    return lambda plain: _with_defaults(plain, schema)


def _with_defaults(value: Any, schema: Any) -> Any:
    if isinstance(schema, list):
        [other] = (branch for branch in schema if branch != "null")
        return None if value is None else _with_defaults(value, other)
    if not isinstance(schema, dict):
        return value
    if schema["type"] == "array":
        return [_with_defaults(item, schema["items"]) for item in value]
    return {
        field["name"]: _with_defaults(value[field["name"]], field["type"])
        if field["name"] in value
        else field["default"]
        for field in schema["fields"]
    }
