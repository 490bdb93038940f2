"""Sessions of a real OpenClaw 2026.9.6: what it asked, what it was answered, and what was said to each answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from clawstream.conversation.messages import role_of, text_of, written_in
from clawstream.events import TurnPaired
from tests import recorded
from tests.sessions import Json

_FILE = Path(__file__).with_name("recorded_sessions.json")


class Asked(NamedTuple):
    """A request and its answer; of one that its client left, what the client had got."""

    messages: list[Json]
    answer: Json
    gone: bool
    trace_id: str


def session(name: str) -> list[Asked]:
    """What took place in a session, in order."""
    found: list[Asked] = []
    history: list[Json | str] = []
    for one in json.loads(_FILE.read_text())[name]:
        history = history[: one["kept"]] + one["new"]
        messages = [recorded.SYSTEM, *(recorded.BLOCK if isinstance(said, str) else said for said in history)]
        found.append(Asked(messages, one["answer"], one.get("gone", False), one["trace_id"]))
    return found


def reaction(turn: TurnPaired, answer: Json, next_request: Sequence[Json]) -> tuple[str, str]:
    """The answer, and who said what to it, as `REACTIONS` has them."""
    return said(answer), " / ".join(said(next_request[index]) for index in turn.next_state)


def said(message: Json) -> str:
    if role_of(message) == "user":
        return " ".join(f"{piece.author}: {piece.text}" for piece in written_in(message))[:60]
    called = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return text_of(message)[:60] or f"calls {', '.join(called)}"


# What people, tools and helpers said to the answers of a real OpenClaw 2026.9.6, session by session.
REACTIONS = {
    "abort": [
        ("Answer 1.", "person: Please talk for long."),
        ("word0 word1", "person: That is wrong, shorter."),
        ("word0 word1 word2 word3", "person: Thanks."),
        ("Answer 4.", "person: More."),
    ],
    "unknown_tool": [
        ("calls frobnicate", "Tool frobnicate not found"),
        ("Frob 8.", "person: That is wrong."),
        ("Answer 9.", "person: More."),
    ],
    "empty": [
        ("Answer 12.", "person: That is wrong."),
        ("Answer 13.", "person: More."),
    ],
    "thinking_only": [
        ("Answer 16.", "person: That is wrong."),
        ("Answer 17.", "person: More."),
    ],
    "settled_tools": [
        ("calls exec", "sett-2"),
        ("Answer 22.", "person: That is wrong."),
        ("Answer 23.", "person: More."),
    ],
    "stop": [
        ("Answer 25.", "person: Please talk for long."),
        ("word0 word1", "person: That is wrong, shorter."),
        ("word0 word1 word2 word3", "person: Thanks."),
    ],
    "steer": [
        ("calls exec", "slow-2done / person: And do it in blue. / person: And in red."),
        ("Answer 31.", "person: Thanks."),
        ("Answer 32.", "person: More."),
    ],
    "collect": [
        ("calls exec", "slow-2done"),
        ("Answer 36.", "person: And do it in blue.\n\nAnd in red."),
        ("Answer 37.", "person: Thanks.\n\nMore."),
    ],
    "followup": [
        ("calls exec", "slow-2done"),
        ("Answer 41.", "person: And do it in blue."),
        ("Answer 42.", "person: And in red."),
        ("Answer 43.", "person: Thanks."),
        ("Answer 44.", "person: More."),
    ],
    "interrupt": [
        ("Answer 46.", "person: Please talk for long."),
        ("word0 word1", "person: That is wrong, shorter."),
        ("word0 word1 word2 word3", "person: Thanks."),
        ("Answer 49.", "person: More."),
    ],
    "steer_text": [
        ("Answer 51.", "person: Please talk for long."),
        ("word0 word1 word2 word3", "person: Stop that, shorter."),
        ("Answer 53.", "person: Thanks."),
        ("Answer 54.", "person: More."),
    ],
    "delegate": [
        ("calls tool_call", '{\n  "tool": {\n    "id": "openclaw:core:sessions_spawn",\n    '),
        ("Answer 58.", "environment: A background task completed. Use this result to"),
        ("Answer 60.", "person: That is wrong."),
        ("Answer 61.", "person: More."),
    ],
    "compact": [
        ("Answer 63.", "person: Two."),
        ("Answer 64.", "person: Three."),
        ("Answer 65.", "person: Four."),
        ("Answer 67.", "person: Five."),
        ("Answer 68.", "person: Six."),
    ],
    "compacted_by_itself": [
        ("Answer 70.", "person: Two many words"),
        ("Answer 71.", "person: Three."),
        ("Answer 72.", "person: Four many words"),
        ("Answer 73.", "person: Five."),
        ("Answer 74.", "person: Six other words"),
    ],
}
NUM_REACTIONS = sum(map(len, REACTIONS.values()))
# Of the answers to the newest request of a session nobody knows yet; an answer that says nothing is never shown.
UNSHOWN = {"empty": 1, "thinking_only": 1, "settled_tools": 1}
