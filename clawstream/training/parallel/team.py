"""A trainer made of several processes, used like one."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from clawstream.config import TrainingSettings
from clawstream.errors import ConfigError, StepRefused
from clawstream.events import SampleAssembled
from clawstream.training.models.base_folder import threads_for
from clawstream.training.parallel.processes import Processes, Start
from clawstream.training.step.trainer import StepSummary

_MEMBER = "clawstream.training.parallel.processes"


class Team:
    """The processes of a trainer; each holds a part of the policy, its moments and its reference.

    All methods raise PartUnavailable where a process ended; then all processes are ended, and nothing more can be
    asked.
    """

    def __init__(
        self, base: Path, settings: TrainingSettings, *, device: str, processes: Processes | None = None
    ) -> None:
        """`device` is "cpu" or "cuda", where each process has a GPU of its own; without `processes` it starts them."""
        start = Start(backend="nccl" if device == "cuda" else "gloo", threads=threads_for(base))
        self._processes = processes or Processes(settings.processes, start)
        self._processes.ask(f"{_MEMBER}:begin", base, settings, device)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of its members."""
        return self._processes.pids

    def update(
        self,
        samples: Sequence[SampleAssembled],
        *,
        version: int,
        seed: int,
        gated: bool = False,
        num_rejected: int = 0,
        advantages: Sequence[float] | None = None,
    ) -> StepSummary:
        """Take the steps that make `version`, as `Trainer.update` does; after StepRefused the processes are there."""
        options = {
            "version": version, "seed": seed, "gated": gated, "num_rejected": num_rejected, "advantages": advantages,
        }  # fmt: skip
        said: StepSummary | StepRefused = self._processes.ask(f"{_MEMBER}:update", tuple(samples), options)[0]
        if isinstance(said, StepRefused):
            raise said
        return said

    def save(self, folder: Path) -> None:
        """Write the weights for engines, and beside them all that `restore` needs, in any number of processes."""
        self._processes.ask(f"{_MEMBER}:save", folder)

    def restore(self, folder: Path | None) -> None:
        """Go on from a checkpoint of this policy, whichever trainer wrote it; None: from its start."""
        self._processes.ask(f"{_MEMBER}:restore", folder)

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def device_of(settings: TrainingSettings, named: str) -> str:
    """Return the team's device, given the one that a single process would use; raises ConfigError if there is none."""
    if settings.trainer == "megatron" and find_spec("megatron") is None:
        raise ConfigError(
            'training.trainer = "megatron" needs megatron-core, which is not installed. Nothing is trained. Install '
            "clawstream with its extra megatron."
        )
    if named == "cpu":
        if settings.trainer == "megatron":
            raise ConfigError(
                'training.trainer = "megatron" needs a GPU for each of its processes, and computes on none here '
                '(torch sees no GPU). Nothing is trained. Take "fsdp", which needs none.'
            )
        return "cpu"
    if settings.processes > torch.cuda.device_count():
        raise ConfigError(
            f"training.processes = {settings.processes}, and torch sees {torch.cuda.device_count()} GPUs. Nothing is "
            "trained. Take as many processes as GPUs, or fewer."
        )
    return "cuda"
