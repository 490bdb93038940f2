"""Records as stages see them, from the bytes of a log. Pure.

The one rule: bytes that can't be read are a value, not an exception; the reader decides what becomes of them.
"""

from hashlib import blake2b

from clawstream.errors import UndecodableRecord
from clawstream.stream.codec.avro import Codec
from clawstream.stream.codec.headers import key_bytes, traceparent_of
from clawstream.stream.log import Arrived, Raw, Undecodable
from clawstream.stream.stage import Record

DIGEST_BYTES = 16


def arrived(raw: Raw, codec: Codec, *, digest: bool = True) -> Arrived:
    """Return the record with its event (and its hash, with `digest`), or why it has no event."""
    try:
        event = codec.decode(raw.value)
    except UndecodableRecord as error:
        return Undecodable(raw=raw, reason=str(error))
    if raw.key != key_bytes(event.key):
        reason = f"{type(event).__name__} {event.event_id} has the key {event.key!r}, its record {raw.key!r}"
        return Undecodable(raw=raw, reason=reason)
    return Record(
        topic=raw.topic,
        partition=raw.partition,
        offset=raw.offset,
        timestamp_ms=raw.timestamp_ms,
        key=event.key,
        event=event,
        traceparent=traceparent_of(raw.headers),
        digest=digest_of(raw) if digest else None,
    )


def digest_of(raw: Raw) -> bytes:
    """Return a hash of key, headers and value, each delimited so that none can pass for part of another."""
    parts = [raw.key, raw.value]
    for name, value in raw.headers:
        parts += (name.encode(), value)
    lengths = ",".join(["none" if part is None else str(len(part)) for part in parts])
    return blake2b(b"".join((lengths.encode(), b":", *filter(None, parts))), digest_size=DIGEST_BYTES).digest()


def digest_in(record: Arrived) -> bytes | None:
    """Return the hash of a record that was read with its digest, or that has no event."""
    return digest_of(record.raw) if isinstance(record, Undecodable) else record.digest
