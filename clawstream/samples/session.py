"""The facts from which a session's samples are joined, read from six topics in any order, and the reward. Pure.

Of two facts with the same identity the first counts, so reading a record again changes nothing. Of a source's scores
the newest by topic order counts; a missing score is absent, never 0. A sample's `num_feedback` is the number of score
changes that it takes into account. Tokens that the client was not sent are neither judged nor trained on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.continuing import Continued, ShownAnswer
from clawstream.conversation.history import (
    Over,
    SettledTurns,
    changed,
    is_over,
    marked,
    with_entry,
    with_first,
)
from clawstream.errors import UnusableEvent
from clawstream.events import (
    FOR_A_LATE_SAMPLE,
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    FeedbackSource,
    FinishReason,
    HintAbsent,
    HintFound,
    RequestDelta,
    RewardWeights,
    SessionDone,
    TeacherScored,
    TokenIds,
    TurnOrphaned,
    TurnPaired,
    TurnsSettled,
    TurnType,
    VerdictReached,
)

REMEMBERED_IDS = 256  # feedback ids kept for a turn: a record is repeated soon, if at all
FIRST_LOOK = 0
FLOOR_LOOK = 1
MAX_UNPLACED = 1024  # turns with feedback or refreshed answers that are kept until their exchange is read
PAST_LIVES = 16


def as_far_as_sent(failed: ExchangeFailed) -> ExchangeCompleted | None:
    """Return the answer as if it had ended where the client left; None: nothing was sent, or the record lacks tokens.

    The answer has no stop token, as it did not end by itself, and no versions where the record has none.
    """
    if not failed.is_interrupted or failed.message is None:
        return None
    if failed.sampling is None or failed.output_logprobs is None or failed.num_sent_tokens is None:
        return None
    num_sent = failed.num_sent_tokens
    return ExchangeCompleted(
        session_id=failed.session_id,
        exchange_id=failed.exchange_id,
        turn_type=failed.turn_type,
        client=failed.client,
        key_name=failed.key_name,
        model=failed.model,
        request=failed.request,
        request_sha256=failed.exchange_id,
        retry_count=None,
        sampling=failed.sampling,
        policy_id=failed.policy_id,
        versions=tuple(replace(span, num_tokens=num_sent) for span in failed.versions or ()),  # one, if any
        message=failed.message,
        output_ids=failed.output_ids[:num_sent],
        output_logprobs=failed.output_logprobs[:num_sent],
        finish_reason=FinishReason.STOP,
        cached_tokens=None,
        num_spliced=0,  # not on record: a hinted prompt is rendered without splices
        trace_id=None,
        received_at_ms=failed.received_at_ms,
        first_token_at_ms=None,
        finished_at_ms=failed.finished_at_ms,
    )


class Opinions(NamedTuple):
    """What was said of one answer."""

    num_changes: int = 0  # how often a source's score or the person's hint changed; `num_feedback` of samples
    scores: Mapping[FeedbackSource, float] = MappingProxyType({})
    ids: tuple[str, ...] = ()  # of the feedback, the newest last
    hint: str | None = None  # a person's newest; None: none was given, or a score above 0 came after it


class Parts(NamedTuple):
    """A reward's parts; None: that source gave no score."""

    judge: int | None
    person: float | None
    environment: float | None
    heuristic: float | None


def heard(opinions: Opinions, given: FeedbackGiven) -> Opinions:
    """Return the opinions with `given` among them; the same object if `given` was read before.

    A person's score above 0 drops the hint. Otherwise a score equal to the source's newest changes nothing, and neither
    do words that are no hint. Raises UnusableEvent for an invalid score.
    """
    if given.score is not None and not (isfinite(given.score) and abs(given.score) <= 1):
        raise UnusableEvent(
            f"feedback {given.feedback_id}: its score is {given.score}, expected -1 to 1; the feedback is set aside"
        )
    if given.feedback_id in opinions.ids:
        return opinions
    ids = (*opinions.ids, given.feedback_id)[-REMEMBERED_IDS:]
    is_pleased = given.source is FeedbackSource.PERSON and (given.score or 0) > 0
    hint = given.hint or (None if is_pleased else opinions.hint)
    scores = opinions.scores
    if given.score not in (None, scores.get(given.source)):
        scores = MappingProxyType({**scores, given.source: given.score})
    is_news = scores is not opinions.scores or hint != opinions.hint
    return Opinions(opinions.num_changes + is_news, scores, ids, hint)


def parts_of(judged: int | None, opinions: Opinions) -> Parts:
    """Return the parts, `judged` being the verdict's score."""
    score = opinions.scores.get
    return Parts(
        judged, score(FeedbackSource.PERSON), score(FeedbackSource.ENVIRONMENT), score(FeedbackSource.HEURISTIC)
    )


def reward_of(parts: Parts, weights: RewardWeights) -> float | None:
    """Return the weighted sum of the parts that count, from -1 to 1.

    None: no part counts, or each that does is 0. Parts that cancel each other give 0, not None.
    """
    said = weights.weighed(**parts._asdict())
    return max(-1.0, min(1.0, sum(said))) if any(said) else None


class SampledAnswer(NamedTuple):
    """An answer that a later request may repeat, trained on or not."""

    message: bytes
    output_ids: TokenIds


class RecordedRequest(NamedTuple):
    """A request as it stands on the log; an era ends when the client says that the session is done."""

    era: int
    delta: RequestDelta
    sampled: SampledAnswer | None  # None: the request failed


class CandidateAnswer(NamedTuple):
    """An answer that may become a sample, and how many requests were answered before it in its era."""

    exchange: ExchangeCompleted
    era: int
    num_earlier_turns: int
    interrupted: bool = False  # the answer is only the part that the client was sent


class RecalledPrompts(NamedTuple):
    """A cache of the parts that hinted prompts are made from; all of it can be computed again."""

    given: Mapping[str, ShownAnswer] = MappingProxyType({})  # by the exchange that answered
    prompts: tuple[Continued, ...] = ()  # the newest one rendered here, if any


class VerdictKey(NamedTuple):
    """The key of verdicts and hints, and of the samples made from them."""

    judge: str  # NOBODY where none is asked
    prompt_version: str
    revision: int
    turn_id: str


class JoiningState(NamedTuple):
    """All that joining knows of a session; only `recalled` depends on how the topics interleave."""

    era: int = 0
    ended_after: frozenset[str] = frozenset()  # the exchanges after which an era ended
    requests: Mapping[str, RecordedRequest] = MappingProxyType({})
    answers: Mapping[str, CandidateAnswer] = MappingProxyType({})
    turns: Mapping[str, TurnPaired] = MappingProxyType({})  # in topic order
    verdicts: Mapping[VerdictKey, VerdictReached] = MappingProxyType({})
    hints: Mapping[VerdictKey, HintFound | HintAbsent] = MappingProxyType({})
    scores: Mapping[str, Mapping[str, TeacherScored | None]] = MappingProxyType({})  # by turn and scoring; None: asked
    marks: tuple[SettledTurns, ...] = ()
    orphans: frozenset[str] = frozenset()  # turns without a next state
    feedback: Mapping[str, Opinions] = MappingProxyType({})  # by turn, also of answers that are not known yet
    lost: tuple[str, ...] = ()  # turns whose feedback the newest fact pushed out
    refreshed: Mapping[str, Mapping[int, AnswerRefreshed]] = MappingProxyType({})  # by turn and number
    scored_refreshed: frozenset[tuple[VerdictKey, str]] = frozenset()  # pairs of hint and refreshed answer, written
    joined: Mapping[VerdictKey, int] = MappingProxyType({})  # keys of samples and refusals; `num_changes` by then
    recalled: RecalledPrompts = RecalledPrompts()
    over: Over = MappingProxyType({})  # ids of past lives
    past: tuple["JoiningState", ...] = ()  # lives that are over, the newest last: feedback may still come


def opinions_of(session: JoiningState, turn_id: str) -> Opinions:
    """Return the feedback on a turn."""
    return session.feedback.get(turn_id, Opinions())


def is_ready(session: JoiningState, key: VerdictKey) -> bool:
    """Return whether all facts of the verdict's sample are known, apart from a teacher's scores."""
    hinted = key.revision == FLOOR_LOOK or key in session.hints
    return hinted and key in session.verdicts and key.turn_id in session.answers


def never_judged(session: JoiningState, turn_ids: Iterable[str]) -> list[str]:
    """Return the answers known to have no next state: the session went on without them, is over, or is idle.

    If an idle session goes on, its answer is judged after all, and a newer sample is made.
    """
    unpaired = [id_ for id_ in turn_ids if id_ in session.answers and id_ not in session.turns]
    if all(id_ in session.orphans for id_ in unpaired):
        return unpaired
    order = {id_: number for number, id_ in enumerate(session.requests)}
    settled = max((order.get(mark.settled.after_exchange_id, -1) for mark in session.marks), default=-1)
    return [id_ for id_ in unpaired if id_ in session.orphans or order[id_] <= settled]


def learn(session: JoiningState, event: Event) -> JoiningState:
    """Return the session with the fact in it; the same object if the fact was known."""
    return session if is_over(session.over, event) else changed(session, _learned(session, event))


def _learned(session: JoiningState, event: Event) -> JoiningState:
    match event:
        case ExchangeCompleted() | ExchangeFailed() if event.exchange_id not in session.requests:
            return _learn_exchange(session, event)
        case SessionDone() if session.requests:
            # A gateway that just started names no exchange; the newest one before this event on the topic is meant.
            newest = event.after_exchange_id or tuple(session.requests)[-1]
            if newest not in session.ended_after:
                return session._replace(era=session.era + 1, ended_after=session.ended_after | {newest})
        case TurnPaired():
            return session._replace(turns=with_first(session.turns, event.turn_id, event))
        case TurnsSettled():
            return session._replace(marks=marked(session.marks, event, len(session.turns)))
        case VerdictReached():
            return session._replace(verdicts=with_first(session.verdicts, judged_of(event), event))
        case HintFound() | HintAbsent():
            return session._replace(hints=with_first(session.hints, judged_of(event), event))
        case TeacherScored() if session.scores.get(event.turn_id, {}).get(event.scoring_id) is None:
            return with_score(session, event.turn_id, event.scoring_id, event)
        case TurnOrphaned() if event.turn_id not in session.orphans:
            return session._replace(orphans=session.orphans | {event.turn_id})
        case FeedbackGiven():
            return _learn_feedback(session, event)
        case AnswerRefreshed() if event.number >= FOR_A_LATE_SAMPLE:  # a rehearsal brings its sample along
            return _learn_refreshed(session, event)
    return session


def with_score(session: JoiningState, turn_id: str, scoring_id: str, scored: TeacherScored | None) -> JoiningState:
    """Return the session with the result of a scoring; `scored` None: the scoring was asked for."""
    of_turn = with_entry(session.scores.get(turn_id, {}), scoring_id, scored)
    return session._replace(scores=with_entry(session.scores, turn_id, of_turn))


def _learn_feedback(session: JoiningState, event: FeedbackGiven) -> JoiningState:
    before = opinions_of(session, event.turn_id)
    after = heard(before, event)
    if after is before:
        return session
    feedback = {**session.feedback, event.turn_id: after}
    lost = _unplaced(session, feedback)[:-MAX_UNPLACED]
    for turn_id in lost:
        del feedback[turn_id]
    scored = session.scored_refreshed
    if after.hint != before.hint:
        scored = frozenset(pair for pair in scored if pair[0].turn_id != event.turn_id)
    return session._replace(feedback=MappingProxyType(feedback), lost=tuple(lost), scored_refreshed=scored)


def _learn_refreshed(session: JoiningState, event: AnswerRefreshed) -> JoiningState:
    before = session.refreshed.get(event.turn_id, MappingProxyType({}))
    after = with_first(before, event.number, event)
    if after is before:
        return session
    refreshed = {**session.refreshed, event.turn_id: after}
    for turn_id in _unplaced(session, refreshed)[:-MAX_UNPLACED]:
        del refreshed[turn_id]
    return session._replace(refreshed=MappingProxyType(refreshed))


def _unplaced(session: JoiningState, turn_ids: Iterable[str]) -> list[str]:
    return [turn_id for turn_id in turn_ids if turn_id not in session.answers]


def _learn_exchange(session: JoiningState, event: ExchangeCompleted | ExchangeFailed) -> JoiningState:
    sampled = SampledAnswer(event.message, event.output_ids) if isinstance(event, ExchangeCompleted) else None
    recorded = RecordedRequest(session.era, event.request, sampled)
    session = session._replace(requests=with_entry(session.requests, event.exchange_id, recorded))
    exchange = as_far_as_sent(event) if isinstance(event, ExchangeFailed) else event
    if exchange is None or exchange.turn_type is TurnType.SIDE:
        return session
    whole = (answer for answer in session.answers.values() if answer.era == session.era and not answer.interrupted)
    before = {answer.exchange.request_sha256 for answer in whole}
    earlier = len(before - {exchange.request_sha256})
    answer = CandidateAnswer(exchange, session.era, earlier, isinstance(event, ExchangeFailed))
    return session._replace(answers=with_first(session.answers, event.exchange_id, answer))


def is_of_the_past(life: JoiningState, event: Event) -> bool:
    """Return whether the event is about an exchange of `life`."""
    match event:
        case ExchangeCompleted() | ExchangeFailed():
            return event.exchange_id in life.requests
        case FeedbackGiven() | TurnOrphaned() | TeacherScored() | AnswerRefreshed():
            return event.turn_id in life.answers
    return False


def judged_of(event: VerdictReached | HintFound | HintAbsent | TeacherScored) -> VerdictKey:
    """Return the key of a verdict, a hint or a teacher's scores."""
    return VerdictKey(event.judge, event.prompt_version, event.revision, event.turn_id)
