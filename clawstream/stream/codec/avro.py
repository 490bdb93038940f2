"""Events to bytes and back: Avro, with the schema's fingerprint in front of each record.

The one rule: every record that was ever written can be read. A record names the schema it was written with, and every
version in schemas/ is known. Single-object encoding (C3 01 and the fingerprint) needs no other service.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import fastavro

from clawstream.errors import UndecodableRecord, UnusableEvent
from clawstream.events import Event
from clawstream.stream.codec.plain import Convert, from_plain, text_as_bytes, to_plain
from clawstream.stream.codec.schemas import Schema, all_schemas
from clawstream.stream.codec.upcasting import UPCASTERS, Plain, Upcast, Upcasters, with_defaults

_SINGLE_OBJECT = b"\xc3\x01"
_HEADER_BYTES = 10
_NOT_AN_EVENT = (EOFError, IndexError, KeyError, MemoryError, OverflowError, TypeError, ValueError, struct.error)
_FIRST_BYTES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class _Writer:
    header: bytes
    plain: Convert
    schema: Any
    schema_of_bytes: Any  # the same bytes on the wire, for texts that are not valid UTF-8


@dataclass(frozen=True, slots=True)
class _Reader:
    kind: type[Event]
    written: Any  # the schema of the record
    upcasts: tuple[Upcast, ...]  # to the newest version, step by step
    event: Convert


class Codec:
    """Writes events with the newest schema and reads all versions."""

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
        """Return the event; raises UndecodableRecord saying what was found."""
        if value is None:
            raise UndecodableRecord("the record has no value; every event has one")
        mark = self._mark(value)
        reader = self._readers.get(mark)
        if reader is None:
            raise UndecodableRecord(
                f"no schema in schemas/ has the fingerprint {mark.hex()}: the record is of another clawstream, "
                "or of something else"
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
                f"{len(value)} bytes that say they are {reader.kind.__name__} are not: {type(error).__name__} {error}"
            ) from error
        if body.tell() != len(value):
            raise UndecodableRecord(
                f"{reader.kind.__name__} ends after {body.tell()} of the record's {len(value)} bytes"
            )
        return event

    def _mark(self, value: bytes) -> bytes:
        """Return the fingerprint that `value` begins with."""
        if value[:2] == _SINGLE_OBJECT and len(value) >= _HEADER_BYTES:
            return value[2:_HEADER_BYTES]
        raise UndecodableRecord(
            f"{len(value)} bytes beginning with {value[:_FIRST_BYTES_SHOWN].hex() or 'nothing'}: "
            "an event begins with c301 and a fingerprint"
        )


@cache
def codec() -> Codec:
    """Return the codec of the schemas that travel with this version."""
    return Codec(all_schemas())


def _writer(schema: Schema) -> _Writer:
    as_bytes = fastavro.parse_schema(_strings_as_bytes(schema.parsed), _force=True)
    return _Writer(_SINGLE_OBJECT + schema.fingerprint, to_plain(schema.event), schema.parsed, as_bytes)


def _reader(schema: Schema, versions: Sequence[Schema], upcasters: Upcasters) -> _Reader:
    upcasts = tuple(
        upcasters.get((schema.event, newer.version - 1)) or with_defaults(json.loads(newer.text))
        for newer in versions
        if newer.version > schema.version
    )
    return _Reader(schema.event, schema.parsed, upcasts, from_plain(schema.event))


def _strings_as_bytes(schema: Any) -> Any:
    """Return the schema with bytes for strings, which are written alike."""
    if schema == "string":
        return "bytes"
    if isinstance(schema, list):
        return [_strings_as_bytes(part) for part in schema]
    if isinstance(schema, dict):
        parts = ("type", "items", "fields")
        return {name: _strings_as_bytes(part) if name in parts else part for name, part in schema.items()}
    return schema
