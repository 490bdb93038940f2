"""What a grid shows: means, intervals, curves, and whether its controls hold."""

import json
import random
from dataclasses import asdict, replace
from math import gamma, pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.simulation.learn.outcome import CellOutcome, ReportRow, read_as
from clawstream.simulation.learn.report import T950, T975, checks, curves, gains, general, lasting, mean_of, steadiness
from clawstream.simulation.opinions import Control
from tests.unit.simulation.learn.outcomes import (
    REFERENCE,
    block_row,
    everyday_row,
    failed,
    long_row,
    outcome,
    row,
    score,
)


def test_the_interval_of_a_mean_is_student_s() -> None:
    mean = mean_of([0.6, 0.7, 0.8, 0.9, 0.5])

    half = 2.776 * sqrt(0.025) / sqrt(5)  # 97.5 % of t with 4 degrees of freedom; the variance by hand
    assert mean.num_seeds == 5
    assert [mean.low, mean.mean, mean.high] == pytest.approx([0.7 - half, 0.7, 0.7 + half])


def test_one_seed_has_no_interval() -> None:
    mean = mean_of([0.6])

    assert (mean.mean, mean.low, mean.high, mean.num_seeds) == (0.6, None, None, 1)


def test_the_interval_holds_the_true_mean_in_about_95_of_100_grids() -> None:
    rng = random.Random(0)
    means = [mean_of([rng.gauss(0.5, 0.05) for _ in range(5)]) for _ in range(2000)]

    held = sum(mean.low is not None and mean.high is not None and mean.low <= 0.5 <= mean.high for mean in means)
    assert 0.935 < held / 2000 < 0.965


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_an_interval_is_around_its_mean_and_within_what_can_be(values: list[float]) -> None:
    mean = mean_of(values)

    assert mean.low is not None
    assert mean.high is not None
    assert 0 <= mean.low <= mean.mean + 1e-12
    assert mean.mean - 1e-12 <= mean.high <= 1


def test_a_curve_is_the_mean_over_seeds_and_the_share_of_the_ceiling() -> None:
    curve, other = curves([row(0.4, 0.6), row(0.1, 0.3, method="opd"), row(0.6, 0.8, seed=1)])

    assert (curve.name, other.name) == ("combined", "opd")
    assert [point.update for point in curve.points] == [0, 8, 16]
    assert [point.score.mean for point in curve.points] == pytest.approx([0.2, 0.5, 0.7])
    assert [point.share for point in curve.points] == pytest.approx([0.25, 0.625, 0.875])
    assert [point.interactions for point in curve.points] == [0, 250, 510]


def test_the_base_s_interval_is_over_its_problems_however_many_seeds_there_are() -> None:
    for rows in ([row(0.4, 0.6)], [row(0.4, 0.6), row(0.6, 0.8, seed=1)]):
        (curve,) = curves(rows)
        assert (curve.points[0].score.low, curve.points[0].score.high) == (0.2 - 0.04, 0.2 + 0.04)


def test_what_was_not_counted_is_absent_and_no_zero() -> None:
    made = row(0.4, 0.6)
    assert made.outcome is not None
    uncounted = replace(made, outcome=replace(made.outcome, interactions={16: 510}))
    no_ceiling = replace(made, reference=replace(made.reference, ceiling=score(0, 0.0)))

    assert uncounted.as_json()["interactions"] == {"0": 0, "8": None, "16": 510}
    assert [point.interactions for point in curves([uncounted])[0].points] == [0, None, 510]
    assert [point.interactions for point in curves([uncounted, made])[0].points] == [0, 250, 510]
    assert curves([no_ceiling])[0].points[-1].share is None


def test_a_cell_that_failed_is_counted_as_failed_and_in_no_mean() -> None:
    (curve,) = curves([row(0.4, 0.6), failed(seed=1)])

    assert curve.num_failed == 1
    assert curve.points[-1].score.mean == 0.6
    (nothing,) = curves([failed()])
    assert (nothing.points, nothing.num_failed) == ((), 1)


def test_a_control_holds_where_no_seed_s_rose_and_each_seed_s_method_is_far_above_it() -> None:
    held = [row(0.5, 0.75, seed=s) for s in (0, 1)] + [row(0.2, 0.25, seed=s, control=Control.SHUFFLED) for s in (0, 1)]
    (check,) = checks(held)
    assert list(check.rise_S) == pytest.approx([0.05, 0.05])
    assert list(check.gap_S) == pytest.approx([0.5, 0.5])
    assert check.holds

    (just,) = checks([row(0.5, 0.7), row(0.2, 0.3, control=Control.SHUFFLED)])  # 0.7 - 0.3 as floats is less than 0.4
    assert just.holds
    (risen,) = checks([*held[:3], row(0.3, 0.31, seed=1, control=Control.SHUFFLED)])  # 0.11 above the base, on one seed
    assert not risen.holds
    (near,) = checks([held[0], row(0.3, 0.6, seed=1), *held[2:]])  # 0.35 above its control, on one seed
    assert not near.holds


def test_a_control_of_which_seeds_failed_or_are_missing_holds_for_nobody_to_know() -> None:
    method, control = row(0.5, 0.75), row(0.2, 0.25, control=Control.SHUFFLED)
    for missing in (failed(seed=1), failed(seed=1, control=Control.SHUFFLED), row(0.5, 0.75, seed=1)):
        (check,) = checks([method, control, missing])
        assert (check.holds, len(check.rise_S), check.num_seeds) == (None, 1, 2)
    (none,) = checks([failed(), failed(control=Control.SHUFFLED)])
    assert (none.holds, none.rise_S) == (None, ())
    (risen,) = checks([method, row(0.5, 0.6, control=Control.SHUFFLED), failed(seed=1)])
    assert risen.holds is False


def test_methods_are_compared_seed_by_seed_at_each_update() -> None:
    binary = [
        row(0.3, 0.5, method="binary"),
        row(0.4, 0.5, method="binary", seed=1),
        row(0.9, 0.9, method="binary", seed=7),
    ]
    combined = [row(0.5, 0.6), row(0.5, 0.8, seed=1), row(0.2, 0.2, seed=1, control=Control.SHUFFLED), failed(seed=7)]

    half_way, last = gains([*binary, *combined])

    assert (half_way.method, half_way.over, half_way.update, last.update) == ("combined", "binary", 8, 16)
    assert list(half_way.gain_S) == pytest.approx([0.2, 0.1])
    half = 6.314 * sqrt(0.005) / sqrt(2)  # 95 % of t with 1 degree of freedom; the variance of 0.2 and 0.1 by hand
    assert [half_way.low, half_way.mean, half_way.high] == pytest.approx([0.15 - half, 0.15, 0.15 + half])
    assert list(last.gain_S) == pytest.approx([0.1, 0.3])


def test_controls_that_leave_outcomes_to_learn_from_are_compared_and_only_frozen_has_to_hold() -> None:
    rows = [
        agents("outcome", 0.5),
        agents("stepwise", 0.6),
        agents("stepwise", 0.45, Control.COIN),
        agents("stepwise", 0.4, Control.SHUFFLED),
        agents("stepwise", 0.2, Control.FROZEN),
    ]

    found = {f"{gain.method} above {gain.over}": gain.mean for gain in gains(rows) if gain.update == 16}

    assert found["stepwise above outcome"] == pytest.approx(0.1)
    assert found["stepwise above stepwise, coin"] == pytest.approx(0.15)
    assert found["stepwise above stepwise, shuffled"] == pytest.approx(0.2)
    assert not any("frozen" in name for name in found)
    assert [(check.method, check.control) for check in checks(rows)] == [("stepwise", Control.FROZEN)]


def test_drawn_verdicts_beside_hints_that_stay_are_compared_and_beside_none_have_to_teach_nothing() -> None:
    rows = [
        row(0.5, 0.9, method="combined"),
        row(0.5, 0.7, method="combined", control=Control.COIN),
        row(0.5, 0.3, method="combined", control=Control.SHUFFLED),
        row(0.5, 0.8, method="binary"),
        row(0.5, 0.2, method="binary", control=Control.COIN),
    ]

    found = {f"{gain.method} above {gain.over}": gain.mean for gain in gains(rows) if gain.update == 16}

    assert found["combined above combined, coin"] == pytest.approx(0.2)
    assert not any("shuffled" in name or "binary, coin" in name for name in found)
    assert {(check.method, check.control) for check in checks(rows)} == {
        ("combined", Control.SHUFFLED), ("binary", Control.COIN),
    }  # fmt: skip


def agents(method: str, last: float, control: Control | None = None) -> ReportRow:
    made = row(0.3, last, method=method, control=control)
    return replace(made, cell=replace(made.cell, scenario="tools"))


def test_one_seed_gives_a_difference_and_no_interval_of_it() -> None:
    (_, last) = gains([row(0.3, 0.5, method="binary"), row(0.5, 0.6)])

    assert last.mean == pytest.approx(0.1)
    assert last.low is last.high is None


@pytest.mark.parametrize("seeds", [2, 3, 5, 40])
def test_the_interval_of_a_difference_holds_the_true_one_in_about_90_of_100_grids(seeds: int) -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(1000):
        drawn = [(rng.gauss(0.5, 0.02), rng.gauss(0.6, 0.02)) for _ in range(seeds)]
        rows = [row(b, b, method="binary", seed=s) for s, (b, _) in enumerate(drawn)]
        last = gains([*rows, *(row(c, c, seed=s) for s, (_, c) in enumerate(drawn))])[-1]
        assert last.low is not None
        assert last.high is not None
        held += last.low <= 0.1 <= last.high
    assert 0.87 < held / 1000 < 0.93


@pytest.mark.parametrize(("quantiles", "below"), [(T950, 0.95), (T975, 0.975)])
def test_the_quantiles_of_student_s_t_are_those_of_its_density(quantiles: tuple[float, ...], below: float) -> None:
    steps = 2000
    for freedom, quantile in enumerate(quantiles, 1):
        density = [
            gamma((freedom + 1) / 2) / gamma(freedom / 2) / sqrt(freedom * pi)
            * (1 + (quantile * step / steps) ** 2 / freedom) ** (-(freedom + 1) / 2)
            for step in range(steps + 1)
        ]  # fmt: skip
        simpson = density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])
        assert 0.5 + simpson * quantile / steps / 3 == pytest.approx(below, abs=6e-5)


def test_a_control_is_compared_with_its_own_method_and_seed_alone() -> None:
    rows = [
        row(0.5, 0.7),
        row(0.2, 0.2, seed=1, control=Control.SHUFFLED),
        row(0.2, 0.2, method="opd", control=Control.SHUFFLED),
    ]

    found = checks([*rows, failed("opd")])

    assert {(check.method, check.rise_S, check.holds) for check in found} == {("combined", (), None), ("opd", (), None)}


def test_a_row_has_what_readers_of_the_report_rely_on() -> None:
    found = json.loads(json.dumps(row(0.4, 0.6, control=Control.SHUFFLED).as_json()))

    assert found | {
        "method": "combined", "base": "standard", "seed": 0, "control": "shuffled", "ceiling": 0.8, "baseline": 0.2,
        "scores": {"0": 0.2, "8": 0.4, "16": 0.6}, "turns": 270, "samples": 260, "corrections": 120,
        "loss_tokens": 1000, "refusals": {"cut_off": 3}, "kl": 0.06, "entropy": 0.5, "mean_length": 30.5,
        "correction_to_policy_s": 4.5, "interactions": {"0": 0, "8": 250, "16": 510}, "problems": 500,
        "rejected": 2, "requests_failed": 1, "right": {"0": 450, "8": 450, "16": 450},
        "styled": {"0": 300, "8": 300, "16": 300},
    } == found  # fmt: skip
    assert found["by_persona"]["16"] == {"student": 0.6, "ta": 0.6}
    assert row(0.4, 0.6).as_json()["control"] is None


def test_a_run_without_a_flip_has_no_figure_of_one() -> None:
    found = row(0.4, 0.6).as_json()

    assert (found["flip"], found["flip_after"], found["teacher"]) == (None, None, "reference")
    assert row(0.4, 0.6, method="binary").as_json()["teacher"] is None
    assert found["rejected_share"] == 0


def test_scores_after_a_flip_are_shares_of_what_the_hint_is_worth_then() -> None:
    (curve,) = curves([long_row({32: 0.6, 40: 0.3}, flip_after=32, at_flip=0.05)])

    assert [point.share for point in curve.points] == pytest.approx([0.25, 0.75, 0.6])
    assert curve.flip is not None
    assert (curve.flip.update, curve.flip.score.mean) == (32, 0.05)
    assert curve.flip.share == pytest.approx(0.1)
    assert curve.flip.interactions == 512
    assert curves([row(0.4, 0.6)])[0].flip is None


def test_the_same_method_with_another_teacher_is_another_curve() -> None:
    rows = [long_row({8: 0.3, 16: 0.6}), long_row({8: 0.3, 16: 0.9}, teacher="reference")]

    assert [(curve.name, curve.points[-1].score.mean) for curve in curves(rows)] == [
        ("combined", 0.6), ("combined, reference teacher", 0.9),
    ]  # fmt: skip
    assert [(gain.method, gain.over, gain.update) for gain in gains(rows)] == [
        ("combined, reference teacher", "combined", 8), ("combined, reference teacher", "combined", 16),
    ]  # fmt: skip


def test_a_row_that_failed_says_why_and_shows_no_figure() -> None:
    found = failed().as_json()

    assert found["error"] == "no broker"
    assert not {"scores", "turns", "kl"} & found.keys()


def test_an_outcome_comes_back_from_json_as_it_was() -> None:
    for before in (outcome(0.4, 0.6), replace(outcome(0.4, 0.6), at_flip=score(16, 0.1))):
        assert read_as(CellOutcome, json.dumps(asdict(before))) == before


BLOCKS = {
    10: {"student": 0.8, "teacher": 0.1, "ta": 0.2},
    20: {"student": 0.4, "teacher": 0.5, "ta": 0.1},
    30: {"student": 0.2, "teacher": 0.5, "ta": 0.9},
}


def test_what_others_lost_is_counted_from_the_base_and_of_those_who_never_talked() -> None:
    by_person = {1: {"student": 0.6, "ta": 0.1}, 3: {"student": 0.9, "ta": 0.05}}
    found = block_row(by_person, scenario="corrections").as_json()
    assert found["others_lost"] == pytest.approx(0.2 - 0.05)
    assert (found["kept"], found["newest"], found["blocks"]) == (None, 0.9, {"student": 3})
    talked = {update: {who: each[who] for who in ("student",)} for update, each in by_person.items()}
    assert block_row(talked, scenario="corrections").as_json()["others_lost"] is None
    assert row(0.5, 0.8).as_json()["others_lost"] is None


def test_what_is_kept_is_each_earlier_person_s_share_of_the_score_when_their_block_ended() -> None:
    found = block_row(BLOCKS).as_json()

    assert found["kept"] == pytest.approx((0.2 / 0.8 + 0.5 / 0.5) / 2)
    assert found["newest"] == 0.9
    assert found["blocks"] == {"student": 10, "teacher": 20, "ta": 30}
    assert found["by_persona"]["20"] == BLOCKS[20]


def test_who_had_learned_nothing_can_keep_nothing_and_is_left_out() -> None:
    nothing = {update: each | {"student": 0.0} for update, each in BLOCKS.items()}
    assert block_row(nothing).as_json()["kept"] == 1.0
    nobody = {update: dict.fromkeys(each, 0.0) for update, each in BLOCKS.items()}
    assert (block_row(nobody).as_json()["kept"], block_row(nobody).as_json()["newest"]) == (None, 0.0)


def test_who_has_no_graded_answer_at_the_end_is_left_out_of_what_is_kept() -> None:
    ungraded = BLOCKS | {30: {who: score for who, score in BLOCKS[30].items() if who != "student"}}
    assert block_row(ungraded).as_json()["kept"] == 0.5 / 0.5


def test_of_a_subject_that_is_not_scored_there_is_no_newest_and_without_blocks_neither() -> None:
    found = block_row({16: {"student": 0.9}, 20: {"student": 0.45}}, scenario="unrelated").as_json()
    assert (found["kept"], found["newest"]) == (0.5, None)
    stream = row(0.4, 0.6).as_json()
    assert (stream["kept"], stream["newest"], stream["blocks"]) == (None, None, None)


def test_a_method_s_blocks_are_means_over_seeds_and_its_controls_stand_apart() -> None:
    other = BLOCKS | {30: {"student": 0.4, "teacher": 0.5, "ta": 0.7}}
    rows = [block_row(BLOCKS), block_row(other, seed=1), block_row(BLOCKS, control=Control.FROZEN), row(0.4, 0.6)]

    real, frozen = lasting(rows)

    assert (real.name, real.num_seeds, frozen.name) == ("combined", 2, "combined, frozen")
    assert real.scores["student"][30].mean == pytest.approx(0.3)
    assert [*real.scores["ta"]] == [0, 10, 20, 30]
    assert real.kept is not None
    assert real.newest is not None
    assert real.kept.mean == pytest.approx((0.625 + 0.75) / 2)
    assert real.newest.mean == pytest.approx(0.8)
    assert steadiness(rows[0]) == ()
    assert checks(rows[:3]) == []


def test_how_much_of_the_gap_is_closed_is_a_share_of_what_the_hint_adds() -> None:
    assert REFERENCE.closed(0.5) == pytest.approx(0.5)
    assert REFERENCE.closed(0.1) == pytest.approx(-1 / 6)
    assert replace(REFERENCE, ceiling=REFERENCE.baseline).closed(0.5) is None


def test_a_row_of_everyday_requests_has_what_was_closed_of_the_gap_and_what_was_kept_beside_it() -> None:
    found = everyday_row(0.5, perplexity=20.0).as_json()
    assert (found["split"], found["baseline"], found["ceiling"], found["ceiling_held_out"]) == ("report", 0.2, 0.8, 0.6)
    assert found["ceiling_by_persona"] == {"student": 0.8, "ta": 0.8}
    assert found["prompt_tokens"] == {"plain": 40.4, "with_hint": 55.0}
    assert found["gap_closed"] == pytest.approx({"0": 0.0, "16": 0.5})
    assert found["general"]["16"] == {"facts": 0.7, "sums": 0.4, "perplexity": 20.0}
    assert row(0.3, 0.5).as_json()["general"] is None


@pytest.mark.parametrize(("control", "real", "holds"), [(0.25, 0.5, True), (0.27, 0.6, False), (0.25, 0.48, False)])
def test_a_control_of_everyday_requests_is_held_against_what_the_hint_adds(
    control: float, real: float, holds: bool
) -> None:
    rows = [everyday_row(real, perplexity=20.0), everyday_row(control, perplexity=20.0, control=Control.SHUFFLED)]
    (found,) = checks(rows)
    assert found.holds is holds
    nothing_to_gain = [replace(r, reference=replace(r.reference, ceiling=r.reference.baseline)) for r in rows]
    assert checks(nothing_to_gain)[0].holds is None


def test_a_perplexity_that_is_missing_in_one_run_is_missing_in_the_mean() -> None:
    found = general([everyday_row(0.5, perplexity=20.0), everyday_row(0.5, perplexity=None)])
    assert found["combined"][16].perplexity is None
    assert found["combined"][0].perplexity == 18.0
