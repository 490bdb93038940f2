"""What a client of OpenAI's Responses API asks for, in the form of Chat Completions. Pure.

The messages of a conversation come out the same in each of its requests, so that answers are found again in later
histories. A field that Chat Completions has no place for is refused by its own name, or listed here:

* `max_tool_calls`, `service_tier`, `safety_identifier` and `reasoning` are recorded with the request and change
  nothing; `client_metadata`, Codex's ids of the request, is not recorded.
* `store: false`: no later request can name the response. `include` can add log-probs and encrypted reasoning.
* `previous_response_id` and items by reference stand for what the gateway remembers of the conversation.
* Tools: see responses_tools.py.
* An answer that the client got as several items (reasoning, text, calls) becomes one message again.

Source: OpenAI's published Responses API, as the `openai` package 2.8.0 has it, and requests of Codex 0.169.0.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clawstream.gateway.dialects.responses_tools import (
    SEALED,
    custom_arguments,
    flat_name,
    opened,
    read_choice,
    read_tools,
)
from clawstream.gateway.requests.fields import BadRequest, items, mapping, text, wrong
from clawstream.gateway.requests.wire import ChatRequest, assistant_message, plain, read_request, truthy
from clawstream.gateway.sessions import Recall, RecalledResponse

Item = Mapping[str, Any]
OURS = re.compile(r"(?:resp|msg|rs|fc|ctc)_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:_([0-9]{1,6}))?")
_ROLES = ("system", "developer", "user", "assistant")
_SAID = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
TRANSLATED = "responses"  # a recorded option: what Chat Completions has no place for
INSTRUCTED = "instructed"  # its flag: the first message is `instructions`, which later requests don't inherit
_RENAMED = frozenset({"input", "instructions", "max_output_tokens", "text", "tools", "tool_choice"})
_NOT_THERE = frozenset(
    {
        *("background", "conversation", "prompt", "messages", "n", "logprobs"),
        *("max_tokens", "max_completion_tokens", "response_format"),
    }
)
_LOGPROBS = "message.output_text.logprobs"
_CODEX = "client_metadata"  # not recorded


@dataclass(slots=True)
class _AssistantItems:
    """An assistant's message, collected from its items."""

    exchange_id: str | None = None  # the answer of ours, where an item's id names it
    said: list[str] | None = None  # None: no text item came
    thought: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """Return it as Chat Completions has it."""
        return assistant_message(self.said or (), self.thought, self.calls)


@dataclass(slots=True)
class _ItemReader:
    """Reads items one by one into messages."""

    recall: Recall
    messages: list[dict[str, Any]] = field(default_factory=list)
    answer: _AssistantItems | None = None
    referred: set[str] = field(default_factory=set)  # ids of items that were put in for references

    def read(self, item: Item, where: str) -> None:
        """Take one item in. Raises BadRequest."""
        named = "message" if item.get("type") is None and "role" in item else item.get("type")
        if named == "message":
            self._message(item, where)
        elif named == "reasoning":
            self._part_of(item, after=("said", "calls")).thought.append(_thought(item, where))
        elif named in ("function_call", "custom_tool_call"):
            self._part_of(item, after=()).calls.append(_call(item, where))
        elif named in ("function_call_output", "custom_tool_call_output"):
            self._put({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": _output(item, where)})
        elif named == "item_reference":
            self._reference(item, where)
        else:
            found = f"{named!r} item" if isinstance(named, str) else "item without a type"
            raise BadRequest(
                f"{where} is a {found[:60]}; expected a message, reasoning, function_call, function_call_output, "
                "custom_tool_call, custom_tool_call_output or item_reference: tools of the server's own are not run.",
                code="unsupported_value",
                param=where,
            )

    def finish(self) -> list[dict[str, Any]]:
        """Return all as messages."""
        if self.answer is not None:
            self.messages.append(self.answer.message())
            self.answer = None
        return self.messages

    def _put(self, message: dict[str, Any]) -> None:
        self.finish()
        self.messages.append(message)

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            found = json.dumps(role)[:50]
            raise BadRequest(f"{where}.role is {found}; expected one of {', '.join(_ROLES)}.", param=f"{where}.role")
        parts = _parts(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._put({"role": role, "content": plain(parts)})
            return
        answer = self._part_of(item, after=("said", "calls"))
        answer.said = [*(answer.said or ()), *(part["text"] for part in _texts(parts, f"{where}.content"))]

    def _part_of(self, item: Item, *, after: Sequence[str]) -> _AssistantItems:
        """Return the answer that the item belongs to: the growing one, unless it has a part named in `after` already.

        Where the ids of both name their answers, the ids decide.
        """
        found = OURS.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
        exchange_id = found.group(1) if found else None
        grows = self.answer
        if grows is not None and exchange_id is not None and grows.exchange_id is not None:
            goes_on = grows.exchange_id == exchange_id
        else:
            goes_on = grows is not None and not any(getattr(grows, name) for name in after)
        if grows is None or not goes_on:
            self.finish()
            grows = self.answer = _AssistantItems(exchange_id)
        return grows

    def _reference(self, item: Item, where: str) -> None:
        """Put the referenced items in; an id of text or reasoning stands for all text or reasoning of its answer."""
        item_id = _text(item, "id", where)
        found = OURS.fullmatch(item_id)
        recalled = self.recall(found.group(1)) if found else None
        if found is None or recalled is None:
            raise BadRequest(
                f"{where}.id is {item_id[:80]!r}, which is no item that this gateway remembers; send the item itself "
                "(store: false makes most clients do so).",
                status=404,
                code="item_not_found",
                param=f"{where}.id",
            )
        for own in _items_of(item_id, recalled.answer):
            if own["id"] not in self.referred:
                self.referred.add(own["id"])
                self.read(own, where)


def read_items(found: object, recall: Recall) -> list[dict[str, Any]]:
    """Return what `input` says, as messages. Raises BadRequest."""
    if isinstance(found, str) and found:
        return [{"role": "user", "content": found}]
    if not isinstance(found, list) or not found:
        raise wrong("input", found, "a string or a list with at least one item")
    reading = _ItemReader(recall)
    for index, item in enumerate(found):
        if not isinstance(item, dict):
            raise wrong(f"input[{index}]", item, "an item with a type")
        reading.read(item, f"input[{index}]")
    return reading.finish()


def _items_of(item_id: str, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of the answer that an item of this id holds, as items."""
    prefix, _, rest = item_id.partition("_")
    exchange_id, _, number = rest.partition("_")
    if prefix == "rs":
        text = answer.get("reasoning_content") or ""
        content = [{"type": "reasoning_text", "text": text}]
        return [{"type": "reasoning", "id": f"rs_{exchange_id}", "content": content}] if text else []
    if prefix == "msg":
        said = {"type": "message", "role": "assistant", "content": answer.get("content") or ""}
        return [{**said, "id": f"msg_{exchange_id}"}]
    calls = answer.get("tool_calls") or ()
    function = {"type": "function_call", "id": item_id}
    at = int(number or 0)
    return [function | {"call_id": one["id"], **one["function"]} for one in calls[at : at + 1]]


def _call(item: Item, where: str) -> dict[str, Any]:
    name = flat_name(item.get("namespace"), _text(item, "name", where))
    is_custom = item.get("type") == "custom_tool_call"
    given = custom_arguments(_string(item, "input", where)) if is_custom else _string(item, "arguments", where)
    function = {"name": name, "arguments": given}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _output(item: Item, where: str) -> str | list[dict[str, Any]]:
    found = item.get("output")
    return found if isinstance(found, str) else plain(_parts(found, f"{where}.output"))


def _thought(item: Item, where: str) -> str:
    """Return the text of a reasoning item; one that another server encrypted can't be read here."""
    sealed = text(item, "encrypted_content")
    if sealed is not None and sealed.startswith(SEALED):
        return opened(sealed, f"{where}.encrypted_content")
    for key in ("content", "summary"):
        pieces = items(item.get(key), f"{where}.{key}")
        if pieces:
            return "".join(part["text"] for part in _texts(_parts(pieces, f"{where}.{key}"), f"{where}.{key}"))
    if sealed:
        raise BadRequest(
            f"{where} holds reasoning that another model encrypted and only that model can read; leave the item out.",
            param=where,
        )
    return ""


def _parts(found: object, where: str) -> list[dict[str, Any]]:
    """Return content as parts of a Chat Completions message; parts that it can't have are refused later, by name."""
    if isinstance(found, str):
        return [{"type": "text", "text": found}]
    if not isinstance(found, list):
        raise wrong(where, found, "a string or a list of parts")
    return [_part(part, f"{where}[{number}]") for number, part in enumerate(found)]


def _part(part: object, where: str) -> dict[str, Any]:
    named = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(named, str):
        raise BadRequest(f"{where} is content without a type.", code="unsupported_content", param=where)
    if named in _SAID or named == "refusal":
        return {"type": "text", "text": _string(part, "refusal" if named == "refusal" else "text", where)}
    if named == "input_image":
        shown = {key: part[key] for key in ("detail",) if part.get(key) is not None}
        return {"type": "image_url", "image_url": {"url": part.get("image_url") or "", **shown}}
    if named == "input_file":
        return {"type": "file", "file": {key: part[key] for key in part if key != "type"}}
    return {"type": named}


def _texts(parts: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    for part in parts:
        if part["type"] != "text":
            raise BadRequest(
                f"{where} holds {part['type']!r} content; an answer is text.", code="unsupported_content", param=where
            )
    return list(parts)


def _text(item: Item, key: str, where: str) -> str:
    found = _string(item, key, where)
    if not found:
        raise BadRequest(f"{where}.{key} is empty.", param=f"{where}.{key}")
    return found


def _string(item: Item, key: str, where: str) -> str:
    found = item.get(key)
    if not isinstance(found, str):
        raise wrong(f"{where}.{key}", found, "a string")
    return found


def read_responses(body: Mapping[str, Any], ends_session: bool, recall: Recall) -> ChatRequest:
    """Return what the body asks for; `ends_session` says that a header ends the session. Raises BadRequest."""
    for key in sorted(_NOT_THERE):
        if body.get(key):
            message = f"{key} is not supported by /v1/responses here; leave it out."
            raise BadRequest(message, code="unsupported_value", param=key)
    if body.get("truncation") not in (None, "disabled"):
        expected = "send disabled, or leave it out"
        message = f"truncation is not supported: a conversation that is too long is refused; {expected}."
        raise BadRequest(message, code="unsupported_value", param="truncation")
    previous = _previous(body, recall)
    ending = (truthy(body.get("session_done")) or ends_session) and not body.get("input")
    instructions = text(body, "instructions")
    before = [] if previous is None else [*previous.before, previous.answer]
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    messages = [] if ending else [*system, *before, *read_items(body.get("input"), recall)]
    tools, known = read_tools(body.get("tools"), may_leave_out=isinstance(body.get(_CODEX), dict))
    include = items(body.get("include"), "include")
    if not all(isinstance(wanted, str) for wanted in include):
        raise BadRequest("include is not a list of strings.", param="include")
    if body.get("top_logprobs") and _LOGPROBS not in include:
        raise BadRequest(f'top_logprobs needs include: ["{_LOGPROBS}"]; send both.', param="top_logprobs")
    found = {
        "tools": tools,
        "response_format": _response_format(body),
        "verbosity": text(mapping(body, "text"), "verbosity"),
        "logprobs": _LOGPROBS in include,
    }
    kept = {key: value for key, value in body.items() if key not in {*_RENAMED, *_NOT_THERE, _CODEX}}
    said = {key: value for key, value in found.items() if value}
    if body.get("max_output_tokens") is not None:
        said["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tool_choice") is not None:
        said["tool_choice"] = read_choice(body["tool_choice"])
    translated = {TRANSLATED: {INSTRUCTED: instructions is not None, **known}}
    chat = read_request(kept | said | translated | {"messages": messages}, ends_session)
    if previous is None or chat.session_id is not None:
        return chat
    return replace(chat, session_id=previous.session_id)


def conversation_of(messages: tuple[bytes, ...], options: Mapping[str, Any]) -> tuple[bytes, ...] | None:
    """Return the messages of an exchange that a later request inherits; None: of another API, or `store` is false."""
    translated = options.get(TRANSLATED)
    if not isinstance(translated, dict) or options.get("store") is False:
        return None
    return messages[1:] if translated.get(INSTRUCTED) else messages


def _previous(body: Mapping[str, Any], recall: Recall) -> RecalledResponse | None:
    response_id = text(body, "previous_response_id")
    if response_id is None:
        return None
    found = OURS.fullmatch(response_id)
    previous = recall(found.group(1)) if found else None
    if previous is None:
        raise BadRequest(
            f"Previous response with id {response_id[:80]!r} not found: it is none that this gateway remembers, was "
            "asked for with store: false, or is older than a day. Send the conversation in input.",
            status=404,
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return previous


def _response_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    asked = mapping(body, "text")
    shape = mapping(asked, "format")
    wanted = shape.get("type")
    if wanted == "text" or asked.get("format") is None:
        return None
    if wanted == "json_object":
        return {"type": wanted}
    if wanted != "json_schema":
        message = f"text.format.type is {json.dumps(wanted)[:50]}; expected text, json_object or json_schema."
        raise BadRequest(message, code="unsupported_value", param="text.format")
    said = {key: shape.get(key) for key in ("name", "description", "schema", "strict")}
    return {"type": "json_schema", "json_schema": {key: value for key, value in said.items() if value is not None}}
