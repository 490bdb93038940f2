"""What judging knows of a session: facts from five topics, in any order. Pure.

The one rule: of two facts with one identity the first counts, so reading a record again changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from clawstream.conversation.floor import Over, SettledTurns, is_over, marked
from clawstream.events import (
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    HintAbsent,
    HintFound,
    Question,
    RequestDelta,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
    VoteCast,
)

_K = TypeVar("_K")
_V = TypeVar("_V")


class VoteKey(NamedTuple):
    """The key of the votes on one question about one turn."""

    turn_id: str
    question: Question
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingState:
    """What judging knows of a session; of two facts with one identity the first counts."""

    requests: Mapping[str, RequestDelta] = field(default_factory=lambda: MappingProxyType({}))  # without tokens
    parts: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))  # of interrupted answers
    turns: Mapping[str, TurnPaired] = field(default_factory=lambda: MappingProxyType({}))  # in topic order
    asked: frozenset[tuple[str, int]] = frozenset()  # turn and revision
    votes: Mapping[VoteKey, Mapping[int, VoteCast]] = field(default_factory=lambda: MappingProxyType({}))  # by ballot
    verdicts: Mapping[tuple[str, int], VerdictReached] = field(default_factory=lambda: MappingProxyType({}))
    hints: Mapping[tuple[str, int], HintFound | HintAbsent] = field(default_factory=lambda: MappingProxyType({}))
    marks: tuple[SettledTurns, ...] = ()
    over: Over = field(default_factory=lambda: MappingProxyType({}))


def learn(session: JudgingState, event: Event, *, judge: str, prompt_version: str) -> JudgingState:
    """Return the session with the fact in it; the same object where it is known already or of another judge."""
    if is_over(session.over, event):
        return session
    match event:
        case ExchangeCompleted() | ExchangeFailed():
            delta = replace(event.request, kept_tokens=0, token_ids=())
            requests = _with(session.requests, event.exchange_id, delta)
            if requests is session.requests:
                return session
            part = event.message if isinstance(event, ExchangeFailed) else None
            parts = session.parts if part is None else _with(session.parts, event.exchange_id, part)
            return replace(session, requests=requests, parts=parts)
        case TurnPaired():
            turns = _with(session.turns, event.turn_id, event)
            return session if turns is session.turns else replace(session, turns=turns)
        case TurnsSettled():
            marks = marked(session.marks, event, len(session.turns))
            return session if marks is session.marks else replace(session, marks=marks)
        case VoteCast() | VerdictReached() | HintFound() | HintAbsent():
            ours = (event.judge, event.prompt_version) == (judge, prompt_version)
            return _learn_judged(session, event) if ours else session
    return session


def _learn_judged(session: JudgingState, event: VoteCast | VerdictReached | HintFound | HintAbsent) -> JudgingState:
    if isinstance(event, VoteCast):
        box = VoteKey(event.turn_id, event.question, event.revision)
        cast = session.votes.get(box, {})
        votes = _with(cast, event.ballot, event)
        return session if votes is cast else replace(session, votes=MappingProxyType({**session.votes, box: votes}))
    key = (event.turn_id, event.revision)
    if isinstance(event, VerdictReached):
        verdicts = _with(session.verdicts, key, event)
        return session if verdicts is session.verdicts else replace(session, verdicts=verdicts)
    hints = _with(session.hints, key, event)
    return session if hints is session.hints else replace(session, hints=hints)


def _with(known: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    return known if key in known else MappingProxyType({**known, key: value})
