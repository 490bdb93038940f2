"""Join an answer with what judges and people said of it into a sample, or say why there is none. Pure.

A sample depends only on its answer, its verdict, its hint (with the teacher's scores, where an engine is the teacher)
and the feedback that it counts. A person's hint replaces a judge's. A sample is written when the last of these facts
is read, so the same facts give the same bytes in any order. An answer gets a sample if it has a hint, a verdict of -1
or 1, or scored feedback. A step of a group gets one anyway: the attempt's outcome rewards it. An answer that ran into
the policy's own limit counts as a verdict of -1, judged or not. Later feedback makes a newer sample.
"""

from dataclasses import replace
from typing import NamedTuple

from clawstream.conversation.continuing import Renderer
from clawstream.conversation.floor import is_cut, mask, num_thinking
from clawstream.conversation.history import WholeRequest, rebuild, with_entry
from clawstream.conversation.messages import parse, tool_calls_of
from clawstream.conversation.pictures import shows_picture
from clawstream.errors import UnusableExchange
from clawstream.events import (
    EVERYTHING,
    Event,
    FeedbackGiven,
    HintFound,
    LearnsFrom,
    Mask,
    OfferedHint,
    RefusalReason,
    RewardWeights,
    SampleAssembled,
    SampleRefused,
    TeacherScored,
    TeacherStatus,
    TokenIds,
    TurnsSettled,
)
from clawstream.inference.engine import ScoreRequest
from clawstream.samples.due import Due, due, rest, with_refreshed_answer
from clawstream.samples.hinted import Scoring, hinted_prompt
from clawstream.samples.session import (
    FIRST_LOOK,
    FLOOR_LOOK,
    CandidateAnswer,
    JoiningState,
    Opinions,
    Parts,
    RecalledPrompts,
    VerdictKey,
    is_of_the_past,
    learn,
    opinions_of,
    parts_of,
    reward_of,
    with_score,
)
from clawstream.stream.stage import Step


class TeacherRule(NamedTuple):
    """The name of the engine that is the teacher. Without `waits`, only scores already on the log count."""

    teacher: str
    waits: bool = True


class SampleRules(NamedTuple):
    """How samples are made.

    `judged` False: feedback waits for no judge. `asks` None: the trainer is the teacher. `grouped`: steps of groups are
    trained on by their attempts' outcomes, and have samples even without a score of their own. `interrupted`: an answer
    that its client cut off is trained on, as far as it was sent. `learns`: which sessions get a second look,
    whether a hint on an answer not drawn with the policy's own probabilities counts, and whether samples have the other
    hints that were offered.
    """

    renderer: Renderer
    weights: RewardWeights = RewardWeights()
    judged: bool = True
    asks: TeacherRule | None = None
    grouped: bool = False
    interrupted: bool = False
    learns: LearnsFrom = EVERYTHING


def observe(
    session: JoiningState | None, event: Event, rules: SampleRules, *, forgets: bool = True
) -> Step[JoiningState, Scoring]:
    """Return what follows from one more record of a session, of any topic that joining reads.

    With `forgets`, a session that is done and joined is reduced to what late feedback needs.
    """
    whole = session if session is not None else JoiningState()
    number = next((number for number, life in enumerate(whole.past) if is_of_the_past(life, event)), None)
    life = whole if number is None else whole.past[number]
    learned = learn(life, event)
    if learned is life:
        return Step(session)
    after, events = _refuse_unknown(learned, event)
    calls: list[Scoring] = []
    for sought in due(after, event, judged=rules.judged, grouped=rules.grouped):
        joined = _join(after, sought, rules)
        after = after._replace(recalled=joined.recalled)
        if isinstance(joined.outcome, Scoring):
            asked = joined.outcome.id in after.scores.get(sought.key.turn_id, {})
            # A scoring lost at a restart, or asked under other settings, is asked again only when feedback comes.
            if isinstance(event, FeedbackGiven) or not asked:
                calls.append(joined.outcome)
                after = with_score(after, sought.key.turn_id, joined.outcome.id, None)
        else:
            events += _news(after, sought, joined.outcome)
            after = _written(after, sought)
    if number is not None:
        after = whole._replace(past=(*whole.past[:number], after, *whole.past[number + 1 :]))
    elif forgets:
        after = rest(after, rules.learns)
    return Step(after, events, calls)


def _refuse_unknown(session: JoiningState, event: Event) -> tuple[JoiningState, list[Event]]:
    """Return the refusals of a session that settled without a next state, and of feedback on unknown answers."""
    match event:
        case TurnsSettled() if session.marks[-1].start == len(session.turns):
            return session, [_refused(event.session_id, None, RefusalReason.NO_NEXT_STATE)]
        case FeedbackGiven():
            refused = [_refused(event.session_id, lost, RefusalReason.ANSWER_UNKNOWN) for lost in session.lost]
            return session._replace(lost=()), [*refused]
    return session, []


def _news(session: JoiningState, sought: Due, outcome: SampleAssembled | RefusalReason) -> list[Event]:
    """Return the events to write: a sample each time, a refusal once."""
    if not isinstance(outcome, RefusalReason):
        return [outcome]
    if sought.given is None and sought.key in session.joined:
        return []
    turn_id = None if outcome is RefusalReason.FLOOR_UNDECIDED else sought.key.turn_id
    return [_refused(session.answers[sought.key.turn_id].exchange.session_id, turn_id, outcome, sought)]


def _written(session: JoiningState, sought: Due) -> JoiningState:
    """Return the session that remembers `sought` as written, with the feedback known by now."""
    key, given = sought
    if given is not None:
        return session._replace(scored_refreshed=session.scored_refreshed | {(key, given.event_id)})
    known = opinions_of(session, key.turn_id).num_changes
    return session._replace(joined=with_entry(session.joined, key, known))


class _Joined(NamedTuple):
    outcome: SampleAssembled | RefusalReason | Scoring  # Scoring: the sample waits for its result
    recalled: RecalledPrompts


class _SampleSignals(NamedTuple):
    """The hint and the rewards of a sample."""

    hint: str | None
    by_person: bool  # whether the hint is a person's own words
    others: tuple[str, ...]  # hints offered beside it
    parts: Parts
    num_feedback: int
    total: float | None
    without_hint: bool  # whether the sample is of use without its hint


def _join(session: JoiningState, sought: Due, rules: SampleRules) -> _Joined:
    """Return the sample, the reason why there is none, or the scoring that a teacher is asked for first."""
    answer = session.answers[sought.key.turn_id]
    if sought.given is not None:
        answer = with_refreshed_answer(answer, sought.given)
    said = _said(session, sought, answer, rules)
    if isinstance(said, RefusalReason):
        return _Joined(said, session.recalled)
    trained = mask(answer.exchange, rewarded=sought.given is None)
    if isinstance(trained, RefusalReason):
        return _Joined(trained, session.recalled)
    request = _request(session, answer)
    if request is None:
        return _Joined(RefusalReason.PROMPT_UNKNOWN, session.recalled)
    if any(map(shows_picture, request.messages)):
        return _Joined(RefusalReason.PICTURES, session.recalled)
    plain = _without_hint(sought, answer, said, request.token_ids, trained, rules.renderer)
    if said.hint is None:
        return _Joined(plain, session.recalled)
    hinted = hinted_prompt(session, answer, request, said.hint, rules.renderer)
    if hinted.token_ids is None:
        return _Joined(plain if said.without_hint else RefusalReason.HINT_UNRENDERABLE, hinted.recalled)
    sample = replace(plain, hint=said.hint, hinted_prompt_ids=hinted.token_ids, hint_by_person=said.by_person)
    if rules.asks is None:
        return _with_others(sample, said.others, session, answer, request, hinted.recalled, rules.renderer)
    call = _scoring(sample, sought.key, rules.asks.teacher, hinted.token_ids)
    scored = session.scores.get(sought.key.turn_id, {}).get(call.id)
    if scored is None and rules.asks.waits:
        return _Joined(call, hinted.recalled)
    if scored is not None and scored.status is TeacherStatus.SCORED:
        return _Joined(_taught(sample, scored), hinted.recalled)
    return _Joined(plain if said.without_hint else RefusalReason.HINT_UNSCORED, hinted.recalled)


def _said(
    session: JoiningState, sought: Due, answer: CandidateAnswer, rules: SampleRules
) -> _SampleSignals | RefusalReason:
    """Return the answer's signals, or why it gets no sample; for a refreshed answer only the hint counts."""
    key, of_its_own = sought.key, sought.given is None
    found, verdict = session.hints.get(key), session.verdicts.get(key) if of_its_own else None
    words = opinions_of(session, key.turn_id).hint
    offered = found if isinstance(found, HintFound) and words is None else None
    hint = words if offered is None else offered.hint
    others = tuple(other.hint for other in offered.others) if offered is not None and rules.learns.other_hints else ()
    judged = verdict.score if verdict is not None and verdict.score in (-1, 1) else None
    if of_its_own and is_cut(answer.exchange):
        judged = -1
    opinions = opinions_of(session, key.turn_id) if of_its_own else Opinions()
    without_hint = judged is not None or bool(opinions.scores)
    floor = key.revision == FLOOR_LOOK
    by_outcome = rules.grouped and answer.exchange.group_id is not None  # the attempt's outcome may be its only reward
    if hint is None and not without_hint and (floor or not by_outcome):
        return RefusalReason.FLOOR_UNDECIDED if floor else RefusalReason.NO_SIGNAL
    if answer.interrupted and not (rules.interrupted and answer.exchange.versions):
        return RefusalReason.INTERRUPTED
    parts, num_feedback = parts_of(judged, opinions), opinions.num_changes
    by_person = words is not None
    if answer.exchange.sampling.of_the_policy:
        total = reward_of(parts, rules.weights)
        return _SampleSignals(hint, by_person, others, parts, num_feedback, total, without_hint)
    if hint is None or not rules.learns.hints_off_distribution:
        return RefusalReason.OFF_DISTRIBUTION
    # A reward would weigh tokens by probabilities with which they were not drawn.
    return _SampleSignals(hint, by_person, others, parts._replace(judge=None), num_feedback, None, without_hint=False)


def _without_hint(
    sought: Due, answer: CandidateAnswer, said: _SampleSignals, prompt_ids: TokenIds, trained: Mask, renderer: Renderer
) -> SampleAssembled:
    exchange = answer.exchange
    message = parse(exchange.message)
    return SampleAssembled(
        session_id=exchange.session_id,
        **sought.key._asdict(),
        reward=said.parts.judge,
        hint=None,
        prompt_ids=prompt_ids,
        hinted_prompt_ids=None,
        response_ids=exchange.output_ids,
        response_logprobs=exchange.output_logprobs,
        trained=trained,
        temperature=exchange.sampling.temperature,
        sampling=exchange.sampling,
        policy_id=exchange.policy_id,
        versions=exchange.versions,
        num_earlier_turns=answer.num_earlier_turns,
        total_reward=said.total,
        person_reward=said.parts.person,
        environment_reward=said.parts.environment,
        heuristic_reward=said.parts.heuristic,
        num_feedback=said.num_feedback or None,
        group_id=exchange.group_id,
        step_index=_step_index(answer),
        refreshed_id=None if sought.given is None else sought.given.event_id,
        key_name=exchange.key_name,
        cut=said.parts.judge is not None and is_cut(exchange),
        calls_tools=bool(tool_calls_of(message)),
        num_thinking=num_thinking(message, exchange.output_ids, renderer),
    )


def _with_others(
    sample: SampleAssembled, others: tuple[str, ...], session: JoiningState, answer: CandidateAnswer,
    request: WholeRequest, recalled: RecalledPrompts, renderer: Renderer,
) -> _Joined:  # fmt: skip
    """Return the sample with the other hints, without those that can't be put into its prompt."""
    offered = []
    for hint in others:
        made = hinted_prompt(session._replace(recalled=recalled), answer, request, hint, renderer)
        recalled = made.recalled
        if made.token_ids is not None:
            offered.append(OfferedHint(hint=hint, hinted_prompt_ids=made.token_ids))
    return _Joined(replace(sample, other_hints=tuple(offered)), recalled)


def _taught(sample: SampleAssembled, scored: TeacherScored) -> SampleAssembled:
    return replace(
        sample,
        teacher=scored.teacher,
        teacher_logprobs=scored.teacher_logprobs,
        student_logprobs=scored.student_logprobs,
        student_version=scored.student_version,
    )


def _scoring(sample: SampleAssembled, key: VerdictKey, teacher: str, hinted_ids: TokenIds) -> Scoring:
    sampled_by = max((span.policy_version for span in sample.versions), default=0)
    wanted = ScoreRequest(hinted_ids, sample.prompt_ids, sample.response_ids, sample.policy_id, sampled_by)
    return Scoring(session_id=sample.session_id, key=key, teacher=teacher, wanted=wanted)


def _step_index(answer: CandidateAnswer) -> int | None:
    if answer.exchange.group_id is None:
        return None
    return answer.num_earlier_turns if answer.exchange.step_index is None else answer.exchange.step_index


def _request(session: JoiningState, answer: CandidateAnswer) -> WholeRequest | None:
    """Return the whole request; None where it refers to another era's request, even if that one is remembered."""
    deltas = {id_: asked.delta for id_, asked in session.requests.items() if asked.era == answer.era}
    try:
        return rebuild(answer.exchange.exchange_id, deltas)
    except UnusableExchange:
        return None


def _refused(session_id: str, turn_id: str | None, reason: RefusalReason, sought: Due | None = None) -> SampleRefused:
    key = None if sought is None else sought.key
    return SampleRefused(
        session_id=session_id,
        turn_id=turn_id,
        judge=None if key is None else key.judge,
        prompt_version=None if key is None else key.prompt_version,
        revision=FIRST_LOOK if key is None else key.revision,
        reason=reason,
        refreshed_id=None if sought is None or sought.given is None else sought.given.event_id,
    )
