"""What each process of a team does when it is asked; `state` is what the process keeps between calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawstream.config import TrainingSettings
from clawstream.errors import StepRefused
from clawstream.events import SampleAssembled
from clawstream.training.models.model import Model
from clawstream.training.step.trainer import StepSummary, Trainer, load_options


def begin(state: dict[str, Any], base: Path, settings: TrainingSettings, device: str) -> None:
    """Have a trainer of the base, and this process' part of its model."""
    state["trainer"] = Trainer(base, settings, device=device, model=_model(base, settings, device))


def restore(state: dict[str, Any], folder: Path | None) -> None:
    """Go on from a checkpoint; None: from the policy's start."""
    state["trainer"].restore(folder)


def update(
    state: dict[str, Any],
    samples: tuple[SampleAssembled, ...],
    options: Mapping[str, Any],
) -> StepSummary | StepRefused:
    """Take the steps that make a version; all processes return the same, a refusal too: they are to go on after it."""
    try:
        said: StepSummary = state["trainer"].update(samples, **options)
    except StepRefused as why:
        return why
    return said


def save(state: dict[str, Any], folder: Path) -> None:
    """Write this process' part of the weights and of the trainer's state."""
    state["trainer"].save(folder)


def _model(base: Path, settings: TrainingSettings, device: str) -> Model:
    options = load_options(settings, device)
    if settings.trainer == "fsdp":
        from clawstream.training.parallel.fsdp_model import FsdpModel

        return FsdpModel.load(base, **options)
    from clawstream.training.megatron.model import MegatronModel, join
    from clawstream.training.megatron.shape import sizes_of

    sizes = sizes_of(settings)
    join(sizes)
    return MegatronModel.load(base, sizes, **options)
