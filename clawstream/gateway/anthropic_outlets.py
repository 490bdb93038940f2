"""How an answer leaves for a client of Anthropic's Messages API: as a stream of events, or whole."""

from typing import Any

from starlette.types import Send

from clawstream.events import FinishReason
from clawstream.gateway.anthropic_replies import PING, MessageEvents, MessageReply, error_body, error_event
from clawstream.gateway.deltas import Delta
from clawstream.gateway.outlets import EventStream, WholeOutlet, send_whole
from clawstream.gateway.refusal import BadRequest, to_json
from clawstream.gateway.replies import Usage, error_headers


class MessageStreamOutlet:
    """Server-sent events, each as soon as it is known."""

    def __init__(self, send: Send, reply: MessageReply) -> None:
        self._send = send
        self._message = MessageEvents(reply=reply)
        self._events = EventStream(send, reply.headers(stream=True))

    async def begin(self) -> None:
        """Send the beginning of the message: markup and half characters may keep content waiting for a while."""
        beginning = self._message.start()
        if beginning:
            await self._events.write(beginning)

    async def delta(self, delta: Delta) -> None:
        """Send what is new."""
        await self._events.write(self._message.delta(delta))

    async def keep_alive(self, every_s: float) -> None:
        """Send a ping whenever nothing was sent for `every_s`; the beginning of a message has one."""
        await self._events.keep_alive(every_s, lambda: self._message.start() or PING)

    async def finish(
        self,
        message: dict[str, Any],  # noqa: ARG002  # it was streamed
        reason: FinishReason,
        usage: Usage,
        matched_stop: str | None,
    ) -> None:
        """Send how the answer ended, and the end of the stream."""
        await self._events.write(self._message.finish(reason, usage, matched_stop), more=False)

    async def fail(self, refused: BadRequest) -> None:
        """Send the error, with its status if nothing was sent yet."""
        if self._events.started:
            await self._events.write(error_event(refused), more=False)
        else:
            await send_error(self._send, refused)


class MessageOutlet(WholeOutlet):
    """One JSON body at the end."""

    def __init__(self, send: Send, reply: MessageReply) -> None:
        self._send = send
        self._reply = reply

    async def finish(
        self, message: dict[str, Any], reason: FinishReason, usage: Usage, matched_stop: str | None
    ) -> None:
        """Send the message."""
        body = to_json(self._reply.whole(message, reason, usage, matched_stop))
        await send_whole(self._send, 200, self._reply.headers(stream=False), body)

    async def fail(self, refused: BadRequest) -> None:
        """Send the error with its status."""
        await send_error(self._send, refused)


async def send_error(send: Send, refused: BadRequest) -> None:
    """Send Anthropic's error object as the whole answer."""
    await send_whole(send, refused.status, error_headers(refused), error_body(refused))
