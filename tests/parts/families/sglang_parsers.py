"""What SGLang's own parsers make of answers; run by SGLang's interpreter, with nothing of ours imported.

Reads one JSON object a line (`reasoning_parser` or null, `opened`, `tool_parser`, `pieces`, `tools`) and writes one:
what each way of parsing says, `{"content", "reasoning", "calls": [[name, arguments], ...]}`, or `{"error"}`.
"""

import json
import sys
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser


def parsers(asked: dict[str, Any]) -> tuple[ReasoningParser | None, FunctionCallParser]:
    """Fresh ones: they keep state."""
    reasoning = None
    if asked["reasoning_parser"] is not None:
        reasoning = ReasoningParser(asked["reasoning_parser"], True, asked["opened"] or None)
    tools = [Tool.model_validate(tool) for tool in asked["tools"]]
    return reasoning, FunctionCallParser(tools, asked["tool_parser"])


def at_once(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer in one piece, as for a client that does not stream."""
    reasoning_parser, tool_parser = parsers(asked)
    text, reasoning = "".join(asked["pieces"]), ""
    if reasoning_parser is not None:
        reasoning, text = (part or "" for part in reasoning_parser.parse_non_stream(text))
    calls: list[Any] = []
    if tool_parser.has_tool_call(text):
        text, calls = tool_parser.parse_non_stream(text)
    return {"content": text, "reasoning": reasoning, "calls": [[call.name, call.parameters] for call in calls]}


def in_pieces(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer token by token."""
    reasoning_parser, tool_parser = parsers(asked)
    content, reasoning = "", ""
    calls: dict[int, list[str]] = {}

    def take(text: str, items: list[Any]) -> str:
        for item in items:
            call = calls.setdefault(item.tool_index, ["", ""])
            call[0] += item.name or ""
            call[1] += item.parameters or ""
        return text or ""

    for piece in asked["pieces"]:
        text = piece
        if reasoning_parser is not None:
            thought, text = (part or "" for part in reasoning_parser.parse_stream_chunk(piece))
            reasoning += thought
        if text:
            content += take(*tool_parser.parse_stream_chunk(text))
    if reasoning_parser is not None:
        thought, text = (part or "" for part in reasoning_parser.parse_stream_end())
        reasoning += thought
        if text:
            content += take(*tool_parser.parse_stream_chunk(text))
    content += take(*tool_parser.parse_stream_end())
    return {"content": content, "reasoning": reasoning, "calls": [calls[index] for index in sorted(calls)]}


def main() -> None:
    """Answer each line of the input."""
    for line in sys.stdin:
        asked, said = json.loads(line), {}
        for way in (at_once, in_pieces):
            try:
                said[way.__name__] = way(asked)
            except Exception as error:  # noqa: BLE001 - whatever it raises is what it says of the text
                said[way.__name__] = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
