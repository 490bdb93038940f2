"""The session, the turn type, the task and the attempt of a request, which each client names in its own way. Pure.

An explicit name (header, then body) has precedence over anything read out of a message. An unusable name is refused
wherever it stands, a group's too, and no session id is invented here.

A group belongs to its asker (the API key, or whose policy is asked), and is recorded as ASKER/GROUP. Advantages are
computed among all attempts of a group, so another asker that could join it could skew them. OpenClaw's form was
recorded from OpenClaw 2026.9.6, Codex's from Codex 0.169.0.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from clawstream.conversation.messages import Message, is_ephemeral, is_housekeeping, parts_of, role_of, text_of
from clawstream.events import TurnType
from clawstream.gateway.requests.fields import BadRequest, check_name
from clawstream.gateway.requests.wire import ChatRequest, truthy

MAX_GROUP_SIZE = 4096
MAX_STEP_INDEX = 10**6
_DIGITS = re.compile(r"0|[1-9][0-9]{0,8}")
_COUNT = re.compile(r"[0-9]{1,9}")  # a longer one is ignored
_RUNTIME = re.compile(r"(?:\A|\n)Runtime: agent=[^\n]*\| sessionId=([!-~]{1,200}) \|[^\n]*\s*\Z")
_RUNTIME_CHARACTERS = 4000
# The beginning of session ids of the client's own side conversations, which are no part of the main one.
_DETACHED = "internal-session-effects-"
_CLAUDE_CODE = "x-claude-code-session-id"
_CLAUDE_CODE_AGENT = "x-claude-code-agent-id"
_CODEX = "x-codex-turn-metadata"
_CODEX_TURN = "turn"  # the kind of an ordinary request, not a compaction or another one of Codex's own
_SUMMARISING = "You are a context summarization assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """The request's group, and its place there."""

    group_id: str
    size: int | None  # attempts at the task; None: not said
    step_index: int | None  # None: its number among the session's turns

    def of_asker(self, asker: str | None) -> "Grouped":
        """Return the group as recorded: under its asker, so that another's group of that name is a different one."""
        return self if asker is None else replace(self, group_id=f"{asker}/{self.group_id}")


def read_group(headers: Mapping[str, str]) -> Grouped | None:
    """Return the group that the headers name; None: they name none. Raises BadRequest for unusable headers."""
    group_id = headers.get("x-group-id") or None
    size = _number(headers, "X-Group-Size", low=1, high=MAX_GROUP_SIZE)
    step_index = _number(headers, "X-Step-Index", low=0, high=MAX_STEP_INDEX)
    if group_id is None:
        for name, value in (("X-Group-Size", size), ("X-Step-Index", step_index)):
            if value is not None:
                raise BadRequest(f"{name} is {value}, without X-Group-Id; expected both, or neither.", param=name)
        return None
    return Grouped(group_id=check_name(group_id, "X-Group-Id"), size=size, step_index=step_index)


def _number(headers: Mapping[str, str], name: str, *, low: int, high: int) -> int | None:
    found = headers.get(name.lower(), "").strip()
    if not found:
        return None
    if not _DIGITS.fullmatch(found) or not low <= int(found) <= high:
        raise BadRequest(f"{name} is {found[:50]!r}; expected a whole number from {low} to {high}.", param=name)
    return int(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIdentity:
    """The names that a request gives. `client` is the profile that named the session; None where none did."""

    session_id: str | None
    client: str | None
    turn_type: TurnType
    session_done: bool
    retry_count: int | None
    group: Grouped | None


def name_request(headers: Mapping[str, str], request: ChatRequest) -> RequestIdentity:
    """Return session, turn and group by headers, body and messages. Raises BadRequest for unusable names."""
    named = (
        ("headers", headers.get("x-session-id") or None),
        ("body", request.session_id),
        ("openclaw", openclaw_session(request.messages)),
        ("claude-code", claude_code_session(headers)),
        ("codex", codex_session(headers)),
    )
    for _, name in named:
        if name is not None:
            check_name(name, "The session id", param="session_id")
    client, session_id = next(((who, what) for who, what in named if what is not None), (None, None))
    turn_types = [_turn_type(word) for word in (headers.get("x-turn-type"), request.turn_type) if word]
    if not turn_types:
        aside = (
            claude_code_housekeeping(headers, request.options)
            or codex_housekeeping(headers)
            or openclaw_housekeeping(request.messages)
        )
        turn_types = [TurnType.SIDE if aside else TurnType.MAIN]
    retries = headers.get("x-stainless-retry-count", "")
    return RequestIdentity(
        session_id=session_id,
        client=client,
        turn_type=turn_types[0],
        session_done=request.session_done or truthy(headers.get("x-session-done")),
        retry_count=int(retries) if _COUNT.fullmatch(retries) else None,
        group=read_group(headers),
    )


def openclaw_session(messages: tuple[Message, ...]) -> str | None:
    """Return the id in the Runtime line at the end of the first user message that has one."""
    for message in messages:
        if role_of(message) == "user":
            for part in parts_of(message):
                found = _RUNTIME.search(part[-_RUNTIME_CHARACTERS:])
                if found:
                    return found.group(1)
    return None


def openclaw_housekeeping(messages: tuple[Message, ...]) -> bool:
    """Return whether OpenClaw asks for itself: a heartbeat, a memory flush, a reminder, a summary, a cron job."""
    if messages and role_of(messages[0]) == "system" and text_of(messages[0]).startswith(_SUMMARISING):
        return True
    if (openclaw_session(messages) or "").startswith(_DETACHED):
        return True
    asked = (one for one in reversed(messages) if role_of(one) == "user" and not is_ephemeral(one))
    return any(is_housekeeping(message) for message in islice(asked, 1))


def claude_code_session(headers: Mapping[str, str]) -> str | None:
    """Return the id that Claude Code sends with each request; a sub-agent's conversation has one of its own.

    Source: the gateway protocol reference on code.claude.com, and requests of Claude Code 2.1.197.
    """
    session, agent = headers.get(_CLAUDE_CODE), headers.get(_CLAUDE_CODE_AGENT)
    return f"{session}.{agent}" if session and agent else session or None


def claude_code_housekeeping(headers: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    """Return whether Claude Code asks for itself, for a title for instance: then the request offers no tools."""
    return bool(headers.get(_CLAUDE_CODE)) and not options.get("tools")


def codex_session(headers: Mapping[str, str]) -> str | None:
    """Return the id that Codex sends with each request; a sub-agent's thread has one of its own."""
    if _CODEX not in headers:
        return None
    session, thread = headers.get("session-id"), headers.get("thread-id")
    return f"{session}.{thread}" if session and thread and session != thread else session or thread or None


def codex_housekeeping(headers: Mapping[str, str]) -> bool:
    """Return whether Codex asks for itself, for a summary for instance."""
    try:
        said = json.loads(headers.get(_CODEX, "{}"))
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("request_kind", _CODEX_TURN) != _CODEX_TURN


def _turn_type(word: str) -> TurnType:
    try:
        return TurnType(word.strip().lower())
    except ValueError as error:
        raise BadRequest(f"The turn type is {word[:50]!r}; expected main or side.", param="turn_type") from error
