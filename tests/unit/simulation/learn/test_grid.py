"""Which runs a comparison is made of, and that each is known by its plan."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from clawstream.config import TrainingSettings
from clawstream.simulation.learn.grid import Cell, changed_settings, grid, usual_score_at
from clawstream.simulation.learn.outcome import read_as
from clawstream.simulation.opinions import Control
from clawstream.simulation.roles import Roles
from clawstream.simulation.runs.scenarios import CASTS

CELL = Cell(
    scenario="all", base="standard", base_sha="a", problems_sha="a", method="opd", seed=3, control=Control.COIN,
    updates=16, learning_rate=2e-4, epochs=1, answers_per_hint=1, lora_rank=None, hurry=False, score_at=(0, 8, 16),
)  # fmt: skip
OTHER: dict[str, Any] = {
    "scenario": "student", "base": "hard", "base_sha": "b", "problems_sha": "b", "method": "binary", "seed": 4,
    "control": None, "updates": 17, "learning_rate": 1e-4, "epochs": 2, "answers_per_hint": 4, "w_topk": 0.5,
    "lora_rank": 8, "hurry": True, "score_at": (0, 16), "teacher": "reference", "flip_after": 8,
    "votes_together": 0.5, "adapters": "by_key", "hint_choice": "fall", "wordy_hints": 0.5,
    "split": "development", "roles": Roles(scorer="m@http://x/v1"), "changed": (("kl", 0.1),),
}  # fmt: skip


def made(
    *, methods: Sequence[str] = ("binary", "opd"), seeds: Sequence[int] = (0, 1), controls: Sequence[Control] = (),
    teachers: Sequence[str] = ("usual",), **changes: Any,
) -> tuple[Cell, ...]:  # fmt: skip
    like = replace(CELL, **{"score_at": (8,)} | changes)
    return grid(like, methods=methods, seeds=seeds, controls=controls, teachers=teachers)


def test_a_grid_has_each_method_with_each_seed_and_the_same_again_under_each_control() -> None:
    cells = made(controls=[Control.SHUFFLED, Control.FROZEN])

    assert len(cells) == len({cell.name for cell in cells}) == 2 * 2 * 3
    assert {(c.method, c.seed, c.control) for c in cells if c.seed == 0 and c.method == "opd"} == {
        ("opd", 0, None), ("opd", 0, Control.SHUFFLED), ("opd", 0, Control.FROZEN),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "control", "changed"),
    [
        ("all", Control.COIN, {"binary", "combined"}),  # by hints alone no verdict counts
        ("all", Control.SHUFFLED, {"binary", "opd", "combined", "topk"}),
        ("all", Control.FROZEN, {"binary", "opd", "combined", "topk"}),
        ("blocks", Control.COIN, {"binary", "combined"}),
        ("unrelated", Control.COIN, {"combined"}),
        ("unrelated", Control.SHUFFLED, {"opd", "combined", "topk"}),
        ("unrelated", Control.FROZEN, {"opd", "combined", "topk"}),
        ("tools", Control.COIN, {"stepwise"}),  # with outcomes alone no verdict counts
        ("tools", Control.SHUFFLED, {"stepwise"}),
        ("tools", Control.FROZEN, {"stepwise", "outcome"}),
    ],
)
def test_a_control_is_run_of_the_methods_that_it_changes(scenario: str, control: Control, changed: set[str]) -> None:
    cells = made(scenario=scenario, methods=CASTS[scenario].methods, controls=[control])

    assert {cell.method for cell in cells if cell.control is None} == set(CASTS[scenario].methods)
    assert {cell.method for cell in cells if cell.control is control} == changed


def test_a_grid_that_is_cut_short_has_all_methods_with_the_same_seeds() -> None:
    assert [cell.seed for cell in made(seeds=[5, 0])] == [5, 5, 0, 0]


def test_where_no_hint_counts_none_scores_several_answers() -> None:
    cells = made(methods=["binary", "opd", "combined"], answers_per_hint=4)
    assert {(cell.method, cell.answers_per_hint) for cell in cells} == {("binary", 1), ("opd", 4), ("combined", 4)}


def test_a_teacher_s_whole_distribution_counts_beside_gaps_alone() -> None:
    cells = made(methods=["binary", "opd", "combined"], w_topk=0.5)
    assert {(cell.method, cell.w_topk) for cell in cells} == {("binary", 0.0), ("opd", 0.0), ("combined", 0.5)}


def test_what_is_named_twice_is_run_once() -> None:
    assert made(methods=["opd", "opd"], seeds=[1, 1]) == made(methods=["opd"], seeds=[1])


def test_the_base_and_the_last_update_are_scored_whatever_is_asked_for() -> None:
    assert {cell.score_at for cell in made(score_at=[12, 4, 4])} == {(0, 4, 12, 16)}


@pytest.mark.parametrize("field", [field.name for field in fields(Cell)])
def test_whatever_changes_a_plan_changes_its_name(field: str) -> None:
    assert replace(CELL, **{field: OTHER[field]}).name != CELL.name


def test_a_cell_that_was_run_before_there_were_teachers_and_flips_has_the_name_that_it_had() -> None:
    assert CELL.name == "all-standard-opd-coin-seed3-86a85a8c"
    assert {cell.name for cell in made(methods=["opd", "binary"])} >= {
        replace(CELL, seed=seed, control=None, method=method).name for seed in (0, 1) for method in ("opd", "binary")
    }


def test_each_teacher_has_a_run_of_each_method_that_hints_teach() -> None:
    cells = made(teachers=["usual", "contrast", "reference", "contrast"], seeds=[0])

    assert [(cell.method, cell.teacher) for cell in cells] == [
        ("binary", "usual"), ("opd", "usual"), ("opd", "contrast"), ("opd", "reference"),
    ]  # fmt: skip
    assert [cell.arm for cell in cells] == ["binary", "opd", "opd, contrast teacher", "opd, reference teacher"]


def test_each_choice_of_hints_has_a_run_of_each_method_that_hints_teach() -> None:
    """By overlap the policy's likeliest tokens are learned alone, unless it is said that the teacher's are too."""
    like = replace(CELL, score_at=(8,), w_topk=1.0, control=None)
    methods, choices = ("binary", "combined"), ("longest", "fall", "overlap", "fall")
    for is_said in (False, True):
        cells = grid(
            like, methods=methods, seeds=[0], controls=(), teachers=["usual"], hint_choices=choices,
            w_topk_is_said=is_said,
        )  # fmt: skip
        assert [(cell.method, cell.hint_choice, cell.w_topk, cell.taught_by) for cell in cells] == [
            ("binary", "longest", 0.0, None),
            ("combined", "longest", 1.0, "contrast"),
            ("combined", "fall", 1.0, "contrast"),
            ("combined", "overlap", *((1.0, "contrast") if is_said else (0.0, "reference"))),
        ]
        assert [cell.training.get("hint_choice") for cell in cells] == [None, None, "fall", "overlap"]
        assert [cell.arm for cell in cells] == [
            "binary", "combined", "combined, hints by fall", "combined, hints by overlap",
        ]  # fmt: skip


def test_the_version_at_the_flip_is_scored_and_later_updates_are_flipped() -> None:
    for cell in made(flip_after=12):
        assert cell.score_at == (0, 8, 12, 16)  # it ends before the 24 updates are over
        assert [cell.is_flipped(update) for update in cell.score_at] == [False, False, False, True]
        assert cell.scorings == ((8, False), (12, False), (12, True), (16, True))
    assert made()[0].scorings == ((8, False), (16, False))
    assert {cell.score_at for cell in made(flip_after=12, updates=40)} == {(0, 8, 12, 36, 40)}


def test_each_block_is_scored_at_its_end_and_unrelated_updates_one_by_one_at_first() -> None:
    (blocks,) = made(scenario="blocks", updates=30, score_at=(), methods=["opd"], seeds=[0])
    assert [(block.talker, block.end) for block in blocks.blocks] == [("student", 10), ("teacher", 20), ("ta", 30)]
    assert blocks.score_at == (0, 10, 20, 30)
    assert blocks.scorings == ((10, False), (20, False), (30, False))

    (unrelated,) = made(scenario="unrelated", updates=20, score_at=(), methods=["opd"], seeds=[0])
    assert [(block.talker, block.end) for block in unrelated.blocks] == [("student", 16), ("unrelated", 20)]
    assert unrelated.score_at == (0, 16, 17, 18, 20)
    assert CELL.blocks == ()


def test_corrections_are_trained_on_at_once_and_scored_after_the_first_and_the_last() -> None:
    (found,) = made(scenario="corrections", updates=3, score_at=(1,), methods=["opd"], seeds=[0])
    assert (found.training["cadence"], found.score_at) == ("correction", (0, 1, 3))
    assert usual_score_at("corrections", 3) == [1]
    assert "cadence" not in CELL.training


def test_without_a_wish_blocks_are_scored_half_way_too() -> None:
    assert usual_score_at("blocks", 30) == [5, 15, 25]
    assert usual_score_at("unrelated", 20) == [8, 18]


def test_a_cell_comes_back_from_json_as_it_was() -> None:
    for cell in (CELL, replace(CELL, control=None)):
        assert read_as(Cell, json.dumps(asdict(cell))) == cell


def test_settings_that_are_changed_are_those_of_the_run_and_of_the_arms_name() -> None:
    changed = changed_settings(["kl=.1", "trainer=torch", "gate=False"], ["combined"])
    cell = replace(CELL, method="combined", changed=changed)

    assert changed == (("gate", False), ("kl", 0.1), ("trainer", "torch"))
    assert cell.training == replace(cell, changed=()).training | {"kl": 0.1, "trainer": "torch", "gate": False}
    assert cell.arm == "combined, gate False, kl 0.1, trainer torch"


def test_however_a_setting_is_spelled_the_cell_is_the_same_and_comes_back_from_json() -> None:
    one, other = (
        replace(CELL, changed=changed_settings(said, ["combined"]))
        for said in (["w_binary=0", "w_opd=2"], ["w_opd=2.0", "w_binary=0.0"])
    )
    assert one.name == other.name
    assert read_as(Cell, json.dumps(asdict(one))).name == one.name


@pytest.mark.parametrize("w_topk_is_said", [False, True])
def test_the_original_s_recipe_has_its_teacher_and_no_divergence_unless_it_is_asked_for(w_topk_is_said: bool) -> None:
    changed = changed_settings(["recipe=openclaw-rl"], ["combined"])
    like = replace(CELL, method="combined", w_topk=1.0, changed=changed)
    [cell] = grid(like, methods=["combined"], seeds=[0], controls=(), teachers=["usual"], w_topk_is_said=w_topk_is_said)
    settings = TrainingSettings(method="combined", **cell.training)

    assert settings.w_topk == float(w_topk_is_said)
    assert (settings.kl, settings.rehearsed_share, settings.as_published) == (0.0, 0.0, True)
    assert settings.taught_by == cell.taught_by == "reference"
