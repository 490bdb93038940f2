"""Answers as OpenAI's JSON: chunks of a stream, whole completions, log-probs, and how an answer ends. Pure.

Only a recorded exchange (answer.py) gets a `finish_reason`; a stream without one is not finished. Log-probs are the
engine's own, at the sampling temperature: of all tokens in Chat Completions, of the text's alone in the Responses API.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from clawstream.events import FinishReason
from clawstream.gateway.answering.deltas import ReplyDelta
from clawstream.gateway.requests.fields import BadRequest, to_json
from clawstream.inference.engine import Chunk
from clawstream.rendering.renderer import HALF_CHARACTER, PromptRenderer

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
JSON = (b"content-type", b"application/json")
_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_SUFFIX = b',"logprobs":null,"finish_reason":null}]}\n\n'  # of a chunk


class SampledTokens:
    """The tokens sampled since the last take; one object for each answer."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer
        self._waiting: list[tuple[int, dict[str, Any]]] = []  # with the token's number in the answer
        self._num_tokens = 0
        self.content_numbers: set[int] = set()  # the numbers of the text's tokens, as far as known

    def another(self) -> "SampledTokens":
        """Return one for another answer."""
        return SampledTokens(self._renderer)

    def add(self, chunk: Chunk) -> None:
        """Take in what an engine sampled."""
        top = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        values = zip(chunk.token_ids, chunk.logprobs_nats, top, strict=True)
        for number, (token, value, others) in enumerate(values, self._num_tokens):
            if token not in self._renderer.stop_token_ids:
                likeliest = [self._entry(other, other_value) for other_value, other in others]
                self._waiting.append((number, self._entry(token, value) | {"top_logprobs": likeliest}))
        self._num_tokens += len(chunk.token_ids)

    def take(self) -> dict[str, Any] | None:
        """Return the new log-probs, as a choice holds them; None: there are none."""
        found, self._waiting = self._waiting, []
        return {"content": [entry for _, entry in found], "refusal": None} if found else None

    def take_content(self) -> list[dict[str, Any]]:
        """Return the new log-probs of the text's tokens. Drop other tokens up to the text's last; keep later ones."""
        found = [entry for number, entry in self._waiting if number in self.content_numbers]
        last = max(self.content_numbers, default=-1)
        self._waiting = [(number, entry) for number, entry in self._waiting if number > last]
        self.content_numbers.clear()
        return found

    def _entry(self, token: int, value: float | None) -> dict[str, Any]:
        text = self._renderer.decode((token,))
        return {"token": text, "logprob": value, "bytes": None if HALF_CHARACTER in text else list(text.encode())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one exchange; `cached_tokens` None: the engine did not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    reasoning_tokens: int | None = None  # of completion_tokens; None: not known

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of an answer that is recorded."""

    message: dict[str, Any]  # as in Chat Completions
    reason: FinishReason
    usage: Usage
    matched_stop: str | None = None  # the client's string that ended it


@dataclass(slots=True, kw_only=True)
class CollectedReplies:
    """The answers to one request as they end."""

    num: int
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usages: list[Usage] = field(default_factory=list)

    def usage_after(self, usage: Usage) -> Usage | None:
        """Count an answer that ended; after the last one, return the usage of all, with their prompt counted once."""
        self.usages.append(usage)
        if len(self.usages) < self.num:
            return None
        cached = [one.cached_tokens for one in self.usages if one.cached_tokens is not None]
        thought = [one.reasoning_tokens for one in self.usages if one.reasoning_tokens is not None]
        return Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=sum(one.completion_tokens for one in self.usages),
            cached_tokens=min(cached, default=None),  # of the first answer; the others found its prompt in the cache
            reasoning_tokens=sum(thought) if len(thought) == self.num else None,
        )


@dataclass(slots=True, kw_only=True)
class CompletionReply:
    """One answer as a choice of a completion; each call returns what is to be sent."""

    exchange_id: str  # of the request's first answer
    session_id: str
    model: str
    created_s: int
    index: int
    choice_id: str | None  # the answer's own exchange; None: the request has only this answer
    together: CollectedReplies
    include_usage: bool
    sampled: SampledTokens | None
    _role: dict[str, Any] = field(default_factory=lambda: {"role": "assistant"})  # the first chunk has it
    _prefix: bytes = field(init=False)  # of a chunk, up to its delta

    def __post_init__(self) -> None:
        frame = orjson.dumps(self._frame("chat.completion.chunk"))[:-1]
        self._prefix = b"data: " + frame + b',"choices":[{"index":%d,"delta":' % self.index

    def start(self) -> bytes:
        """Return the role alone, the first time."""
        return self.delta(ReplyDelta()) if self._role else b""

    def alive(self) -> bytes:
        return KEEP_ALIVE

    def delta(self, delta: ReplyDelta) -> bytes:
        logprobs = self._logprobs()
        if not (self._role or delta.reasoning or delta.tool_calls or logprobs):  # as most are
            return self._prefix + b'{"content":' + to_json(delta.content) + b"}" + _SUFFIX
        said, self._role = self._role | (delta.as_dict() or {"content": ""}), {}
        return self._chunk(said, logprobs)

    def finish(self, ending: Ending) -> bytes:
        """Return the answer's ending; for the last answer also the usage, if asked for, and the stream's end."""
        begun = self._chunk(self._role | {"content": ""}, None) if self._role else b""
        events = begun + self._event([self._choice({"delta": {}}, ending)])
        usage = self.together.usage_after(ending.usage)
        if usage is None:
            return events
        return events + (self._event([], usage=usage.as_dict()) if self.include_usage else b"") + DONE

    def fail(self, refused: BadRequest) -> bytes:
        return b"data: " + refused.as_json() + b"\n\n"

    def whole(self, ending: Ending) -> bytes | None:
        choices = self.together.choices
        choices[self.index] = self._choice({"message": ending.message}, ending)
        usage = self.together.usage_after(ending.usage)
        if usage is None:
            return None
        said = {"choices": [choices[at] for at in sorted(choices)], "usage": usage.as_dict()}
        return to_json(self._frame("chat.completion") | said)

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> bytes:
        return self._prefix + to_json(delta) + b',"logprobs":' + to_json(logprobs) + b',"finish_reason":null}]}\n\n'

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + to_json(self._frame("chat.completion.chunk") | {"choices": choices, **more}) + b"\n\n"

    def _choice(self, said: dict[str, Any], ending: Ending) -> dict[str, Any]:
        choice = {"index": self.index, **said, "logprobs": self._logprobs(), "finish_reason": ending.reason.value}
        return choice if self.choice_id is None else choice | {"response_id": f"chatcmpl-{self.choice_id}"}

    def _logprobs(self) -> dict[str, Any] | None:
        return None if self.sampled is None else self.sampled.take()

    def _frame(self, kind: str) -> dict[str, Any]:
        frame = {"id": f"chatcmpl-{self.exchange_id}", "object": kind, "created": self.created_s, "model": self.model}
        return frame | {"session_id": self.session_id}


def reply_headers(session_id: str, policy_version: int, *, stream: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer."""
    return [
        *(_STREAM if stream else (JSON,)),
        (b"x-session-id", session_id.encode("ascii")),
        (b"x-policy-version", str(policy_version).encode("ascii")),
    ]


def session_ended(session_id: str, model: str, created_s: int) -> bytes:
    """Return the answer to a request that only ends its session: a completion without choices."""
    frame = {"id": f"session-{session_id}", "object": "chat.completion", "created": created_s, "model": model}
    return orjson.dumps(frame | {"choices": [], "session_id": session_id, "session_done": True})


def error_headers(refused: BadRequest) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error answer."""
    headers = [JSON]
    if refused.retry_after_s is not None:
        headers.append((b"retry-after", str(refused.retry_after_s).encode("ascii")))
    if refused.allow is not None:
        headers.append((b"allow", refused.allow.encode("ascii")))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    return headers
