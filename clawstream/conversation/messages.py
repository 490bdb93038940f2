"""The content of messages in comparable form: text, tool calls, and a client's own blocks. Pure.

The one rule: an answer is recognised by its content, never by its bytes. Clients rewrite ids of tool calls, leave
reasoning out and send text as parts.
"""

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from clawstream.conversation.authors import (
    Author,
    MessagePiece,
    is_frame,
    is_housekeeping_part,
    is_summary_part,
    written,
)
from clawstream.errors import UnusableExchange

Message = Mapping[str, Any]

_REMEMBERED_BYTES = 4096  # larger messages are parsed each time, so that the cache stays at some megabytes

_BLOCK_BEGINS = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_BLOCK_ENDS = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparableCall:
    """A tool call in comparable form: its id without what clients rewrite, its arguments as canonical JSON."""

    call_id: str
    name: str
    arguments: str


def parse(raw: bytes, what: str = "a message") -> Message:
    """Return the message whose JSON is `raw`; lone surrogates survive. It is shared: never change it.

    Raises UnusableExchange, whose text names it by `what`, for anything but a message; the gateway records no such
    thing, so the record is damaged.
    """
    return _parsed_before(raw, what) if len(raw) <= _REMEMBERED_BYTES else _parsed(raw, what)


def _parsed(raw: bytes, what: str) -> Message:
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UnusableExchange(f"{what} of {len(raw)} bytes is not JSON ({error}); its exchange is skipped") from error
    if not isinstance(message, dict):
        raise UnusableExchange(f"{what} is {type(message).__name__}, not an object; its exchange is skipped")
    return message


_parsed_before = lru_cache(maxsize=4096)(_parsed)  # each request of a conversation repeats what was said before


def dump(message: Message) -> bytes:
    """Return the message as JSON in ASCII, so that lone surrogates and NUL can be written."""
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def role_of(message: Message) -> str:
    """Return the role; `developer` is the newer name of `system`."""
    role = message.get("role")
    return "system" if role == "developer" else str(role)


def text_of(message: Message) -> str:
    """Return the text of the content, be it a string, parts, or absent."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def is_ephemeral(message: Message) -> bool:
    """Return whether the message is a client's own block, which the next request's history will not hold.

    A model's answer never is one, whatever it says.
    """
    if role_of(message) == "assistant":
        return False
    text = text_of(message).strip()
    return text.startswith(_BLOCK_BEGINS) and text.endswith(_BLOCK_ENDS)


def parts_of(message: Message) -> tuple[str, ...]:
    """Return the texts of the content, one for each part that has any."""
    content = message.get("content")
    pieces = [content] if isinstance(content, str) or not isinstance(content, Sequence) else content
    return tuple(
        text for piece in pieces if (text := text_of({"content": piece if isinstance(piece, str) else [piece]}))
    )


def is_summary(message: Message) -> bool:
    """Return whether the message begins with the summary of a history that its client compacted."""
    told = (piece for piece in written_in(message) if piece.author is not Author.CLIENT)
    return role_of(message) == "user" and any(is_summary_part(piece.text) for piece in islice(told, 1))


def is_housekeeping(message: Message) -> bool:
    """Return whether a client wrote this user's message itself: a heartbeat, a memory flush, a reminder.

    OpenClaw joins messages with no answer between them; the last part then is the question.
    """
    asked = [part for part in parts_of(message) if not is_frame(part)]
    return role_of(message) == "user" and bool(asked) and is_housekeeping_part(asked[-1])


def written_in(message: Message) -> tuple[MessagePiece, ...]:
    """Return the pieces of a user's message with their authors, without frames."""
    return tuple(piece for part in parts_of(message) if (piece := written(part)) is not None)


def said_in(message: Message) -> tuple[Hashable, ...]:
    """Return comparable values of a message's content, equal however a client joined a user's messages.

    A user's message gives one value for each line that the person wrote, as a client's reports and instructions come
    and go; a message that a client wrote gives none.
    """
    if role_of(message) != "user" or not any(map(str.strip, parts_of(message))):
        return (meaning(message),)
    return tuple(("user", line) for line in lines_of(message))


def lines_of(message: Message) -> tuple[str, ...]:
    """Return each line of a user's message that the person wrote."""
    lines = (line.strip() for line in _spoken(message).split("\n"))
    return tuple(line for line in lines if line)


def _spoken(message: Message) -> str:
    """Return the person's words, one part below the other."""
    return "\n".join(piece.text for piece in written_in(message) if piece.author is Author.PERSON)


def tool_calls_of(message: Message) -> tuple[ComparableCall, ...]:
    """Return the message's tool calls, in order."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence):
        return ()
    return tuple(_tool_call(call) for call in calls if isinstance(call, dict))


def normal_call_id(call_id: str) -> str:
    """Return a tool call's id in the form that clients' rewriting leaves equal: `call_1` and `call1` are one."""
    return _NOT_IN_IDS.sub("", call_id)


def same_answer(answer: Message, echo: Message) -> bool:
    """Return whether `echo` is `answer` come back in a history.

    Outer white space and reasoning don't count, and tool calls are the same when names and arguments are: some clients
    give every call an id of their own.
    """
    return role_of(echo) == "assistant" and _said(answer) == _said(echo)


def meaning(message: Message) -> Hashable:
    """Return a value that is equal for messages which say the same in the same role."""
    return role_of(message), _said(message), _said_for(message)


def _said(message: Message) -> tuple[str, tuple[tuple[str, str], ...]]:
    text = _spoken(message) if role_of(message) == "user" else text_of(message).strip()
    return text, tuple((call.name, call.arguments) for call in tool_calls_of(message))


def _said_for(message: Message) -> str | None:
    call_id = message.get("tool_call_id")
    return normal_call_id(call_id) if isinstance(call_id, str) else None


def _tool_call(call: Mapping[str, Any]) -> ComparableCall:
    function = call.get("function")
    named: Mapping[str, Any] = function if isinstance(function, dict) else {}
    return ComparableCall(
        call_id=normal_call_id(str(call.get("id", ""))),
        name=str(named.get("name", "")),
        arguments=_canonical(named.get("arguments")),
    )


def _canonical(arguments: object) -> str:
    """Return equal text for arguments that mean the same; text that is not JSON stays as it is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"))
