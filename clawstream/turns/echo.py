"""Find an answer in the history of a later request. Pure.

The one rule: an echo stands where the answer was given, after the messages that it answered; the same words elsewhere
in a history prove nothing. System messages, a client's own blocks, and what it asks for itself with the answers to that
have no place in that count: clients rewrite and drop them from request to request.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from clawstream.events import OrphanReason
from clawstream.events.conversation import (
    Message,
    is_ephemeral,
    is_housekeeping,
    is_summary,
    meaning,
    parse,
    role_of,
    same_answer,
)


@dataclass(frozen=True, slots=True)
class _Said:
    """A message that belongs to the conversation, and its index in the request."""

    index: int
    message: Message
    meaning: Hashable


@dataclass(frozen=True, slots=True)
class Echo:
    """The answer stands at `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Displaced:
    """Another message stands at `index`, where the answer was given."""

    index: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The history has changed, and the answer is not in it."""

    reason: OrphanReason


def look(asked: Sequence[bytes] | None, answer: bytes, history: Sequence[bytes]) -> Echo | Displaced | Missing | None:
    """Return where `history` has the answer to `asked`; None where it shows nothing, as the same was asked again.

    `asked` is None where the answered request is not known: then only the one message that says the same is an echo.
    """
    given = parse(answer)
    if asked is None:
        return _only_echo(given, history)
    same = _num_equal(asked, history)
    before, now = _said(asked, same), _said(history, same)
    if _starts_with(now, before):
        if len(now) == len(before):
            return None
        found = now[len(before)]
        return Echo(found.index) if same_answer(given, found.message) else Displaced(found.index)
    return _echo_in_changed(_said(asked, 0), given, _said(history, 0))


def next_state(messages: Sequence[bytes], echo: int) -> tuple[int, ...]:
    """Return the indices of what followed the echo: the user's or the tools' messages up to the next answer."""
    found: list[int] = []
    for said in _said(messages, echo + 1):
        if role_of(said.message) == "assistant":
            break
        found.append(said.index)
    return tuple(found)


def _said(messages: Sequence[bytes], start: int) -> list[_Said]:
    found: list[_Said] = []
    aside = _is_aside(messages[:start])
    for index in range(start, len(messages)):
        message = parse(messages[index])
        if not _belongs(message):
            continue
        if role_of(message) == "user":
            aside = is_housekeeping(message)
        if not aside:
            found.append(_Said(index, message, meaning(message)))
    return found


def _belongs(message: Message) -> bool:
    return role_of(message) != "system" and not is_ephemeral(message)


def _is_aside(before: Sequence[bytes]) -> bool:
    """Return whether what follows `before` answers what the client asked for itself."""
    for raw in reversed(before):
        message = parse(raw)
        if role_of(message) == "user" and not is_ephemeral(message):
            return is_housekeeping(message)
    return False


def _num_equal(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number
    return min(len(left), len(right))


def _starts_with(now: Sequence[_Said], before: Sequence[_Said]) -> bool:
    return len(before) <= len(now) and _num_same(now, before) == len(before)


def _num_same(left: Sequence[_Said], right: Sequence[_Said]) -> int:
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one.meaning != other.meaning:
            return number
    return min(len(left), len(right))


def _echo_in_changed(before: Sequence[_Said], given: Message, now: Sequence[_Said]) -> Echo | Missing:
    """Return the echo in a history that is not what was asked and more.

    Two changes keep the proof: the last message asked was rewritten where it stood, as by clients that add context to
    a request only; or the beginning was cut or summarised and the answer still follows the message that it answered.
    """
    kept = _num_same(before, now)
    if kept == len(before) - 1 and len(now) > len(before) and same_answer(given, now[len(before)].message):
        return Echo(now[len(before)].index)
    following = [
        echo.index
        for asked, echo in pairwise(now)
        if before and asked.meaning == before[-1].meaning and same_answer(given, echo.message)
    ]
    return Echo(following[0]) if len(following) == 1 else Missing(_reason(before, now, kept))


def _only_echo(given: Message, history: Sequence[bytes]) -> Echo | None:
    found = [said.index for said in _said(history, 0) if same_answer(given, said.message)]
    return Echo(found[0]) if len(found) == 1 else None


def _reason(before: Sequence[_Said], now: Sequence[_Said], kept: int) -> OrphanReason:
    if now and is_summary(now[0].message) and kept == 0:
        return OrphanReason.COMPACTED
    later_kept = not {old.meaning for old in before[kept:]}.isdisjoint(new.meaning for new in now[kept:])
    if kept == 0 and not later_kept:
        return OrphanReason.RESET
    if later_kept and len(now) <= len(before):
        return OrphanReason.COMPACTED
    return OrphanReason.EDITED
