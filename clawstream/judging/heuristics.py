"""Scores finished turns by a function that the user wrote. Pure, as far as that function is.

A turn is due with the record that completes it: once its pairing and the request that shows it are both known. Where
the function raises or returns no score, that turn has no score, never a 0; other turns keep theirs.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.history import only, rebuild, with_entry
from clawstream.conversation.messages import ComparableCall, Message, tool_calls_of
from clawstream.errors import UnusableEvent
from clawstream.events import (
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    FeedbackSource,
    RequestDelta,
    TurnPaired,
    TurnsSettled,
    derived_id,
)
from clawstream.judging.prompts import case_of
from clawstream.stream.stage import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTurn:
    """A finished turn; messages are as the client sent them, in OpenAI's form."""

    messages: tuple[Message, ...]  # those the answer replies to, the oldest first
    answer: Message
    tool_calls: tuple[ComparableCall, ...]  # of the answer
    next_state: tuple[Message, ...]  # what followed: a reply of the user, or the results of the calls; not empty
    interrupted: bool = False  # the answer is the part that the client got before it left


class Heuristic(NamedTuple):
    """A function that scores a turn from -1 to 1, or None for no opinion, and the name that the log has for it."""

    name: str
    score: Callable[[FinishedTurn], float | None]


class Shown(NamedTuple):
    """A request, without its tokens."""

    delta: RequestDelta
    at_ms: int
    part: bytes | None = None  # of the answer, where the client went away


class Watched(NamedTuple):
    """What is known of a session."""

    requests: Mapping[str, Shown] = MappingProxyType({})  # the newest last
    waiting: Mapping[str, TurnPaired] = MappingProxyType({})  # turns whose next request is not known yet


class DueTurn(NamedTuple):
    """A turn to be scored."""

    paired: TurnPaired
    messages: tuple[bytes, ...]  # of the request that shows it
    at_ms: int  # when that request came
    asked: tuple[bytes, ...] = ()  # of an interrupted answer: the messages that it answers
    part: bytes | None = None  # of an interrupted answer: the part that the client got


def observe(session: Watched | None, event: Event) -> Step[Watched, DueTurn]:
    """Return the new session and the turns due. Raises UnusableExchange for a request that can't be rebuilt."""
    known = session or Watched()
    match event:
        case ExchangeCompleted() | ExchangeFailed():
            part = event.message if isinstance(event, ExchangeFailed) else None
            shown = Shown(replace(event.request, kept_tokens=0, token_ids=()), event.received_at_ms, part)
            known = known._replace(requests=with_entry(known.requests, event.exchange_id, shown))
        case TurnPaired():
            known = known._replace(waiting=with_entry(known.waiting, event.turn_id, event))
        case TurnsSettled() if event.done and not known.waiting and event.after_exchange_id in [*known.requests][-1:]:
            return Step(None)  # the next record begins a session that refers to nothing before it
        case _:
            return Step(session)
    complete = {id_: turn for id_, turn in known.waiting.items() if _is_known(turn, known.requests)}
    due = [_due(turn, known.requests) for turn in complete.values()]
    return Step(known._replace(waiting=only(known.waiting, lambda id_: id_ not in complete)), calls=due)


def _due(turn: TurnPaired, requests: Mapping[str, Shown]) -> DueTurn:
    deltas = {id_: shown.delta for id_, shown in requests.items()}
    due = DueTurn(turn, rebuild(turn.next_exchange_id, deltas).messages, requests[turn.next_exchange_id].at_ms)
    if not turn.interrupted:
        return due
    return due._replace(asked=rebuild(turn.turn_id, deltas).messages, part=requests[turn.turn_id].part)


def _is_known(turn: TurnPaired, requests: Mapping[str, Shown]) -> bool:
    return turn.next_exchange_id in requests and (not turn.interrupted or turn.turn_id in requests)


def feedback(due: DueTurn, heuristic: Heuristic) -> FeedbackGiven | None:
    """Return the feedback of `heuristic` on a turn; None: no opinion. Raises UnusableEvent where the function fails."""
    turn = due.paired
    score = _score(heuristic, turn.turn_id, _turn(due))
    if score is None:
        return None
    return FeedbackGiven(
        session_id=turn.session_id,
        feedback_id=derived_id("Heuristic", heuristic.name, turn.turn_id),
        turn_id=turn.turn_id,
        key_name=None,
        source=FeedbackSource.HEURISTIC,
        score=score,
        text=heuristic.name,
        given_at_ms=due.at_ms,
    )


def _turn(due: DueTurn) -> FinishedTurn:
    case = case_of(due.messages, due.paired.next_state, due.asked, due.part)
    turn = FinishedTurn(
        messages=case.request,
        answer=case.answer,
        tool_calls=tool_calls_of(case.answer),
        next_state=case.next_state,
        interrupted=case.interrupted,
    )
    return copy.deepcopy(turn)  # what `parse` returns is shared


def _score(heuristic: Heuristic, turn_id: str, turn: FinishedTurn) -> float | None:
    after = "The record that completes the turn is set aside: mend the function, restart the stage, `dlq replay` it"
    try:
        said: object = heuristic.score(turn)
    except Exception as error:  # whatever somebody else's function raises
        raise UnusableEvent(f"heuristic {heuristic.name}, turn {turn_id}: it raised {error!r}. {after}") from error
    if said is None:
        return None
    if isinstance(said, bool) or not isinstance(said, int | float) or not -1 <= said <= 1:
        raise UnusableEvent(
            f"heuristic {heuristic.name}, turn {turn_id}: it returned {said!r}, expected -1 to 1 or None. {after}"
        )
    return float(said)
