"""What is wanted of long runs, and whether it is said of each run as it was."""

import json
from dataclasses import replace

import pytest

from clawstream.simulation.learn.outcome import ReportRow
from clawstream.simulation.learn.report import SteadinessCheck, steadiness, with_lines
from clawstream.simulation.opinions import Control
from tests.unit.simulation.learn.outcomes import failed, long_row, row

LAST, LATE, REJECTED, ENTROPY, LENGTH, RELEARNED = range(6)
STEADY = {8: 0.5, 16: 0.9, 24: 0.9, 32: 0.9}
RELEARNED_SCORES = STEADY | {40: 0.2, 48: 0.3, 56: 0.3}


def line(of: ReportRow, number: int) -> SteadinessCheck:
    return steadiness(of)[number]


@pytest.mark.parametrize(("last", "holds"), [(0.9, True), (0.84, True), (0.83, False)])
def test_the_last_score_is_at_least_the_best_less_six_points(last: float, *, holds: bool) -> None:
    found = line(long_row(STEADY | {32: last}), LAST)

    assert found.found == pytest.approx((0.9 - last,))
    assert found.holds is holds


@pytest.mark.parametrize(
    ("scores", "holds"),
    [
        ({24: 0.75}, True),
        ({24: 0.74}, False),
        ({8: 0.1, 16: 0.1}, True),  # it learns until then
        ({8: 0.95, 24: 0.79}, False),  # the best may have been early
    ],
)
def test_no_score_after_update_16_is_more_than_fifteen_points_below_the_best(
    scores: dict[int, float], *, holds: bool
) -> None:
    assert line(long_row(STEADY | scores), LATE).holds is holds


def test_at_most_one_step_in_twenty_is_rejected() -> None:
    within, beyond = long_row(STEADY, rejected=(5,)), long_row(STEADY, rejected=(5, 6))

    assert line(within, REJECTED) == replace(line(within, REJECTED), found=(1 / 33,), holds=True)
    assert line(beyond, REJECTED) == replace(line(beyond, REJECTED), found=(2 / 34,), holds=False)
    assert (within.as_json()["rejected_share"], beyond.as_json()["rejected_share"]) == (1 / 33, 2 / 34)


@pytest.mark.parametrize(
    ("figures", "entropy", "length"),
    [
        ({20: (0.05, 21.0)}, True, True),
        ({20: (0.04, 30.0)}, False, True),
        ({20: (1.5, 42.0)}, True, True),
        ({20: (1.6, 43.0)}, False, False),
        ({20: (0.5, 20.0)}, True, False),
    ],
)
def test_entropy_and_length_of_every_update_are_near_the_first(
    figures: dict[int, tuple[float, float]], *, entropy: bool, length: bool
) -> None:
    found = long_row(STEADY, figures=figures)

    assert line(found, ENTROPY).holds is entropy
    assert line(found, LENGTH).holds is length
    low, high = line(found, LENGTH).found or ()
    assert (low, high) == (min(1.0, figures[20][1] / 30), max(1.0, figures[20][1] / 30))


def test_what_comes_after_the_flip_says_nothing_of_the_time_before_it() -> None:
    flipped = long_row(
        RELEARNED_SCORES, flip_after=32, at_flip=0.05, rejected=(40, 41, 42, 43), figures={40: (9.0, 90.0)}
    )  # fmt: skip

    assert [found.holds for found in steadiness(flipped)[:RELEARNED]] == [True] * 5
    assert [found.holds for found in steadiness(long_row(STEADY))] == [True] * 5


@pytest.mark.parametrize(
    ("scores", "holds"),
    [
        ({56: 0.3}, True),  # of 0.5
        ({48: 0.29, 56: 0.29}, False),
        ({48: 0.3, 56: 0.1}, True),
        ({48: 0.29, 56: 0.29, 57: 0.5}, False),  # too late
        ({48: 0.29, 56: None, 57: 0.5}, None),  # nobody looked when it was time
    ],
)
def test_after_a_flip_six_tenths_of_the_ceiling_are_reached_within_24_updates(
    scores: dict[int, float | None], *, holds: bool | None
) -> None:
    taken = {update: score for update, score in (RELEARNED_SCORES | scores).items() if score is not None}
    assert line(long_row(taken, flip_after=32, at_flip=0.05), RELEARNED).holds is holds


def test_a_run_that_ends_before_the_24_updates_are_over_has_not_failed_to_learn_again() -> None:
    short = long_row(STEADY | {40: 0.2}, flip_after=32, at_flip=0.05)

    assert line(short, RELEARNED) == replace(line(short, RELEARNED), found=(0.4,), holds=None)


def test_what_was_not_measured_holds_for_nobody_to_know() -> None:
    found = long_row(STEADY)
    assert found.outcome is not None
    steps = found.outcome.steps
    blank = (*steps[:-1], replace(steps[-1], entropy=None, mean_length=None))
    unmeasured = replace(found, outcome=replace(found.outcome, steps=blank))
    early = long_row({1: 0.3, 2: 0.9, 4: 0.9}, flip_after=2)

    assert [(one.found, one.holds) for one in steadiness(unmeasured)[REJECTED:]] == [
        ((0.0,), True), ((1.0, 1.0), None), ((1.0, 1.0), None),
    ]  # fmt: skip
    assert line(early, LATE) == replace(line(early, LATE), found=None, holds=None)
    cut = replace(found, outcome=replace(found.outcome, steps=steps[:-1]))
    assert (steadiness(cut)[REJECTED].found, cut.as_json()["rejected_share"]) == (None, None)


def test_what_was_out_of_bounds_once_does_not_hold_whatever_was_not_measured() -> None:
    found = long_row(STEADY, figures={20: (0.04, 20.0)})
    assert found.outcome is not None
    blank = [replace(s, entropy=None, mean_length=None) if s.update == 9 else s for s in found.outcome.steps]
    gaps = replace(found, outcome=replace(found.outcome, steps=tuple(blank)))

    assert [one.holds for one in steadiness(gaps)[ENTROPY:]] == [False, False]


def test_a_short_run_a_control_and_a_failed_run_have_no_lines() -> None:
    control = long_row(STEADY)

    assert steadiness(row(0.4, 0.6)) == steadiness(failed()) == ()
    assert steadiness(replace(control, cell=replace(control.cell, control=Control.COIN))) == ()
    assert "wanted" not in with_lines(row(0.4, 0.6))


def test_the_report_says_of_each_line_whether_it_holds() -> None:
    found = json.loads(json.dumps(with_lines(long_row(RELEARNED_SCORES, flip_after=32, at_flip=0.05))))

    assert found["flip"] == {
        "baseline": 0.1, "ceiling": 0.5, "scores": {"0": 0.05, "8": 0.2, "16": 0.3, "24": 0.3}
    }  # fmt: skip
    assert len(found["wanted"]) == 6
    assert found["wanted"]["0.6 of the ceiling within 24 of the flip"] == {"found": [0.6], "holds": True}


def test_of_agents_whose_runs_count_rounds_nothing_is_said() -> None:
    one = long_row({16: 0.7, 24: 0.72})
    agents = replace(one, cell=replace(one.cell, scenario="tools", method="stepwise"))

    assert steadiness(one)
    assert steadiness(agents) == ()
    assert one.as_json()["rejected_share"] == 0.0
    assert agents.as_json()["rejected_share"] is None
