"""Which samples the newest fact of a session may complete, and which refreshed answers a hint scores. Pure.

A refreshed answer's sample depends on that answer and the hint alone, never on scores of the turn's own
answer. Of two answers with one number the first on the log counts, so the same log always gives the same samples.

A verdict's sample is due once the verdict, its answer and its hint (or `HintAbsent`) are known. An answer without a
verdict is due once there is feedback on it and no verdict is to come. Either is due again with newer feedback.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from clawstream.events import (
    NOBODY,
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    HintAbsent,
    HintFound,
    TeacherScored,
    TurnOrphaned,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
)
from clawstream.samples.session import (
    FIRST_LOOK,
    CandidateAnswer,
    JoiningState,
    VerdictKey,
    is_ready,
    judged_of,
    never_judged,
    opinions_of,
)


def made_whole(session: JoiningState, event: Event) -> list[tuple[VerdictKey, AnswerRefreshed]]:
    """Return the pairs of hint and refreshed answer that `event`, the newest fact, may have completed."""
    match event:
        case AnswerRefreshed() | HintFound() | TeacherScored():
            turn_id = event.turn_id
        case ExchangeCompleted():
            turn_id = event.exchange_id
        case _:
            return []
    given = [one for one in session.refreshed.get(turn_id, {}).values() if one.message is not None]
    if not given or turn_id not in session.answers:
        return []
    if isinstance(event, AnswerRefreshed):
        given = [one for one in given if one.event_id == event.event_id]
    keys = [key for key, found in session.hints.items() if key.turn_id == turn_id and isinstance(found, HintFound)]
    if isinstance(event, HintFound | TeacherScored):
        keys = [key for key in keys if key == judged_of(event)]
    return [(key, one) for key in keys for one in given if (key, one.event_id) not in session.scored_anew]


def answered_anew(answer: CandidateAnswer, given: AnswerRefreshed) -> CandidateAnswer:
    """Return the turn as if this had been its answer."""
    assert given.message is not None, "an answer that is none is scored by no hint"
    assert given.finish_reason is not None, "an answer ended somehow"
    exchange = replace(
        answer.exchange,
        message=given.message,
        output_ids=given.output_ids,
        output_logprobs=given.output_logprobs,
        finish_reason=given.finish_reason,
        sampling=given.sampling,
        policy_id=given.policy_id,
        versions=given.versions,
        group_id=None,
    )
    return answer._replace(exchange=exchange, interrupted=False)


class Due(NamedTuple):
    """A sample to be made."""

    key: VerdictKey
    given: AnswerRefreshed | None = None  # the refreshed answer that it is of; None: it is of the turn's own


def due(session: JoiningState, event: Event, *, judged: bool, grouped: bool) -> list[Due]:
    """Return the samples to be joined now that `event` is known: for the first time, or with new feedback."""
    keys = [key for key in _completed(session, event) if is_ready(session, key)]
    keys += _of_feedback_alone(session, event, judged=judged)
    if grouped and not judged:
        keys += _of_a_group(session, event)
    own = [
        Due(key)
        for key in dict.fromkeys(keys)
        if session.joined.get(key, -1) < opinions_of(session, key.turn_id).num_changes
    ]
    return [*own, *(Due(key, given) for key, given in made_whole(session, event))]


def _completed(session: JoiningState, event: Event) -> list[VerdictKey]:
    """Return the keys of the verdicts that `event`, the newest fact, may complete."""
    match event:
        case VerdictReached() | HintFound() | HintAbsent() | TeacherScored():
            return [judged_of(event)]
        case ExchangeCompleted() | ExchangeFailed():
            return [key for key in session.verdicts if key.turn_id == event.exchange_id]
        case FeedbackGiven():
            return _newest(key for key in session.verdicts if key.turn_id == event.turn_id)
    return []


def _newest(keys: Iterable[VerdictKey]) -> list[VerdictKey]:
    """Return the key of each judge's last look."""
    newest: dict[tuple[str, str], VerdictKey] = {}
    for key in sorted(keys, key=lambda key: key.revision):
        newest[key.judge, key.prompt_version] = key
    return list(newest.values())


def _of_feedback_alone(session: JoiningState, event: Event, *, judged: bool) -> list[VerdictKey]:
    """Return the answers with new feedback that `event` shows to get no verdict; without judges, all with feedback."""
    match event:
        case FeedbackGiven() | TurnOrphaned():
            turn_ids = [event.turn_id]
        case ExchangeCompleted() | ExchangeFailed() | TurnsSettled():
            turn_ids = list(session.feedback)
        case _:
            return []
    new = [
        turn_id
        for turn_id in turn_ids
        if session.joined.get(_alone(turn_id), 0) < opinions_of(session, turn_id).num_changes
    ]
    alone = never_judged(session, new) if judged else [turn_id for turn_id in new if turn_id in session.answers]
    return [_alone(turn_id) for turn_id in alone]


def _of_a_group(session: JoiningState, event: Event) -> list[VerdictKey]:
    """Return the answer that `event` shows to be a step of an attempt; its sample need not wait for a verdict."""
    match event:
        case TurnPaired():
            turn_id = event.turn_id
        case ExchangeCompleted():
            turn_id = event.exchange_id
        case _:
            return []
    answer = session.answers.get(turn_id)
    grouped = answer is not None and answer.exchange.group_id is not None
    return [_alone(turn_id)] if grouped and turn_id in session.turns else []


def _alone(turn_id: str) -> VerdictKey:
    return VerdictKey(NOBODY, NOBODY, FIRST_LOOK, turn_id)
