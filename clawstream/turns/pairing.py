"""Pair each answer with what happened next in its session. Pure.

An answer counts as delivered only when the history of a later request echoes it, whether that request was
answered or not; what came next ends where that request ends. Until then the answer is pending. A history with something
else in its place makes it an orphan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.floor import with_entry
from clawstream.conversation.history import rebuild
from clawstream.conversation.messages import parse, same_answer
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
from clawstream.turns.echo import Displaced, Echo, Missing, look, look_behind, next_state, stands_at

MAX_PENDING = 32  # reached only by asking the same again and again; the oldest answer is then given up
MAX_ALIKE = 32  # how many of the newest equal answers are compared with a changed history


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An answer of which no request has shown yet what became of it."""

    turn_id: str
    asked: tuple[bytes, ...] | None  # the request's messages; None: an exchange they refer to is not known
    answer: bytes
    finished_at_ms: int
    interrupted: bool = False  # the client got no more of it than `answer`
    choice_of: str | None = None  # shared by the answers of one request; None: the request has no other


class PairingState(NamedTuple):
    """What pairing knows of a session."""

    session_id: str
    newest_exchange_id: str
    newest_at_ms: int  # when the broker appended it
    requests: Mapping[str, RequestDelta] = MappingProxyType({})  # without tokens
    pending: tuple[Pending, ...] = ()  # in answer order
    paired: Mapping[str, bytes] = MappingProxyType({})  # answers by turn; their echoes prove no other answer
    answered: bool = False  # a main answer was seen
    idle_after: str | None = None  # the exchange after which the session was said to be idle


def observe(
    session: PairingState | None, arrived: ExchangeCompleted | ExchangeFailed, at_ms: int
) -> Step[PairingState, None]:
    """Return the session with `arrived` in it, and what became of each pending answer that `arrived` shows.

    An exchange seen before changes nothing. A side turn is remembered only as a parent of later requests. So is a
    failed exchange, once its history was read, unless its client got a part of the answer. A main request whose parent
    is unknown shows nothing; its own answer is pending like any other.
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
    """Return the answer that awaits its echo, if any; a partial answer needs a known request."""
    whole = isinstance(arrived, ExchangeCompleted)
    if arrived.message is None or (asked is None and not whole):
        return None
    return Pending(
        turn_id=arrived.exchange_id,
        asked=asked,
        answer=arrived.message,
        # A client may ask again before its leaving is noticed.
        finished_at_ms=arrived.finished_at_ms if whole else arrived.received_at_ms,
        interrupted=not whole,
        choice_of=arrived.choice_of if isinstance(arrived, ExchangeCompleted) else None,
    )


def _remember(session: PairingState | None, arrived: ExchangeCompleted | ExchangeFailed, at_ms: int) -> PairingState:
    """Return the session with the messages of `arrived`; pairing needs no token."""
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
    """Return what `arrived` shows, by turn id and in answer order; answers left out stay pending."""
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
        # A request that was sent before the answer was complete can't echo it, and shows nothing.
        if reason is not None and arrived.received_at_ms >= item.finished_at_ms:
            decided[item.turn_id] = _orphan(item, arrived, reason)
    return decided


def _finding(session: PairingState, item: Pending, messages: Sequence[bytes]) -> Echo | Displaced | Missing | None:
    """Return what the request shows of `item`; a message that is another answer's exact echo shows only that one."""
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
    """Return the pending answer that each echo proves: of equal answers the newest exact match, else the newest."""
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
