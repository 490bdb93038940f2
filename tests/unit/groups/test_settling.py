"""What steps were worth among a group's attempts: numbers by hand, and what holds in any order."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    Event,
    GroupSettled,
    GroupWaited,
    RewardWeights,
    StepDropReason,
    TrajectoryEnded,
    TrajectoryLate,
    TrajectoryStep,
)
from clawstream.groups.trajectories import GroupState, advantages_of, reward_of, settle, wait
from clawstream.stream.stage import Step

WEIGHTS = RewardWeights()


def step(turn_id: str, index: int, judge: int | None = None, *, sampled: bool = True) -> TrajectoryStep:
    return TrajectoryStep(
        turn_id=turn_id,
        step_index=index,
        sample_id=f"sample of {turn_id}" if sampled else None,
        judge_reward=judge,
        person_reward=None,
        heuristic_reward=None,
    )


def ended(
    name: str,
    steps: Iterable[TrajectoryStep],
    *,
    outcome: float | None = 1.0,
    size: int | None = 2,
    revision: int = 1,
    ended_at_ms: int = 1000,
) -> TrajectoryEnded:
    return TrajectoryEnded(
        group_id="task",
        session_id=f"session {name}",
        trajectory_id=name,
        revision=revision,
        ended_at_ms=ended_at_ms,
        group_size=size,
        outcome=outcome,
        steps=tuple(steps),
    )


WAITED = GroupWaited(group_id="task", wait_s=60.0)


def written(events: Sequence[Event], weights: RewardWeights = WEIGHTS) -> list[Event]:
    group: GroupState | None = None
    found: list[Event] = []
    for event in events:
        group, events_now, _ = settle(group, event, weights)
        found += events_now
    return found


def settled(events: Sequence[Event], weights: RewardWeights = WEIGHTS) -> GroupSettled:
    [found] = [event for event in written(events, weights) if isinstance(event, GroupSettled)]
    return found


STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, -1, 1]), st.booleans()), max_size=4)
ATTEMPTS = st.lists(st.tuples(STEPS, st.sampled_from([None, -1.0, 0.0, 0.5, 1.0])), min_size=1, max_size=5)


def attempts(drawn: list[tuple[list[tuple[int, int | None, bool]], float | None]], size: int | None) -> list[Event]:
    return [
        ended(
            f"t{number}",
            [step(f"t{number} {n}", index, judge, sampled=sampled) for n, (index, judge, sampled) in enumerate(steps)],
            outcome=outcome,
            size=size,
        )
        for number, (steps, outcome) in enumerate(drawn)
    ]


@given(ATTEMPTS, st.data())
def test_any_order_with_repeats_and_cut_anywhere_comes_to_the_same(
    drawn: list[tuple[list[tuple[int, int | None, bool]], float | None]], data: st.DataObject
) -> None:
    events = attempts(drawn, size=None)
    calm = settled([*events, WAITED])
    shuffled = data.draw(st.permutations(events))
    again = data.draw(st.lists(st.sampled_from(events), max_size=3))
    log = [*shuffled, *again, WAITED, *again]
    assert settled(log) == calm
    cut = data.draw(st.integers(0, len(log)))
    assert settled(log) == settled([*log[:cut], *log])  # read again from its beginning
    assert not [event for event in written(log) if isinstance(event, TrajectoryLate)]


@given(ATTEMPTS, st.integers(1, 5), st.data())
def test_every_step_of_a_settled_group_is_settled_once_or_dropped_with_a_reason(
    drawn: list[tuple[list[tuple[int, int | None, bool]], float | None]], size: int, data: st.DataObject
) -> None:
    events = attempts(drawn, size=size)
    where = data.draw(st.integers(1, len(events)))
    found = written([*events[:where], WAITED, *events[where:], WAITED])
    steps = Counter(step.turn_id for one in events if isinstance(one, TrajectoryEnded) for step in one.steps)
    said: Counter[str] = Counter()
    for event in found:
        if isinstance(event, GroupSettled):
            said += Counter(kept.turn_id for kept in event.advantages)
        if isinstance(event, GroupSettled | TrajectoryLate):
            said += Counter(gone.turn_id for gone in event.dropped)
    assert said == steps
    assert [type(event) for event in found].count(GroupSettled) == 1


def test_a_reward_is_process_and_outcome_and_an_advantage_its_distance_from_the_mean_by_hand() -> None:
    """Rewards at index 0: 1+1, 1-1 and -1-1; mean 0, deviation of all sqrt(8/3). At index 1 one step alone: 1-1."""
    found = settled([
        ended("a", [step("a0", 0, 1)], outcome=1.0, size=3),
        ended("b", [step("b0", 0, 1), step("b1", 1, 1)], outcome=-1.0, size=3),
        ended("c", [step("c0", 0, -1)], outcome=-1.0, size=3),
    ])  # fmt: skip
    assert {kept.turn_id: kept.reward for kept in found.advantages} == {"a0": 2.0, "b0": 0.0, "c0": -2.0, "b1": 0.0}
    assert {kept.turn_id: kept.advantage for kept in found.advantages} == pytest.approx(
        {"a0": 2 / (8 / 3) ** 0.5, "b0": 0.0, "c0": -2 / (8 / 3) ** 0.5, "b1": 0.0}
    )
    assert found.complete
    assert found.dropped == ()


def test_a_step_alone_at_its_index_keeps_its_reward() -> None:
    found = settled([ended("a", [step("a0", 0, 1)], outcome=0.5, size=1)])
    assert [(kept.reward, kept.advantage) for kept in found.advantages] == [(1.5, 1.5)]


def test_steps_that_all_have_one_reward_are_dropped_and_it_is_said() -> None:
    found = settled([ended(name, [step(f"{name}0", 0, 1), step(f"{name}1", 1)]) for name in "ab"])
    assert found.advantages == ()
    assert {gone.turn_id: gone.reason for gone in found.dropped} == dict.fromkeys(
        ("a0", "a1", "b0", "b1"), StepDropReason.CONSTANT
    )


def test_what_has_no_sample_or_no_reward_is_dropped_for_that() -> None:
    steps = [step("a0", 0, 1, sampled=False), step("a1", 1)]
    found = settled([ended("a", steps, outcome=None), WAITED])
    assert [(gone.turn_id, gone.sample_id, gone.reason) for gone in found.dropped] == [
        ("a0", None, StepDropReason.NO_SAMPLE),
        ("a1", "sample of a1", StepDropReason.NO_REWARD),
    ]


def test_a_group_is_settled_by_the_attempt_that_completes_it_or_by_the_end_of_the_wait() -> None:
    one, two = (ended(name, [step(f"{name}0", 0, judge)]) for name, judge in (("a", 1), ("b", -1)))
    assert written([one]) == []
    assert settled([one, two]).complete
    assert not settled([one, WAITED]).complete


def test_an_attempt_without_an_outcome_does_not_complete_its_group() -> None:
    one, two = ended("a", [step("a0", 0, 1)]), ended("b", [step("b0", 0, -1)], outcome=None)
    assert written([one, two]) == []
    found = settled([one, two, WAITED])
    assert {kept.turn_id: kept.reward for kept in found.advantages} == {"a0": 2.0, "b0": -1.0}


@given(st.permutations([1, 2, 3]))
def test_of_an_attempt_s_revisions_the_newest_counts_whichever_comes_last(order: list[int]) -> None:
    revisions = [ended("a", [step("a0", 0, 1)], outcome=number / 4, revision=number, size=None) for number in order]
    assert [kept.reward for kept in settled([*revisions, WAITED]).advantages] == [1.75]


def test_what_comes_after_the_group_was_settled_is_late_once_and_changes_nothing() -> None:
    one, two = (ended(name, [step(f"{name}0", 0, judge)]) for name, judge in (("a", 1), ("b", -1)))
    more = ended("a", [step("a0", 0, 1), step("a1", 1, 1)], revision=2)
    [_, late] = written([one, two, more, more, one, WAITED])
    assert isinstance(late, TrajectoryLate)
    assert (late.trajectory, [(gone.turn_id, gone.reason) for gone in late.dropped]) == (
        more.event_id,
        [("a1", StepDropReason.LATE)],
    )


def test_the_wait_is_over_once_by_the_time_that_is_passed_in() -> None:
    group, _, _ = settle(None, ended("a", [step("a0", 0, 1)]), WEIGHTS)
    assert group is not None
    assert wait(group, 60_999, 60.0) == Step(group)
    after, [waited], _ = wait(group, 61_000, 60.0)
    assert waited == WAITED
    assert after is not None
    assert wait(after, 99_000, 60.0).events == ()


@pytest.mark.parametrize(
    ("judge", "outcome", "weights", "reward"),
    [
        (1, -0.5, RewardWeights(), 0.5),
        (None, 0.0, RewardWeights(), 0.0),
        (1, None, RewardWeights(), 1.0),
        (1, 0.5, RewardWeights(judge=0.5, environment=2.0), 1.5),
        (1, 0.5, RewardWeights(judge=0.0), 0.5),
        (1, None, RewardWeights(judge=0.0), None),
        (None, None, RewardWeights(), None),
    ],
)
def test_a_part_that_is_absent_or_counts_nothing_is_not_a_part(
    judge: int | None, outcome: float | None, weights: RewardWeights, reward: float | None
) -> None:
    assert reward_of(step("a0", 0, judge), outcome, weights) == reward


def test_where_a_person_scored_a_step_no_guess_counts_beside_it() -> None:
    scored = replace(step("a0", 0, 1), person_reward=-0.5, heuristic_reward=1.0)
    assert reward_of(scored, 0.25, WEIGHTS) == -0.25
    assert reward_of(scored, None, RewardWeights(person=0.0)) == 2.0


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8))
def test_advantages_have_the_mean_0_and_the_deviation_1(rewards: list[float]) -> None:
    found = advantages_of(rewards)
    if found is None:
        assert max(rewards) - min(rewards) < 1e-5
    else:
        assert sum(found) / len(found) == pytest.approx(0, abs=1e-6)
        assert sum(value**2 for value in found) / len(found) == pytest.approx(1)
