"""The samples that the newest fact of a session may complete, and what is kept of a session that is over. Pure.

A verdict's sample is due once the verdict, its answer and its hint (or `HintAbsent`) are known. The sample of an answer
without a verdict is due once no verdict can come any more, if there is feedback on the answer or it was cut. Newer
feedback makes either sample due again. A refreshed answer's sample depends on that answer and its turn's hint alone (a
person's, else a judge's), never on scores of the turn's own answer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.floor import Teaches, is_cut, second_looks, teaches
from clawstream.conversation.history import buried, only
from clawstream.events import (
    NOBODY,
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    HintAbsent,
    HintFound,
    LearnsFrom,
    TeacherScored,
    TurnOrphaned,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
)
from clawstream.samples.session import (
    FIRST_LOOK,
    FLOOR_LOOK,
    PAST_LIVES,
    CandidateAnswer,
    JoiningState,
    RecalledPrompts,
    VerdictKey,
    is_ready,
    judged_of,
    never_judged,
    opinions_of,
)


def _made_whole(session: JoiningState, event: Event, *, judged: bool) -> list[tuple[VerdictKey, AnswerRefreshed]]:
    """Return the pairs of hint and refreshed answer that `event`, the newest fact, may have completed."""
    match event:
        case AnswerRefreshed() | HintFound() | HintAbsent() | TeacherScored() | FeedbackGiven() | TurnOrphaned():
            turn_ids = [event.turn_id]
        case ExchangeCompleted():
            turn_ids = [event.exchange_id]
        case TurnsSettled():
            turn_ids = list(session.refreshed)
        case _:
            return []
    return [pair for turn_id in turn_ids for pair in _pairs(session, turn_id, event, judged=judged)]


def _pairs(
    session: JoiningState, turn_id: str, event: Event, *, judged: bool
) -> list[tuple[VerdictKey, AnswerRefreshed]]:
    given = [one for one in session.refreshed.get(turn_id, {}).values() if one.message is not None]
    if not given or turn_id not in session.answers:
        return []
    if isinstance(event, AnswerRefreshed):
        given = [one for one in given if one.event_id == event.event_id]
    told = opinions_of(session, turn_id).hint is not None
    of_turn = [(key, found) for key, found in session.hints.items() if key.turn_id == turn_id]
    keys = [key for key, found in of_turn if told or isinstance(found, HintFound)]
    if told and not keys and (not judged or never_judged(session, [turn_id])):
        keys = [_alone(turn_id)]
    if isinstance(event, HintFound | HintAbsent | TeacherScored):
        keys = [key for key in keys if key == judged_of(event)]
    return [(key, one) for key in keys for one in given if (key, one.event_id) not in session.scored_refreshed]


def with_refreshed_answer(answer: CandidateAnswer, given: AnswerRefreshed) -> CandidateAnswer:
    """Return the turn's answer replaced by the refreshed answer `given`."""
    assert given.message is not None, "only an answer that was given becomes a sample"
    assert given.finish_reason is not None, "an answer that was given has a finish reason"
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
    given: AnswerRefreshed | None = None  # the refreshed answer to make it of; None: the turn's own answer


def due(session: JoiningState, event: Event, *, judged: bool, grouped: bool) -> list[Due]:
    """Return the samples that `event` makes due, for the first time or again with newer feedback."""
    keys = [key for key in _completed(session, event) if is_ready(session, key)]
    keys += _of_feedback_alone(session, event, judged=judged)
    keys += _of_cut_answers(session, event, judged=judged)
    if grouped and not judged:
        keys += _of_a_group(session, event)
    own = [
        Due(key)
        for key in dict.fromkeys(keys)
        if session.joined.get(key, -1) < opinions_of(session, key.turn_id).num_changes
    ]
    return [*own, *(Due(key, given) for key, given in _made_whole(session, event, judged=judged))]


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
    """Return the keys of answers with new feedback that wait for no verdict: none can come, or there are no judges."""
    match event:
        case FeedbackGiven() | TurnOrphaned():
            turn_ids = [event.turn_id]
        case TeacherScored() if judged_of(event) == _alone(event.turn_id):
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


def _of_cut_answers(session: JoiningState, event: Event, *, judged: bool) -> list[VerdictKey]:
    """Return the keys of answers that ran into the policy's own limit and, as `event` shows, get no verdict."""
    match event:
        case ExchangeCompleted() | TurnOrphaned() | TurnsSettled():
            cut = [turn_id for turn_id, answer in session.answers.items() if is_cut(answer.exchange)]
        case _:
            return []
    new = [turn_id for turn_id in cut if _alone(turn_id) not in session.joined]
    return [_alone(turn_id) for turn_id in (never_judged(session, new) if judged else new)]


def _of_a_group(session: JoiningState, event: Event) -> list[VerdictKey]:
    """Return the key of the answer that `event` shows to be a step of an attempt; its sample waits for no verdict."""
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


def rest(session: JoiningState, learns: LearnsFrom) -> JoiningState:
    """Return what is still needed of a session: once it is done and joined, only the facts of its next life.

    Ids of its past lives are kept too, to recognise events that are written again, and the last lives for feedback.
    """
    newest = session.marks[-1] if session.marks else None
    if newest is None or not newest.settled.done or newest.num_turns != len(session.turns):
        return session
    end = newest.settled.after_exchange_id
    if end not in session.requests or not _all_joined(session, learns):
        return session
    order = list(session.requests)
    at = order.index(end) + 1
    later, life = set(order[at:]), _life(session, set(order[:at]))
    joined = life.answers.keys() | session.turns.keys()  # turns of the life that is over
    kept = session._replace(
        requests=only(session.requests, later.__contains__),
        answers=only(session.answers, later.__contains__),
        turns=MappingProxyType({}),
        verdicts=only(session.verdicts, lambda key: key.turn_id not in session.turns),
        hints=only(session.hints, lambda key: key.turn_id not in session.turns),
        scores=only(session.scores, lambda turn_id: turn_id not in session.turns),
        marks=(),
        orphans=session.orphans - life.answers.keys(),
        feedback=only(session.feedback, lambda turn_id: turn_id not in life.answers),
        lost=(),
        refreshed=only(session.refreshed, lambda turn_id: turn_id not in life.answers),
        scored_refreshed=frozenset(pair for pair in session.scored_refreshed if pair[0].turn_id not in life.answers),
        joined=only(session.joined, lambda key: key.turn_id not in joined),
        recalled=RecalledPrompts(),
        over=buried(session.over, session.marks, session.turns),
        past=(*session.past, life)[-PAST_LIVES:],
    )
    if kept.requests or kept.verdicts or kept.hints:
        return kept
    return JoiningState(over=kept.over, past=kept.past, feedback=kept.feedback, refreshed=kept.refreshed)


def _life(session: JoiningState, exchange_ids: set[str]) -> JoiningState:
    """Return the session reduced to the facts about these exchanges."""

    def of_it(key: VerdictKey) -> bool:
        return key.turn_id in exchange_ids

    return session._replace(
        requests=only(session.requests, exchange_ids.__contains__),
        answers=only(session.answers, exchange_ids.__contains__),
        verdicts=only(session.verdicts, of_it),
        hints=only(session.hints, of_it),
        scores=only(session.scores, exchange_ids.__contains__),
        feedback=only(session.feedback, exchange_ids.__contains__),
        refreshed=only(session.refreshed, exchange_ids.__contains__),
        scored_refreshed=frozenset(pair for pair in session.scored_refreshed if of_it(pair[0])),
        joined=only(session.joined, of_it),
        recalled=RecalledPrompts(),
        over=MappingProxyType({}),
        past=(),
    )


def _all_joined(session: JoiningState, learns: LearnsFrom) -> bool:
    """Return whether every judge with a verdict is done with every turn: the first look, and the second where due."""
    judges = {(key.judge, key.prompt_version) for key in session.verdicts}
    if session.turns and not judges:
        return False
    return all(_judge_is_done(session, *judge, learns) for judge in judges)


def _judge_is_done(session: JoiningState, judge: str, prompt_version: str, learns: LearnsFrom) -> bool:
    def of(revision: int) -> Mapping[str, VerdictReached]:
        mine = (judge, prompt_version, revision)
        return {key.turn_id: verdict for key, verdict in session.verdicts.items() if key[:3] == mine}

    def taught_by(turn_id: str) -> Teaches | None:
        return teaches(session.answers[turn_id].exchange, learns) if turn_id in session.answers else None

    hints = {key.turn_id: hint for key, hint in session.hints.items() if key[:2] == (judge, prompt_version)}
    turns = list(session.turns.values())
    looks = second_looks(turns, session.marks, of(FIRST_LOOK), hints, of(FLOOR_LOOK), taught_by)
    first = [VerdictKey(judge, prompt_version, FIRST_LOOK, turn_id) for turn_id in session.turns]
    again = [VerdictKey(judge, prompt_version, FLOOR_LOOK, look.turn_id) for look in looks.due]
    # A teacher's score that is still to come finds its answer in `past`.
    return looks.settled and all(is_ready(session, key) for key in [*first, *again])
