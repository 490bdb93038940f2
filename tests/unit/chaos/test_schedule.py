"""The schedule of faults follows from the seed, and has what a run has to show."""

import pytest

from tests.chaos.guards import Guard
from tests.chaos.plan import NAMES
from tests.chaos.schedule import OF_PARTS, SESSION_TIMEOUT_S, Kind, schedule
from tests.chaos.trials import directed

SEEDS = range(1, 6)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_seed_gives_one_schedule_and_another_seed_another(seed: int) -> None:
    assert schedule(seed, 60, NAMES) == schedule(seed, 60, NAMES)
    assert schedule(seed, 60, NAMES) != schedule(seed + 1, 60, NAMES)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_minute_has_thirty_faults_of_more_than_six_kinds(seed: int) -> None:
    faults = schedule(seed, 60, NAMES)
    assert len(faults) >= 30
    assert len({fault.kind for fault in faults}) >= 9
    assert all(0 <= fault.at_s < 60 for fault in faults)


def test_a_frozen_part_wakes_up_after_its_group_has_given_it_up_and_is_left_alone_until_then() -> None:
    faults = schedule(1, 900, NAMES)
    frozen = [fault for fault in faults if fault.kind is Kind.FREEZE]
    assert frozen
    for fault in frozen:
        assert fault.lasts_s > SESSION_TIMEOUT_S
        until_s = fault.at_s + fault.lasts_s
        of_part = [other for other in faults if other.kind in OF_PARTS and other.part == fault.part]
        meanwhile = [other for other in of_part if fault.at_s < other.at_s < until_s]
        assert not meanwhile


def test_every_part_and_every_kind_has_its_turn() -> None:
    faults = schedule(1, 900, NAMES)
    assert {fault.part for fault in faults} == {*NAMES, None}
    assert {fault.kind for fault in faults} == set(Kind)


@pytest.mark.parametrize("guard", Guard)
def test_the_faults_that_reach_a_guard_are_of_parts_that_run_and_over_within_half_a_minute(guard: Guard) -> None:
    plan = directed(guard)
    assert {fault.part for fault in plan.faults} <= {*plan.parts, None}
    assert bool(plan.faults) is not plan.stale_writer  # it comes about when it comes about
    assert all(fault.at_s + fault.lasts_s < plan.seconds <= 30 for fault in plan.faults)
