"""Mistral's tool calls, which the renderers package has no parser for; importing this module registers one.

Two formats exist, both after the token `[TOOL_CALLS]`: a JSON list of `{"name", "arguments", "id"}`, and, newer, each
call after a mark of its own: `name[ARGS]{...}`, with `[CALL_ID]id` before the arguments in some versions.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from renderers import ParsedToolCall, ToolCallParseStatus
from renderers.parsers import TOOL_PARSERS

NAME = "mistral"
MARK = "[TOOL_CALLS]"
_NAMED = re.compile(
    r"\s*(?P<name>[^\s\[\]{}]+?)\s*(\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]\s*(?P<arguments>.*)", re.DOTALL
)
_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


class MistralToolParser:
    """Finds the calls after each mark; other text becomes a failed call, so that it is not lost."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._mark: int = tokenizer.convert_tokens_to_ids(MARK)

    def extract(self, ids: list[int]) -> tuple[list[int], list[ParsedToolCall]]:
        """Return the ids before the first mark, and every attempt at a call after it."""
        marks = [at for at, token in enumerate(ids) if token == self._mark]
        if not marks:
            return ids, []
        calls: list[ParsedToolCall] = []
        for start, end in zip(marks, [*marks[1:], len(ids)], strict=True):
            text = self._tokenizer.decode(ids[start + 1 : end], skip_special_tokens=False)
            calls.extend(_listed(text) if text.lstrip().startswith("[{") else [_named(text)])
        return ids[: marks[0]], calls


def _listed(text: str) -> Iterator[ParsedToolCall]:
    """The calls of a JSON list, up to where the JSON breaks."""
    at = text.index("[") + 1
    while not text.startswith("]", at := _end_of(_BETWEEN, text, at)):
        try:
            item, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError:
            yield _failed(text[at:])
            return
        yield _call(item, text[at:end])
        at = end
    if text[at + 1 :].strip():
        yield _failed(text[at + 1 :])


def _named(text: str) -> ParsedToolCall:
    found = _NAMED.fullmatch(text)
    if found is None:
        return _failed(MARK + text)
    try:
        arguments = json.loads(found["arguments"])
    except json.JSONDecodeError:
        return _failed(MARK + text)
    return _call({"name": found["name"], "arguments": arguments, "id": found["id"]}, text)


def _call(item: Any, text: str) -> ParsedToolCall:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=text, status=ToolCallParseStatus.MISSING_NAME)
    native = item.get("id")
    return ParsedToolCall(
        raw=text, name=name, arguments=item.get("arguments", {}), id=native if isinstance(native, str) else None
    )


def _failed(text: str) -> ParsedToolCall:
    return ParsedToolCall(raw=text, status=ToolCallParseStatus.UNCLOSED_BLOCK)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # the pattern matches the empty text too
    return found.end()


TOOL_PARSERS[NAME] = MistralToolParser
