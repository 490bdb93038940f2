"""Requests that are answered at once, without the engine: feedback, and how many tokens a prompt has."""

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from clawstream.errors import TryLater
from clawstream.gateway.access.keys import Caller
from clawstream.gateway.answering.admission import CALLER, Admission, unavailable
from clawstream.gateway.answering.outlets import send_whole
from clawstream.gateway.dialects.anthropic import read_messages
from clawstream.gateway.requests.body import ClientGone, read_body, read_headers
from clawstream.gateway.requests.feedback import read_feedback, unknown_response
from clawstream.gateway.requests.refusal import BadRequest, to_json
from clawstream.gateway.requests.wire import ChatRequest, parse_body
from clawstream.gateway.sessions.conversations import Recall

_JSON = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostReply:
    """What the client gets."""

    status: int
    body: Mapping[str, Any]


Answer = Callable[[Admission, Mapping[str, Any], Caller], Awaitable[PostReply]]
Refuse = Callable[[Send, BadRequest], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Post:
    """One route: a JSON object in, one out; refused in its clients' dialect."""

    admission: Admission
    answer: Answer
    refuse: Refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bounds = self.admission.bounds
        try:
            raw = await read_body(
                read_headers(scope), receive, max_bytes=bounds.max_body_bytes, within_s=bounds.request_timeout_s
            )
            answered = await self.answer(self.admission, parse_body(raw), scope[CALLER])
        except ClientGone:
            return
        except BadRequest as refused:
            await self.refuse(send, refused)
            return
        await send_whole(send, answered.status, _JSON, to_json(answered.body))


async def count_tokens(admission: Admission, body: Mapping[str, Any], caller: Caller) -> PostReply:
    """Return how many tokens the messages have; nothing is generated. Raises BadRequest."""

    def read(counted: Mapping[str, Any], ends_session: bool, _recall: Recall) -> ChatRequest:
        return read_messages(counted, ends_session, counted=True)

    return PostReply(status=200, body={"input_tokens": await admission.count_tokens(body, read, caller)})


async def give_feedback(admission: Admission, body: Mapping[str, Any], caller: Caller) -> PostReply:
    """Record the feedback; return once Kafka has acknowledged it. Raises BadRequest."""
    feedback = read_feedback(body)
    sessions = admission.sessions
    known = sessions.session_of(feedback.exchange_id)
    session_id = known or feedback.session_id
    if session_id is None or not _is_open(admission, session_id, caller):
        raise unknown_response(str(body["response_id"]))
    if feedback.session_id not in (None, session_id):
        raise BadRequest(
            f"session_id is {feedback.session_id}, and the response was given in another session; leave it out.",
            param="session_id",
        )
    event = feedback.event(session_id, caller.name, admission.now_ms(), str(uuid.uuid4()))
    try:
        await admission.recorder.append((event,))
    except TryLater as error:
        raise unavailable(str(error)) from error
    given = {"feedback_id": event.feedback_id, "response_id": body["response_id"], "session_id": session_id}
    said = {"source": event.source.value, "score": event.score, "text": event.text}
    return PostReply(status=201, body={"object": "feedback", **given, **said, "created": event.given_at_ms // 1000})


def _is_open(admission: Admission, session_id: str, caller: Caller) -> bool:
    try:
        return admission.owners.is_open_to(session_id, caller.name)
    except TryLater as error:
        raise unavailable(f"{error}; nothing was recorded. Try again.") from error
