"""HTTP written byte by byte, as no well-behaved client writes it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from urllib.parse import urlsplit

WITHIN_S = 15.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Said:
    """Everything a server said until it closed the connection or fell silent."""

    raw: bytes
    closed: bool

    @property
    def statuses(self) -> list[int]:
        """The status of each answer."""
        return [int(status) for status in _STATUS.findall(self.raw)]


@dataclass(slots=True)
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def write(self, *first: bytes, pieces: Iterable[bytes] = ()) -> None:
        """Send `first` and the pieces, each when the one before is in the kernel; a server may hang up meanwhile."""
        try:
            for piece in chain(first, pieces):
                self.writer.write(piece)
                await self.writer.drain()
        except ConnectionError:
            pass

    async def said(self, *, answers: int | None = None, silence_s: float = WITHIN_S) -> Said:
        """Read until there are `answers`, the connection is closed, or nothing came for so long."""
        found = Said(b"", False)
        while answers is None or len(found.statuses) < answers:
            try:
                async with asyncio.timeout(silence_s):
                    piece = await self.reader.read(65_536)
            except TimeoutError:
                return found
            except ConnectionError:
                piece = b""
            found = Said(found.raw + piece, not piece)
            if not piece:
                return found
        return found


@asynccontextmanager
async def wire(url: str) -> AsyncIterator[Wire]:
    """A connection to the server at `url`."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def post(body: bytes, headers: Sequence[bytes] = (), *, path: bytes = b"/v1/chat/completions") -> bytes:
    """A correct request, and what `headers` adds to it."""
    length = b"content-length: %d" % len(body)
    return b"\r\n".join([b"POST " + path + b" HTTP/1.1", b"host: x", length, *headers, b"", body])


def question(**more: object) -> bytes:
    """A body that is answered."""
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Hi"}]} | more).encode()
