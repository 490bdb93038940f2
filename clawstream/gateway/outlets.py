"""How an answer leaves: as a stream of events, or whole. The only place that sends a chat answer.

The one rule: a status can be told only before the first byte; after it an error is an event and the stream just ends.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Send

from clawstream.events import FinishReason
from clawstream.gateway.deltas import Delta
from clawstream.gateway.refusal import BadRequest
from clawstream.gateway.replies import KEEP_ALIVE, Reply, Usage, error_headers, stream_error
from clawstream.gateway.sampled import SampledTokens


class Outlet(Protocol):
    """Where an answer goes."""

    async def begin(self) -> None:
        """The first token is there, though it shows nothing yet."""

    async def delta(self, delta: Delta) -> None:
        """What is new goes out, if this outlet shows an answer as it grows."""

    async def keep_alive(self, every_s: float) -> None:
        """A silent stream gets a sign of life every so often; never returns."""

    async def finish(
        self, message: dict[str, Any], reason: FinishReason, usage: Usage, matched_stop: str | None
    ) -> None:
        """The answer is over, and on the log; `matched_stop` is the client's string that ended it."""

    async def fail(self, refused: BadRequest) -> None:
        """The answer ends here, with what went wrong."""


class EventStream:
    """A response of server-sent events, one write at a time."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = False
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

    async def keep_alive(self, every_s: float, sign_of_life: Callable[[], bytes]) -> None:
        """Send a sign of life whenever nothing was sent for `every_s`; never returns."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + every_s - loop.time()))
            if loop.time() >= self._sent_at + every_s:
                await self.write(sign_of_life())


class StreamOutlet:
    """Server-sent events, each as soon as it is known."""

    def __init__(self, send: Send, reply: Reply, *, include_usage: bool, sampled: SampledTokens | None = None) -> None:
        self._sampled = sampled
        self._send = send
        self._reply = reply
        self._include_usage = include_usage
        self._role: dict[str, Any] = {"role": "assistant"}
        self._events = EventStream(send, reply.headers(stream=True))

    async def begin(self) -> None:
        """Send the role alone: markup and half characters may keep content waiting for a while."""
        if self._role:
            await self.delta(Delta())

    async def delta(self, delta: Delta) -> None:
        """Send a chunk; the first one has the role."""
        logprobs = None if self._sampled is None else self._sampled.take()
        if not (self._role or delta.reasoning or delta.tool_calls or logprobs):
            await self._events.write(self._reply.text_chunk(delta.content))
            return
        content, self._role = self._role | (delta.as_dict() or {"content": ""}), {}
        await self._events.write(self._reply.chunk(content, logprobs))

    async def keep_alive(self, every_s: float) -> None:
        """Send a comment whenever nothing was sent for `every_s`."""
        await self._events.keep_alive(every_s, lambda: KEEP_ALIVE)

    async def finish(
        self,
        message: dict[str, Any],  # noqa: ARG002  # it was streamed
        reason: FinishReason,
        usage: Usage,
        matched_stop: str | None,  # noqa: ARG002  # OpenAI's clients are not told which
    ) -> None:
        """Send how the answer ended, its usage where that was asked for, and the end of the stream."""
        begun = self._reply.chunk(self._role | {"content": ""}) if self._role else b""
        logprobs = None if self._sampled is None else self._sampled.take()
        ending = self._reply.ending(reason, usage if self._include_usage else None, logprobs)
        await self._events.write(begun + ending, more=False)

    async def fail(self, refused: BadRequest) -> None:
        """Send the error, with its status if nothing was sent yet."""
        if self._events.started:
            await self._events.write(stream_error(refused), more=False)
        else:
            await send_error(self._send, refused)


class WholeOutlet:
    """What any outlet does that shows nothing before the end."""

    async def begin(self) -> None:
        """A status can still be told."""

    async def delta(self, delta: Delta) -> None:
        """The message at the end has it all."""

    async def keep_alive(self, every_s: float) -> None:
        """A body has no room for comments."""


class PlainOutlet(WholeOutlet):
    """One JSON body at the end."""

    def __init__(self, send: Send, reply: Reply, sampled: SampledTokens | None = None) -> None:
        self._send = send
        self._reply = reply
        self._sampled = sampled

    async def finish(
        self,
        message: dict[str, Any],
        reason: FinishReason,
        usage: Usage,
        matched_stop: str | None,  # noqa: ARG002  # OpenAI's clients are not told which
    ) -> None:
        """Send the completion."""
        logprobs = None if self._sampled is None else self._sampled.take()
        body = self._reply.whole(message, reason, usage, logprobs)
        await send_whole(self._send, 200, self._reply.headers(stream=False), body)

    async def fail(self, refused: BadRequest) -> None:
        """Send the error with its status."""
        await send_error(self._send, refused)


async def send_error(send: Send, refused: BadRequest) -> None:
    """Send OpenAI's error object as the whole answer."""
    await send_whole(send, refused.status, error_headers(refused), refused.as_json())


async def send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a whole answer."""
    length = (b"content-length", str(len(body)).encode("ascii"))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
