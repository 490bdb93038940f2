"""The spool's bytes: records one after another, each in a frame that says how long it is and whether it is whole. Pure.

A frame is its body's length and CRC-32 (both uint32, little-endian), then the body. The first byte of a body says what
it is: a record, a note of the place up to which the log has all records, or bytes without meaning (bytes that a bad
disk left, for example). The spool's contents are a fold over its frames, so no second file can disagree with it.

A file cut at any byte holds every record whose frame ends before the cut, and nothing else; one with damaged bytes
holds every record whose frame has none of them.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple
from zlib import crc32

from clawstream.stream.log import Sealed

_HEAD = struct.Struct("<II")
_RECORD, _TAKEN, _DAMAGED = b"r", b"t", b"d"
_SPOOLED_AT = struct.Struct("<q")
_PLACE = struct.Struct("<Q")
_NUM = struct.Struct("<I")
MAX_BODY_BYTES = 2**26  # a larger length is damage
# The beginning of a record's frame (length, checksum, kind, time, length of the topic's name, up to 249) or a note's.
_BEGINS = re.compile(rb"(?=.{3}[\x00-\x04].{4}r.{9}\x00{3}|\x09\x00{3}.{4}t)", re.DOTALL)
BEGINS_BYTES = 21  # bytes that `_BEGINS` looks at


class Spooled(NamedTuple):
    """A record in the spool."""

    record: Sealed
    at_ms: int  # when it came, since the epoch, UTC
    end: int  # where its frame ends in the file


class Contents(NamedTuple):
    """The contents of a spool's bytes, from the beginning of a frame on."""

    records: Sequence[Spooled]
    taken: int | None  # up to this place every record is on the log; None: no such note here
    end: int  # of the last whole frame; where the bytes begin if there is none


def record_frame(record: Sealed, at_ms: int) -> bytes:
    """Return the frame of a record."""
    parts = [record.topic.encode(), record.key, record.value]
    for name, value in record.headers:
        parts += [name.encode(), value]
    body = b"".join(_NUM.pack(len(part)) + part for part in parts)
    return _frame(_RECORD + _SPOOLED_AT.pack(at_ms) + body)


def taken_frame(place: int) -> bytes:
    """Return the note that the log has every record whose frame ends at `place` or before it."""
    return _frame(_TAKEN + _PLACE.pack(place))


def contents(data: bytes, *, begins_at: int = 0) -> Contents:
    """Return the contents of the whole frames of `data`, which begins with a frame, at `begins_at` in the file."""
    found: list[Spooled] = []
    taken: int | None = None
    end = 0
    for body, end in _bodies(data):
        if body[:1] == _RECORD:
            found.append(_spooled(body, begins_at + end))
        elif body[:1] == _TAKEN:
            (taken,) = _PLACE.unpack_from(body, 1)
    return Contents(found, taken, begins_at + end)


def beginnings(data: bytes) -> Iterator[int]:
    """Yield the places in `data` where frames may begin: all where one does, and few others."""
    return (found.start() for found in _BEGINS.finditer(data))


def without_notes(data: bytes) -> bytes:
    """Return the whole frames that `data` begins with, each note replaced by a meaningless frame of its length."""
    return b"".join(
        _frame(body if body[:1] != _TAKEN else _DAMAGED + body[len(_DAMAGED) :]) for body, _ in _bodies(data)
    )


def taken_up_to(file: BinaryIO) -> int:
    """Return the place up to which the log has all records, by the notes in the file; checksums are not checked."""
    taken = at = 0
    while size := frame_bytes(head := file.read(_HEAD.size + len(_TAKEN))):
        if head[_HEAD.size :] == _TAKEN and len(note := file.read(_PLACE.size)) == _PLACE.size:
            (taken,) = _PLACE.unpack(note)
        at += size
        file.seek(at)
    return taken


def damaged_frames(data: bytes) -> bytes:
    """Return frames without meaning that are together as long as `data` and keep most of its bytes.

    Data too short for a frame is returned as it is.
    """
    rest = data if len(data) <= MAX_BODY_BYTES else data[: MAX_BODY_BYTES // 2]
    if len(rest) <= _HEAD.size:
        return data  # too little for a frame
    made = _frame(_DAMAGED + rest[_HEAD.size + len(_DAMAGED) :])
    return made if len(rest) == len(data) else made + damaged_frames(data[len(rest) :])


def frame_bytes(data: bytes) -> int:
    """Return the length of the frame that `data` begins with; 0 where it begins with none."""
    if len(data) < _HEAD.size:
        return 0
    length, _ = _HEAD.unpack_from(data)
    return _HEAD.size + int(length) if 0 < length <= MAX_BODY_BYTES else 0


def _frame(body: bytes) -> bytes:
    return _HEAD.pack(len(body), crc32(body)) + body


def _bodies(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each whole frame's body and end, up to the first that is not whole."""
    at = 0
    while size := frame_bytes(data[at : at + _HEAD.size]):
        body = data[at + _HEAD.size : at + size]
        if at + size > len(data) or crc32(body) != _HEAD.unpack_from(data, at)[1]:
            return
        at += size
        yield body, at


def _spooled(body: bytes, end: int) -> Spooled:
    (at_ms,) = _SPOOLED_AT.unpack_from(body, 1)
    parts: list[bytes] = []
    at = 1 + _SPOOLED_AT.size
    while at < len(body):
        (length,) = _NUM.unpack_from(body, at)
        parts.append(body[at + _NUM.size : at + _NUM.size + length])
        at += _NUM.size + length
    topic, key, value, *about = parts
    headers = tuple((name.decode(), said) for name, said in zip(about[::2], about[1::2], strict=True))
    return Spooled(Sealed(topic.decode(), key, value, headers), at_ms, end)
