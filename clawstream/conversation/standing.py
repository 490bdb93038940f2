"""How much of a request still stands in a later request's history, and where the history goes on. Pure.

Only messages of the conversation are compared, and of a user's message each line that the person wrote. Clients join
messages of one role, drop some, and put a summary in the place of the first ones.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from clawstream.conversation.main_messages import main_messages
from clawstream.conversation.messages import Message, lines_of, parse, role_of, said_in


@dataclass(frozen=True, slots=True)
class Said:
    """A unit of the conversation: a message, or a person's line of one, with the message's index in the request."""

    index: int
    message: Message
    meaning: Hashable


@dataclass(frozen=True, slots=True)
class Continued:
    """How a history goes on behind an earlier request's messages."""

    last: int  # index of the last message in it that was asked
    found: Said | None  # the first new unit; None: nothing is new
    num_lines: int  # of `found`'s message, lines that were asked before: the client joined both
    exact: bool  # exactly what was asked precedes `found`


def said(messages: Sequence[bytes], start: int = 0) -> list[Said]:
    """Return the units of the conversation from message `start` on."""
    return list(each_said(messages, start))


def each_said(messages: Sequence[bytes], start: int) -> Iterator[Said]:
    """Yield the units of the conversation from message `start` on."""
    for index, message in main_messages(messages, start):
        for meaning in said_in(message):
            yield Said(index, message, meaning)


def num_equal(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """Return how many leading messages are equal."""
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number
    return min(len(left), len(right))


def num_same(left: Sequence[Said], right: Sequence[Said]) -> int:
    """Return how many leading units have the same meaning."""
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one.meaning != other.meaning:
            return number
    return min(len(left), len(right))


def starts_with(now: Sequence[Said], before: Sequence[Said]) -> bool:
    """Return whether `now` begins with all of `before`."""
    return len(before) <= len(now) and num_same(now, before) == len(before)


def left_of(before: Sequence[Said], now: Sequence[Said]) -> tuple[int, int]:
    """Return how many leading units of `now` are left of `before` after dropping some, and how far into `before`.

    Each unit is matched as early in `before` as possible.
    """
    reached = 0
    for number, one in enumerate(now):
        at = next((at for at in range(reached, len(before)) if before[at].meaning == one.meaning), None)
        if at is None:
            return number, reached
        reached = at + 1
    return len(now), reached


def continued(asked: Sequence[bytes], history: Sequence[bytes]) -> Continued | None:
    """Return how `history` goes on behind the messages `asked`; None where the person's last one can't be found.

    Messages before and behind that one may have been dropped, or replaced by a summary.
    """
    same = num_equal(asked, history)
    before, now = said(asked, same), said(history, same)
    num_left, exact = len(before), starts_with(now, before)
    if not exact:
        before, now = said(asked), said(history)
        num_left, reached = left_of(before, now)
        persons = [at for at, one in enumerate(before) if role_of(one.message) == "user"]
        if not persons or reached <= persons[-1]:
            return None
    last = now[num_left - 1].index if num_left else same - 1
    found = now[num_left] if num_left < len(now) else None
    joined = found is not None and found.index == last
    return Continued(last, found, sum(one.index == last for one in now[:num_left]) if joined else 0, exact)


def reaction(asked: Sequence[bytes], history: Sequence[bytes], next_state: Sequence[int]) -> tuple[Message, ...]:
    """Return the messages that followed an answer to `asked` that was cut off.

    Where the client joined the first of them to the question, the question's lines are left out.
    """
    first, *more = (parse(history[index]) for index in next_state)
    going_on = continued(asked, history)
    if going_on is not None and going_on.found is not None and going_on.found.index == next_state[0]:
        first = _without(first, going_on.num_lines)
    return first, *more


def _without(message: Message, num_lines: int) -> Message:
    """Return a user's message without its first `num_lines` lines."""
    content = message["content"]
    kept: list[object] = []
    for part in [content] if isinstance(content, str) else content:
        text = part if isinstance(part, str) else part.get("text", "")
        lines = lines_of({"content": text}) if num_lines else ()
        if not num_lines:
            kept.append(part)
        elif len(lines) > num_lines:
            rest = "\n".join(lines[num_lines:])
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
        num_lines = max(0, num_lines - len(lines))
    return {**message, "content": kept[0] if isinstance(content, str) else kept}
