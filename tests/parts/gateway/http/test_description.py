"""What GET /openapi.json says and what the code does are the same: fields that are read, statuses that can come."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from clawstream.gateway.dialects import anthropic, responses
from clawstream.gateway.dialects.anthropic_replies import signature
from clawstream.gateway.http.pages import openapi_json
from clawstream.gateway.requests.feedback import read_feedback
from clawstream.gateway.requests.wire import read_request, scope_of
from clawstream.gateway.sessions import RecalledResponse
from clawstream.rendering.renderer import PromptRenderer

Json = dict[str, Any]
PUBLISHED: Json = orjson.loads(openapi_json())
GATEWAY = Path(anthropic.__file__).parents[1]
TEXT = [{"type": "text", "text": "Hello"}]
FUNCTION = {"name": "exec", "description": "Runs.", "parameters": {}}
OPENAI: Json = {
    "messages": [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    "tools": [{"type": "function", "function": FUNCTION}],
    "metadata": {"session_id": "s"},
    "chat_template_kwargs": {"enable_thinking": False},
}
CALL = {"type": "tool_use", "id": "c", "name": "exec", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": signature("hm")}
ANTHROPIC: Json = {
    "max_tokens": 1,
    "system": TEXT,
    "messages": [
        {"role": "assistant", "content": [THOUGHT, CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXT}, *TEXT]},
    ],
    "tools": [{"name": "exec", "input_schema": {}}],
    "tool_choice": {"type": "tool", "name": "exec"},
    "thinking": {"type": "enabled"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stream_options": {"include_usage": True},
    "metadata": {"session_id": "s"},
}
RESPONSES: Json = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "id": "msg_1"},
        {"type": "function_call", "call_id": "c", "name": "exec", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": [{"type": "input_image", "detail": "low"}]},
        {"type": "item_reference", "id": f"msg_{'0' * 8}-0000-4000-8000-{'0' * 12}"},
    ],
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "exec"}]},
    ],
    "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "include": ["reasoning.encrypted_content"],
    "stream_options": {"include_usage": True},
    "metadata": {"session_id": "s"},
    "chat_template_kwargs": {"enable_thinking": False},
}
EXEC = {"type": "function", "function": {"name": "exec"}}
FORCING = OPENAI | {"tool_choice": EXEC}
ALLOWING = OPENAI | {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [EXEC]}}}
RESPONSES_FORCING = RESPONSES | {"tool_choice": {"type": "function", "name": "exec"}}
RESPONSES_ALLOWING = RESPONSES | {
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "exec"}]}
}
THE_TEMPLATE_S = {"chat_template_kwargs.enable_thinking"}  # the renderers package reads it
FEEDBACK: Json = {"response_id": "0" * 8 + "-0000-0000-0000-" + "0" * 12, "thumb": "up", "text": "Good."}


class Watched(dict[str, Any]):
    """A JSON object that notes the path of each field that is asked for; lists are no part of a path."""

    def __init__(self, found: Mapping[str, Any], asked: set[str], path: str = "") -> None:
        super().__init__({key: _watched(value, asked, f"{path}{key}.") for key, value in found.items()})
        self._asked, self._path = asked, path

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(self._path + key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._asked.add(self._path + key)
        return super().__getitem__(key)


def _watched(value: Any, asked: set[str], path: str) -> Any:
    if isinstance(value, dict):
        return Watched(value, asked, path)
    return [_watched(item, asked, path) for item in value] if isinstance(value, list) else value


def described(name: str) -> dict[str, bool]:
    """The paths of a schema's fields, and whether anything is said of their values."""
    found: dict[str, bool] = {}
    for path, bound in _fields(PUBLISHED["components"]["schemas"][name]):
        found[path] = bound or found.get(path, False)
    return found


def _fields(schema: Json, path: str = "") -> Iterator[tuple[str, bool]]:
    if "$ref" in schema:
        yield from _fields(PUBLISHED["components"]["schemas"][schema["$ref"].rpartition("/")[2]], path)
    for part in (*schema.get("oneOf", ()), *([schema["items"]] if "items" in schema else ())):
        yield from _fields(part, path)
    for key, value in schema.get("properties", {}).items():
        yield path + key, bool(value.keys() - {"description"})
        yield from _fields(value, f"{path}{key}.")


def read_openai(body: Json, renderer: PromptRenderer) -> set[str]:
    asked: set[str] = set()
    chat = read_request(Watched(body, asked))
    options = Watched(chat.options, asked)
    scope_of(options)
    renderer.prompt_ids(chat.messages, options)
    return asked


def test_chat_reads_the_fields_that_are_described(renderer: PromptRenderer) -> None:
    fields = described("Chat")
    bodies = (OPENAI, FORCING, ALLOWING)
    asked = set[str]().union(THE_TEMPLATE_S, *(read_openai(body, renderer) for body in bodies))
    assert asked - fields.keys() == set()
    assert {path for path, bound in fields.items() if bound} - asked == set()


@pytest.mark.parametrize(("name", "counted"), [("Messages", False), ("Counted", True)])
def test_messages_reads_the_fields_that_are_described(
    renderer: PromptRenderer, monkeypatch: pytest.MonkeyPatch, name: str, counted: bool
) -> None:
    fields, asked, passed_on = described(name), set[str](), set[str]()
    monkeypatch.setattr(anthropic, "read_request", lambda body, ends: read_request(Watched(body, passed_on), ends))
    chat = anthropic.read_messages(Watched(ANTHROPIC, asked), counted=counted)
    renderer.prompt_ids(chat.messages, Watched(chat.options, passed_on))
    scope_of(Watched(chat.options, passed_on))
    asked |= THE_TEMPLATE_S | {path for path in passed_on if "." not in path} | (passed_on & fields.keys())
    assert asked - fields.keys() == set()
    assert {path for path, bound in fields.items() if bound} - asked == set()


def test_responses_reads_the_fields_that_are_described(
    renderer: PromptRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, asked, passed_on = described("Responses"), set[str](), set[str]()
    monkeypatch.setattr(responses, "read_request", lambda body, ends: read_request(Watched(body, passed_on), ends))
    recalled = RecalledResponse(session_id="s", before=(), answer={"role": "assistant", "content": "Hi."})
    for body in (RESPONSES_FORCING, RESPONSES_ALLOWING):
        responses.read_responses(Watched(body, asked), False, lambda _id: recalled)
    chat = responses.read_responses(Watched(RESPONSES, asked), False, lambda _id: recalled)
    renderer.prompt_ids(chat.messages, Watched(chat.options, passed_on))
    scope_of(Watched(chat.options, passed_on))
    responses.conversation_of(chat.messages_json, Watched(chat.options, passed_on))
    own = {"responses"}  # what the translation notes
    asked |= THE_TEMPLATE_S | {path for path in passed_on if "." not in path} - own | (passed_on & fields.keys())
    assert asked - fields.keys() == set()
    assert {path for path, bound in fields.items() if bound} - asked == set()


def test_feedback_reads_the_fields_that_are_described() -> None:
    asked: set[str] = set()
    read_feedback(Watched(FEEDBACK, asked))
    assert asked == described("Feedback").keys()


def statuses(*modules: str) -> set[str]:
    """The statuses that these modules of the gateway name, and 400, which is a refusal's where it names none."""
    trees = [ast.parse(next(GATEWAY.rglob(f"{module}.py")).read_text()) for module in modules]
    keywords = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    values = [one.value.value for one in keywords if one.arg == "status" and isinstance(one.value, ast.Constant)]
    return {"400", *map(str, values)}


ENGINE_S = "422"  # SGLang's own, when it refuses what nobody here did
PAGE = statuses("connection") | {"405", "200"}
POST = PAGE | statuses("security", "keys", "body", "admission")
POSSIBLE = {
    "/v1/chat/completions": POST | {ENGINE_S},
    "/v1/responses": POST | {ENGINE_S},
    "/v1/messages": POST | {ENGINE_S},
    "/v1/messages/count_tokens": POST,
    "/v1/feedback": (POST | statuses("feedback") | {"201"}) - {"200"},
    "/v1/models": PAGE | statuses("security"),
    "/v1/models/{model}": PAGE | statuses("security") | {"404"},
    "/healthz": PAGE,
    "/healthz/ready": PAGE | {"503"},
    "/readyz": PAGE | statuses("security") | {"503"},
    "/metrics": PAGE | statuses("security"),
    "/openapi.json": PAGE | statuses("security"),
}


@pytest.mark.parametrize("path", [*POSSIBLE, *(PUBLISHED["paths"].keys() - POSSIBLE.keys())])
def test_every_status_that_can_come_is_described_and_no_other(path: str) -> None:
    (operation,) = PUBLISHED["paths"][path].values()
    assert operation["responses"].keys() == POSSIBLE.get(path, set())
