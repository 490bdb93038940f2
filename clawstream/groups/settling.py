"""The advantage of each step of a group's attempts. Pure.

A group is settled once, when its last attempt ends or the wait is over, by the records before that on its
topic. Each step is then settled or dropped; later records are late. A step's reward is the weighted sum of its scores
and its attempt's outcome. Its advantage is how many standard deviations the reward is above the mean of all attempts at
the same index, or the reward itself where there is no other attempt.
"""

from collections.abc import Collection, Iterable, Mapping
from math import fsum, sqrt
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.floor import with_entry
from clawstream.events import (
    Event,
    GroupSettled,
    GroupWaited,
    RewardWeights,
    StepAdvantage,
    StepDropped,
    StepDropReason,
    TrajectoryEnded,
    TrajectoryLate,
    TrajectoryStep,
)
from clawstream.stream.stage import Step

SAME = 1e-6  # rewards with no larger standard deviation count as equal


class GroupState(NamedTuple):
    """What is known of a group."""

    group_id: str
    first_at_ms: int  # when the first attempt ended
    ended: Mapping[str, TrajectoryEnded] = MappingProxyType({})  # the newest revision of each; empty once settled
    waited: bool = False
    settled: bool = False
    heard: frozenset[str] = frozenset()  # ids of the TrajectoryEnded that it was settled with, or that were late
    steps: frozenset[tuple[str, str | None]] = frozenset()  # turns and samples that were settled or dropped


def observe(group: GroupState | None, event: Event, weights: RewardWeights) -> Step[GroupState, None]:
    """Return what follows from one more record of a group."""
    match event:
        case TrajectoryEnded():
            known = group or GroupState(event.group_id, event.ended_at_ms)
            return _late(known, event) if known.settled else _ended(known, event, weights)
        case GroupWaited() if group is not None and not group.settled:
            return _settled(group, weights, complete=False)
    return Step(group)


def wait(group: GroupState, now_ms: int, wait_s: float) -> Step[GroupState, None]:
    """Say once that unfinished attempts are no longer waited for; `now_ms` is the clock of attempts' ends."""
    if group.settled or group.waited or now_ms - group.first_at_ms < wait_s * 1000:
        return Step(group)
    return Step(group._replace(waited=True), [GroupWaited(group_id=group.group_id, wait_s=wait_s)])


def advantages_of(rewards: Collection[float]) -> list[float] | None:
    """Return how many (population) standard deviations each is above the mean; None: all are equal.

    A single reward is returned as it is.
    """
    if len(rewards) == 1:
        return list(rewards)
    mean = fsum(rewards) / len(rewards)
    deviation = sqrt(fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return None if deviation <= SAME else [(reward - mean) / deviation for reward in rewards]


def reward_of(step: TrajectoryStep, outcome: float | None, weights: RewardWeights) -> float | None:
    """Return the weighted sum of the scores and the outcome; None: none that counts. A score of 0 counts."""
    said = (
        (weights.judge, step.judge_reward),
        (weights.person, step.person_reward),
        (weights.heuristic, step.heuristic_reward),
        (weights.environment, outcome),
    )
    parts = [weight * part for weight, part in said if part is not None and weight > 0]
    return fsum(parts) if parts else None


def _ended(group: GroupState, event: TrajectoryEnded, weights: RewardWeights) -> Step[GroupState, None]:
    known = group.ended.get(event.trajectory_id)
    if known is not None and (known.revision, known.event_id) >= (event.revision, event.event_id):
        return Step(group)
    group = group._replace(ended=with_entry(group.ended, event.trajectory_id, event))
    sizes = [ended.group_size for ended in group.ended.values() if ended.group_size is not None]
    whole = bool(sizes) and len(group.ended) >= max(sizes)
    if not whole or any(ended.outcome is None for ended in group.ended.values()):
        return Step(group)
    return _settled(group, weights, complete=True)


def _settled(group: GroupState, weights: RewardWeights, *, complete: bool) -> Step[GroupState, None]:
    ended = [group.ended[name] for name in sorted(group.ended)]
    kept, dropped = _valued(ended, weights)
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


def _valued(ended: Iterable[TrajectoryEnded], weights: RewardWeights) -> tuple[list[StepAdvantage], list[StepDropped]]:
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
