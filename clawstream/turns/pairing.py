"""Finds each answer in the history of a later request, and pairs it with the messages that follow it. Pure.

An answer is pending until the history of a later request shows what became of it. If the history repeats the answer (an
echo), the answer is paired with its next state: the messages behind the echo. If another message stands in its place,
or the history was changed and lacks it, the answer is an orphan. An echo counts only behind the messages that the
answer replied to, as far as the history keeps them. System messages, a client's own blocks and its housekeeping
questions are ignored, since clients rewrite them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.history import (
    Said,
    continued,
    each_said,
    left_of,
    num_equal,
    num_same,
    rebuild,
    said,
    starts_with,
    with_entry,
)
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
from clawstream.errors import UnusableExchange
from clawstream.events import (
    ExchangeCompleted,
    ExchangeFailed,
    OrphanReason,
    RequestDelta,
    TurnOrphaned,
    TurnPaired,
    TurnType,
)
from clawstream.stream.stage import Step

_NOTE = re.compile(r"\s*(?:\n|[\[(])")  # the beginning of a note that a client appends to a cut-off answer
MAX_PENDING = 32  # reached only by asking the same again and again; the oldest answer is then given up
MAX_ALIKE = 32  # how many of the newest equal answers are compared with a changed history


@dataclass(frozen=True, slots=True)
class Echo:
    """The answer is the message at `index`; or it was cut off and left out, and `index` is the message before it."""

    index: int
    exact: bool = True  # exactly the messages of the answered request precede the answer
    joined: bool = False  # the next state begins within the message at `index`, behind the question


@dataclass(frozen=True, slots=True)
class Displaced:
    """Another message stands at `index`, where the answer was given."""

    index: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The history has changed, and the answer is not in it."""

    reason: OrphanReason


def look(asked: Sequence[bytes] | None, answer: bytes, history: Sequence[bytes]) -> Echo | Displaced | Missing | None:
    """Return where `history` has the answer to the messages `asked`.

    None: the request only asks the same again, which shows nothing. `asked` is None where the answered request is
    unknown; then a message is an echo only if no other message of the history equals it.
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
        return Missing(_echo_reason(before, now, summarised=summarised))
    return Echo(now[at].index, exact=False) if at < len(now) else None


def look_behind(asked: Sequence[bytes], part: bytes, history: Sequence[bytes]) -> Echo | Displaced | Missing | None:
    """Return where `history` goes on after an answer that was cut off, of which the client got `part`.

    Some clients keep the part, others drop it; some join the person's next words to the question. None: the request
    only asks the same again.
    """
    going_on = continued(asked, history)
    if going_on is None:
        return Missing(_echo_reason(said(asked), said(history), summarised=_is_summarised(history)))
    found = going_on.found
    if found is None:
        return None
    if role_of(found.message) == "user":
        return Echo(going_on.last, exact=going_on.exact, joined=going_on.num_lines > 0)
    if _is_part(parse(part), found.message):
        return Echo(found.index, exact=going_on.exact)
    return Displaced(found.index)


def stands_at(index: int, asked: Sequence[bytes] | None, answer: bytes, history: Sequence[bytes]) -> bool:
    """Return whether the answer is the message at `index`, behind exactly the messages `asked`."""
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
    """Return the indices of the messages of users and tools between the echo and the next answer."""
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

    An echo is still proved after three kinds of change. The last message asked was rewritten in its place, as by
    clients that add context to one request only. Messages before the answer were dropped (all of them only where a
    summary replaces them). Or the beginning was cut, and the answer still follows the message that it answered.
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
    """Return the place behind the message that replaced the last message asked; None: it was not replaced."""
    last = next((number for number, one in enumerate(before) if one.index == before[-1].index), None)
    if last is None or last >= len(now) or num_same(before, now) < last:
        return None
    return next((number for number in range(last, len(now)) if now[number].index != now[last].index), None)


def _is_echo(given: Message, found: Message, before: Sequence[Said]) -> bool:
    """Return whether `found` is the answer, or the previous answer and this one joined into one message."""
    if same_answer(given, found):
        return True
    earlier = next((one.message for one in reversed(before) if role_of(one.message) == "assistant"), None)
    words = text_of(given).strip()
    if earlier is None or role_of(found) != "assistant" or not words or tool_calls_of(given) or tool_calls_of(found):
        return False
    return text_of(found).strip() == f"{text_of(earlier).strip()}\n{words}"


def _is_part(given: Message, found: Message) -> bool:
    """Return whether `found` may be the part of the answer that the client kept: its beginning, or all with a note.

    A message that goes on without a note, or has more calls than the client got, is another model's answer.
    """
    kept, got = text_of(found).strip(), text_of(given).strip()
    if not (kept and got) or len(tool_calls_of(found)) > len(tool_calls_of(given)):
        return False
    return got.startswith(kept) or (kept.startswith(got) and bool(_NOTE.match(kept, len(got))))


def _only_echo(given: Message, history: Sequence[bytes]) -> Echo | None:
    found = [one.index for one in said(history) if same_answer(given, one.message)]
    return Echo(found[0]) if len(found) == 1 else None


def _echo_reason(before: Sequence[Said], now: Sequence[Said], *, summarised: bool) -> OrphanReason:
    kept = num_same(before, now)
    if summarised and kept == 0:
        return OrphanReason.COMPACTED
    later_kept = not {old.meaning for old in before[kept:]}.isdisjoint(new.meaning for new in now[kept:])
    if kept == 0 and not later_kept:
        return OrphanReason.RESET
    if later_kept and len(now) <= len(before):
        return OrphanReason.COMPACTED
    return OrphanReason.EDITED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An answer that no later request has shown to be paired or orphaned."""

    turn_id: str
    asked: tuple[bytes, ...] | None  # the request's messages; None: they refer to an unknown exchange
    answer: bytes
    finished_at_ms: int
    interrupted: bool = False  # the client got no more of it than `answer`
    choice_of: str | None = None  # shared by the answers of one request; None: the request has no other


class PairingState(NamedTuple):
    """The state of a session in this stage."""

    session_id: str
    newest_exchange_id: str
    newest_at_ms: int  # when the broker appended it
    requests: Mapping[str, RequestDelta] = MappingProxyType({})  # without tokens
    pending: tuple[Pending, ...] = ()  # in answer order
    paired: Mapping[str, bytes] = MappingProxyType({})  # answers by turn; the echo of one proves no other answer
    answered: bool = False  # the session has an answer that is no side turn
    idle_after: str | None = None  # the exchange after which the session was reported as idle


def observe(
    session: PairingState | None, arrived: ExchangeCompleted | ExchangeFailed, at_ms: int
) -> Step[PairingState, None]:
    """Return the session with the exchange `arrived` added, and the pending answers that its history decides.

    An exchange seen before changes nothing. A side turn decides nothing: it is kept only as a parent of later requests.
    A failed exchange decides like any other; its own answer is pending only if the client got a part of it. A request
    with an unknown parent decides nothing, and its own answer is pending only if it is complete.
    """
    if session is not None and arrived.exchange_id in session.requests:
        return Step(session)
    session = _remember(session, arrived, at_ms)
    if arrived.turn_type is TurnType.SIDE:
        return Step(session)
    messages = _asked(session, arrived.exchange_id)
    decided = {} if messages is None else _decided(session, arrived, messages)
    paired = {
        item.turn_id: item.answer
        for item in session.pending
        if not item.interrupted and isinstance(decided.get(item.turn_id), TurnPaired)
    }
    left = tuple(item for item in session.pending if item.turn_id not in decided)
    session = session._replace(pending=left, paired=MappingProxyType({**session.paired, **paired}))
    asked = _pending(arrived, messages)
    if asked is None:
        return Step(session, [*decided.values()])
    given_up = [_orphan(item, arrived, OrphanReason.REGENERATED) for item in left[: 1 - MAX_PENDING]]
    kept = (*left[1 - MAX_PENDING :], asked)
    return Step(session._replace(pending=kept, answered=True), [*decided.values(), *given_up])


def _pending(arrived: ExchangeCompleted | ExchangeFailed, asked: tuple[bytes, ...] | None) -> Pending | None:
    """Return the answer of `arrived` as pending, if it has one; a partial answer also needs a known request."""
    whole = isinstance(arrived, ExchangeCompleted)
    if arrived.message is None or (asked is None and not whole):
        return None
    return Pending(
        turn_id=arrived.exchange_id,
        asked=asked,
        answer=arrived.message,
        # A client that left may ask again before the gateway notices that it left.
        finished_at_ms=arrived.finished_at_ms if whole else arrived.received_at_ms,
        interrupted=not whole,
        choice_of=arrived.choice_of if isinstance(arrived, ExchangeCompleted) else None,
    )


def _remember(session: PairingState | None, arrived: ExchangeCompleted | ExchangeFailed, at_ms: int) -> PairingState:
    """Return the session with the messages of `arrived`, without token ids, which pairing does not need."""
    delta = replace(arrived.request, kept_tokens=0, token_ids=())
    if session is None:
        session = PairingState(
            session_id=arrived.session_id, newest_exchange_id=arrived.exchange_id, newest_at_ms=at_ms
        )
    return session._replace(
        newest_exchange_id=arrived.exchange_id,
        newest_at_ms=at_ms,
        requests=with_entry(session.requests, arrived.exchange_id, delta),
    )


def _decided(
    session: PairingState, arrived: ExchangeCompleted | ExchangeFailed, messages: Sequence[bytes]
) -> dict[str, TurnPaired | TurnOrphaned]:
    """Return the pairings and orphans that `arrived` shows, by turn id, in answer order; others stay pending."""
    findings = [_finding(session, item, messages) for item in session.pending]
    claims = _claims(findings)
    chosen = {session.pending[number].choice_of for number in claims.values()} - {None}
    decided: dict[str, TurnPaired | TurnOrphaned] = {}
    for number, (item, finding) in enumerate(zip(session.pending, findings, strict=True)):
        if isinstance(finding, Echo) and claims[finding.index] == number:
            state = next_state(messages, finding)
            if state:
                decided[item.turn_id] = TurnPaired(
                    session_id=arrived.session_id,
                    turn_id=item.turn_id,
                    next_exchange_id=arrived.exchange_id,
                    next_state=state,
                    interrupted=item.interrupted,
                )
            continue
        reason = OrphanReason.REGENERATED if item.choice_of in chosen else _reason(finding, number, claims)
        # A request that was sent before the answer was complete can't echo it, so it makes no orphan.
        if reason is not None and arrived.received_at_ms >= item.finished_at_ms:
            decided[item.turn_id] = _orphan(item, arrived, reason)
    return decided


def _finding(session: PairingState, item: Pending, messages: Sequence[bytes]) -> Echo | Displaced | Missing | None:
    """Return what the request shows of `item`. A message that is another answer's exact echo is no echo of `item`."""
    if item.interrupted and item.asked is not None:
        return look_behind(item.asked, item.answer, messages)
    found = look(item.asked, item.answer, messages)
    if isinstance(found, Echo) and not found.exact and _is_of_another(session, messages, found.index):
        return Missing(OrphanReason.EDITED)
    return found


def _is_of_another(session: PairingState, messages: Sequence[bytes], index: int) -> bool:
    said = parse(messages[index])
    alike = (turn for turn in reversed([*session.paired.items()]) if same_answer(parse(turn[1]), said))
    return any(
        stands_at(index, _asked(session, turn_id), answer, messages) for turn_id, answer in islice(alike, MAX_ALIKE)
    )


def _asked(session: PairingState, turn_id: str) -> tuple[bytes, ...] | None:
    try:
        return rebuild(turn_id, session.requests).messages
    except UnusableExchange:
        return None


def _orphan(item: Pending, arrived: ExchangeCompleted | ExchangeFailed, reason: OrphanReason) -> TurnOrphaned:
    return TurnOrphaned(
        session_id=arrived.session_id, turn_id=item.turn_id, next_exchange_id=arrived.exchange_id, reason=reason
    )


def _claims(findings: Sequence[Echo | Displaced | Missing | None]) -> dict[int, int]:
    """Return, by the echo's index, the pending answer it proves: the newest exact match, else the newest match."""
    claims: dict[int, int] = {}
    for exact in (False, True):
        for number, finding in enumerate(findings):
            if isinstance(finding, Echo) and finding.exact is exact:
                claims[finding.index] = number
    return claims


def _reason(finding: Echo | Displaced | Missing | None, number: int, claims: Mapping[int, int]) -> OrphanReason | None:
    if finding is None:
        return None
    if isinstance(finding, Missing):
        return finding.reason
    newer = claims.get(finding.index, -1) > number
    return OrphanReason.REGENERATED if newer else OrphanReason.EDITED
