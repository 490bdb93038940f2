"""Executes plans, one after the other, on a thread of its own: the event loop stays free for the log.

A step is taken under the settings that its plan names, from its parent's checkpoint, so a plan that is executed again
gives the same bytes on the same machine; what was said of the step already is not measured again.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from clawstream.config import TrainingSettings
from clawstream.events import BatchPlanned, SampleAssembled, StepTaken
from clawstream.training.checkpoints import Checkpoint, write
from clawstream.training.lived import step_taken
from clawstream.training.trainable import ModelLimits, flaw
from clawstream.training.trainer import Trainer

log = logging.getLogger(__name__)


class Stepper:
    """A policy's trainer, kept between steps as long as the settings stay."""

    def __init__(self, base: Path, checkpoints_dir: Path, thread: ThreadPoolExecutor, limits: ModelLimits) -> None:
        self._base = base
        self._limits = limits
        self._checkpoints_dir = checkpoints_dir
        self._thread = thread
        self._trainer: tuple[TrainingSettings, Trainer] | None = None

    async def execute(
        self,
        plan: BatchPlanned,
        samples: tuple[SampleAssembled, ...],
        *,
        parent: Path | None,
        said: StepTaken | None,
    ) -> Checkpoint:
        """Take the plan's step on these samples and return its checkpoint, whole on disk.

        A sample that no step can be taken on, which only a plan of an older version names, is left out: whenever the
        step is taken, it is taken on the same ones. `parent` is the verified folder of the version before, None the
        base; `said` is what the log says of this step.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._execute, plan, samples, parent, said
        )

    def _execute(
        self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...], parent: Path | None, said: StepTaken | None
    ) -> Checkpoint:
        started = time.perf_counter()
        trainer = self._trainer_for(TrainingSettings.model_validate_json(plan.settings), parent)
        usable = self._usable(plan, samples)
        update = trainer.update(usable, version=plan.policy_version, seed=plan.seed)
        step_ms = round((time.perf_counter() - started) * 1000)
        step = said or step_taken(plan, usable, update, step_ms=step_ms, now_ms=int(time.time() * 1000))
        return write(self._checkpoints_dir, plan, step, trainer.save)

    def _usable(self, plan: BatchPlanned, samples: Sequence[SampleAssembled]) -> list[SampleAssembled]:
        usable = [sample for sample in samples if flaw(sample, self._limits) is None]
        if len(usable) < len(samples):
            log.warning(
                "version=%d samples_left_out=%d reason=the plan names samples that no step can be taken on; see "
                "`clawstream dlq list --stage train`",
                plan.policy_version, len(samples) - len(usable),
            )  # fmt: skip
        return usable

    def _trainer_for(self, training: TrainingSettings, parent: Path | None) -> Trainer:
        if self._trainer is None or self._trainer[0] != training:
            if training.threads is not None:
                torch.set_num_threads(training.threads)
            trainer = Trainer(self._base, training, device=_device(training.device))
            if parent is not None:
                trainer.restore(parent)
            self._trainer = (training, trainer)
        return self._trainer[1]


def _device(named: str | None) -> str:
    return named or ("cuda" if torch.cuda.is_available() else "cpu")
