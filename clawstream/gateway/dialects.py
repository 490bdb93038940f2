"""The ways in which clients ask for an answer and are given one. Pure but for what an outlet sends.

The one rule: a dialect translates. What is recorded, rendered and trained on is OpenAI's form of the conversation,
whoever asked.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.types import Send

from clawstream.gateway import anthropic_outlets, anthropic_replies, responses_outlets, responses_replies
from clawstream.gateway.admission import Exchange, Farewell
from clawstream.gateway.anthropic import read_messages
from clawstream.gateway.conversations import Recall
from clawstream.gateway.outlets import Outlet, PlainOutlet, StreamOutlet, send_error, send_whole
from clawstream.gateway.refusal import BadRequest
from clawstream.gateway.replies import Reply, session_ended
from clawstream.gateway.responses import read_responses
from clawstream.gateway.wire import ChatRequest, read_request


class Dialect(Protocol):
    """One kind of client."""

    def read(self, body: Mapping[str, Any], ends_session: bool, recall: Recall, /) -> ChatRequest:
        """Return what the body asks for; `ends_session` says that a header ends the session. Raises BadRequest.

        `recall` finds an earlier answer that the body names.
        """

    def outlet(self, send: Send, exchange: Exchange) -> Outlet:
        """Return where the exchange's answer goes."""

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """The client is told why there is no answer."""

    async def farewell(self, send: Send, farewell: Farewell, now_ms: int) -> None:
        """The client is told that its session has ended, which is on the log."""


class ChatCompletions:
    """OpenAI's POST /v1/chat/completions."""

    def read(self, body: Mapping[str, Any], ends_session: bool, _recall: Recall, /) -> ChatRequest:
        """Return what the body asks for. Raises BadRequest."""
        return read_request(body, ends_session)

    def outlet(self, send: Send, exchange: Exchange) -> Outlet:
        """Return a stream of chunks, or a whole completion."""
        accepted, asked = exchange.accepted, exchange.chat.asked
        reply = Reply(
            exchange_id=accepted.exchange_id,
            session_id=accepted.session_id,
            model=accepted.model,
            created_s=accepted.received_at_ms // 1000,
            policy_version=exchange.policy_version,
        )
        if asked.stream:
            return StreamOutlet(send, reply, include_usage=asked.include_usage, sampled=exchange.sampled)
        return PlainOutlet(send, reply, exchange.sampled)

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """Send OpenAI's error object."""
        await send_error(send, refused)

    async def farewell(self, send: Send, farewell: Farewell, now_ms: int) -> None:
        """Send a completion without choices."""
        body = session_ended(farewell.session_id, farewell.model, now_ms // 1000)
        headers = [(b"content-type", b"application/json"), (b"x-session-id", farewell.session_id.encode("ascii"))]
        await send_whole(send, 200, headers, body)


class Messages:
    """Anthropic's POST /v1/messages."""

    def read(self, body: Mapping[str, Any], ends_session: bool, _recall: Recall, /) -> ChatRequest:
        """Return what the body asks for, in OpenAI's form. Raises BadRequest."""
        return read_messages(body, ends_session)

    def outlet(self, send: Send, exchange: Exchange) -> Outlet:
        """Return a stream of events, or a whole message."""
        reply = anthropic_replies.MessageReply(
            exchange_id=exchange.accepted.exchange_id,
            session_id=exchange.accepted.session_id,
            model=exchange.accepted.model,
            policy_version=exchange.policy_version,
            prompt_tokens=len(exchange.whole.token_ids),
        )
        if exchange.chat.asked.stream:
            return anthropic_outlets.MessageStreamOutlet(send, reply)
        return anthropic_outlets.MessageOutlet(send, reply)

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """Send Anthropic's error object."""
        await anthropic_outlets.send_error(send, refused)

    async def farewell(self, send: Send, farewell: Farewell, now_ms: int) -> None:  # noqa: ARG002  # has no time
        """Send a message without content."""
        body = anthropic_replies.session_ended(farewell.session_id, farewell.model)
        headers = [(b"content-type", b"application/json"), (b"x-session-id", farewell.session_id.encode("ascii"))]
        await send_whole(send, 200, headers, body)


class Responses:
    """OpenAI's POST /v1/responses."""

    def read(self, body: Mapping[str, Any], ends_session: bool, recall: Recall, /) -> ChatRequest:
        """Return what the body asks for, in the form of Chat Completions. Raises BadRequest."""
        return read_responses(body, ends_session, recall)

    def outlet(self, send: Send, exchange: Exchange) -> Outlet:
        """Return a stream of typed events, or a whole response."""
        reply = responses_replies.ResponseReply(
            exchange_id=exchange.accepted.exchange_id,
            session_id=exchange.accepted.session_id,
            model=exchange.accepted.model,
            created_s=exchange.accepted.received_at_ms // 1000,
            policy_version=exchange.policy_version,
            options=exchange.chat.options,
        )
        if exchange.chat.asked.stream:
            return responses_outlets.ResponseStreamOutlet(send, reply)
        return responses_outlets.ResponseOutlet(send, reply)

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """Send OpenAI's error object."""
        await send_error(send, refused)

    async def farewell(self, send: Send, farewell: Farewell, now_ms: int) -> None:
        """Send a response without output."""
        body = responses_replies.session_ended(farewell.session_id, farewell.model, now_ms // 1000)
        headers = [(b"content-type", b"application/json"), (b"x-session-id", farewell.session_id.encode("ascii"))]
        await send_whole(send, 200, headers, body)
