"""What Claude Code 2.1.197 sends, by its headers: which session it is, and what it asks for itself."""

from typing import Any

from clawstream.events import TurnType
from clawstream.gateway.dialects.anthropic import read_messages
from clawstream.gateway.requests.profiles import RequestIdentity, name_request

SESSION = {"x-claude-code-session-id": "c3afa137-c8cb-4090-87f2-e5207391f435"}
TOOL = {"name": "Read", "input_schema": {"type": "object"}}


def named(headers: dict[str, str], **more: Any) -> RequestIdentity:
    body = {
        "model": "policy",
        "max_tokens": 32_000,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "The following skills are available."},
        ],
        "tools": [TOOL],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    return name_request(headers, read_messages(body | more))


def test_its_session_is_ours() -> None:
    found = named(SESSION)
    assert (found.session_id, found.client) == (SESSION["x-claude-code-session-id"], "claude-code")
    assert found.turn_type is TurnType.MAIN


def test_a_sub_agent_has_a_session_of_its_own() -> None:
    found = named(SESSION | {"x-claude-code-agent-id": "af07d9904cec35c84"})
    assert found.session_id == f"{SESSION['x-claude-code-session-id']}.af07d9904cec35c84"
    assert found.turn_type is TurnType.MAIN


def test_what_it_asks_without_tools_is_a_side_turn_unless_a_header_says_otherwise() -> None:
    assert named(SESSION, tools=[]).turn_type is TurnType.SIDE
    assert named(SESSION | {"x-turn-type": "main"}, tools=[]).turn_type is TurnType.MAIN
    assert named({}, tools=[]).turn_type is TurnType.MAIN


def test_a_session_header_of_ours_goes_before_its_own() -> None:
    assert named(SESSION | {"x-session-id": "s1"}).session_id == "s1"
