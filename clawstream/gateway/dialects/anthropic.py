"""What a client of Anthropic's Messages API asks for, in OpenAI's form. Pure.

The messages of a conversation come out the same in each of its requests, so that answers are found again in later
histories. A field that OpenAI's form has no place for is refused by its own name, or listed here:

* `cache_control`, `citations` and `caller` of blocks, and `eager_input_streaming`, `strict`, `input_examples`,
  `defer_loading` and `allowed_callers` of tools, are left out: they ask for nothing that changes what is answered.
* `thinking.budget_tokens`, `output_config.effort`, `context_management`, `service_tier` and `speed` are recorded with
  the request and change nothing: reasoning counts towards max_tokens, and the whole history is shown to the policy.
* An image of a user or a tool becomes words (requests/fields.py); a document becomes its text, or words.
* A tool result with `is_error` says so in front of its text, since a tool message has no such mark.

Source: Anthropic's published Messages API, as the `anthropic` package 2.10.0 has it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clawstream.gateway.dialects.anthropic_replies import SIGNED, arguments_of, signature
from clawstream.gateway.requests.fields import (
    SHOWN_BY_A_TOOL,
    SHOWN_BY_THE_USER,
    BadRequest,
    boolean,
    check_shown,
    items,
    kind,
    mapping,
    number,
    text,
    with_words,
    wrong,
)
from clawstream.gateway.requests.wire import (
    PRIVATE_KEYS,
    ChatRequest,
    assistant_message,
    plain,
    read_request,
    read_stops,
    truthy,
)

_SAME_IN_BOTH = frozenset({"model", "stream", "max_tokens", "temperature", "top_p", "top_k"}) | PRIVATE_KEYS
_TRANSLATED = frozenset(
    {"messages", "system", "stop_sequences", "tools", "tool_choice", "metadata", "cache_control", "output_config"}
)
_NOT_THERE = ("container", "mcp_servers", "prefill", "n", "logprobs", "response_format")
_THINKING: Mapping[str, dict[str, bool]] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": {},
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ROLES = ("user", "assistant", "system")
_FAILED = "Error: "


def read_messages(body: Mapping[str, Any], ends_session: bool = False, *, counted: bool = False) -> ChatRequest:
    """Return what the body asks for; `ends_session` says that a header ends the session. Raises BadRequest.

    `counted`: the request only has its tokens counted, so it needs no max_tokens.
    """
    for key in _NOT_THERE:
        if body.get(key) is not None:
            raise BadRequest(f"{key} is not supported; leave it out.", param=key)
    number(body, "temperature", 0, 1)
    ending = not counted and (truthy(body.get("session_done")) or ends_session) and not body.get("messages")
    if body.get("max_tokens") is None and not (ending or counted):
        raise BadRequest("max_tokens is missing; say how many tokens the answer may have.", param="max_tokens")
    named = mapping(body, "metadata")
    same = {key: value for key, value in body.items() if key in _SAME_IN_BOTH}
    labels = {key: value for key, value in body.items() if key not in _SAME_IN_BOTH | _TRANSLATED}
    found = {
        "user": text(named, "user_id"),
        "metadata": {key: value for key, value in named.items() if key != "user_id"},
        "stop": list(read_stops(items(body.get("stop_sequences"), "stop_sequences"), "stop_sequences")),
        "tools": [_tool(tool, f"tools[{at}]") for at, tool in enumerate(items(body.get("tools"), "tools"))],
        "chat_template_kwargs": _template_options(body),
        "response_format": _response_format(body),
        "output_config": {key: value for key, value in mapping(body, "output_config").items() if key != "format"},
    }
    said = {key: value for key, value in found.items() if value} | _tool_choice(body)
    messages = [] if ending else [*_system(body.get("system")), *_messages(body.get("messages"))]
    request = read_request(labels | same | said | {"messages": messages}, ends_session)
    user_id = named.get("user_id")
    return request if user_id is None else replace(request, metadata={**request.metadata, "user_id": user_id})


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise BadRequest(f"{where} is not a tool with a name.", param=where)
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"{where} is a {tool['type']!r} tool; only tools of the client's own are called.", param=where)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise wrong(f"{where}.input_schema", schema, "a JSON schema", param=where)
    about = text(tool, "description")
    described = {} if about is None else {"description": about}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": schema}}


def _tool_choice(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's tool_choice and parallel_tool_calls."""
    choice = mapping(body, "tool_choice")
    if body.get("tool_choice") is None:
        return {}
    wanted: object = _CHOICES.get(str(choice.get("type")))
    if choice.get("type") == "tool" and isinstance(choice.get("name"), str):
        wanted = {"type": "function", "function": {"name": choice["name"]}}
    if wanted is None:
        found = json.dumps(choice)[:100]
        raise BadRequest(
            f"tool_choice is {found}; expected type auto, any, none, or tool with name.", param="tool_choice"
        )
    single = {"parallel_tool_calls": False} if boolean(choice, "disable_parallel_tool_use") else {}
    return {"tool_choice": wanted, **single}


def _response_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    where, output = "output_config.format", mapping(body, "output_config")
    shape = mapping({where: output.get("format")}, where)
    if output.get("format") is None:
        return None
    if shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
        found = json.dumps(shape)[:100]
        raise BadRequest(f"{where} is {found}; expected type json_schema, and schema as an object.", param=where)
    return {"type": "json_schema", "json_schema": {"schema": shape["schema"]}}


def _template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    thinking = mapping(body, "thinking")
    given = dict(mapping(body, "chat_template_kwargs"))
    if not isinstance(given.get("enable_thinking", True), bool):  # `thinking` may replace it below
        raise BadRequest("chat_template_kwargs.enable_thinking is not a boolean.", param="chat_template_kwargs")
    if body.get("thinking") is None:
        return given
    wanted = thinking.get("type")
    if not isinstance(wanted, str) or wanted not in _THINKING:
        raise BadRequest(
            f"thinking.type is {json.dumps(wanted)[:50]}; expected one of {', '.join(_THINKING)}.", param="thinking"
        )
    if thinking.get("display") not in (None, "summarized"):
        raise BadRequest("thinking.display is not supported; thinking is always shown whole.", param="thinking")
    return given | _THINKING[wanted]


def _system(found: object) -> list[dict[str, Any]]:
    if found in (None, "", []):
        return []
    return [{"role": "system", "content": found if isinstance(found, str) else plain(_texts(found, "system"))}]


def _messages(found: object) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found:
        raise wrong("messages", found, "a list with at least one message")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(found):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise BadRequest(
                f"{where}.role is {json.dumps(role)[:50]}; expected one of {', '.join(_ROLES)}.", param=where
            )
        assert isinstance(message, dict)
        blocks = _blocks(message.get("content"), f"{where}.content", may_be_empty=role == "assistant")
        if role == "system":
            messages.append({"role": "system", "content": plain(_texts(blocks, f"{where}.content"))})
        else:
            messages += _user(blocks, where) if role == "user" else [_assistant(blocks, where)]
    if messages[-1]["role"] == "assistant":
        raise BadRequest(
            "The last message is the assistant's; an answer can't be prefilled. End with a user message.",
            param="messages",
        )
    return messages


def _blocks(content: object, where: str, *, may_be_empty: bool) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not (content or may_be_empty):
        raise wrong(where, content, "a string or a list of content blocks")
    for number_, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise BadRequest(f"{where}[{number_}] is not a content block with a type.", param=where)
    return content


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the results as tool messages, then the user's text as a user message."""
    num_results = sum(block["type"] == "tool_result" for block in blocks)
    results = [_tool_message(block, f"{where}.content[{at}]") for at, block in enumerate(blocks[:num_results])]
    said = _texts(blocks[num_results:], f"{where}.content", pictures=SHOWN_BY_THE_USER)
    return [*results, {"role": "user", "content": plain(said)}] if said else results


def _tool_message(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if block["type"] != "tool_result":
        raise BadRequest(f"{where} is {block['type']!r}; tool_result blocks come before all others.", param=where)
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise BadRequest(f"{where}.tool_use_id is {kind(call_id)}; name the call that this answers.", param=where)
    if content is None:
        content = ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in _texts(content, where, pictures=SHOWN_BY_A_TOOL))
    failed = _FAILED if boolean(block, "is_error") else ""
    return {"role": "tool", "tool_call_id": call_id, "content": failed + content}


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    said: list[str] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    for number_, block in enumerate(blocks):
        place = f"{where}.content[{number_}]"
        if block["type"] == "thinking":
            thought.append(_thinking(block, place))
        elif block["type"] == "tool_use":
            calls.append(_tool_call(block, place))
        else:
            said += [part["text"] for part in _texts([block], place)]
    return assistant_message(said, thought, calls)


def _thinking(block: Mapping[str, Any], where: str) -> str:
    thought, signed = block.get("thinking"), block.get("signature")
    if not isinstance(thought, str) or not isinstance(signed, str):
        raise BadRequest(f"{where} is not a thinking block: expected thinking and signature.", param=where)
    if signed.startswith(SIGNED) and signed != signature(thought):
        raise BadRequest(f"{where} was changed after it was signed; send thinking as it came.", param=where)
    return thought


def _tool_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not all(isinstance(block.get(key), str) for key in ("id", "name")) or not isinstance(block.get("input"), dict):
        raise BadRequest(f"{where} is not a tool_use block: expected id, name and an input object.", param=where)
    function = {"name": block["name"], "arguments": arguments_of(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}


def _texts(found: object, where: str, *, pictures: str | None = None) -> list[dict[str, str]]:
    """Return text blocks as OpenAI's parts; the words `pictures` replace an image. None: only text may stand here.

    Raises BadRequest for any other block.
    """
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise wrong(where, found, "a string or a list of text blocks")
    for block in found:
        named = block.get("type") if isinstance(block, dict) else None
        if named == "redacted_thinking":
            raise BadRequest(
                f"{where} holds redacted_thinking, which only the model that wrote it can read; leave it out.",
                param=where,
            )
        if named in ("image", "document") and pictures is not None:
            check_shown(block, where)
        elif named != "text" or not isinstance(block.get("text"), str):
            shown = f"{named!r} content" if isinstance(named, str) else "content without a type"
            raise BadRequest(f"{where} holds {shown}; this policy reads text only.", param=where)
    said = found if pictures is None else with_words(found, pictures)
    return [{"type": "text", "text": block["text"]} for block in said]
