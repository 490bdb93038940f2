"""When the people of a run are stopped, and by which settings its parts run."""

from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.simulation.run import People, Plan, _next_stop, _settings

PEOPLE = People(scenario="all", hint_share=0.5, asked=Path("a"), scored=Path("b"), scored_flipped=Path("c"))
PLAN = Plan(
    people=PEOPLE, method="combined", updates=88, seed=0, folder=Path("f"), cache_dir=Path("c"), base=Path("b"),
    temperature=1.0, learning_rate=1e-3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("flip_after", "score_every", "stops"),
    [
        (None, None, [88]),
        (64, None, [64, 88]),
        (None, 40, [40, 80, 88]),
        (64, 40, [40, 64, 88]),
    ],
)
def test_people_are_stopped_for_each_score_for_the_flip_and_at_the_end(
    flip_after: int | None, score_every: int | None, stops: list[int]
) -> None:
    plan = replace(PLAN, flip_after=flip_after, score_every=score_every)
    found = [0]
    while found[-1] < plan.updates:
        found.append(_next_stop(plan, found[-1]))

    assert found[1:] == stops


def test_the_teacher_is_the_plan_s_and_without_one_that_of_the_settings(tmp_path: Path) -> None:
    plan = replace(PLAN, folder=tmp_path)

    assert _settings(replace(plan, teacher="ema"), 1234).training.teacher == "ema"
    assert _settings(plan, 1234).training.teacher == "reference"
    assert _settings(plan, 1234).training.keep_checkpoints == 89  # all of them: which are scored is not known here
