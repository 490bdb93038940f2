"""Faults as they could come into a trainer that has learned for a while, each planted from its next step on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from clawstream.events import SampleAssembled
from clawstream.training.step.trainer import Trainer

Samples = Sequence[SampleAssembled]


def rate_times_100(trainer: Trainer) -> None:
    """The learning rate is a hundred times what it should be."""
    trainer._settings = trainer._settings.model_copy(update={"learning_rate": 100 * trainer._settings.learning_rate})


def sign_flipped(trainer: Trainer) -> None:
    """The loss is climbed, not descended."""
    _after_loss(trainer, lambda total: -total)


def not_a_number(trainer: Trainer) -> None:
    """The gradient is NaN."""
    _after_loss(trainer, lambda total: total * math.nan)


def weights_not_a_number(trainer: Trainer) -> None:
    """A process' first weights are NaN after the step."""

    def spoil() -> None:
        next(iter(trainer._model.trained.values())).data.mul_(torch.nan)  # of any process' part

    _after_step(trainer, spoil)


def loops(trainer: Trainer) -> None:
    """The policy says its last token again and again after the step: nothing is added to a token's own embedding."""

    def spoil() -> None:
        for name, parameter in trainer._model.trained.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.zero_()
            elif name == "model.norm.weight":
                parameter.data.mul_(10.0)

    _after_step(trainer, spoil)


def always_good(samples: Samples) -> list[SampleAssembled]:
    """What a judge makes of answers that says yes to everything; its hints are what they were."""
    return [replace(sample, reward=1, total_reward=1.0) for sample in samples]


FAULTS: Mapping[str, Callable[[Trainer], None]] = {
    "learning rate x 100": rate_times_100,
    "sign flipped": sign_flipped,
    "NaN in the gradient": not_a_number,
    "NaN in the weights": weights_not_a_number,
    "loops": loops,
}


def _after_loss(trainer: Trainer, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    own = trainer._loss.of

    def changed(*arguments: Any, **options: Any) -> Any:
        total, *rest = own(*arguments, **options)
        return change(total), *rest

    trainer._loss.of = changed  # type: ignore[method-assign]


def _after_step(trainer: Trainer, spoil: Callable[[], None]) -> None:
    own = trainer._step

    def stepped(*arguments: Any, **options: Any) -> float | None:
        norm = own(*arguments, **options)
        spoil()
        return norm

    trainer._step = stepped  # type: ignore[method-assign]
