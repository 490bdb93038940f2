"""How often the gate rejects healthy steps of the demonstration's policy, and whether it catches what is planted.

One process and no servers: students ask the policy, its answers are sampled by the trainer's own weights, and three
votes of which each is wrong with 10 % judge them, as in `clawstream demo`. Faults are planted in copies of a trainer
that has learned for a while; a fault is caught where one of the `PATIENCE` steps from then on is rejected.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import platformdirs
import torch
import typer

from clawstream.config import TrainingSettings
from clawstream.errors import StepRefused
from clawstream.events import SampleAssembled
from clawstream.simulation.policy.recipe import base_policy
from clawstream.training.step.trainer import Trainer
from tests.bench.people import People
from tests.bench.report import report
from tests.keeping import keep
from tests.parts.training.planted import FAULTS, always_good

SETTINGS = TrainingSettings(learning_rate=2e-4)
STEPS_A_RUN = 20  # of one policy; then another one begins
PLANTED_AFTER = (2, 5, 10)  # healthy steps
PATIENCE = 10  # steps within which a fault is to be caught


def gate(
    num_null: Annotated[int, typer.Option(help="healthy steps")] = 100,
    seed: Annotated[int, typer.Option(help="of the first run")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Count false rejections, and faults caught."""
    torch.set_num_threads(1)
    base = base_policy(Path(platformdirs.user_cache_dir("clawstream")))
    rejected: list[str] = []
    caught: dict[str, list[int | None]] = {name: [] for name in (*FAULTS, "always +1")}
    shares: list[float] = []
    steps = 0
    while steps < num_null:
        trainer, students = Trainer(base, SETTINGS), People(seed)
        for version in range(1, min(STEPS_A_RUN, num_null - steps) + 1):
            samples = students.samples(trainer, version=version - 1)
            with tempfile.TemporaryDirectory() as kept:
                keep(trainer, Path(kept))
                if version - 1 in PLANTED_AFTER:
                    for name, steps_until in caught.items():
                        steps_until.append(_until_caught(base, Path(kept), name, version, seed))
                try:
                    took_s = _timed(trainer, samples, version, gated=True)
                except StepRefused as why:
                    rejected.append(f"run {seed} version {version}: {why}")
                    trainer = _restored(base, Path(kept))
                else:
                    plain_s = _timed(_restored(base, Path(kept)), samples, version, gated=False)
                    shares.append(1 - plain_s / took_s)
            steps += 1
        seed += 1
    report(
        {
            "null_steps": num_null,
            "false_rejections": len(rejected),
            "false_rejections_why": rejected,
            "caught_within": {name: {"tried": len(found), "steps": found} for name, found in caught.items()},
            "gate_share_of_step": sorted(shares)[len(shares) // 2],
        },
        json_file,
    )


def _until_caught(base: Path, kept: Path, fault: str, version: int, seed: int) -> int | None:
    """Return at which step the fault was caught, from 1 on; None: it was not."""
    trainer, students = _restored(base, kept), People(1000 + 100 * seed + version)
    for step in range(1, PATIENCE + 1):
        samples = students.samples(trainer, version=version + step - 2)
        if fault == "always +1":
            samples = always_good(samples)
        elif step == 1:
            FAULTS[fault](trainer)
        try:
            trainer.update(samples, version=version + step - 1, seed=step, gated=True)
        except StepRefused:
            return step
    return None


def _timed(trainer: Trainer, samples: list[SampleAssembled], version: int, *, gated: bool) -> float:
    """Take the step; return the seconds of this thread that it took."""
    began_s = time.thread_time()
    trainer.update(samples, version=version, seed=version, gated=gated)
    return time.thread_time() - began_s


def _restored(base: Path, folder: Path) -> Trainer:
    trainer = Trainer(base, SETTINGS)
    trainer.restore(folder)
    return trainer
