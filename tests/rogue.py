"""Servers that answer with whatever bytes they are told to, for as long as they are asked to."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Rogue:
    """Where it listens, the requests' heads and bodies, and how much it got rid of."""

    url: str = ""
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    sent_bytes: int = 0


@asynccontextmanager
async def rogue(say: Callable[[Rogue, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[Rogue]:
    """A server that reads each request, has `say` answer it, and closes the connection."""
    found = Rogue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            said = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            found.heads.append(head)
            found.bodies.append(await reader.readexactly(int(said[1]) if said else 0))
            await say(found, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()


def head(status: int = 200, *headers: str) -> bytes:
    """The head of a response in chunks."""
    lines = [f"HTTP/1.1 {status} Said", "Transfer-Encoding: chunked", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def piece(data: bytes) -> bytes:
    """One chunk."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def pour(found: Rogue, writer: asyncio.StreamWriter, data: bytes, times: int) -> None:
    """Send `data` so many times, as fast as it is taken; ends where the other side has gone."""
    for _ in range(times):
        writer.write(piece(data))
        await writer.drain()
        found.sent_bytes += len(data)


async def drip(writer: asyncio.StreamWriter, data: bytes, every_s: float) -> None:
    """Send `data` again and again, slowly, until the other side has gone."""
    while not writer.is_closing():
        writer.write(piece(data))
        await writer.drain()
        await asyncio.sleep(every_s)
