"""A client's messages as a family's template takes them: text, system messages where they may stand, whole calls. Pure.

Messages that a template can't take are rewritten, never refused, and in the same way for rendered prompts and for those
that go on from sampled tokens. The template itself is probed, as checkpoints of one family differ.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawstream.conversation.messages import Message, role_of, text_of

UNPRINTABLE = {0: "\ufffd"} | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """Which sequences of plain text messages a template takes."""

    later_system: bool  # behind another message
    joined: frozenset[str]  # roles of which two in a row have to be joined


def probed(text_of_prompt: Callable[[Sequence[Message], Sequence[Any] | None], str | None]) -> TemplateCapabilities:
    """Return what a template takes; `text_of_prompt` renders messages and tools, and gives None where it refuses.

    A template takes a message if its prompt shows the message, in its place.
    """

    def takes(*roles: str, tools: Sequence[Any] | None = None) -> bool:
        said = [f"said{number}" for number in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        prompt = text_of_prompt(messages, tools)
        places = [prompt.find(text) for text in said] if prompt is not None else [-1]
        return -1 not in places and places == sorted(places)

    rows = {
        "system": takes("system", "system", "user") and takes("system", "system", "user", tools=[_TOOL]),
        "user": takes("user", "user"),
    }
    return TemplateCapabilities(
        later_system=takes("user", "assistant", "system", "user"),
        joined=frozenset(role for role, taken in rows.items() if not taken),
    )


def placed(messages: Sequence[Message], takes: TemplateCapabilities) -> list[Message]:
    """Return the messages, joined where they must be, with misplaced system messages as a user's."""
    found: list[Message] = []
    for message in messages:
        before = found[-1]["role"] if found else "system"
        role = message["role"]
        if role == "system" and before != "system" and not takes.later_system:
            role = "user"
        if found and role == before and role in takes.joined:
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append({**message, "role": role})
    return found


def shown(message: Message) -> Message:
    """The message as templates expect it: text content, system for developer, no unprintable characters."""
    found: dict[str, Any] = {"role": role_of(message), "content": text_of(message).translate(UNPRINTABLE)}
    for key in ("reasoning_content", "name", "tool_call_id"):
        if isinstance(message.get(key), str):
            found[key] = message[key].translate(UNPRINTABLE)
    if message.get("tool_calls"):
        found["tool_calls"] = [_shown_call(call) for call in message["tool_calls"]]
    return found


def _shown_call(call: Mapping[str, Any]) -> dict[str, Any]:
    printable = _printable(call)
    arguments = printable["function"].get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = _printable_json(arguments)
    return {**printable, "function": {**printable["function"], "arguments": arguments}}


def _printable_json(text: str) -> str:
    """The JSON unchanged, unless it escapes unprintable characters."""
    if "\\u" not in text:
        return text
    try:
        value = json.loads(text)
        printable = _printable(value)
    except (ValueError, RecursionError):
        return text
    return text if printable == value else json.dumps(printable, ensure_ascii=False)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(UNPRINTABLE)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value
