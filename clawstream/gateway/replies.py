"""Answers as OpenAI's JSON: chunks of a stream, whole completions, and what ends them. Pure.

The one rule: a stream that has no `finish_reason` is not finished; only an exchange that is on the log gets one.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from clawstream.events import FinishReason
from clawstream.gateway.refusal import BadRequest, to_json

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_JSON = (b"content-type", b"application/json")
_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one exchange; `cached_tokens` None: the engine did not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer's frame: everything but what it says."""

    exchange_id: str
    session_id: str
    model: str
    created_s: int
    policy_version: int
    _prefix: bytes = field(init=False)
    _suffix: bytes = field(init=False)

    def __post_init__(self) -> None:
        frame = orjson.dumps(self._frame("chat.completion.chunk"))[:-1]
        object.__setattr__(self, "_prefix", b"data: " + frame + b',"choices":[{"index":0,"delta":')
        object.__setattr__(self, "_suffix", b',"logprobs":null,"finish_reason":null}]}\n\n')

    def headers(self, *, stream: bool) -> list[tuple[bytes, bytes]]:
        """Return the response headers."""
        return reply_headers(self.session_id, self.policy_version, stream=stream)

    def chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        """Return the event of a delta."""
        if logprobs is not None:
            return self._prefix + to_json(delta) + b',"logprobs":' + to_json(logprobs) + b',"finish_reason":null}]}\n\n'
        return self._prefix + to_json(delta) + self._suffix

    def text_chunk(self, content: str) -> bytes:
        """Return the event of a delta that is content alone, as most are."""
        return self._prefix + b'{"content":' + to_json(content) + b"}" + self._suffix

    def ending(self, finish_reason: FinishReason, usage: Usage | None, logprobs: dict[str, Any] | None = None) -> bytes:
        """Return the events that end the stream; with `usage` where the client wants it."""
        frame = self._frame("chat.completion.chunk")
        choice = {"index": 0, "delta": {}, "logprobs": logprobs, "finish_reason": finish_reason.value}
        events = b"data: " + to_json(frame | {"choices": [choice]}) + b"\n\n"
        if usage is not None:
            events += b"data: " + orjson.dumps(frame | {"choices": [], "usage": usage.as_dict()}) + b"\n\n"
        return events + DONE

    def whole(
        self,
        message: dict[str, Any],
        finish_reason: FinishReason,
        usage: Usage,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """Return the body of a plain answer."""
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason.value}
        return to_json(self._frame("chat.completion") | {"choices": [choice], "usage": usage.as_dict()})

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.exchange_id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "session_id": self.session_id,
        }


def reply_headers(session_id: str, policy_version: int, *, stream: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer."""
    return [
        *(_STREAM if stream else (_JSON,)),
        (b"x-session-id", session_id.encode("ascii")),
        (b"x-policy-version", str(policy_version).encode("ascii")),
    ]


def session_ended(session_id: str, model: str, created_s: int) -> bytes:
    """Return the answer to a request that only ends its session: a completion without choices."""
    frame = {"id": f"session-{session_id}", "object": "chat.completion", "created": created_s, "model": model}
    return orjson.dumps(frame | {"choices": [], "session_id": session_id, "session_done": True})


def stream_error(refused: BadRequest) -> bytes:
    """Return the event that breaks a stream off."""
    return b"data: " + refused.as_json() + b"\n\n"


def error_headers(refused: BadRequest) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error answer."""
    headers = [_JSON]
    if refused.retry_after_s is not None:
        headers.append((b"retry-after", str(refused.retry_after_s).encode("ascii")))
    if refused.allow is not None:
        headers.append((b"allow", refused.allow.encode("ascii")))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    return headers
