"""The dialects in which clients ask for answers and get them. Pure but for what an outlet sends.

The one rule: a dialect only translates; the conversation is recorded, rendered and trained on in OpenAI's form.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import Send

from clawstream.gateway.answering.admission import Exchange, Read, SessionEndRequest
from clawstream.gateway.answering.outlets import (
    DialectReply,
    EventStream,
    Outlet,
    StreamOutlet,
    WholeOutlet,
    send_whole,
)
from clawstream.gateway.answering.replies import (
    JSON,
    CollectedReplies,
    CompletionReply,
    error_headers,
    reply_headers,
    session_ended,
)
from clawstream.gateway.dialects import anthropic_replies, responses_replies
from clawstream.gateway.dialects.anthropic import read_messages
from clawstream.gateway.dialects.responses import read_responses
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.wire import read_request


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The dialect of one kind of client."""

    read: Read  # returns what a body asks for, in OpenAI's form; raises BadRequest
    replies: Callable[[Sequence[Exchange]], Sequence[DialectReply]]  # one for each answer to a request
    error_body: Callable[[BadRequest], bytes]
    session_ended: Callable[[str, str, int], bytes]  # the body for a session, a model and a time in seconds
    request_id: bytes | None = None  # the header that names the request

    def outlets(self, send: Send, exchanges: Sequence[Exchange]) -> Sequence[Outlet]:
        """Return where each answer to one request goes: into a stream of events, or a whole body."""
        first, stream = exchanges[0], exchanges[0].chat.asked.stream
        headers = reply_headers(first.accepted.session_id, first.policy_version, stream=stream)
        if self.request_id is not None:
            headers.append((self.request_id, f"req_{first.accepted.exchange_id}".encode("ascii")))
        replies = self.replies(exchanges)
        if not stream:
            return [WholeOutlet(send, headers, reply, self.refuse) for reply in replies]
        events = EventStream(send, headers, len(replies))
        return [StreamOutlet(send, events, reply, self.refuse) for reply in replies]

    async def refuse(self, send: Send, refused: BadRequest) -> None:
        """Tell the client why there is no answer."""
        await send_whole(send, refused.status, error_headers(refused), self.error_body(refused))

    async def farewell(self, send: Send, farewell: SessionEndRequest, now_ms: int) -> None:
        """Tell the client that the end of its session is recorded."""
        headers = [JSON, (b"x-session-id", farewell.session_id.encode("ascii"))]
        body = self.session_ended(farewell.session_id, farewell.model, now_ms // 1000)
        await send_whole(send, 200, headers, body)


def _completions(exchanges: Sequence[Exchange]) -> list[CompletionReply]:
    together, first = CollectedReplies(num=len(exchanges)), exchanges[0].accepted
    return [
        CompletionReply(
            exchange_id=first.exchange_id,
            session_id=first.session_id,
            model=first.model,
            created_s=first.received_at_ms // 1000,
            index=index,
            choice_id=None if first.choice_of is None else exchange.accepted.exchange_id,
            together=together,
            include_usage=exchange.chat.asked.include_usage,
            sampled=exchange.sampled,
        )
        for index, exchange in enumerate(exchanges)
    ]


def _message(exchanges: Sequence[Exchange]) -> list[anthropic_replies.MessageReply]:
    (exchange,) = exchanges
    accepted, num_tokens = exchange.accepted, len(exchange.whole.token_ids)
    return [
        anthropic_replies.MessageReply(exchange_id=accepted.exchange_id, model=accepted.model, prompt_tokens=num_tokens)
    ]


def _response(exchanges: Sequence[Exchange]) -> list[responses_replies.ResponseReply]:
    (exchange,) = exchanges
    return [
        responses_replies.ResponseReply(
            exchange_id=exchange.accepted.exchange_id,
            model=exchange.accepted.model,
            created_s=exchange.accepted.received_at_ms // 1000,
            options=exchange.chat.options,
            sampled=exchange.sampled,
        )
    ]


CHAT = Dialect(
    read=lambda body, ends_session, _recall: read_request(body, ends_session),
    replies=_completions,
    error_body=BadRequest.as_json,
    session_ended=session_ended,
)
MESSAGES = Dialect(
    read=lambda body, ends_session, _recall: read_messages(body, ends_session),
    replies=_message,
    error_body=anthropic_replies.error_body,
    session_ended=anthropic_replies.session_ended,
    request_id=b"request-id",
)
RESPONSES = Dialect(
    read=read_responses,
    replies=_response,
    error_body=BadRequest.as_json,
    session_ended=responses_replies.session_ended,
    request_id=b"x-request-id",
)
