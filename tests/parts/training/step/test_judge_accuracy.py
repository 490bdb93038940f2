"""A judge's verdicts count as much as people's scores of the same answers bear them out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.config import TrainingSettings
from clawstream.events import SampleAssembled
from clawstream.training.step.batch_loss import Scored
from clawstream.training.step.carried import TRUSTED_VERDICTS, WINDOW, Carried, JudgeAccuracy
from clawstream.training.step.trainer import Trainer
from tests.parts.training import tiny


def checked(name: str, *, verdict: int | None, person: float | None, judge: str = "judge") -> SampleAssembled:
    sample = tiny.sample(name, reward=verdict, judge=judge)
    return replace(sample, person_reward=person, total_reward=float(verdict or 0) if person is None else person)


def accuracy(agreed: Sequence[bool]) -> JudgeAccuracy:
    return JudgeAccuracy().after(
        [checked(f"s{n}", verdict=1, person=1.0 if one else -0.5) for n, one in enumerate(agreed)]
    )


VERDICT = checked("new", verdict=-1, person=None)


def wanted(sample: SampleAssembled, judges: JudgeAccuracy, *, tool_baseline: float = 0.0) -> float | None:
    return Scored(
        samples=[sample], plain=[], hinted={}, students={}, tops={}, old=None, reference=None, judges=judges,
        tool_baseline=tool_baseline,
    ).wanted(0)  # fmt: skip


def test_a_judge_whom_nobody_checked_is_taken_at_its_word() -> None:
    assert wanted(VERDICT, JudgeAccuracy()) == -1.0


def test_a_verdict_counts_by_how_often_people_agreed_with_the_judge() -> None:
    judges = accuracy([True] * 6 + [False] * 4)
    assert judges.weight(VERDICT) == pytest.approx(2 * (6 + TRUSTED_VERDICTS) / (10 + TRUSTED_VERDICTS) - 1)
    assert wanted(VERDICT, judges) == pytest.approx(-judges.weight(VERDICT))


def test_a_judge_who_is_no_better_than_chance_teaches_nothing() -> None:
    refuted = accuracy([False] * 3 * TRUSTED_VERDICTS)
    assert wanted(VERDICT, refuted) is None
    assert wanted(replace(VERDICT, calls_tools=True), refuted, tool_baseline=0.75) is None


def test_of_a_call_a_verdict_counts_by_how_far_it_is_from_what_is_usual_and_by_its_judge() -> None:
    judges = accuracy([True] * 6 + [False] * 4)
    weight = judges.weight(VERDICT)
    good, bad = (replace(checked("call", verdict=verdict, person=None), calls_tools=True) for verdict in (1, -1))
    said = [wanted(one, judges, tool_baseline=0.75) for one in (good, bad)]
    assert said == pytest.approx([weight * 0.25, weight * -1.75])
    assert weight < 0.75, "so a mean that is subtracted unweighed would make praise a blame"
    outcome = replace(good, environment_reward=1.0)
    assert wanted(outcome, judges, tool_baseline=0.75) == 0.25


@given(st.lists(st.booleans(), max_size=40), st.booleans())
def test_a_further_agreement_never_lowers_the_weight_and_a_disagreement_never_raises_it(
    agreed: list[bool], next_one: bool
) -> None:
    before, after = accuracy(agreed).weight(VERDICT), accuracy([*agreed, next_one]).weight(VERDICT)
    assert 0 <= after <= 1
    assert after >= before if next_one else after <= before


def test_what_a_person_an_environment_or_a_limit_says_is_no_verdict() -> None:
    doubted = accuracy([False] * 3 * TRUSTED_VERDICTS)
    assert wanted(checked("p", verdict=1, person=-1.0), doubted) == -1.0
    assert wanted(replace(VERDICT, environment_reward=-1.0), doubted) == -1.0
    assert wanted(replace(VERDICT, cut=True), doubted) == -1.0


def test_each_judge_and_prompt_is_known_by_its_own_answers_and_by_the_last_ones() -> None:
    judges = accuracy([False] * 2 * WINDOW)
    assert judges.weight(checked("other", verdict=1, person=None, judge="another")) == 1.0
    assert judges.weight(replace(VERDICT, prompt_version="2")) == 1.0
    again = judges.after([checked(f"a{n}", verdict=-1, person=-1.0) for n in range(WINDOW)])
    assert again.weight(VERDICT) == 1.0
    unheard = [checked("n", verdict=None, person=1.0), checked("z", verdict=1, person=0.0), VERDICT]
    assert JudgeAccuracy().after(unheard) == JudgeAccuracy()


def test_the_score_that_a_limit_gave_is_no_error_of_the_judge() -> None:
    cut = replace(checked("long", verdict=-1, person=1.0), cut=True)
    assert JudgeAccuracy().after([cut]) == JudgeAccuracy()


def test_it_goes_on_in_the_checkpoint() -> None:
    carried = Carried(judges=accuracy([True, False, True]))
    assert Carried.of(json.loads(json.dumps(carried.plain()))) == carried


@pytest.mark.parametrize(("recipe", "moves"), [("clawstream", False), ("openclaw-rl", True)])
def test_a_trainer_learns_from_no_verdict_of_a_judge_that_people_refuted(base: Path, recipe: str, moves: bool) -> None:
    training = TrainingSettings.model_validate({"method": "binary", "recipe": recipe, "kl": 0.0, "learning_rate": 1e-3})
    trainer = Trainer(base, training)
    refuted = [checked(f"s{n}", verdict=1, person=-0.5) for n in range(3 * TRUSTED_VERDICTS)]
    trainer.update(refuted, version=1, seed=1)
    assert (trainer.update([VERDICT], version=2, seed=2).grad_norm is not None) is moves
