"""Find an answer in the history of a later request. Pure.

The one rule: an echo stands where the answer was given, behind what the history keeps of the messages that it answered;
the same words elsewhere prove nothing. System messages, a client's own blocks, and its housekeeping questions with
their answers are ignored, since clients rewrite and drop them. Clients also join messages of one role, drop the last
message before an answer, and put a summary in the place of the first ones.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from clawstream.conversation.history import Said, continued, each_said, left_of, num_equal, num_same, said, starts_with
from clawstream.conversation.messages import (
    Message,
    is_summary,
    main_messages,
    parse,
    role_of,
    same_answer,
    text_of,
    tool_calls_of,
)
from clawstream.events import OrphanReason

_NOTE = re.compile(r"\s*(?:\n|[\[(])")  # how a note begins that a client appends to a part of an answer


@dataclass(frozen=True, slots=True)
class Echo:
    """The answer is the message at `index`, or was cut off behind it and left out; what followed comes next."""

    index: int
    exact: bool = True  # exactly what was asked precedes the answer
    joined: bool = False  # what followed begins within that message, behind the question


@dataclass(frozen=True, slots=True)
class Displaced:
    """Another message stands at `index`, where the answer was given."""

    index: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The history has changed, and the answer is not in it."""

    reason: OrphanReason


def look(asked: Sequence[bytes] | None, answer: bytes, history: Sequence[bytes]) -> Echo | Displaced | Missing | None:
    """Return where `history` has the answer to `asked`; None: the same was asked again, which shows nothing.

    `asked` is None where the answered request is unknown; then a message is an echo only if no other says the same.
    """
    given = parse(answer)
    if asked is None:
        return _only_echo(given, history)
    same = num_equal(asked, history)
    before, now = said(asked, same), said(history, same)
    if starts_with(now, before):
        if len(now) == len(before):
            return None
        found = now[len(before)]
        return Echo(found.index) if same_answer(given, found.message) else Displaced(found.index)
    before, now = said(asked), said(history)
    summarised = _is_summarised(history)
    at = _in_changed(before, given, now, summarised=summarised)
    if at is None:
        return Missing(_reason(before, now, summarised=summarised))
    return Echo(now[at].index, exact=False) if at < len(now) else None


def look_behind(asked: Sequence[bytes], part: bytes, history: Sequence[bytes]) -> Echo | Displaced | Missing | None:
    """Return where `history` goes on after an answer that was cut off, of which the client got `part`.

    Some clients keep what they got, others drop it; some join what the person says next to what was asked. None where
    the same was asked again.
    """
    going_on = continued(asked, history)
    if going_on is None:
        return Missing(_reason(said(asked), said(history), summarised=_is_summarised(history)))
    found = going_on.found
    if found is None:
        return None
    if role_of(found.message) == "user":
        return Echo(going_on.last, exact=going_on.exact, joined=going_on.num_lines > 0)
    if _is_part(parse(part), found.message):
        return Echo(found.index, exact=going_on.exact)
    return Displaced(found.index)


def stands_at(index: int, asked: Sequence[bytes] | None, answer: bytes, history: Sequence[bytes]) -> bool:
    """Return whether the answer is the message at `index`, behind all that was asked and nothing else."""
    if asked is None:
        return look(None, answer, history) == Echo(index)
    same = num_equal(asked, history)
    now = each_said(history, same)
    for one in each_said(asked, same):
        found = next(now, None)
        if found is None or found.meaning != one.meaning:
            return False
    found = next(now, None)
    return found is not None and found.index == index and same_answer(parse(answer), found.message)


def next_state(messages: Sequence[bytes], echo: Echo) -> tuple[int, ...]:
    """Return the indices of what followed the echo: the user's or the tools' messages up to the next answer."""
    found: list[int] = []
    for index, message in main_messages(messages, echo.index if echo.joined else echo.index + 1):
        if role_of(message) == "assistant":
            break
        found.append(index)
    return tuple(found)


def _is_summarised(history: Sequence[bytes]) -> bool:
    return any(is_summary(message) for _, message in islice(main_messages(history), 1))


def _in_changed(before: Sequence[Said], given: Message, now: Sequence[Said], *, summarised: bool) -> int | None:
    """Return the answer's place in `now`, which does not begin with `before`; len(now) where nothing is new.

    Three changes still prove an echo: the last message asked was rewritten in its place, as by clients that add context
    to one request only; messages before the answer were dropped, all of them only where a summary replaces them; or the
    beginning was cut and the answer still follows the message that it answered.
    """
    rewritten = _behind_rewritten(before, now)
    if rewritten is not None and same_answer(given, now[rewritten].message):
        return rewritten
    num_left = left_of(before, now)[0]
    if summarised and num_left == len(now) > 0:
        return num_left
    if (num_left or summarised) and num_left < len(now) and _is_echo(given, now[num_left].message, before):
        return num_left
    following = _following(before, given, now)
    return following[0] if len(following) == 1 and not _following(before, given, before) else None


def _following(before: Sequence[Said], given: Message, now: Sequence[Said]) -> list[int]:
    """Return the places at which the answer, or an equal one, directly follows the last message asked."""
    return [
        number + 1
        for number, (asked, echo) in enumerate(pairwise(now))
        if before and asked.meaning == before[-1].meaning and same_answer(given, echo.message)
    ]


def _behind_rewritten(before: Sequence[Said], now: Sequence[Said]) -> int | None:
    """Return the place behind the message that replaced the last one asked; None where no message did."""
    last = next((number for number, one in enumerate(before) if one.index == before[-1].index), None)
    if last is None or last >= len(now) or num_same(before, now) < last:
        return None
    return next((number for number in range(last, len(now)) if now[number].index != now[last].index), None)


def _is_echo(given: Message, found: Message, before: Sequence[Said]) -> bool:
    """Return whether `found` is the answer, or the answer joined to the one before it, the rest between dropped."""
    if same_answer(given, found):
        return True
    earlier = next((one.message for one in reversed(before) if role_of(one.message) == "assistant"), None)
    words = text_of(given).strip()
    if earlier is None or role_of(found) != "assistant" or not words or tool_calls_of(given) or tool_calls_of(found):
        return False
    return text_of(found).strip() == f"{text_of(earlier).strip()}\n{words}"


def _is_part(given: Message, found: Message) -> bool:
    """Return whether `found` may be what the client kept of the answer: its beginning, or all of it with a note.

    Text that goes on without such a note is another model's answer, as is one with more calls than the client got.
    """
    kept, got = text_of(found).strip(), text_of(given).strip()
    if not (kept and got) or len(tool_calls_of(found)) > len(tool_calls_of(given)):
        return False
    return got.startswith(kept) or (kept.startswith(got) and bool(_NOTE.match(kept, len(got))))


def _only_echo(given: Message, history: Sequence[bytes]) -> Echo | None:
    found = [one.index for one in said(history) if same_answer(given, one.message)]
    return Echo(found[0]) if len(found) == 1 else None


def _reason(before: Sequence[Said], now: Sequence[Said], *, summarised: bool) -> OrphanReason:
    kept = num_same(before, now)
    if summarised and kept == 0:
        return OrphanReason.COMPACTED
    later_kept = not {old.meaning for old in before[kept:]}.isdisjoint(new.meaning for new in now[kept:])
    if kept == 0 and not later_kept:
        return OrphanReason.RESET
    if later_kept and len(now) <= len(before):
        return OrphanReason.COMPACTED
    return OrphanReason.EDITED
