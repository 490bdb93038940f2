"""Sends answers, in any dialect, as a stream of events or whole. No other module sends one.

The status can be sent only before the first byte. So a later error is an event, after which the stream ends.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starlette.types import Send

from clawstream.gateway.answering.deltas import ReplyDelta
from clawstream.gateway.answering.replies import Ending
from clawstream.gateway.requests.fields import BadRequest

Refuse = Callable[[Send, BadRequest], Awaitable[None]]
T = TypeVar("T")


class DialectReply(Protocol):
    """An answer in its dialect, as events or whole; each call returns the bytes to send."""

    def start(self) -> bytes:
        """Return the beginning, the first time."""

    def alive(self) -> bytes:
        """Return a sign of life."""

    def delta(self, delta: ReplyDelta) -> bytes:
        """Return what is new."""

    def finish(self, ending: Ending) -> bytes:
        """Return how the answer ended and, after the last answer, the end of the stream."""

    def fail(self, refused: BadRequest) -> bytes:
        """Return what breaks the stream off."""

    def whole(self, ending: Ending) -> bytes | None:
        """Return the body of a plain answer; None while other answers to the request are to come."""


class EventStream:
    """A response of server-sent events, one write at a time; it ends with the last of its answers."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], num_answers: int = 1) -> None:
        self.started = False
        self._num_answers = num_answers
        self._send = send
        self._headers = headers
        self._sending = asyncio.Lock()
        self._sent_at = asyncio.get_running_loop().time()

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send events; the first write sends the headers before them."""
        async with self._sending:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            self._sent_at = asyncio.get_running_loop().time()

    async def end_answer(self, body: bytes) -> None:
        """Send the events that end one of the answers."""
        self._num_answers -= 1
        await self.write(body, more=self._num_answers > 0)

    async def keep_alive(self, every_s: float, sign_of_life: Callable[[], bytes]) -> None:
        """Send a sign of life whenever nothing was sent for `every_s`; never returns."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + every_s - loop.time()))
            if loop.time() >= self._sent_at + every_s:
                await self.write(sign_of_life())


@dataclass(frozen=True, slots=True)
class StreamOutlet:
    """Server-sent events, each as soon as it is known."""

    send: Send
    events: EventStream
    reply: DialectReply
    refuse: Refuse

    async def begin(self) -> None:
        """Send the beginning before any content, which markup and half characters may hold back for a while."""
        beginning = self.reply.start()
        if beginning:
            await self.events.write(beginning)

    async def delta(self, delta: ReplyDelta) -> None:
        """Send what is new."""
        await self.events.write(self.reply.delta(delta))

    async def keep_alive(self, every_s: float) -> None:
        """Send a sign of life whenever nothing was sent for `every_s`."""
        await self.events.keep_alive(every_s, self.reply.alive)

    async def finish(self, ending: Ending) -> None:
        """Send how the answer ended and, after the last answer, the end of the stream."""
        await self.events.end_answer(self.reply.finish(ending))

    async def fail(self, refused: BadRequest) -> None:
        """Break the stream off, or send the error with its status if nothing was sent yet."""
        if self.events.started:
            await self.events.write(self.reply.fail(refused), more=False)
        else:
            await self.refuse(self.send, refused)


@dataclass(frozen=True, slots=True)
class WholeOutlet:
    """One body at the end."""

    send: Send
    headers: list[tuple[bytes, bytes]]
    reply: DialectReply
    refuse: Refuse

    async def begin(self) -> None:
        """Send nothing, so that the status stays open."""

    async def delta(self, delta: ReplyDelta) -> None:
        """Send nothing: the message at the end has it all."""

    async def keep_alive(self, every_s: float) -> None:
        """Send nothing: a body has no room for comments."""

    async def finish(self, ending: Ending) -> None:
        """Send the body, if this was the last answer."""
        body = self.reply.whole(ending)
        if body is not None:
            await send_whole(self.send, 200, self.headers, body)

    async def fail(self, refused: BadRequest) -> None:
        """Send the error with its status."""
        await self.refuse(self.send, refused)


Outlet = StreamOutlet | WholeOutlet


async def send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a whole answer."""
    length = (b"content-length", str(len(body)).encode("ascii"))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close `items` at the end of the block, if it can be closed."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
