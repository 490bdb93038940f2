"""The broker and the database under test, each behind a port that stays while what is behind it comes and goes.

The broker is known to its clients by the proxy's address alone, so every byte passes here, and an acknowledgement can
be lost on its way without the broker knowing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import psutil
from sqlalchemy.engine import make_url

from clawstream.local.servers import kafka
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.local.servers.postgres import EmbeddedPostgres
from clawstream.local.servers.server_process import HOST

_PIECE_BYTES = 2**18
_PRODUCE = 0  # the number of the request, in Kafka's protocol


class _Requests:
    """Finds the kinds of requests in what a client of Kafka sends: a length, then the kind, then the rest."""

    def __init__(self) -> None:
        self.produces = False
        self._head = b""
        self._left = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            piece = data[at : at + 6 - len(self._head)]
            self._head += piece
            at += len(piece)
            if len(self._head) == 6:
                self.produces = self.produces or int.from_bytes(self._head[4:]) == _PRODUCE
                self._left = int.from_bytes(self._head[:4]) - 2
                self._head = b""


class Proxy:
    """A port of 127.0.0.1 that leads to another one, or nowhere."""

    def __init__(self) -> None:
        self.port = 0
        self.to_port: int | None = None  # None: connections are refused
        self.leads = asyncio.Event()  # somewhere
        self.drops_acks = False
        self.num_acks_dropped = 0
        self._lossy: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> "AsyncIterator[Proxy]":
        """Listen for the length of the block."""
        server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.lead(None)
            await server.wait_closed()

    def lead(self, to_port: int | None) -> None:
        """Lead there from now on; None: nowhere, and every connection ends."""
        self.to_port = to_port
        if to_port is not None:
            self.leads.set()
            return
        self.leads.clear()
        for writer in list(self._open):
            writer.transport.abort()

    @asynccontextmanager
    async def dropping_acks(self) -> AsyncIterator[None]:
        """What the broker answers to writers is lost, and at the end of the block so are their connections."""
        self.drops_acks = True
        try:
            yield
        finally:
            self.drops_acks = False
            for writer in list(self._lossy):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError):
            await self._connect(reader, writer)
        self._open.discard(writer)
        self._lossy.discard(writer)
        writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.to_port is None:
            return
        there_reader, there_writer = await asyncio.open_connection(HOST, self.to_port)
        self._open.add(there_writer)
        requests = _Requests()
        try:
            there = asyncio.create_task(self._there(reader, there_writer, requests))
            back = asyncio.create_task(self._back(there_reader, writer, requests))
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
        finally:
            self._open.discard(there_writer)
            there_writer.transport.abort()

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: _Requests) -> None:
        while data := await reader.read(_PIECE_BYTES):
            requests.feed(data)
            writer.write(data)
            await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: _Requests) -> None:
        while data := await reader.read(_PIECE_BYTES):
            if requests.produces and (self.drops_acks or writer in self._lossy):
                self._lossy.add(writer)
                self.num_acks_dropped += 1
                continue
            writer.write(data)
            await writer.drain()


class Broker:
    """A real broker that is stopped, killed and started."""

    def __init__(self, folder: Path, proxy: Proxy) -> None:
        self._folder = folder
        self._proxy = proxy
        self._server: EmbeddedKafka | None = None

    @property
    def bootstrap(self) -> str:
        """host:port for clients."""
        return f"{HOST}:{self._proxy.port}"

    async def start(self) -> None:
        """Serve, with all that was acknowledged before."""
        own = kafka.server_properties

        def advertised(log_dir: str, ports: str) -> str:
            # Of two lines for one property the last counts.
            return own(log_dir, ports) + f"advertised.listeners=PLAINTEXT://{self.bootstrap}\n"

        server = EmbeddedKafka(self._folder, open_to_all=True)
        self._server = server
        with mock.patch.object(kafka, "server_properties", advertised):
            await asyncio.to_thread(server.__enter__)
        self._proxy.lead(int(server.bootstrap.rpartition(":")[2]))

    async def stop(self) -> None:
        """End as an operator ends it."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.__exit__, None, None, None)
        self._proxy.lead(None)

    async def kill(self) -> None:
        """End as the kernel ends it."""
        server = self._server
        assert server is not None
        assert server._server_process is not None
        for process in psutil.Process(server._server_process.watcher_pid).children():
            process.kill()
        await self.stop()


class Database:
    """A real database that is restarted."""

    def __init__(self, folder: Path, proxy: Proxy) -> None:
        self._folder = folder
        self._proxy = proxy
        self._server: EmbeddedPostgres | None = None

    @property
    def url(self) -> str:
        """For clients, by way of the proxy."""
        assert self._server is not None
        address = make_url(self._server.url).set(port=self._proxy.port)
        return address.render_as_string(hide_password=False)

    async def start(self) -> None:
        """Serve."""
        server = EmbeddedPostgres(self._folder)
        self._server = server
        await asyncio.to_thread(server.__enter__)
        self._proxy.lead(make_url(server.url).port)

    async def stop(self) -> None:
        """End; transactions under way are rolled back."""
        self._proxy.lead(None)
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.__exit__, None, None, None)
