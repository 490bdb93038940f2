"""The Avro schemas in schemas/, one file per event and version, and the check which of them can read which.

A released file is never edited, since its fingerprint stands in every record that was written with it: a change becomes
the next version. Each version reads what all earlier ones wrote, and also what the next version writes, since two
versions are at work during an upgrade (BACKWARD_TRANSITIVE, and FORWARD by one). Only primitive types, records, arrays
and unions are allowed; a logical type is compared as the type that it annotates.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fastavro.schema

from clawstream import resources
from clawstream.events import EVENTS, Event

_PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_PROMOTED = frozenset({
    ("int", "long"), ("int", "float"), ("int", "double"), ("long", "float"), ("long", "double"), ("float", "double"),
    ("string", "bytes"), ("bytes", "string"),
})  # fmt: skip
_FILE_NAME = re.compile(r"(?P<event>[a-z_]+)\.v(?P<version>[0-9]+)\.avsc")


def problems(written: Any, reading: Any) -> list[str]:
    """Return why a reader with the schema `reading` can't read all records written with `written`; empty: it can.

    Both are schemas as JSON. Raises ValueError for a kind of schema that this check does not know.
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
        return [] if (kind, wanted) in _PROMOTED else [f"{where} was {kind} and would be read as {wanted}"]
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
    raise ValueError(f"{kind!r} is a kind of schema whose changes can't be checked: use another, or add a check for it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One version of one event's schema."""

    event: type[Event]
    version: int
    fingerprint: bytes  # CRC-64-AVRO of the canonical form, little-endian: as it stands in records
    text: str  # of the file, unchanged
    parsed: Any  # in fastavro's form


@cache
def all_schemas() -> tuple[Schema, ...]:
    """Return every schema that this version can read, the versions of an event in order."""
    return load(resources.folder("schemas"))


def load(folder: Path, *, events: Iterable[type[Event]] = EVENTS) -> tuple[Schema, ...]:
    """Return the schemas of `events` in `folder`.

    Raises ValueError for a file of no known event, an event without a schema, equal fingerprints, or a version that
    can't read another.
    """
    kinds = {snake_name(kind): kind for kind in events}
    schemas = [_read(path, kinds) for path in sorted(folder.glob("*.avsc"))]
    _refuse_lookalikes(schemas)
    _refuse_incompatible(schemas)
    missing = sorted(set(kinds.values()) - {schema.event for schema in schemas}, key=lambda kind: kind.__name__)
    if missing:
        raise ValueError(f"{folder}: no schema for {', '.join(kind.__name__ for kind in missing)}")
    return tuple(sorted(schemas, key=lambda schema: (schema.event.__name__, schema.version)))


def snake_name(kind: type[Event]) -> str:
    """Return the event's name in snake case, as file names have it."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def fingerprint(parsed: Any) -> bytes:
    """Return the eight bytes that name a schema in each record."""
    canonical = fastavro.schema.to_parsing_canonical_form(parsed)
    # The library's hexadecimal form is little-endian already: '"int"' gives 8f5c393f1ad57572.
    return bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))


def _read(path: Path, kinds: Mapping[str, type[Event]]) -> Schema:
    name = _FILE_NAME.fullmatch(path.name)
    if name is None or name["event"] not in kinds:
        raise ValueError(f"{path}: expected <event>.v<version>.avsc, the event one of {', '.join(sorted(kinds))}")
    text = path.read_text()
    parsed = fastavro.schema.parse_schema(json.loads(text))
    return Schema(
        event=kinds[name["event"]],
        version=int(name["version"]),
        fingerprint=fingerprint(parsed),
        text=text,
        parsed=parsed,
    )


def _refuse_lookalikes(schemas: Iterable[Schema]) -> None:
    """Raise ValueError where two schemas have one fingerprint, which covers neither defaults nor docs."""
    seen: dict[bytes, Schema] = {}
    for schema in schemas:
        other = seen.setdefault(schema.fingerprint, schema)
        if other is not schema:
            raise ValueError(
                f"{schema.event.__name__} v{schema.version} and {other.event.__name__} v{other.version} have one "
                f"fingerprint, {schema.fingerprint.hex()}: a record does not say which it is. Change a name or a type"
            )


def _refuse_incompatible(schemas: Iterable[Schema]) -> None:
    versions: dict[type[Event], list[Schema]] = {}
    for schema in sorted(schemas, key=lambda schema: schema.version):
        versions.setdefault(schema.event, []).append(schema)
    for kind, known in versions.items():
        if [schema.version for schema in known] != list(range(1, len(known) + 1)):
            raise ValueError(f"{kind.__name__} has versions {[schema.version for schema in known]}: expected 1, 2, ..")
        for number, schema in enumerate(known):
            for earlier in known[:number]:
                _refuse(earlier, schema)
            if number:
                _refuse(schema, known[number - 1])


def _refuse(written: Schema, reading: Schema) -> None:
    found = problems(json.loads(written.text), json.loads(reading.text))
    if found:
        raise ValueError(
            f"{reading.event.__name__} v{reading.version} can't read what v{written.version} writes: "
            f"{'; '.join(found)}. Give a new field a default and keep the old ones, or make it another event"
        )
