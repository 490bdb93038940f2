"""One client's connection: uvicorn's HTTP/1.1 with a bound on everything that a client can make last or grow.

Whatever a client sends, or does not send or read, its connection holds a bounded amount of memory for a bounded time. A
request that llhttp refuses (Content-Length twice or beside Transfer-Encoding, a transfer coding that does not end in
chunked, bare line feeds, spaces before a colon) is refused here too, never parsed leniently. The header `Upgrade` is
ignored, as RFC 9110 7.8 allows: the request has its body and its end like any other. llhttp takes what follows such a
head for another protocol, not for the body; so the head is parsed again without that header.

uvicorn has no such bounds: it takes headers of any size, waits for ever for a first request and for the rest of one
that began, adds the trailers of a body to the headers, and waits for ever for a client that reads nothing. No setting
bounds these, so its connection is subclassed here; pyproject.toml says for which versions of uvicorn that holds.
"""

import asyncio
from asyncio import TimerHandle
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from clawstream.gateway.engines import ANSWERS_WITHIN_S
from clawstream.gateway.requests.fields import BadRequest

MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
# Bytes of framing that each byte of a body may have on the wire; a chunk of one byte has five or more.
_FRAMING_PER_BODY_BYTE = 16
_VERSIONS = ("1.0", "1.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one gateway; only tests change them."""

    request_timeout_s: float = 30.0  # for a request's headers, then for its body, then to render it
    idle_timeout_s: float = 60.0  # from the connection's start, or an answer on it, to the next request
    write_timeout_s: float = 30.0  # for 64 KiB to be read; a client that reads nothing for so long is given up
    heartbeat_s: float = 10.0  # between comments on a silent stream; proxies cut what is silent for 30 to 60 s
    first_token_timeout_s: float = 300.0  # an engine may hold a request in its queue, and prefill 100,000 tokens
    engine_answers_within_s: float = ANSWERS_WITHIN_S
    ack_timeout_s: float = 0.02  # an answer's end waits so long for Kafka; then the exchange goes to the spool
    max_body_bytes: int = 8 * 2**20  # some 2,000,000 tokens of text
    index_window_s: int = 86_400  # sessions and answers of the last day are read from the log at the start


def connection_class(bounds: Bounds) -> type[asyncio.Protocol]:
    """Return the protocol of connections within `bounds`."""

    class Connection(_Connection):
        _bounds = bounds

    return Connection


class _Connection(HttpToolsProtocol):
    _bounds: Bounds

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._reading: TimerHandle | None = None
        self._writing: TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._in_headers = False
        self._header_bytes = 0
        self._framing_bytes = 0  # received bytes, less those that the body so far may have taken
        self._refused = BadRequest("This is not HTTP/1.1; the connection is closed.")
        self._head_to_parse = b""

    # The connection's life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._read_within(self._bounds.idle_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        running = self._answering
        super().connection_lost(exc)
        if running is not None and not running.response_complete:
            # uvicorn tells only the newest request of the disconnect. This one may be older, and still be answered.
            running.disconnected = True
            running.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_within(self._bounds.write_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: bytes that begin no request would stop uvicorn's timer for good, so `_reading` is used."""

    # What comes in

    def data_received(self, data: bytes) -> None:
        self._framing_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except HttpParserError:
            self.logger.warning("connection=refused reason=%s", self._refused)
            self._refuse(self._refused)
            return
        if self._framing_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(_too_many_headers())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0
        self._read_within(self._bounds.request_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # a trailer, which is ignored
        self._count(len(name) + len(value))
        if len(self.headers) == MAX_HEADERS:
            raise self._remember(_too_many_headers())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if self._reading is not None:
            self._reading.cancel()
        method, version = self.parser.get_method(), self.parser.get_http_version()
        problem = unclear(method, version, self.headers)
        if problem is not None:
            raise self._remember(problem)
        if self.parser.should_upgrade():
            self._head_to_parse = without_upgrade(method, self.url, version, self.headers)
            return
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = max(0, self._framing_bytes - (1 + _FRAMING_PER_BODY_BYTE) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # not complete: its head is about to be parsed again
        self._framing_bytes = 0
        super().on_message_complete()

    def _parse(self, data: memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
                self.parser.feed_data(self._head_to_parse)
            else:
                return

    # What goes out

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering, _ = self.pipeline[-1]
        super().on_response_complete()
        if self.transport.is_closing():
            self._write_within(self._bounds.write_timeout_s)
        elif not self._in_headers:
            self._read_within(self._bounds.idle_timeout_s)

    def _refuse(self, refused: BadRequest) -> None:
        """End the connection, with the reason unless an answer is half sent."""
        running = self._answering
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.abort()
                return
        body = refused.as_json()
        head = f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            self._write_within(self._bounds.write_timeout_s)

    # Bounds

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise self._remember(_too_many_headers())

    def _remember(self, refused: BadRequest) -> BadRequest:
        """Remember and return the refusal to raise, since the parser only tells that something was raised."""
        self._refused = refused
        return refused

    def _read_within(self, seconds: float) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.loop.call_later(seconds, self._late)

    def _write_within(self, seconds: float) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._writing = self.loop.call_later(seconds, self.transport.abort)

    def _late(self) -> None:
        if not self._in_headers:
            self._close()
            return
        message = f"The request's headers did not come within {self._bounds.request_timeout_s:g} s."
        self._refuse(BadRequest(message, status=408, code="request_timeout"))


def unclear(method: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> BadRequest | None:
    """Return why another server could read these headers as a different request; None: it could not."""
    if method == b"CONNECT":
        return BadRequest("CONNECT asks for a tunnel; this is no proxy.")
    if version not in _VERSIONS:
        return BadRequest(f"HTTP/{version[:10]} is not spoken here; use HTTP/1.1.", status=505)
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        return BadRequest("HTTP/1.0 has no Transfer-Encoding; use HTTP/1.1.")
    if codings not in ([], [b"chunked"]):
        return BadRequest("The Transfer-Encoding is not known here; expected chunked alone.", status=501)
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        return BadRequest(f"The request has {num_hosts} Host headers; expected one.")
    return None


def without_upgrade(method: bytes, url: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the head of the request without its wish for another protocol."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"".join([b"%b %b HTTP/%b\r\n" % (method, url, version.encode("ascii")), *lines, b"\r\n"])


def _too_many_headers() -> BadRequest:
    return BadRequest(
        f"There are more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them or of a body's framing; the "
        "connection is closed.",
        status=431,
        code="headers_too_large",
    )
