"""Events to bytes and to plain values, and back: Avro, with the schema's fingerprint in front of each record.

Single-object encoding (C3 01 and the fingerprint) needs no schema registry, and schemas/ has every version, so every
record that was ever written can be read. A field that an older record lacks gets the default of the newer schema,
unless `UPCASTERS` has a conversion between the two versions. A new meaning that older records can't have needs another
event, not a new version. No header holds anything that a person said.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cache, lru_cache, partial
from io import BytesIO
from operator import attrgetter
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import fastavro

from clawstream.errors import UndecodableRecord, UnusableEvent
from clawstream.events import Event, Packed
from clawstream.stream.schemas import Schema, all_schemas

Convert = Callable[[Any], Any]
_NAN = float("nan")
TRACEPARENT = "traceparent"
_SINGLE_OBJECT = b"\xc3\x01"
_HEADER_BYTES = 10
_NOT_AN_EVENT = (EOFError, IndexError, KeyError, MemoryError, OverflowError, TypeError, ValueError, struct.error)
_FIRST_BYTES_SHOWN = 12


def to_plain(kind: type) -> Convert:
    """Return the function that turns an object of `kind` into a dict of values that Avro knows."""
    hints = get_type_hints(kind, include_extras=True)
    names = tuple(field.name for field in fields(kind))
    read = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
    changed = tuple((name, convert) for name in names if (convert := _converter(hints[name], to_plain)) is not None)

    def convert_all(value: Any) -> dict[str, Any]:
        plain = dict(zip(names, read(value), strict=True))
        for name, convert in changed:
            plain[name] = convert(plain[name])
        return plain

    return convert_all


def from_plain(kind: type) -> Convert:
    """Return the inverse of `to_plain`'s function; it raises KeyError where an enum has no such value."""
    hints = get_type_hints(kind, include_extras=True)
    changed = tuple(
        (field.name, convert) for field in fields(kind) if (convert := _converter(hints[field.name], from_plain))
    )

    def convert_all(plain: dict[str, Any]) -> Any:
        for name, convert in changed:
            plain[name] = convert(plain[name])
        return kind(**plain)

    return convert_all


def text_as_bytes(value: Any) -> Any:
    """Return a plain value with each text as the bytes that Avro writes for it, also where it has lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, Mapping):
        return {name: text_as_bytes(part) for name, part in value.items()}
    return [text_as_bytes(part) for part in value] if isinstance(value, list) else value


def _converter(hint: Any, convert_dataclass: Callable[[type], Convert]) -> Convert | None:
    """Return how a value of this annotation is converted, by `to_plain` or `from_plain`; None: it stays as it is."""
    writing = convert_dataclass is to_plain
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return (_packer if writing else _unpacker)(arguments[1])
    if origin in (UnionType, Union):
        [other] = [argument for argument in arguments if argument is not NoneType]
        convert = _converter(other, convert_dataclass)
        return None if convert is None else lambda value: None if value is None else convert(value)
    if origin is tuple:
        collect, convert_item = list if writing else tuple, _converter(arguments[0], convert_dataclass)
        return collect if convert_item is None else lambda values: collect(map(convert_item, values))
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return convert_dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("value") if writing else {member.value: member for member in hint}.__getitem__
    return None


def _packer(how: Packed) -> Convert:
    if how is Packed.FLOAT32:  # None is written as NaN
        return lambda values: _pack(how, [_NAN if value is None else value for value in values])
    return partial(_pack, how)


def _pack(how: Packed, values: Sequence[Any]) -> bytes:
    return struct.pack(f"<{len(values)}{how.value}", *values)


def _unpacker(how: Packed) -> Convert:
    size = struct.calcsize(how.value)

    def unpack(packed: bytes) -> tuple[Any, ...]:
        # If the data's length is no multiple of `size`, struct.unpack raises: the data is longer than the format.
        return struct.unpack(f"<{len(packed) // size}{how.value}", packed)

    if how is Packed.FLOAT32:  # only NaN differs from itself
        return lambda packed: tuple([value if value == value else None for value in unpack(packed)])
    return unpack


Headers = list[tuple[str, bytes]]
ReadHeaders = tuple[tuple[str, bytes | None], ...]  # not only ours: any program may have written the record


def headers_of(event: Event, *, source: str, now_ms: int, traceparent: str | None) -> Headers:
    """Return the record's headers; `source` names the process that writes."""
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", event.event_id.encode("ascii")),
        ("ce_type", f"clawstream.{type(event).__name__}".encode()),
        ("ce_source", key_bytes(source)),
        ("ce_time", _time(now_ms)),
        ("ce_subject", key_bytes(event.key)),
        ("content-type", b"application/avro"),
    ]
    if traceparent is not None:
        headers.append((TRACEPARENT, key_bytes(traceparent)))
    return headers


def traceparent_of(headers: ReadHeaders) -> str | None:
    """Return the trace that a record belongs to."""
    for name, value in headers:
        if name == TRACEPARENT and value is not None:
            return value.decode("ascii", "replace")
    return None


def key_bytes(text: str) -> bytes:
    """Return text as the bytes of a key or header, also where it has lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=1024)  # many events are written within the same millisecond
def _time(now_ms: int) -> bytes:
    return datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds").encode("ascii")


Plain = Mapping[str, Any]  # a record's fields as Avro has them
Upcast = Callable[[Plain], Plain]  # to the next version
Upcasters = Mapping[tuple[type[Event], int], Upcast]  # by the record's event and version

UPCASTERS: Upcasters = MappingProxyType({})


def _with_defaults(value: Any, schema: Any) -> Any:
    """Return a value of the version before `schema` (which is JSON) with exactly the fields of `schema`."""
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


@dataclass(frozen=True, slots=True)
class _Writer:
    header: bytes
    plain: Convert
    schema: Any
    schema_of_bytes: Any  # with bytes in place of texts, for texts that are not valid UTF-8; both are written alike


@dataclass(frozen=True, slots=True)
class _Reader:
    kind: type[Event]
    written: Any  # the schema of the record
    upcasts: tuple[Upcast, ...]  # to the newest version, step by step
    event: Convert


class Codec:
    """Writes events with the newest version of their schema, and reads all versions."""

    def __init__(self, schemas: Iterable[Schema], *, upcasters: Upcasters = UPCASTERS) -> None:
        schemas = sorted(schemas, key=lambda schema: schema.version)
        newest = {schema.event: schema for schema in schemas}
        self._writers = {kind: _writer(schema) for kind, schema in newest.items()}
        self._readers = {
            schema.fingerprint: _reader(schema, [one for one in schemas if one.event is schema.event], upcasters)
            for schema in schemas
        }

    def encode(self, event: Event) -> bytes:
        """Return the record's value; raises UnusableEvent for a number that its field can't hold."""
        writer = self._writers[type(event)]
        out = BytesIO()
        out.write(writer.header)
        try:
            plain = writer.plain(event)
            try:
                fastavro.schemaless_writer(out, writer.schema, plain)
            except UnicodeEncodeError:
                out.seek(len(writer.header))
                out.truncate()
                fastavro.schemaless_writer(out, writer.schema_of_bytes, text_as_bytes(plain))
        except (OverflowError, TypeError, ValueError, struct.error) as error:
            raise UnusableEvent(
                f"{type(event).__name__} {event.event_id} does not fit its schema ({error}); it is not written"
            ) from error
        return out.getvalue()

    def decode(self, value: bytes | None) -> Event:
        """Return the event; raises UndecodableRecord, which says what was found in its place."""
        if value is None:
            raise UndecodableRecord("the record has no value; every event has one")
        if value[:2] != _SINGLE_OBJECT or len(value) < _HEADER_BYTES:
            raise UndecodableRecord(
                f"{len(value)} bytes beginning with {value[:_FIRST_BYTES_SHOWN].hex() or 'nothing'}: "
                "an event begins with c301 and a fingerprint"
            )
        fingerprint = value[2:_HEADER_BYTES]
        reader = self._readers.get(fingerprint)
        if reader is None:
            raise UndecodableRecord(
                f"no schema in schemas/ has the fingerprint {fingerprint.hex()}: the record was written by another "
                "version of clawstream, or by another program"
            )
        body = BytesIO(value)
        body.seek(_HEADER_BYTES)
        try:
            plain: Plain = fastavro.schemaless_reader(body, reader.written, None, handle_unicode_errors="surrogatepass")
            for upcast in reader.upcasts:
                plain = upcast(plain)
            event: Event = reader.event(plain)
        except _NOT_AN_EVENT as error:
            raise UndecodableRecord(
                f"{len(value)} bytes marked as {reader.kind.__name__} can't be decoded: {type(error).__name__} {error}"
            ) from error
        if body.tell() != len(value):
            raise UndecodableRecord(
                f"{reader.kind.__name__} ends after {body.tell()} of the record's {len(value)} bytes"
            )
        return event


@cache
def codec() -> Codec:
    """Return the codec of all schemas that come with this version of clawstream."""
    return Codec(all_schemas())


def _writer(schema: Schema) -> _Writer:
    as_bytes = fastavro.parse_schema(_strings_as_bytes(schema.parsed), _force=True)
    return _Writer(_SINGLE_OBJECT + schema.fingerprint, to_plain(schema.event), schema.parsed, as_bytes)


def _reader(schema: Schema, versions: Sequence[Schema], upcasters: Upcasters) -> _Reader:
    upcasts = tuple(
        upcasters.get((schema.event, newer.version - 1)) or partial(_with_defaults, schema=json.loads(newer.text))
        for newer in versions
        if newer.version > schema.version
    )
    return _Reader(schema.event, schema.parsed, upcasts, from_plain(schema.event))


def _strings_as_bytes(schema: Any) -> Any:
    """Return the schema with bytes in place of strings; Avro writes both alike."""
    if schema == "string":
        return "bytes"
    if isinstance(schema, list):
        return [_strings_as_bytes(part) for part in schema]
    if isinstance(schema, dict):
        parts = ("type", "items", "fields")
        return {name: _strings_as_bytes(part) if name in parts else part for name, part in schema.items()}
    return schema
