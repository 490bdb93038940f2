"""Gives tool calls and results of a history ids in the form that a family's template wants. Pure.

A call and its results get the same id, and equal histories get equal ids. Ids that are in the family's form already, as
sampled ones are, stay.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_NUMBERED = re.compile(r"functions\.[^:]+:\d+")


def fitted(messages: Sequence[Mapping[str, Any]], family: str) -> list[Mapping[str, Any]]:
    """Return `messages` with ids, and names of results, in the family's form; most families take any."""
    form = _FORMS.get(family)
    if form is None:
        return list(messages)
    known: dict[str, tuple[str, str]] = {}
    shown: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [_fitted_call(call, form, known) for call in message["tool_calls"]]
            shown.append({**message, "tool_calls": calls})
        elif message["role"] == "tool":
            given = str(message.get("tool_call_id") or "")
            fitting, name = known.get(given) or (form(given, "tool", len(known)), "tool")
            named = {"name": message.get("name") or name} if family == "gpt-oss" else {}
            shown.append({**message, **named, "tool_call_id": fitting})
        else:
            shown.append(message)
    return shown


def _fitted_call(call: Mapping[str, Any], form: "_Form", known: dict[str, tuple[str, str]]) -> dict[str, Any]:
    given, name = str(call.get("id") or ""), str(call["function"]["name"])
    fitting = form(given, name, len(known))
    known[given] = (fitting, name)
    return {**call, "id": fitting}


def _nine_letters(given: str, name: str, index: int) -> str:
    if _NINE.fullmatch(given):
        return given
    return hashlib.sha256((given or f"{name}:{index}").encode()).hexdigest()[:9]


def _numbered(given: str, name: str, index: int) -> str:
    return given if _NUMBERED.fullmatch(given) else f"functions.{name}:{index}"


def _as_given(given: str, name: str, index: int) -> str:  # noqa: ARG001 - it has to have the form of the others
    return given


_Form = Callable[[str, str, int], str]
_FORMS: Mapping[str, _Form] = {
    "mistral": _nine_letters,
    "kimi-k2": _numbered,
    "kimi-k2.5": _numbered,
    "gpt-oss": _as_given,  # a result names its call by the tool's name alone
}
