"""How an answer leaves for a client of OpenAI's Responses API: as a stream of typed events, or whole."""

from typing import Any

from starlette.types import Send

from clawstream.events import FinishReason
from clawstream.gateway.deltas import Delta
from clawstream.gateway.outlets import EventStream, WholeOutlet, send_error, send_whole
from clawstream.gateway.refusal import BadRequest, to_json
from clawstream.gateway.replies import Usage
from clawstream.gateway.responses_replies import ResponseEvents, ResponseReply


class ResponseStreamOutlet:
    """Server-sent events, each as soon as it is known."""

    def __init__(self, send: Send, reply: ResponseReply) -> None:
        self._send = send
        self._response = ResponseEvents(reply=reply)
        self._events = EventStream(send, reply.headers(stream=True))

    async def begin(self) -> None:
        """Send the beginning of the response: markup and half characters may keep content waiting for a while."""
        beginning = self._response.start()
        if beginning:
            await self._events.write(beginning)

    async def delta(self, delta: Delta) -> None:
        """Send what is new."""
        await self._events.write(self._response.delta(delta))

    async def keep_alive(self, every_s: float) -> None:
        """Send the beginning of the response, then a comment, whenever nothing was sent for `every_s`."""
        await self._events.keep_alive(every_s, self._response.alive)

    async def finish(
        self,
        message: dict[str, Any],  # noqa: ARG002  # it was streamed
        reason: FinishReason,
        usage: Usage,
        matched_stop: str | None,  # noqa: ARG002  # OpenAI's clients are not told which
    ) -> None:
        """Send how the answer ended, and the end of the stream."""
        await self._events.write(self._response.finish(reason, usage), more=False)

    async def fail(self, refused: BadRequest) -> None:
        """Send response.failed, or the error with its status if nothing was sent yet."""
        if self._events.started:
            await self._events.write(self._response.fail(refused), more=False)
        else:
            await send_error(self._send, refused)


class ResponseOutlet(WholeOutlet):
    """One JSON body at the end."""

    def __init__(self, send: Send, reply: ResponseReply) -> None:
        self._send = send
        self._reply = reply

    async def finish(
        self,
        message: dict[str, Any],
        reason: FinishReason,
        usage: Usage,
        matched_stop: str | None,  # noqa: ARG002  # OpenAI's clients are not told which
    ) -> None:
        """Send the response."""
        body = to_json(self._reply.whole(message, reason, usage))
        await send_whole(self._send, 200, self._reply.headers(stream=False), body)

    async def fail(self, refused: BadRequest) -> None:
        """Send the error with its status."""
        await send_error(self._send, refused)
