"""The dialects in which clients ask for answers and get them. Pure but for what an outlet sends.

The one rule: a dialect only translates; the conversation is recorded, rendered and trained on in OpenAI's form.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.types import Send

from clawstream.gateway.answering.admission import Exchange, SessionEndRequest
from clawstream.gateway.answering.outlets import EventStream, Outlet, StreamOutlet, WholeOutlet, send_error, send_whole
from clawstream.gateway.answering.replies import Chunks, CollectedReplies, Ending, Reply, error_headers, session_ended
from clawstream.gateway.dialects import anthropic_replies, responses_replies
from clawstream.gateway.dialects.anthropic import read_messages
from clawstream.gateway.dialects.responses import read_responses
from clawstream.gateway.requests.refusal import BadRequest, to_json
from clawstream.gateway.requests.wire import ChatRequest, read_request
from clawstream.gateway.sessions import Recall


class Dialect(Protocol):
    """The dialect of one kind of client."""

    def read(self, body: Mapping[str, Any], ends_session: bool, recall: Recall, /) -> ChatRequest:
        """Return what the body asks for; `ends_session` says that a header ends the session. Raises BadRequest.

        `recall` finds an earlier answer that the body names.
        """

    def outlets(self, send: Send, exchanges: Sequence[Exchange]) -> Sequence[Outlet]:
        """Return where each answer of one request goes."""

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """Tell the client why there is no answer."""

    async def farewell(self, send: Send, farewell: SessionEndRequest, now_ms: int, /) -> None:
        """Tell the client that the end of its session is on the log."""


class ChatCompletions:
    """OpenAI's POST /v1/chat/completions."""

    def read(self, body: Mapping[str, Any], ends_session: bool, _recall: Recall, /) -> ChatRequest:
        """Return what the body asks for. Raises BadRequest."""
        return read_request(body, ends_session)

    def outlets(self, send: Send, exchanges: Sequence[Exchange]) -> Sequence[Outlet]:
        """Return a stream of chunks, or a whole completion."""
        together, first = CollectedReplies(num=len(exchanges)), exchanges[0]
        replies = [_reply(exchange, index, first) for index, exchange in enumerate(exchanges)]
        headers = replies[0].headers(stream=first.chat.asked.stream)
        if first.chat.asked.stream:
            events = EventStream(send, headers, len(exchanges))
            return [
                StreamOutlet(send, events, _chunks(reply, exchange, together), self.refuse)
                for reply, exchange in zip(replies, exchanges, strict=True)
            ]
        return [
            WholeOutlet(send, headers, _body(reply, exchange, together), self.refuse)
            for reply, exchange in zip(replies, exchanges, strict=True)
        ]

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """Send OpenAI's error object."""
        await send_error(send, refused)

    async def farewell(self, send: Send, farewell: SessionEndRequest, now_ms: int, /) -> None:
        """Send a completion without choices."""
        body = session_ended(farewell.session_id, farewell.model, now_ms // 1000)
        headers = [(b"content-type", b"application/json"), (b"x-session-id", farewell.session_id.encode("ascii"))]
        await send_whole(send, 200, headers, body)


class Messages:
    """Anthropic's POST /v1/messages."""

    def read(self, body: Mapping[str, Any], ends_session: bool, _recall: Recall, /) -> ChatRequest:
        """Return what the body asks for, in OpenAI's form. Raises BadRequest."""
        return read_messages(body, ends_session)

    def outlets(self, send: Send, exchanges: Sequence[Exchange]) -> Sequence[Outlet]:
        """Return a stream of events, or a whole message."""
        (exchange,) = exchanges
        reply = anthropic_replies.MessageReply(
            exchange_id=exchange.accepted.exchange_id,
            session_id=exchange.accepted.session_id,
            model=exchange.accepted.model,
            policy_version=exchange.policy_version,
            prompt_tokens=len(exchange.whole.token_ids),
        )
        headers = reply.headers(stream=exchange.chat.asked.stream)
        if exchange.chat.asked.stream:
            events = EventStream(send, headers)
            return [StreamOutlet(send, events, anthropic_replies.MessageEvents(reply=reply), self.refuse)]
        return [WholeOutlet(send, headers, lambda ending: to_json(reply.whole(ending)), self.refuse)]

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """Send Anthropic's error object."""
        await send_whole(send, refused.status, error_headers(refused), anthropic_replies.error_body(refused))

    async def farewell(self, send: Send, farewell: SessionEndRequest, _now_ms: int, /) -> None:
        """Send a message without content; a message has no time."""
        body = anthropic_replies.session_ended(farewell.session_id, farewell.model)
        headers = [(b"content-type", b"application/json"), (b"x-session-id", farewell.session_id.encode("ascii"))]
        await send_whole(send, 200, headers, body)


class Responses:
    """OpenAI's POST /v1/responses."""

    def read(self, body: Mapping[str, Any], ends_session: bool, recall: Recall, /) -> ChatRequest:
        """Return what the body asks for, in the form of Chat Completions. Raises BadRequest."""
        return read_responses(body, ends_session, recall)

    def outlets(self, send: Send, exchanges: Sequence[Exchange]) -> Sequence[Outlet]:
        """Return a stream of typed events, or a whole response."""
        (exchange,) = exchanges
        reply = responses_replies.ResponseReply(
            exchange_id=exchange.accepted.exchange_id,
            session_id=exchange.accepted.session_id,
            model=exchange.accepted.model,
            created_s=exchange.accepted.received_at_ms // 1000,
            policy_version=exchange.policy_version,
            options=exchange.chat.options,
        )
        headers = reply.headers(stream=exchange.chat.asked.stream)
        if exchange.chat.asked.stream:
            events = EventStream(send, headers)
            grows = responses_replies.ResponseEvents(reply=reply, sampled=exchange.sampled)
            return [StreamOutlet(send, events, grows, self.refuse)]
        return [WholeOutlet(send, headers, lambda ending: to_json(reply.whole(ending, exchange.sampled)), self.refuse)]

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """Send OpenAI's error object."""
        await send_error(send, refused)

    async def farewell(self, send: Send, farewell: SessionEndRequest, now_ms: int, /) -> None:
        """Send a response without output."""
        body = responses_replies.session_ended(farewell.session_id, farewell.model, now_ms // 1000)
        headers = [(b"content-type", b"application/json"), (b"x-session-id", farewell.session_id.encode("ascii"))]
        await send_whole(send, 200, headers, body)


def _reply(exchange: Exchange, index: int, first: Exchange) -> Reply:
    accepted = exchange.accepted
    return Reply(
        exchange_id=first.accepted.exchange_id,
        session_id=accepted.session_id,
        model=accepted.model,
        created_s=accepted.received_at_ms // 1000,
        policy_version=exchange.policy_version,
        index=index,
        choice_id=None if accepted.choice_of is None else accepted.exchange_id,
    )


def _chunks(reply: Reply, exchange: Exchange, together: CollectedReplies) -> Chunks:
    include_usage = exchange.chat.asked.include_usage
    return Chunks(reply=reply, together=together, include_usage=include_usage, sampled=exchange.sampled)


def _body(reply: Reply, exchange: Exchange, together: CollectedReplies) -> Callable[[Ending], bytes | None]:
    sampled = exchange.sampled
    return lambda ending: together.whole_after(reply, ending, None if sampled is None else sampled.take())
