"""Reads a peer's response up to a limit of bytes, before and after decompression.

The one rule: a peer decides neither how much memory its response takes, nor where else our request goes.
"""

import asyncio
import zlib
from typing import NamedTuple, TypedDict

import aiohttp
import orjson

SHOWN_CHARACTERS = 300
_ERROR_BYTES = 16 * 2**10
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS


class RequestArguments(TypedDict):
    """The aiohttp arguments of every request to a peer."""

    allow_redirects: bool
    auto_decompress: bool


# A redirect would send the request elsewhere: a conversation, and the key in its headers.
ASKING: RequestArguments = {"allow_redirects": False, "auto_decompress": False}
PLAIN = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class Body(NamedTuple):
    """The part of a body that arrived; `wrong` says why it is incomplete or not as sent."""

    content: bytes
    wrong: str | None = None


async def read_body(response: aiohttp.ClientResponse, *, most_bytes: int, until: float | None = None) -> Body:
    """Return the body, of which no more than `most_bytes` are held.

    At `until`, on the event loop's clock, returns what arrived by then. Raises TimeoutError where that is blank, and
    aiohttp.ClientError where the connection is lost.
    """
    found = bytearray()
    try:
        async with asyncio.timeout_at(until):
            async for piece in response.content.iter_any():
                found += piece
                if len(found) > most_bytes:
                    return Body(bytes(found[:most_bytes]), f"it has more than {most_bytes} bytes")
    except TimeoutError:
        if not found.strip():
            raise
        return Body(bytes(found), f"it did not end in time, after {len(found)} bytes")
    return _decompressed(bytes(found), response.headers.get("Content-Encoding", "identity"), most_bytes)


async def read_error(response: aiohttp.ClientResponse, *, until: float | None = None) -> bytes:
    """Return the beginning of a refusal's body; failing to read it changes nothing, as the status counts."""
    if 300 <= response.status < 400:
        where = response.headers.get("Location", "nowhere")[:SHOWN_CHARACTERS]
        return f"it redirects to {where}, and redirects are not followed: name the address itself".encode()
    try:
        return (await read_body(response, most_bytes=_ERROR_BYTES, until=until)).content
    except (TimeoutError, aiohttp.ClientError):
        return b""


def shown(text: str) -> str:
    """Return as much of a peer's words as an error echoes."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def parsed(raw: bytes) -> object:
    """Return the JSON of a body; None where it has none."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _decompressed(raw: bytes, encoding: str, most_bytes: int) -> Body:
    if encoding in ("identity", ""):
        return Body(raw)
    if encoding not in ("gzip", "deflate"):
        return Body(b"", f"it is compressed ({shown(encoding)}), which was not asked for")
    inflating = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        content = inflating.decompress(raw, most_bytes)
    except zlib.error as error:
        return Body(b"", f"it is no {encoding} ({error})")
    if inflating.eof:
        return Body(content)
    return Body(content, f"it has more than {most_bytes} bytes, or is cut off, under its {encoding}")
