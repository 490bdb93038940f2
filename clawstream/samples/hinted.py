"""The prompt with the hint in it, as the teacher sees it. Pure."""

from collections.abc import Sequence
from typing import Any

from clawstream.events.conversation import Message, is_ephemeral, role_of

MARKER = "[user's hint / instruction]"


def with_hint(messages: Sequence[Message], hint: str) -> tuple[Message, ...]:
    """Return the messages with `hint` at the end of the last user message that is not a client's own block.

    Content that comes in parts keeps its shape. Where no user has spoken, the hint is a user message at the end.
    """
    said = [
        number for number, message in enumerate(messages) if role_of(message) == "user" and not is_ephemeral(message)
    ]
    if not said:
        return (*messages, {"role": "user", "content": f"{MARKER}\n{hint}"})
    last = said[-1]
    hinted = {**messages[last], "content": _extended(messages[last].get("content"), f"\n\n{MARKER}\n{hint}")}
    return (*messages[:last], hinted, *messages[last + 1 :])


def _extended(content: Any, addition: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": addition}]
    return f"{content if isinstance(content, str) else ''}{addition}"
