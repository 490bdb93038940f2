"""When an attempt has ended, the rewards of its steps, and the advantage of each step in its group. Pure.

An attempt is a session, or one of several answers to one request. It has ended once its session is settled and each
turn that judges were to see has a sample or a refusal; later facts make a newer revision. A group is settled once, when
its last attempt ends or the wait is over; later records are late. A step's reward is the weighted sum of its scores and
its attempt's outcome. Its advantage is how many standard deviations the reward is above the mean of all attempts at the
same index, or the reward itself if there is no other attempt.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import fsum, isfinite, sqrt
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.history import changed, with_entry, with_first
from clawstream.errors import UnusableEvent
from clawstream.events import (
    NOBODY,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    FeedbackSource,
    GroupSettled,
    GroupWaited,
    RewardWeights,
    SampleAssembled,
    SampleRefused,
    StepAdvantage,
    StepDropped,
    StepDropReason,
    TrajectoryEnded,
    TrajectoryLate,
    TrajectoryStep,
    TurnPaired,
    TurnsSettled,
    TurnType,
)
from clawstream.stream.stage import Step

SAME = 1e-6  # rewards with no larger standard deviation count as equal


class MainAnswer(NamedTuple):
    """A main answer, and the group, size and step that its client gave."""

    group_id: str | None
    group_size: int | None
    step_index: int | None
    request_sha256: str
    is_choice: bool  # one of several answers to its request, and so an attempt by itself


class SampledTurn(NamedTuple):
    """The newest sample of a turn. Its first six fields, compared in order, tell which of two samples is newer."""

    judged: bool
    revision: int
    num_feedback: int
    judge: str  # so that of two judges' samples the same one counts, whichever was read first
    prompt_version: str
    sample_id: str
    judge_reward: int | None
    person_reward: float | None
    heuristic_reward: float | None


class SettledExchange(NamedTuple):
    """The session is settled up to an exchange."""

    done: bool  # the client said that the session is done
    at_ms: int  # when the broker appended the first such event


class TrajectoryState(NamedTuple):
    """All that is known of a session."""

    exchanges: Mapping[str, MainAnswer | None] = MappingProxyType({})  # in topic order; None: no main answer
    paired: frozenset[str] = frozenset()  # turns
    marks: Mapping[str, SettledExchange] = MappingProxyType({})  # by the exchange that it was settled after
    samples: Mapping[str, SampledTurn] = MappingProxyType({})  # by turn
    refused: frozenset[str] = frozenset()  # turns
    outcomes: Mapping[str, float] = MappingProxyType({})  # by turn, the newest last
    facts: Mapping[str, frozenset[str]] = MappingProxyType({})  # of a turn: ids of samples, refusals and scores
    said: Mapping[str, str] = MappingProxyType({})  # ids of the newest TrajectoryEnded, by trajectory


def observe(session: TrajectoryState | None, event: Event, at_ms: int) -> Step[TrajectoryState, None]:
    """Return what follows from one more record of a session; `at_ms` is when the broker appended it.

    Raises UnusableEvent for an invalid score.
    """
    before = session or TrajectoryState()
    after = changed(before, _learn(before, event, at_ms))
    if after is before:
        return Step(before)
    found = [ended for ended in _ended(after, event.key) if after.said.get(ended.trajectory_id) != ended.event_id]
    said = {ended.trajectory_id: ended.event_id for ended in found}
    return Step(after._replace(said=MappingProxyType({**after.said, **said})), found)


def _learn(session: TrajectoryState, event: Event, at_ms: int) -> TrajectoryState:
    match event:
        case ExchangeCompleted() | ExchangeFailed():
            return session._replace(exchanges=with_first(session.exchanges, event.exchange_id, _main(event)))
        case TurnPaired() if event.turn_id not in session.paired:
            return session._replace(paired=session.paired | {event.turn_id})
        case TurnsSettled():
            return _learn_mark(session, event, at_ms)
        case SampleAssembled() if event.group_id is not None:
            return _learn_sample(session, event)
        case SampleRefused(turn_id=str(turn_id), refreshed_id=None):
            after = _noted(session, turn_id, event.event_id)
            return after if after is session else after._replace(refused=after.refused | {turn_id})
        case FeedbackGiven() if event.source is FeedbackSource.ENVIRONMENT and event.score is not None:
            return _learn_outcome(session, event.turn_id, event.feedback_id, event.score)
    return session


def _main(event: ExchangeCompleted | ExchangeFailed) -> MainAnswer | None:
    if isinstance(event, ExchangeFailed) or event.turn_type is TurnType.SIDE:
        return None
    return MainAnswer(
        event.group_id, event.group_size, event.step_index, event.request_sha256, event.choice_of is not None
    )


def _learn_mark(session: TrajectoryState, event: TurnsSettled, at_ms: int) -> TrajectoryState:
    known = session.marks.get(event.after_exchange_id)
    if known is not None and known.done >= event.done:
        return session
    mark = SettledExchange(event.done, at_ms if known is None else known.at_ms)
    return session._replace(marks=with_entry(session.marks, event.after_exchange_id, mark))


def _learn_sample(session: TrajectoryState, event: SampleAssembled) -> TrajectoryState:
    sampled = SampledTurn(
        event.judge != NOBODY, event.revision, event.num_feedback or 0, event.judge, event.prompt_version,
        event.sample_id, event.reward, event.person_reward, event.heuristic_reward,
    )  # fmt: skip
    after = _noted(session, event.turn_id, event.sample_id)
    known = session.samples.get(event.turn_id)
    if known is not None and known[:6] >= sampled[:6]:
        return after
    return after._replace(samples=with_entry(after.samples, event.turn_id, sampled))


def _learn_outcome(session: TrajectoryState, turn_id: str, feedback_id: str, score: float) -> TrajectoryState:
    if not (isfinite(score) and abs(score) <= 1):
        raise UnusableEvent(f"feedback {feedback_id}: its score is {score}, expected -1 to 1; it is set aside")
    after = _noted(session, turn_id, feedback_id)
    if after is session:
        return session
    older = {id_: outcome for id_, outcome in session.outcomes.items() if id_ != turn_id}
    return after._replace(outcomes=MappingProxyType({**older, turn_id: score}))


def _noted(session: TrajectoryState, turn_id: str, fact: str) -> TrajectoryState:
    known = session.facts.get(turn_id, frozenset())
    if fact in known:
        return session
    return session._replace(facts=MappingProxyType({**session.facts, turn_id: known | {fact}}))


def _ended(session: TrajectoryState, session_id: str) -> Iterator[TrajectoryEnded]:
    for life in _lives(session):
        attempts_at: dict[tuple[str, str | None], dict[str, MainAnswer]] = {}
        for turn_id, answer in life.items():
            if answer.group_id is not None:
                choice = turn_id if answer.is_choice else None
                attempts_at.setdefault((answer.group_id, choice), {})[turn_id] = answer
        for (group_id, _), turns in attempts_at.items():
            if all(_is_concluded(session, turn_id) for turn_id in turns):
                yield _trajectory(session, session_id, group_id, turns, _indices(life))


def _lives(session: TrajectoryState) -> Iterator[dict[str, MainAnswer]]:
    """Yield the main answers of each life, up to the last settled exchange; a life ends where the session is done."""
    order = list(session.exchanges)
    places = {exchange_id: place for place, exchange_id in enumerate(order)}
    ends = sorted((places[id_], mark.done) for id_, mark in session.marks.items() if id_ in places)
    start = 0
    for number, (place, done) in enumerate(ends):
        if done or number == len(ends) - 1:
            here = {id_: session.exchanges[id_] for id_ in order[start : place + 1]}
            yield {id_: answer for id_, answer in here.items() if answer is not None}
            start = place + 1


def _is_concluded(session: TrajectoryState, turn_id: str) -> bool:
    """Return whether nothing but further feedback is to come for the turn."""
    awaited = turn_id in session.paired or turn_id in session.outcomes
    return not awaited or turn_id in session.samples or turn_id in session.refused


def _indices(life: Mapping[str, MainAnswer]) -> Mapping[str, int]:
    """Return each answer's number in the session, a request that was asked again counting once."""
    found: dict[str, int] = {}
    before: set[str] = set()
    for turn_id, answer in life.items():
        found[turn_id] = len(before - {answer.request_sha256})
        before.add(answer.request_sha256)
    return found


def _trajectory(
    session: TrajectoryState,
    session_id: str,
    group_id: str,
    turns: Mapping[str, MainAnswer],
    numbers: Mapping[str, int],
) -> TrajectoryEnded:
    sizes = [answer.group_size for answer in turns.values() if answer.group_size is not None]
    outcomes = [score for turn_id, score in session.outcomes.items() if turn_id in turns]
    return TrajectoryEnded(
        group_id=group_id,
        session_id=session_id,
        trajectory_id=next(iter(turns)),
        revision=len(turns) + sum(len(session.facts.get(turn_id, ())) for turn_id in turns),
        ended_at_ms=_ended_at_ms(session, list(turns)[-1]),
        group_size=max(sizes, default=None),
        outcome=outcomes[-1] if outcomes else None,
        steps=tuple(_step(session, turn_id, answer, numbers[turn_id]) for turn_id, answer in turns.items()),
    )


def _ended_at_ms(session: TrajectoryState, last_turn_id: str) -> int:
    """Return when the session was first reported settled with this turn in it."""
    order = list(session.exchanges)
    rest = order[order.index(last_turn_id) :]
    return next(session.marks[id_].at_ms for id_ in rest if id_ in session.marks)


def _step(session: TrajectoryState, turn_id: str, answer: MainAnswer, number: int) -> TrajectoryStep:
    sampled = session.samples.get(turn_id)
    return TrajectoryStep(
        turn_id=turn_id,
        step_index=number if answer.step_index is None else answer.step_index,
        sample_id=None if sampled is None else sampled.sample_id,
        judge_reward=None if sampled is None else sampled.judge_reward,
        person_reward=None if sampled is None else sampled.person_reward,
        heuristic_reward=None if sampled is None else sampled.heuristic_reward,
    )


class GroupState(NamedTuple):
    """What is known of a group."""

    group_id: str
    first_at_ms: int  # when the first attempt ended
    ended: Mapping[str, TrajectoryEnded] = MappingProxyType({})  # the newest revision of each; empty once settled
    waited: bool = False
    settled: bool = False
    heard: frozenset[str] = frozenset()  # ids of the TrajectoryEnded that it was settled with, or that were late
    steps: frozenset[tuple[str, str | None]] = frozenset()  # turns and samples that were settled or dropped


def settle(group: GroupState | None, event: Event, weights: RewardWeights) -> Step[GroupState, None]:
    """Return what follows from one more record of a group."""
    match event:
        case TrajectoryEnded():
            known = group or GroupState(event.group_id, event.ended_at_ms)
            return _late(known, event) if known.settled else _attempt_ended(known, event, weights)
        case GroupWaited() if group is not None and not group.settled:
            return _settled(group, weights, complete=False)
    return Step(group)


def wait(group: GroupState, now_ms: int, wait_s: float) -> Step[GroupState, None]:
    """Say once that unfinished attempts are no longer waited for; `now_ms` is by the clock of `ended_at_ms`."""
    if group.settled or group.waited or now_ms - group.first_at_ms < wait_s * 1000:
        return Step(group)
    return Step(group._replace(waited=True), [GroupWaited(group_id=group.group_id, wait_s=wait_s)])


def advantages_of(rewards: Collection[float]) -> list[float] | None:
    """Return how many (population) standard deviations each reward is above the mean; None: all are equal.

    A single reward is returned as it is.
    """
    if len(rewards) == 1:
        return list(rewards)
    mean = fsum(rewards) / len(rewards)
    deviation = sqrt(fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return None if deviation <= SAME else [(reward - mean) / deviation for reward in rewards]


def reward_of(step: TrajectoryStep, outcome: float | None, weights: RewardWeights) -> float | None:
    """Return the weighted sum of the scores that count and the outcome; None: none counts. A score of 0 counts."""
    parts = weights.weighed(
        judge=step.judge_reward, person=step.person_reward, environment=outcome, heuristic=step.heuristic_reward
    )
    return fsum(parts) if parts else None


def _attempt_ended(group: GroupState, event: TrajectoryEnded, weights: RewardWeights) -> Step[GroupState, None]:
    known = group.ended.get(event.trajectory_id)
    if known is not None and (known.revision, known.event_id) >= (event.revision, event.event_id):
        return Step(group)
    group = group._replace(ended=with_entry(group.ended, event.trajectory_id, event))
    return _settled(group, weights, complete=True) if _is_complete(group) else Step(group)


def _is_complete(group: GroupState) -> bool:
    """Return whether as many attempts as the group's size have ended, each with an outcome."""
    sizes = [ended.group_size for ended in group.ended.values() if ended.group_size is not None]
    whole = bool(sizes) and len(group.ended) >= max(sizes)
    return whole and all(ended.outcome is not None for ended in group.ended.values())


def settled_at_once(ended: Iterable[TrajectoryEnded], weights: RewardWeights) -> list[GroupSettled]:
    """Return the settlement of each group, in the order of ids; no further attempt is to come after `ended`."""
    groups: dict[str, GroupState] = {}
    for one in sorted(ended, key=lambda one: (one.group_id, one.ended_at_ms, one.trajectory_id)):
        group = groups.get(one.group_id) or GroupState(one.group_id, one.ended_at_ms)
        groups[one.group_id] = group._replace(ended=with_entry(group.ended, one.trajectory_id, one))
    steps = [_settled(group, weights, complete=_is_complete(group)) for group in groups.values()]
    return [event for step in steps for event in step.events if isinstance(event, GroupSettled)]


def _settled(group: GroupState, weights: RewardWeights, *, complete: bool) -> Step[GroupState, None]:
    ended = [group.ended[name] for name in sorted(group.ended)]
    kept, dropped = _with_advantages(ended, weights)
    settled = GroupSettled(
        group_id=group.group_id,
        trajectories=tuple(one.event_id for one in ended),
        complete=complete,
        advantages=tuple(kept),
        dropped=tuple(dropped),
    )
    steps = frozenset((step.turn_id, step.sample_id) for one in ended for step in one.steps)
    over = GroupState(
        group.group_id, group.first_at_ms, settled=True, heard=frozenset(settled.trajectories), steps=steps
    )
    return Step(over, [settled])


def _with_advantages(
    ended: Iterable[TrajectoryEnded], weights: RewardWeights
) -> tuple[list[StepAdvantage], list[StepDropped]]:
    buckets: dict[int, list[tuple[TrajectoryStep, str, float]]] = {}
    dropped: list[StepDropped] = []
    for one in ended:
        for step in one.steps:
            reward = reward_of(step, one.outcome, weights)
            if step.sample_id is None:
                dropped.append(_dropped(step, StepDropReason.NO_SAMPLE))
            elif reward is None:
                dropped.append(_dropped(step, StepDropReason.NO_REWARD))
            else:
                buckets.setdefault(step.step_index, []).append((step, step.sample_id, reward))
    kept: list[StepAdvantage] = []
    for index, bucket in sorted(buckets.items()):
        advantages = advantages_of([reward for _, _, reward in bucket])
        if advantages is None:
            dropped += [_dropped(step, StepDropReason.CONSTANT) for step, _, _ in bucket]
            continue
        kept += [
            StepAdvantage(
                turn_id=step.turn_id, sample_id=sample_id, step_index=index, reward=reward, advantage=advantage
            )
            for (step, sample_id, reward), advantage in zip(bucket, advantages, strict=True)
        ]
    return kept, dropped


def _late(group: GroupState, event: TrajectoryEnded) -> Step[GroupState, None]:
    if event.event_id in group.heard:
        return Step(group)
    new = [step for step in event.steps if (step.turn_id, step.sample_id) not in group.steps]
    late = TrajectoryLate(
        group_id=event.group_id,
        trajectory=event.event_id,
        session_id=event.session_id,
        dropped=tuple(_dropped(step, StepDropReason.LATE) for step in new),
    )
    steps = group.steps | {(step.turn_id, step.sample_id) for step in new}
    return Step(group._replace(heard=group.heard | {event.event_id}, steps=steps), [late])


def _dropped(step: TrajectoryStep, reason: StepDropReason) -> StepDropped:
    return StepDropped(turn_id=step.turn_id, sample_id=step.sample_id, step_index=step.step_index, reason=reason)
