"""The learning rate, update by update, and what has it start again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.training.step.carried import LEAST_SHARE, WINDOW, Schedule

BATCH = 16


def rate(schedule: Schedule, peak: float = 1.0) -> float:
    return schedule.learning_rate(peak=peak)


def run_through(rewards: list[int], schedule: Schedule | None = None) -> list[Schedule]:
    """The schedules of one update after another, each on a batch of these rewards."""
    schedules = []
    schedule = schedule or Schedule()
    for start in range(0, len(rewards), BATCH):
        schedule = schedule.after(rewards[start : start + BATCH])
        schedules.append(schedule)
    return schedules


def beginnings(schedules: list[Schedule]) -> int:
    """How often the rate's fall began again."""
    return sum(one.num_updates == 1 for one in schedules)


def answers(share_good: float, num: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [1 if rng.random() < share_good else -1 for _ in range(num)]


def test_the_rate_is_constant_then_falls_with_the_inverse_square_root_and_never_under_a_quarter() -> None:
    rates = [rate(Schedule(num_updates=u), 2e-4) for u in (1, 8, 32, 128, 129, 100_000)]
    assert rates == pytest.approx([2e-4, 2e-4, 1e-4, 5e-5, 5e-5, 5e-5])
    assert LEAST_SHARE == 0.25


def test_the_rate_never_rises_by_itself() -> None:
    rates = [rate(Schedule(num_updates=u)) for u in range(1, 100)]

    assert rates == sorted(rates, reverse=True)


def test_where_people_want_something_else_the_rate_starts_again_within_a_window() -> None:
    before = run_through(answers(0.9, 64 * BATCH))
    assert [one.num_updates for one in before] == list(range(1, 65))
    after = run_through(answers(0.1, WINDOW), before[-1])
    [restart] = [place for place, one in enumerate(after) if one.num_updates == 1]
    assert rate(after[restart]) == 1.0
    assert rate(before[-1]) < 0.5


def test_it_starts_again_once_for_one_change() -> None:
    before = run_through(answers(0.9, 64 * BATCH))[-1]
    assert beginnings(run_through(answers(0.1, 64 * BATCH), before)) == 1


@pytest.mark.parametrize("share_good", [0.2, 0.5, 0.8])
def test_chance_alone_does_not_start_it_again(share_good: float) -> None:
    seeds = range(20)
    restarted = [beginnings(run_through(answers(share_good, 64 * BATCH, seed))[1:]) > 0 for seed in seeds]
    assert sum(restarted) <= 1


def test_a_policy_that_learns_is_not_taken_for_one_that_fails() -> None:
    rising = [reward for step in range(64) for reward in answers(0.2 + 0.75 * step / 64, BATCH, step)]
    assert run_through(rising)[-1].num_updates == 64


@given(st.lists(st.lists(st.sampled_from([-1, 1]), max_size=BATCH), max_size=40))
def test_a_schedule_follows_from_rewards_and_gaps_and_remembers_no_more_than_a_window(
    batches: list[list[int]],
) -> None:
    one = two = Schedule()
    for numbers in batches:
        one, two = (of.after(numbers).having_seen(numbers) for of in (one, two))
        assert one == two
        assert max(len(one.last_rewards), len(one.last_gaps)) <= WINDOW


def gaps_seen(means: list[float], seed: int, schedule: Schedule | None = None) -> list[Schedule]:
    """The schedules of updates with 8 hinted answers each, whose gaps scatter as widely as they are."""
    rng = random.Random(seed)
    schedules = []
    schedule = schedule or Schedule()
    for mean in means:
        schedule = schedule.after([]).having_seen([rng.gauss(mean, mean + 0.1) for _ in range(8)])
        schedules.append(schedule)
    return schedules


def restarts(schedules: list[Schedule]) -> int:
    """How often the next step is at the peak again."""
    return sum(one.num_updates == 0 for one in schedules)


def test_where_hints_want_something_else_the_rate_starts_again_once_without_any_reward() -> None:
    before = gaps_seen([0.5 - 0.4 * min(1, step / 32) for step in range(64)], 0)
    assert [one.num_updates for one in before] == list(range(1, 65))
    after = gaps_seen([0.5] * 64, 1, before[-1])
    assert restarts(after) == 1
    [place] = [place for place, one in enumerate(after) if one.num_updates == 0]
    assert place < WINDOW // 8
    assert rate(after[place + 1]) == 1.0


@pytest.mark.parametrize("mean", [0.0, 0.02, 0.3, 2.0])
def test_gaps_that_scatter_by_chance_do_not_start_it_again(mean: float) -> None:
    assert sum(restarts(gaps_seen([mean] * 200, seed)) > 0 for seed in range(20)) <= 1


@pytest.mark.parametrize(("rises_to", "num_updates"), [(0.19, 40), (0.21, 0)])
def test_gaps_that_rise_by_less_than_twice_do_not_start_it_again(rises_to: float, num_updates: int) -> None:
    """However certain the rise is: all gaps of a window are alike."""
    seen = Schedule(num_updates=40).having_seen([0.1] * WINDOW)
    assert seen.having_seen([rises_to] * WINDOW).num_updates == num_updates


def test_fewer_gaps_than_a_window_say_nothing() -> None:
    few = Schedule().having_seen([0.1] * (WINDOW - 1))
    assert few.least_gap is None
    assert few.having_seen([9.0] * WINDOW).num_updates == 0
    seen = Schedule(num_updates=40).having_seen([0.1] * WINDOW)
    assert seen.num_updates == 40
    assert seen.least_gap == pytest.approx(0.1)
    assert seen.having_seen([0.3]).num_updates == 40
    assert seen.having_seen([9.0 + i for i in range(WINDOW)]) == Schedule()
