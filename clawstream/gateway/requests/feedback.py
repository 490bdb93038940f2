"""Feedback on an answer, outside the conversation: POST /v1/feedback, read and checked. Pure.

The one rule: each request is separate feedback, so that up, down, up ends with up. A client that may repeat a request
gives it a `feedback_id`: the same body under the same id is one event, however often it arrives.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clawstream.events import FeedbackGiven, FeedbackSource
from clawstream.events.base import derived_id
from clawstream.gateway.requests.fields import BadRequest, check_name, number, text, too_many

MAX_TEXT = 32_768
_FIELDS = ("response_id", "thumb", "score", "text", "source", "feedback_id", "session_id")
_THUMBS = {"up": 1.0, "down": -1.0}
_RESPONSE_ID = re.compile(r"(?:chatcmpl-|msg_|resp_)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Feedback as a client sends it."""

    exchange_id: str
    source: FeedbackSource
    score: float | None  # -1 to 1; None: words only
    text: str | None
    feedback_id: str | None  # the client's; None: the request will not be repeated
    session_id: str | None  # as the client remembers it

    def event(self, session_id: str, key_name: str | None, now_ms: int, new_id: str) -> FeedbackGiven:
        """Return the event; its id is `new_id` unless the client gave one."""
        score = None if self.score is None else repr(self.score)
        said = (self.exchange_id, self.feedback_id, self.source.value, score, self.text)
        feedback_id = new_id if self.feedback_id is None else derived_id("Feedback", json.dumps(said))
        return FeedbackGiven(
            session_id=session_id,
            feedback_id=feedback_id,
            turn_id=self.exchange_id,
            key_name=key_name,
            source=self.source,
            score=self.score,
            text=self.text,
            given_at_ms=now_ms,
        )


def read_feedback(body: Mapping[str, Any]) -> Feedback:
    """Return the body's feedback. Raises BadRequest."""
    unknown = sorted(body.keys() - set(_FIELDS))
    if unknown:
        raise BadRequest(f"{unknown[0][:50]} is not a field of feedback; expected {', '.join(_FIELDS)}.")
    thumb = text(body, "thumb")
    score = number(body, "score", -1, 1)
    said = text(body, "text")
    if thumb is not None and thumb not in _THUMBS:
        raise BadRequest(f"thumb is {thumb[:50]!r}; expected up or down.", param="thumb")
    if thumb is not None and score is not None:
        raise BadRequest("thumb and score are both there; send one of them.", param="score")
    if thumb is None and score is None and said is None:
        raise BadRequest("Nothing is said of the answer; send thumb, score or text.", param="thumb")
    if said is not None and len(said) > MAX_TEXT:
        raise too_many(f"text has {len(said)} characters", MAX_TEXT, "text")
    return Feedback(
        exchange_id=_exchange_id(body),
        source=_source(body),
        score=score if thumb is None else _THUMBS[thumb],
        text=said,
        feedback_id=_name(body, "feedback_id"),
        session_id=_name(body, "session_id"),
    )


def _exchange_id(body: Mapping[str, Any]) -> str:
    response_id = text(body, "response_id")
    if response_id is None:
        raise BadRequest("response_id is missing; send the id of the answer.", param="response_id")
    found = _RESPONSE_ID.fullmatch(response_id)
    if found is None:
        raise unknown_response(response_id)
    return found.group(1)


def _source(body: Mapping[str, Any]) -> FeedbackSource:
    word = text(body, "source") or FeedbackSource.PERSON.value
    try:
        return FeedbackSource(word)
    except ValueError as error:
        expected = ", ".join(source.value for source in FeedbackSource)
        raise BadRequest(f"source is {word[:50]!r}; expected one of {expected}.", param="source") from error


def _name(body: Mapping[str, Any], key: str) -> str | None:
    name = text(body, key)
    return None if name is None else check_name(name, key)


def unknown_response(response_id: str) -> BadRequest:
    """Return the refusal of feedback on an answer that the gateway does not know."""
    return BadRequest(
        f"The response {response_id[:80]!r} is none that this gateway remembers; nothing was recorded. Send the id of "
        "an answer (chatcmpl-..., msg_... or resp_...), and for an older one its session_id, the answer's x-session-id "
        "header.",
        status=404,
        code="response_not_found",
        param="response_id",
    )
