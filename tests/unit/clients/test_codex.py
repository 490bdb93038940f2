"""What Codex 0.169.0 sends: which session it is, what it asks for itself, and which of its words are the user's."""

import json
from typing import Any

import pytest

from clawstream.conversation.messages import Author, MessagePiece, written
from clawstream.events import TurnType
from clawstream.gateway.dialects.responses import read_responses
from clawstream.gateway.requests.profiles import RequestIdentity, name_request

SESSION = "01a20964-070d-78e0-b87c-fc2132f83aad"
THREAD = "01a20964-9999-78e0-b87c-fc2132f83aad"


def metadata(**more: str) -> str:
    return json.dumps({"session_id": SESSION, "thread_id": SESSION, "request_kind": "turn"} | more)


HEADERS = {
    "x-codex-beta-features": "remote_compaction_v2",
    "x-codex-window-id": f"{SESSION}:0",
    "x-codex-turn-metadata": metadata(),
    "x-client-request-id": SESSION,
    "session-id": SESSION,
    "thread-id": SESSION,
    "originator": "codex_exec",
}
BODY: dict[str, Any] = {
    "model": "policy",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_01a20964-0812-7b41-bd0a-27c33a5d6620",
            "role": "user",
            "content": [{"type": "input_text", "text": "List the files."}],
        },
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": SESSION,
    "client_metadata": {"session_id": SESSION, "thread_id": SESSION},
}


def named(headers: dict[str, str]) -> RequestIdentity:
    return name_request(headers, read_responses(BODY, False, lambda _id: None))


def test_its_session_is_ours() -> None:
    found = named(HEADERS)
    assert (found.session_id, found.client, found.turn_type) == (SESSION, "codex", TurnType.MAIN)
    assert named(HEADERS | {"x-session-id": "s1"}).session_id == "s1"


def test_a_sub_agent_s_thread_has_a_session_of_its_own() -> None:
    assert named(HEADERS | {"thread-id": THREAD}).session_id == f"{SESSION}.{THREAD}"


def test_a_session_id_header_of_another_client_is_none_of_codex() -> None:
    assert named({"session-id": SESSION}).session_id is None


def test_what_it_asks_for_itself_is_a_side_turn() -> None:
    compaction = HEADERS | {"x-codex-turn-metadata": metadata(request_kind="compaction")}
    assert named(compaction).turn_type is TurnType.SIDE
    assert named(HEADERS | {"x-codex-turn-metadata": "no json"}).turn_type is TurnType.MAIN


@pytest.mark.parametrize(
    "text",
    [
        "# AGENTS.md instructions for /work\n\n<INSTRUCTIONS>\nAlways be kind.\n\n</INSTRUCTIONS>",
        "<environment_context>\n  <cwd>/work</cwd>\n  <shell>bash</shell>\n</environment_context>",
        "<turn_aborted>\nThe user interrupted the previous turn on purpose.\n</turn_aborted>",
        "Another language model started to solve this problem and produced a summary of its thinking process. You also",
    ],
)
def test_what_it_writes_in_the_user_s_place_is_the_environment_s(text: str) -> None:
    assert written(text) == MessagePiece(Author.ENVIRONMENT, text)
