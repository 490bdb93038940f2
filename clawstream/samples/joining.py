"""Join an answer with what judges and people said of it to a sample, or say why there is none. Pure.

The one rule: a sample rests on its answer, its verdict, its hint (with what a teacher makes of it, where an engine is
one) and the feedback that it counts, and on nothing else; whichever comes last writes it, so the same facts give the
same bytes in any order. A score of 0, or none, is nothing to train on, but a step of a group has a sample all the same:
its attempt has an outcome. Feedback that comes later makes the next revision, of all that is known by then; an answer
without a next state has a sample of feedback alone.
"""

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.continuing import Renderer
from clawstream.conversation.history import WholeRequest, rebuild
from clawstream.errors import UnusableExchange
from clawstream.events import (
    NOBODY,
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    HintAbsent,
    HintFound,
    OffDistribution,
    RefusalReason,
    RewardWeights,
    SampleAssembled,
    SampleRefused,
    TeacherScored,
    TeacherStatus,
    TokenIds,
    TurnOrphaned,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
)
from clawstream.samples.forgetting import rest
from clawstream.samples.hinted import Hinted, hinted_prompt
from clawstream.samples.masks import mask
from clawstream.samples.refreshing import answered_anew, made_whole, of_anew
from clawstream.samples.rewards import parts_of, reward_of
from clawstream.samples.session import (
    FIRST_LOOK,
    FLOOR_LOOK,
    Answer,
    Judged,
    Recalled,
    Session,
    is_of_the_past,
    is_ready,
    judged_of,
    learn,
    never_judged,
    opinions_of,
    with_score,
)
from clawstream.samples.teaching import Scoring


class Asks(NamedTuple):
    """An engine that is the teacher, by its name; without `waits` what it said before is all that it will say."""

    teacher: str
    waits: bool = True


class Rules(NamedTuple):
    """How samples are made; `off_distribution` None: such answers are like any others.

    Where nothing is `judged`, feedback waits for no judge. `asks` None: the trainer is the teacher. `grouped`: steps of
    groups are trained on by their attempts' outcomes, and have samples whatever is said of them alone. `interrupted`:
    of answers that their clients left, what was sent by then is trained on.
    """

    renderer: Renderer
    off_distribution: OffDistribution | None = OffDistribution.REFUSE
    weights: RewardWeights = RewardWeights()
    judged: bool = True
    asks: Asks | None = None
    grouped: bool = False
    interrupted: bool = False


class Follows(NamedTuple):
    """The session after a record, and what to write and to ask."""

    session: Session | None
    events: list[Event]
    calls: Sequence[Scoring] = ()


def observe(session: Session | None, event: Event, rules: Rules, *, forgets: bool = True) -> Follows:
    """Return what follows from one more record of a session, of any topic that joining reads.

    A session that is done and joined is then put away, where `forgets` says so: feedback alone is still heard.
    """
    before = session if session is not None else Session()
    for number, life in enumerate(before.past):
        if is_of_the_past(life, event):
            again = _observe(life, event, rules)
            past = (*before.past[:number], again.session or life, *before.past[number + 1 :])
            return Follows(before._replace(past=past), again.events, again.calls)
    after = _observe(before, event, rules)
    if after.session is before:
        return Follows(session, [])
    assert after.session is not None, "what was learned is known"
    return after._replace(session=rest(after.session)) if forgets else after


def _observe(before: Session, event: Event, rules: Rules) -> Follows:
    after = learn(before, event)
    if after is before:
        return Follows(before, [])
    events: list[Event] = []
    calls: list[Scoring] = []
    if isinstance(event, TurnsSettled) and after.marks[-1].start == len(after.turns):
        events.append(_refused(event.session_id, None, None, RefusalReason.NO_NEXT_STATE))
    if isinstance(event, FeedbackGiven):
        events += [_refused(event.session_id, lost, None, RefusalReason.ANSWER_UNKNOWN) for lost in after.lost]
        after = after._replace(lost=())
    for key in _due(after, event, judged=rules.judged, grouped=rules.grouped):
        joined = _join(after, key, rules)
        if isinstance(joined.event, Scoring):
            # Where it was asked under settings of before a restart, or was not, nobody asks any more: feedback does.
            if isinstance(event, FeedbackGiven) or joined.event.id not in after.scores.get(key.turn_id, {}):
                calls.append(joined.event)
                after = with_score(after, key.turn_id, joined.event.id, None)
            after = after._replace(recalled=joined.recalled)
            continue
        if key not in after.joined or isinstance(joined.event, SampleAssembled):
            events.append(joined.event)
        known = opinions_of(after, key.turn_id).num_changes
        after = after._replace(joined=MappingProxyType({**after.joined, key: known}), recalled=joined.recalled)
    anew = _scored_anew(after, event, rules)
    return Follows(anew.session, [*events, *anew.events], [*calls, *anew.calls])


def _scored_anew(session: Session, event: Event, rules: Rules) -> Follows:
    """Write the samples of answers given anew that are whole now, or why there is none."""
    events: list[Event] = []
    calls: list[Scoring] = []
    for key, given in made_whole(session, event):
        answer, hint = answered_anew(session.answers[key.turn_id], given), session.hints[key]
        assert isinstance(hint, HintFound), "only a hint scores an answer"
        if _is_used(given, rules):
            joined = _sample(session, answer, key, _Said(hint.hint, None, None, without_hint=False), rules)
        else:
            refusal = _refused(given.session_id, key.turn_id, key, RefusalReason.OFF_DISTRIBUTION)
            joined = _Joined(refusal, session.recalled)
        session = session._replace(recalled=joined.recalled)
        if isinstance(joined.event, Scoring):
            if joined.event.id not in session.scores.get(key.turn_id, {}):
                calls.append(joined.event)
                session = with_score(session, key.turn_id, joined.event.id, None)
            continue
        session = session._replace(scored_anew=session.scored_anew | {(key, given.event_id)})
        events.append(of_anew(joined.event, given))
    return Follows(session, events, calls)


def _is_used(given: AnswerRefreshed, rules: Rules) -> bool:
    on_distribution = rules.off_distribution is None or given.sampling.of_the_policy
    return on_distribution or rules.off_distribution is OffDistribution.HINT_ONLY


def _due(session: Session, event: Event, *, judged: bool, grouped: bool) -> list[Judged]:
    """Return what is to be joined now that `event` is known: for the first time, or with feedback that is new."""
    keys = [key for key in _completed(session, event) if is_ready(session, key)]
    keys += _of_feedback_alone(session, event, judged=judged)
    if grouped and not judged:
        keys += _of_a_group(session, event)
    return [
        key
        for key in dict.fromkeys(keys)
        if session.joined.get(key, -1) < opinions_of(session, key.turn_id).num_changes
    ]


def _completed(session: Session, event: Event) -> list[Judged]:
    """Return the verdicts that `event`, the newest, may be the last fact for."""
    match event:
        case VerdictReached() | HintFound() | HintAbsent() | TeacherScored():
            return [judged_of(event)]
        case ExchangeCompleted() | ExchangeFailed():
            return [key for key in session.verdicts if key.turn_id == event.exchange_id]
        case FeedbackGiven():
            return _newest(key for key in session.verdicts if key.turn_id == event.turn_id)
    return []


def _newest(keys: Iterable[Judged]) -> list[Judged]:
    """Return of each judge the key of its last look."""
    newest: dict[tuple[str, str], Judged] = {}
    for key in sorted(keys, key=lambda key: key.revision):
        newest[key.judge, key.prompt_version] = key
    return list(newest.values())


def _of_feedback_alone(session: Session, event: Event, *, judged: bool) -> list[Judged]:
    """Return the answers with feedback that `event` may have shown never to be judged; all of them, if none is."""
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


def _of_a_group(session: Session, event: Event) -> list[Judged]:
    """Return the answer that `event` shows to be a step of an attempt at a task: the outcome is all that is to come."""
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


def _alone(turn_id: str) -> Judged:
    return Judged(NOBODY, NOBODY, FIRST_LOOK, turn_id)


class _Joined(NamedTuple):
    event: SampleAssembled | SampleRefused | Scoring  # the last: it waits for what comes of that
    recalled: Recalled


class _Said(NamedTuple):
    """What a sample is to say beside its tokens."""

    hint: str | None
    judged: int | None
    total: float | None
    without_hint: bool  # whether it says anything then


def _join(session: Session, key: Judged, rules: Rules) -> _Joined:
    answer, verdict, found = session.answers[key.turn_id], session.verdicts.get(key), session.hints.get(key)
    session_id, opinions = answer.exchange.session_id, opinions_of(session, key.turn_id)
    hint = found.hint if isinstance(found, HintFound) else None
    judged = verdict.score if verdict is not None and verdict.score in (-1, 1) else None
    floor = key.revision == FLOOR_LOOK
    needless = (
        floor or not rules.grouped or answer.exchange.group_id is None
    )  # a step's reward may be its attempt's outcome alone
    if hint is None and judged is None and not opinions.num_changes and needless:
        reason = RefusalReason.FLOOR_UNDECIDED if floor else RefusalReason.NO_SIGNAL
        return _Joined(_refused(session_id, None if floor else key.turn_id, key, reason), session.recalled)
    if answer.interrupted and not (rules.interrupted and answer.exchange.versions):
        return _Joined(_refused(session_id, key.turn_id, key, RefusalReason.INTERRUPTED), session.recalled)
    total = reward_of(parts_of(judged, opinions), rules.weights)
    without_hint = judged is not None or bool(opinions.num_changes)
    if rules.off_distribution is not None and not answer.exchange.sampling.of_the_policy:
        if hint is None or rules.off_distribution is not OffDistribution.HINT_ONLY:
            refusal = _refused(session_id, key.turn_id, key, RefusalReason.OFF_DISTRIBUTION)
            return _Joined(refusal, session.recalled)
        judged = total = None  # it would weigh tokens by a probability that they were not drawn with
        without_hint = False
    return _sample(session, answer, key, _Said(hint, judged, total, without_hint), rules)


def _sample(session: Session, answer: Answer, key: Judged, said: _Said, rules: Rules) -> _Joined:
    exchange, hint, opinions = answer.exchange, said.hint, opinions_of(session, key.turn_id)
    parts = parts_of(said.judged, opinions)

    def refused(reason: RefusalReason, recalled: Recalled = session.recalled) -> _Joined:
        return _Joined(_refused(exchange.session_id, key.turn_id, key, reason), recalled)

    trained = mask(exchange)
    if isinstance(trained, RefusalReason):
        return refused(trained)
    request = _request(session, answer)
    if request is None:
        return refused(RefusalReason.PROMPT_UNKNOWN)
    hinted = Hinted(None, session.recalled)
    scored: TeacherScored | None = None
    if hint is not None:
        hinted = hinted_prompt(session, answer, request, hint, rules.renderer)
        if hinted.token_ids is None:
            return refused(RefusalReason.HINT_UNRENDERABLE, hinted.recalled)
        if rules.asks is not None:
            scoring = _scoring(answer, key, rules.asks.teacher, hinted.token_ids, request.token_ids)
            scored = session.scores.get(key.turn_id, {}).get(scoring.id)
            if scored is None and rules.asks.waits:
                return _Joined(scoring, hinted.recalled)
            if scored is None or scored.status is not TeacherStatus.SCORED:
                if not said.without_hint:
                    return refused(RefusalReason.HINT_UNSCORED, hinted.recalled)
                hint, hinted, scored = None, hinted._replace(token_ids=None), None
    sample = SampleAssembled(
        session_id=exchange.session_id,
        turn_id=key.turn_id,
        judge=key.judge,
        prompt_version=key.prompt_version,
        revision=key.revision,
        reward=parts.judge,
        hint=hint,
        prompt_ids=request.token_ids,
        hinted_prompt_ids=hinted.token_ids,
        response_ids=exchange.output_ids,
        response_logprobs=exchange.output_logprobs,
        trained=trained,
        temperature=exchange.sampling.temperature,
        sampling=exchange.sampling,
        policy_id=exchange.policy_id,
        versions=exchange.versions,
        num_earlier_turns=answer.num_earlier_turns,
        total_reward=said.total,
        person_reward=parts.person,
        environment_reward=parts.environment,
        heuristic_reward=parts.heuristic,
        num_feedback=opinions.num_changes or None,
        teacher=None if scored is None else scored.teacher,
        teacher_logprobs=None if scored is None else scored.teacher_logprobs,
        student_logprobs=None if scored is None else scored.student_logprobs,
        student_version=None if scored is None else scored.student_version,
        group_id=exchange.group_id,
        step_index=_step_index(answer),
    )
    return _Joined(sample, hinted.recalled)


def _scoring(answer: Answer, key: Judged, teacher: str, hinted_ids: TokenIds, prompt_ids: TokenIds) -> Scoring:
    exchange = answer.exchange
    return Scoring(
        session_id=exchange.session_id,
        key=key,
        teacher=teacher,
        policy_id=exchange.policy_id,
        hinted_ids=hinted_ids,
        prompt_ids=prompt_ids,
        response_ids=exchange.output_ids,
        sampled_by=max((span.policy_version for span in exchange.versions), default=0),
    )


def _step_index(answer: Answer) -> int | None:
    if answer.exchange.group_id is None:
        return None
    return answer.num_earlier_turns if answer.exchange.step_index is None else answer.exchange.step_index


def _request(session: Session, answer: Answer) -> WholeRequest | None:
    """Return the whole request; one that rests on another era's is not known, however long we remember that one."""
    deltas = {id_: asked.delta for id_, asked in session.requests.items() if asked.era == answer.era}
    try:
        return rebuild(answer.exchange.exchange_id, deltas)
    except UnusableExchange:
        return None


def _refused(session_id: str, turn_id: str | None, key: Judged | None, reason: RefusalReason) -> SampleRefused:
    return SampleRefused(
        session_id=session_id,
        turn_id=turn_id,
        judge=None if key is None else key.judge,
        prompt_version=None if key is None else key.prompt_version,
        revision=FIRST_LOOK if key is None else key.revision,
        reason=reason,
    )
