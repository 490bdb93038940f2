"""What joining knows of a session: facts from four topics, in any order. Pure.

The one rule: of two facts with one identity the first counts, so reading a record again is no news.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from clawstream.events import (
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    HintAbsent,
    HintFound,
    RequestDelta,
    SessionDone,
    TokenIds,
    TurnPaired,
    TurnsSettled,
    TurnType,
    VerdictReached,
)
from clawstream.events.floor import Mark, Over, is_over, marked
from clawstream.inference.continuing import Continued
from clawstream.inference.echoes import Answered

_K = TypeVar("_K")
_V = TypeVar("_V")


class Sampled(NamedTuple):
    """An answer that a later request may repeat, trained on or not."""

    message: bytes
    output_ids: TokenIds


class Asked(NamedTuple):
    """A request as it stands on the log; an era ends when the client says that the session is done."""

    era: int
    delta: RequestDelta
    sampled: Sampled | None  # None: it failed


class Answer(NamedTuple):
    """An answer that may become a sample, and how many other requests were answered before it in its era."""

    exchange: ExchangeCompleted
    era: int
    num_earlier_turns: int


class Recalled(NamedTuple):
    """What hinted prompts were made of, for the next to go on from; it would be made again, and be the same."""

    given: Mapping[str, Answered] = MappingProxyType({})  # by the exchange that answered
    prompts: tuple[Continued, ...] = ()  # the newest that was rendered again, if any


class Judged(NamedTuple):
    """What verdicts and hints are collected under."""

    judge: str
    prompt_version: str
    revision: int
    turn_id: str


class Session(NamedTuple):
    """All of it; nothing in here depends on how the topics interleave, but for `recalled`."""

    era: int = 0
    ended_after: frozenset[str] = frozenset()  # the exchanges after which an era ended
    requests: Mapping[str, Asked] = MappingProxyType({})
    answers: Mapping[str, Answer] = MappingProxyType({})
    turns: Mapping[str, TurnPaired] = MappingProxyType({})  # in topic order
    verdicts: Mapping[Judged, VerdictReached] = MappingProxyType({})
    hints: Mapping[Judged, HintFound | HintAbsent] = MappingProxyType({})
    marks: tuple[Mark, ...] = ()
    joined: frozenset[Judged] = frozenset()  # what a sample or a refusal was written for
    recalled: Recalled = Recalled()
    over: Over = MappingProxyType({})


def learn(session: Session, event: Event) -> Session:
    """Return the session with the fact in it; itself where that is no news."""
    if is_over(session.over, event):
        return session
    match event:
        case ExchangeCompleted() | ExchangeFailed():
            return _learn_exchange(session, event)
        case SessionDone():
            if not session.requests:
                return session
            # A gateway that was just started knows no newest one; what stands before it on the topic is what ended.
            newest = event.after_exchange_id or tuple(session.requests)[-1]
            if newest in session.ended_after:
                return session
            return session._replace(era=session.era + 1, ended_after=session.ended_after | {newest})
        case TurnPaired():
            turns = _with(session.turns, event.turn_id, event)
            return session if turns is session.turns else session._replace(turns=turns)
        case TurnsSettled():
            marks = marked(session.marks, event, len(session.turns))
            return session if marks is session.marks else session._replace(marks=marks)
        case VerdictReached():
            verdicts = _with(session.verdicts, judged_of(event), event)
            return session if verdicts is session.verdicts else session._replace(verdicts=verdicts)
        case HintFound() | HintAbsent():
            hints = _with(session.hints, judged_of(event), event)
            return session if hints is session.hints else session._replace(hints=hints)
    return session


def _learn_exchange(session: Session, event: ExchangeCompleted | ExchangeFailed) -> Session:
    sampled = Sampled(event.message, event.output_ids) if isinstance(event, ExchangeCompleted) else None
    requests = _with(session.requests, event.exchange_id, Asked(session.era, event.request, sampled))
    if requests is session.requests:
        return session
    session = session._replace(requests=requests)
    if isinstance(event, ExchangeFailed) or event.turn_type is TurnType.SIDE:
        return session
    before = {answer.exchange.request_sha256 for answer in session.answers.values() if answer.era == session.era}
    answer = Answer(event, session.era, len(before - {event.request_sha256}))
    return session._replace(answers=_with(session.answers, event.exchange_id, answer))


def judged_of(event: VerdictReached | HintFound | HintAbsent) -> Judged:
    """Return what the verdict or the hint is collected under."""
    return Judged(event.judge, event.prompt_version, event.revision, event.turn_id)


def _with(known: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    return known if key in known else MappingProxyType({**known, key: value})
