"""Answers as Anthropic's JSON: the events of a stream, whole messages, and errors. Pure.

The one rule: only a recorded exchange gets a `stop_reason`; a stream without one is not finished.
Source: Anthropic's published Messages API, as the `anthropic` package 2.10.0 has it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from clawstream.events import FinishReason
from clawstream.gateway.answering.deltas import ReplyDelta, ToolCall
from clawstream.gateway.answering.replies import Ending, Usage
from clawstream.gateway.requests.fields import BadRequest, TooLong, to_json

SIGNED = "clawstream-"
_NO_OBJECT = "arguments_that_are_no_object"
_STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(slots=True, kw_only=True)
class MessageReply:
    """One answer as a message; each call returns what is to be sent."""

    exchange_id: str
    model: str
    prompt_tokens: int
    _started: bool = False
    _index: int = -1  # of the newest content block
    _open: str | None = None  # its type, while it grows
    _thought: list[str] = field(default_factory=list)  # of the thinking block that grows

    def start(self) -> bytes:
        """Return the beginning of the message, the first time."""
        if self._started:
            return b""
        self._started = True
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        message = self._frame([], {"stop_reason": None, "stop_sequence": None}, usage)
        return _event("message_start", message=message) + PING

    def alive(self) -> bytes:
        """Return a ping; the first is part of the message's beginning."""
        return self.start() or PING

    def delta(self, delta: ReplyDelta) -> bytes:
        """Return what is new, each kind in a block of its own."""
        events = self.start()
        if delta.reasoning:
            events += self._grow("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events += self._change(type="thinking_delta", thinking=delta.reasoning)
            self._thought.append(delta.reasoning)
        if delta.content:
            events += self._grow("text", {"type": "text", "text": ""})
            events += self._change(type="text_delta", text=delta.content)
        for call in delta.tool_calls:
            events += self._call(call)
        return events

    def finish(self, ending: Ending) -> bytes:
        events = self.start() + self._close()
        return events + _event("message_delta", delta=_ending(ending), usage=_usage(ending.usage)) + _STOPPED

    def fail(self, refused: BadRequest) -> bytes:
        return b"event: error\ndata: " + error_body(refused) + b"\n\n"

    def whole(self, ending: Ending) -> bytes:
        return to_json(self._frame(_blocks(ending.message), _ending(ending), _usage(ending.usage)))

    def _frame(self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        said = {"role": "assistant", "model": self.model, "content": content}
        return {"id": f"msg_{self.exchange_id}", "type": "message", **said, **ending, "usage": usage}

    def _call(self, call: ToolCall) -> bytes:
        block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        events = self._close() + self._grow("tool_use", block)
        return events + self._change(type="input_json_delta", partial_json=json.dumps(input_of(call.arguments)))

    def _grow(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Return the events that open a block of this kind, unless one is open already."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open, self._index = kind, self._index + 1
        return closed + _event("content_block_start", index=self._index, content_block=empty)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._change(type="signature_delta", signature=signature("".join(self._thought)))
            self._thought.clear()
        self._open = None
        return signed + _event("content_block_stop", index=self._index)

    def _change(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def signature(thought: str) -> str:
    """Return the signature of a thinking block as this gateway sent it; it is no secret, and guards against slips."""
    return SIGNED + hashlib.sha256(thought.encode("utf-8", "surrogatepass")).hexdigest()


def input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as a tool_use block's object; any other value becomes a field of one."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {_NO_OBJECT: arguments}


def arguments_of(found: Mapping[str, Any]) -> str:
    """Return the arguments that `input_of` was given, or JSON of the same meaning."""
    if found.keys() == {_NO_OBJECT} and isinstance(found[_NO_OBJECT], str):
        return str(found[_NO_OBJECT])
    return json.dumps(found, ensure_ascii=False)


def session_ended(session_id: str, model: str, _created_s: int) -> bytes:
    """Return the answer to a request that only ends its session: a message without content or time."""
    said = {"role": "assistant", "model": model, "content": []}
    ended = {"stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
    return orjson.dumps({"id": f"session-{session_id}", "type": "message", **said, **ended})


def error_body(refused: BadRequest) -> bytes:
    """Return Anthropic's error object."""
    fallback = "invalid_request_error" if refused.status < 500 else "api_error"
    error = {"type": _ERROR_TYPES.get(refused.status, fallback), "message": _words(refused)}
    return to_json({"type": "error", "error": error})


def _words(refused: BadRequest) -> str:
    """Return the message; for a too long conversation, in the words that Anthropic's clients recognise."""
    if not isinstance(refused, TooLong):
        return str(refused)
    most = refused.context_length_tokens
    if refused.prompt_tokens is None:
        long = f"{refused.found}; the model's context is {most} tokens"
    else:
        long = f"{refused.prompt_tokens} tokens > {most} maximum, the answer included"
    return f"prompt is too long: {long}. Shorten the conversation."


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode("ascii") + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    thought, said = message.get("reasoning_content"), message.get("content")
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature(thought)})
    if said:
        blocks.append({"type": "text", "text": said})
    for call in message.get("tool_calls", ()):
        name, given = call["function"]["name"], input_of(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return blocks


def _ending(ending: Ending) -> dict[str, Any]:
    if ending.reason is FinishReason.STOP and ending.matched_stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.matched_stop}
    return {"stop_reason": _STOP_REASONS[ending.reason], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage, in which tokens that were read from a cache are counted apart."""
    cached = usage.cached_tokens or 0
    known = {} if usage.cached_tokens is None else {"cache_read_input_tokens": cached}
    return {"input_tokens": usage.prompt_tokens - cached, **known, "output_tokens": usage.completion_tokens}
