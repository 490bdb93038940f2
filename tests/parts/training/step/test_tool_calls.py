"""What is usual for an answer that calls tools is subtracted from its reward."""

from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.config import TrainingSettings
from clawstream.events import SampleAssembled
from clawstream.training.step.carried import LEAST_REWARDS, WINDOW, Carried, ToolCalls
from clawstream.training.step.trainer import Trainer
from tests.parts.training import tiny


def calling(*rewards: int | None) -> list[SampleAssembled]:
    return [replace(tiny.sample(f"c{i}", reward=reward), calls_tools=True) for i, reward in enumerate(rewards)]


def test_the_mean_of_the_last_ones_counts_once_there_are_eight() -> None:
    few = ToolCalls().after(calling(*[1] * (LEAST_REWARDS - 1)))
    assert (LEAST_REWARDS, few.baseline) == (8, 0.0)
    assert few.after(calling(-1)).baseline == pytest.approx(6 / 8)
    full = few.after(calling(*[-1] * 8 * WINDOW))
    assert (len(full.last_rewards), full.baseline) == (WINDOW, -1.0)


def test_other_answers_and_those_without_a_reward_are_not_in_it() -> None:
    samples = [*calling(*[1, -1] * 4, *[None] * 9), *(tiny.sample(f"t{i}", reward=-1) for i in range(9))]
    assert ToolCalls().after(samples).baseline == 0.0
    assert len(ToolCalls().after(samples).last_rewards) == 8


def test_it_goes_on_in_the_checkpoint() -> None:
    carried = Carried(tool_calls=ToolCalls().after(calling(*[1] * 9)))
    assert Carried.of(carried.plain()) == carried


def test_a_call_that_is_as_good_as_usual_does_not_count_among_the_answers_of_its_batch(base: Path) -> None:
    norms = []
    for calls in ([], calling(1, 1)):
        trainer = Trainer(base, TrainingSettings(method="binary", kl=0.0, learning_rate=1e-3))
        trainer._carried = Carried(tool_calls=ToolCalls(last_rewards=(1.0,) * LEAST_REWARDS))
        update = trainer.update([tiny.sample("told", reward=-1), *calls], version=1, seed=0)
        norms.append(update.grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
