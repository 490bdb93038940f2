"""Whose request this is: the session and the turn type that a client names, each client in its own way. Pure.

The one rule: an explicit word (header, then body) goes before anything that is read out of a message, and a session id
is never invented here. What OpenClaw sends was recorded from OpenClaw 2026.9.6.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.events import TurnType
from clawstream.events.conversation import Message, is_ephemeral, role_of, text_of
from clawstream.gateway.refusal import BadRequest
from clawstream.gateway.wire import ChatRequest, truthy

SESSION_ID = re.compile(r"[!-~]{1,200}")
_RUNTIME = re.compile(r"(?:^|\n)Runtime: agent=[^\n]*\| sessionId=([!-~]{1,200}) \|[^\n]*\s*\Z")
_TIME = re.compile(r"\A\s*\[\w{3} \d{4}-\d{2}-\d{2} \d{2}:\d{2}[^\]]*\]\s*")
# Prompts that OpenClaw writes itself, in the user's place.
_HOUSEKEEPING = re.compile(
    r"\A(?:"
    r"Follow the heartbeat monitor scratch context"
    r"|Read HEARTBEAT\.md if it exists"
    r"|\[OpenClaw (?:heartbeat poll|cron wake|exec completion|session event)\]"
    r"|Pre-compaction memory flush\."
    r"|\[cron:[^\]]+\]"
    r")"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a request says of itself. `client` is who named the session; None where nobody did."""

    session_id: str | None
    client: str | None
    turn_type: TurnType
    session_done: bool
    retry_count: int | None


def name_request(headers: Mapping[str, str], request: ChatRequest, default: TurnType) -> Named:
    """Return what headers, body and messages say of session and turn type. Raises BadRequest for unusable names."""
    named = (
        ("headers", headers.get("x-session-id") or None),
        ("body", request.session_id),
        ("openclaw", openclaw_session(request.messages)),
    )
    client, session_id = next(((who, what) for who, what in named if what is not None), (None, None))
    if session_id is not None and not SESSION_ID.fullmatch(session_id):
        raise BadRequest(
            f"The session id is {session_id[:50]!r}; expected 1 to 200 printable ASCII characters without spaces.",
            param="session_id",
        )
    retries = headers.get("x-stainless-retry-count", "")
    return Named(
        session_id=session_id,
        client=client,
        turn_type=_turn_type(headers.get("x-turn-type") or request.turn_type, request.messages, default),
        session_done=request.session_done or truthy(headers.get("x-session-done")),
        retry_count=int(retries) if retries.isascii() and retries.isdigit() else None,
    )


def openclaw_session(messages: tuple[Message, ...]) -> str | None:
    """Return the id in the Runtime line at the end of the first user message that has one."""
    for message in messages:
        if role_of(message) == "user":
            found = _RUNTIME.search(text_of(message)[-2000:])
            if found:
                return found.group(1)
    return None


def openclaw_housekeeping(messages: tuple[Message, ...]) -> bool:
    """Return whether the newest user message is a heartbeat, memory flush or cron prompt of OpenClaw's own."""
    for message in reversed(messages):
        if role_of(message) == "user" and not is_ephemeral(message):
            return bool(_HOUSEKEEPING.match(_TIME.sub("", text_of(message))))
    return False


def _turn_type(word: str | None, messages: tuple[Message, ...], default: TurnType) -> TurnType:
    if word is None:
        return TurnType.SIDE if openclaw_housekeeping(messages) else default
    try:
        return TurnType(word.strip().lower())
    except ValueError as error:
        raise BadRequest(f"The turn type is {word[:50]!r}; expected main or side.", param="turn_type") from error
