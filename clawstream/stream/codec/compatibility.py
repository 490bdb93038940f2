"""Whether what was written with one Avro schema can be read with another, by Avro's rules of resolution. Pure.

A kind of schema that this module does not know is refused. It knows primitive types, records, arrays and unions, which
is all that schemas/ uses; logical types are compared as the types they annotate.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_PROMOTED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "int": frozenset({"long", "float", "double"}),
        "long": frozenset({"float", "double"}),
        "float": frozenset({"double"}),
        "string": frozenset({"bytes"}),
        "bytes": frozenset({"string"}),
    }
)


def problems(written: Any, reading: Any) -> list[str]:
    """Return why a reader with the schema `reading` can't read all records written with `written`; empty: it can.

    Both are schemas as JSON. Raises ValueError for a kind of schema that is not known here.
    """
    return _problems(written, reading, "it")


def _problems(written: Any, reading: Any, where: str) -> list[str]:
    if isinstance(written, list):
        return [found for branch in written for found in _problems(branch, reading, where)]
    if isinstance(reading, list):
        tries = [_problems(written, branch, where) for branch in reading]
        of_its_kind = [found for found, branch in zip(tries, reading, strict=True) if _kind(branch) == _kind(written)]
        return [] if [] in tries else (of_its_kind or [[f"{where} was {_kind(written)}, which the union lacks"]])[0]
    kind, wanted = _kind(written), _kind(reading)
    if kind != wanted:
        promoted = wanted in _PROMOTED.get(kind, ())
        return [] if promoted else [f"{where} was {kind} and would be read as {wanted}"]
    if kind == "array":
        return _problems(written["items"], reading["items"], f"an item of {where}")
    return _record_problems(written, reading, where) if kind == "record" else []


def _record_problems(written: Any, reading: Any, where: str) -> list[str]:
    if written["name"] != reading["name"]:
        return [f"{where} was the record {written['name']} and would be read as {reading['name']}"]
    there = {field["name"]: field for field in written["fields"]}
    found: list[str] = []
    for field in reading["fields"]:
        name = f"{reading['name']}.{field['name']}"
        if field["name"] in there:
            found += _problems(there[field["name"]]["type"], field["type"], name)
        elif "default" not in field:
            found.append(f"{name} was not written and has no default")
    return found


def _kind(schema: Any) -> str:
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(kind, str) and (kind in _PRIMITIVES or (kind in ("record", "array") and isinstance(schema, dict))):
        return kind
    raise ValueError(f"{kind!r} is a kind of schema whose changes can't be checked: use another, or teach it here")
