"""Answers as the JSON of OpenAI's Responses API: the typed events of a stream, whole responses, and errors. Pure.

The one rule: only a recorded exchange gets a `response.completed` or `response.incomplete`; a stream without one is not
finished. So the last item is closed only after the exchange is recorded.

Source: OpenAI's published Responses API, as the `openai` package 2.8.0 has it, and what Codex 0.169.0 reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from clawstream.events import FinishReason
from clawstream.gateway.answering.deltas import ReplyDelta, ToolCall
from clawstream.gateway.answering.replies import KEEP_ALIVE, Ending, SampledTokens, Usage
from clawstream.gateway.dialects.responses import TRANSLATED
from clawstream.gateway.dialects.responses_tools import custom_input, offered, sealed
from clawstream.gateway.requests.fields import BadRequest, TooLong, to_json

_SEALED_THOUGHT = "reasoning.encrypted_content"
_LATER = frozenset({429, 503})


@dataclass(slots=True, kw_only=True)
class ResponseReply:
    """One answer as a response; each call returns what is to be sent. `options` is the request as recorded."""

    exchange_id: str
    model: str
    created_s: int
    options: Mapping[str, Any]
    sampled: SampledTokens | None = None  # whose log-probs the client asked for; None: it did not
    _number: int = 0  # of the next event
    _items: list[dict[str, Any]] = field(default_factory=list)  # the closed ones
    _open: dict[str, Any] | None = None  # the item that grows
    _text: list[str] = field(default_factory=list)  # of the open item
    _logprobs: list[dict[str, Any]] = field(default_factory=list)  # of `_text`
    _prefix: bytes = b""  # how the open item's delta events begin
    _ids: dict[str, int] = field(default_factory=dict)  # how many items have an id of this prefix

    def start(self) -> bytes:
        """Return the beginning of the response, the first time."""
        if self._number:
            return b""
        response = self._frame("in_progress", [])
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def alive(self) -> bytes:
        return self.start() or KEEP_ALIVE

    def delta(self, delta: ReplyDelta) -> bytes:
        """Return what is new, each kind in an item of its own."""
        events = self.start()
        if delta.reasoning:
            events += self._grow("reasoning") + self._change(delta.reasoning)
        if delta.content:
            events += self._grow("message") + self._say(delta.content)
        for call in delta.tool_calls:
            events += self._call(call)
        return events

    def finish(self, ending: Ending) -> bytes:
        events = self.start() + self._end(ending)
        response = self._frame(_status_of(ending.reason), self._items, ending.usage)
        return events + self._event(f"response.{response['status']}", response=response)

    def fail(self, refused: BadRequest) -> bytes:
        error = {"code": _code(refused), "message": str(refused)}
        events = self.start()
        return events + self._event("response.failed", response=self._frame("failed", self._items, error=error))

    def whole(self, ending: Ending) -> bytes:
        """Return a plain answer, of the items that a stream would have."""
        message = ending.message
        calls = (
            ToolCall(index=index, call_id=call["id"], **call["function"])
            for index, call in enumerate(message.get("tool_calls", ()))
        )
        thought, said = message.get("reasoning_content") or "", message.get("content") or ""
        self._number = 1  # the stream's beginning, which repeats all tools twice, is not made
        self.delta(ReplyDelta(reasoning=thought, content=said, tool_calls=tuple(calls)))
        self._end(ending)
        return to_json(self._frame(_status_of(ending.reason), self._items, ending.usage))

    def _call(self, call: ToolCall) -> bytes:
        """Return the beginning of a call, in the form of the tool that the client offered."""
        events = self._close("completed")
        function = offered(call.name, self.options.get(TRANSLATED) or {})
        item_id = f"{'ctc' if function.is_custom else 'fc'}_{self.exchange_id}_{call.index}"
        item = {"id": item_id, "call_id": call.call_id, "name": function.name, "status": "in_progress"}
        within = {} if function.namespace is None else {"namespace": function.namespace}
        kind, given = ("custom_tool_call", "input") if function.is_custom else ("function_call", "arguments")
        self._open, self._text = item | within | {"type": kind, given: ""}, [call.arguments]
        return events + self._event("response.output_item.added", output_index=len(self._items), item=self._open)

    def _grow(self, kind: str) -> bytes:
        """Return the events that open an item of this kind, unless one is open already."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        closed = self._close("completed")
        self._text, self._logprobs = [], []
        if kind == "reasoning":
            part, delta = {"type": "reasoning_text", "text": ""}, "response.reasoning_text.delta"
            self._open = self._thought("", self._new_id("rs"), "in_progress")
        else:
            part, delta = _output_text(""), "response.output_text.delta"
            self._open = {**_said_item("", self._new_id("msg"), "in_progress"), "content": []}
        self._prefix = _prefix(delta, self._open["id"], len(self._items))
        begun = self._event("response.output_item.added", output_index=len(self._items), item=self._open)
        return closed + begun + self._part("response.content_part.added", part=part)

    def _say(self, text: str) -> bytes:
        if self.sampled is None:
            return self._change(text)
        self._text.append(text)
        logprobs = self.sampled.take_content()
        self._logprobs += logprobs
        return self._part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _change(self, text: str) -> bytes:
        self._text.append(text)
        number, self._number = self._number, self._number + 1
        return self._prefix + to_json(text) + b',"sequence_number":%d}\n\n' % number

    def _end(self, ending: Ending) -> bytes:
        """Return the end of the last item; an empty answer is a message too."""
        is_empty = not self._items and self._open is None
        return (self._grow("message") if is_empty else b"") + self._close(_status_of(ending.reason))

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        item, text = self._open, "".join(self._text)
        kind = item["type"]
        if kind == "reasoning":
            whole = self._thought(text, item["id"], status)
            events = self._part("response.reasoning_text.done", text=text)
            events += self._part("response.content_part.done", part={"type": "reasoning_text", "text": text})
        elif kind == "message":
            logprobs = self._logprobs + ([] if self.sampled is None else self.sampled.take_content())
            whole = _said_item(text, item["id"], status, logprobs)
            events = self._part("response.output_text.done", text=text, logprobs=logprobs)
            events += self._part("response.content_part.done", part=_output_text(text, logprobs))
        else:
            whole, events = self._closed_call(item, text, status)
        at = len(self._items)
        self._items.append(whole)
        self._open = None
        return events + self._event("response.output_item.done", output_index=at, item=whole)

    def _closed_call(self, item: dict[str, Any], arguments: str, status: str) -> tuple[dict[str, Any], bytes]:
        """Return the item of a whole call, and the events of its arguments."""
        at = {"item_id": item["id"], "output_index": len(self._items)}
        is_custom = item["type"] == "custom_tool_call"
        key, shown = ("input", custom_input(arguments)) if is_custom else ("arguments", arguments)
        kind = f"response.{item['type']}_{key}"
        events = self._event(f"{kind}.delta", **at, delta=shown)
        events += self._event(f"{kind}.done", **at, name=item["name"], **{key: shown})
        return {**item, key: shown, "status": status}, events

    def _part(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the only part of the item that grows."""
        assert self._open is not None
        at = {"item_id": self._open["id"], "output_index": len(self._items), "content_index": 0}
        return self._event(kind, **at, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = to_json({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode("ascii") + b"\ndata: " + data + b"\n\n"

    def _new_id(self, prefix: str) -> str:
        """Return the id of an item of text or reasoning; a reference to it means all text, or all reasoning."""
        number = self._ids.get(prefix, 0)
        self._ids[prefix] = number + 1
        return f"{prefix}_{self.exchange_id}" + (f"_{number}" if number else "")

    def _frame(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return a response with this output."""
        asked = self.options
        return {
            "id": f"resp_{self.exchange_id}",
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": asked.get("max_completion_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": asked.get("previous_response_id"),
            "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": asked.get("store", True),
            "temperature": asked.get("temperature"),
            "text": {"format": _format_of(asked)},
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": [{"type": "function", "strict": None} | tool["function"] for tool in asked.get("tools") or ()],
            "top_logprobs": asked.get("top_logprobs") or 0,
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": asked.get("user"),
        }

    def _thought(self, text: str, item_id: str, status: str) -> dict[str, Any]:
        """Return a reasoning item, with the sealed text for a client that asks for it."""
        said = [{"type": "reasoning_text", "text": text}] if text else []
        item: dict[str, Any] = {"type": "reasoning", "id": item_id, "status": status, "summary": [], "content": said}
        if _SEALED_THOUGHT in (self.options.get("include") or ()):
            item["encrypted_content"] = sealed(text) if text else None
        return item


def _said_item(text: str, item_id: str, status: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return a message item."""
    content = [_output_text(text, logprobs)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def _status_of(reason: FinishReason) -> str:
    """Return the status of a response that ended for `reason`."""
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def session_ended(session_id: str, model: str, created_s: int) -> bytes:
    """Return the answer to a request that only ends its session: a response without output."""
    frame = {"id": f"session-{session_id}", "object": "response", "created_at": created_s, "model": model}
    return orjson.dumps(frame | {"status": "completed", "output": [], "session_id": session_id, "session_done": True})


def _prefix(kind: str, item_id: str, output_index: int) -> bytes:
    frame = {"type": kind, "item_id": item_id, "output_index": output_index, "content_index": 0, "logprobs": []}
    if kind == "response.reasoning_text.delta":
        del frame["logprobs"]
    return b"event: " + kind.encode("ascii") + b"\ndata: " + orjson.dumps(frame)[:-1] + b',"delta":'


def _output_text(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _format_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    shape = asked.get("response_format") or {"type": "text"}
    return {"type": shape["type"], **shape.get("json_schema", {})}


def _code(refused: BadRequest) -> str:
    if isinstance(refused, TooLong):
        return "context_length_exceeded"
    if refused.status in _LATER or refused.status >= 500:
        return "rate_limit_exceeded" if refused.status == 429 else "server_error"
    return "invalid_prompt"


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage object of a response, without the number of reasoning tokens if it is unknown."""
    thought = {} if usage.reasoning_tokens is None else {"reasoning_tokens": usage.reasoning_tokens}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": thought,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
