"""The learning rate, update by update, and what has it start anew."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.training.step.packing import WINDOW_REWARDS, Schedule

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
    """How often the rate's fall began anew."""
    return sum(one.num_updates == 1 for one in schedules)


def answers(share_good: float, num: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [1 if rng.random() < share_good else -1 for _ in range(num)]


def test_the_rate_is_constant_and_then_falls_with_the_inverse_square_root() -> None:
    assert [rate(Schedule(num_updates=u), 2e-4) for u in (1, 8, 32, 128)] == pytest.approx([2e-4, 2e-4, 1e-4, 5e-5])


def test_the_rate_never_rises_by_itself() -> None:
    rates = [rate(Schedule(num_updates=u)) for u in range(1, 100)]

    assert rates == sorted(rates, reverse=True)


def test_where_people_want_something_else_the_rate_starts_anew_within_a_window() -> None:
    before = run_through(answers(0.9, 64 * BATCH))
    assert [one.num_updates for one in before] == list(range(1, 65))
    after = run_through(answers(0.1, WINDOW_REWARDS), before[-1])
    [anew] = [place for place, one in enumerate(after) if one.num_updates == 1]
    assert rate(after[anew]) == 1.0
    assert rate(before[-1]) < 0.5


def test_it_starts_anew_once_for_one_change() -> None:
    before = run_through(answers(0.9, 64 * BATCH))[-1]
    assert beginnings(run_through(answers(0.1, 64 * BATCH), before)) == 1


@pytest.mark.parametrize("share_good", [0.2, 0.5, 0.8])
def test_chance_alone_does_not_start_it_anew(share_good: float) -> None:
    seeds = range(20)
    anew = [beginnings(run_through(answers(share_good, 64 * BATCH, seed))[1:]) > 0 for seed in seeds]
    assert sum(anew) <= 1


def test_a_policy_that_learns_is_not_taken_for_one_that_fails() -> None:
    rising = [reward for step in range(64) for reward in answers(0.2 + 0.75 * step / 64, BATCH, step)]
    assert run_through(rising)[-1].num_updates == 64


@given(st.lists(st.lists(st.sampled_from([-1, 1]), max_size=BATCH), max_size=40))
def test_a_schedule_follows_from_the_rewards_and_remembers_no_more_than_a_window(
    batches: list[list[int]],
) -> None:
    one = two = Schedule()
    for rewards in batches:
        one, two = one.after(rewards), two.after(rewards)
        assert one == two
        assert len(one.last_rewards) <= WINDOW_REWARDS
