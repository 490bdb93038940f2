"""What a client of OpenAI's Responses API asks for, in the form of Chat Completions. Pure.

The messages of a conversation come out the same in each of its requests, so that answers are found again in later
histories. A field that Chat Completions has no place for is refused by its own name, or listed here:

* `store`, `include`, `max_tool_calls`, `service_tier`, `safety_identifier` and `reasoning` are recorded with the
  request and change nothing; `client_metadata`, Codex's ids of the request, is not recorded.
* `previous_response_id` and items by reference stand for what the gateway remembers of the conversation.
* Tools: see responses_tools.py.

Source: OpenAI's published Responses API, as the `openai` package 2.8.0 has it, and requests of Codex 0.169.0.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clawstream.gateway.dialects.responses_items import OURS, read_items
from clawstream.gateway.dialects.responses_tools import read_choice, read_tools
from clawstream.gateway.requests.fields import items, kind, mapping, text
from clawstream.gateway.requests.refusal import BadRequest
from clawstream.gateway.requests.wire import ChatRequest, read_request, truthy
from clawstream.gateway.sessions.conversations import Recall, RecalledResponse

TRANSLATED = "responses"  # an option: what the request held besides the messages it became
INSTRUCTED = "instructed"  # its flag: the first message is `instructions`, which later requests don't inherit
_RENAMED = frozenset({"input", "instructions", "max_output_tokens", "text", "tools", "tool_choice"})
_NOT_RECORDED = frozenset({"client_metadata"})
_NOT_THERE = frozenset(
    {
        *("background", "conversation", "prompt", "messages", "n", "logprobs"),
        *("max_tokens", "max_completion_tokens", "response_format"),
    }
)
_LOGPROBS = "message.output_text.logprobs"
_CODEX = "client_metadata"


def read_responses(body: Mapping[str, Any], ends_session: bool, recall: Recall) -> ChatRequest:
    """Return what the body asks for; `ends_session` says that a header ends the session. Raises BadRequest."""
    for key in sorted(_NOT_THERE):
        if body.get(key):
            raise BadRequest(
                f"{key} is not supported by /v1/responses here; leave it out.", code="unsupported_value", param=key
            )
    if body.get("truncation") not in (None, "disabled"):
        raise BadRequest(
            "truncation is not supported: a conversation that is too long is refused; expected disabled, or it left "
            "out.",
            code="unsupported_value",
            param="truncation",
        )
    previous = _previous(body, recall)
    ending = (truthy(body.get("session_done")) or ends_session) and not body.get("input")
    instructions = _instructions(body.get("instructions"))
    before = [] if previous is None else [*previous.before, previous.answer]
    messages = [] if ending else [*instructions, *before, *read_items(body.get("input"), recall)]
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
    kept = {key: value for key, value in body.items() if key not in _RENAMED | _NOT_RECORDED | _NOT_THERE}
    said = {key: value for key, value in found.items() if value}
    if body.get("max_output_tokens") is not None:
        said["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tool_choice") is not None:
        said["tool_choice"] = read_choice(body["tool_choice"])
    translated = {TRANSLATED: {INSTRUCTED: bool(instructions), **known}}
    chat = read_request(kept | said | translated | {"messages": messages}, ends_session)
    if previous is None or chat.session_id is not None:
        return chat
    return replace(chat, session_id=previous.session_id)


def conversation_of(messages: tuple[bytes, ...], options: Mapping[str, Any]) -> tuple[bytes, ...] | None:
    """Return the messages of an exchange that a later request inherits; None: the client wanted nothing kept."""
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


def _instructions(found: object) -> list[dict[str, Any]]:
    if found is None or found == "":
        return []
    if not isinstance(found, str):
        raise BadRequest(f"instructions is {kind(found)}; expected a string.", param="instructions")
    return [{"role": "system", "content": found}]


def _response_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    asked = mapping(body, "text")
    shape = mapping(asked, "format")
    wanted = shape.get("type")
    if wanted == "text" or asked.get("format") is None:
        return None
    if wanted == "json_object":
        return {"type": wanted}
    if wanted != "json_schema":
        raise BadRequest(
            f"text.format.type is {json.dumps(wanted)[:50]}; expected text, json_object or json_schema.",
            code="unsupported_value",
            param="text.format",
        )
    said = {key: shape.get(key) for key in ("name", "description", "schema", "strict")}
    return {"type": "json_schema", "json_schema": {key: value for key, value in said.items() if value is not None}}
