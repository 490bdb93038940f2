"""How often the gate rejects healthy steps, of the demonstration's policy or of SmolLM2, and what it catches.

One process and no servers: students ask the policy, its answers are sampled by the trainer's own weights, and three
votes of which each is wrong with 10 % judge them, as in `clawstream demo`. Faults are planted in copies of a trainer
that has learned for a while; a fault is caught where one of the `PATIENCE` steps from then on is rejected.
"""

import tempfile
import time
from dataclasses import dataclass
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
from tests.bench.everyday import EverydayPeople
from tests.bench.people import People
from tests.bench.report import report
from tests.keeping import keep
from tests.parts.training.planted import FAULTS, always_good

SETTINGS = TrainingSettings(learning_rate=2e-4)
OF_A_MODEL = TrainingSettings(learning_rate=1e-3, lora_rank=16, w_binary=0.2, w_opd=0.2, kl=0.1)  # of docs/learn.md
STEPS_A_RUN = 20  # of one policy; then another one begins
PATIENCE = 10  # steps within which a fault is to be caught


@dataclass(frozen=True, slots=True)
class Policy:
    """What is trained, and how."""

    base: Path
    settings: TrainingSettings
    pretrained: bool

    def trainer(self, kept: Path | None = None) -> Trainer:
        """Return its trainer, as it began or as it was kept."""
        trainer = Trainer(self.base, self.settings)
        if kept is not None:
            trainer.restore(kept)
        return trainer

    def people(self, seed: int) -> "People | EverydayPeople":
        """Return who talks with it."""
        return EverydayPeople(self.base, seed) if self.pretrained else People(seed)

    @property
    def faults(self) -> tuple[str, ...]:
        """What can be planted: loops are made of all weights, which an adapter does not train."""
        return tuple(name for name in FAULTS if name != "loops" or self.settings.lora_rank is None)


def gate(
    num_null: Annotated[int, typer.Option(help="healthy steps")] = 100,
    seed: Annotated[int, typer.Option(help="of the first run")] = 0,
    model: Annotated[Path | None, typer.Option(help="Of `clawstream model get smollm2`; else the demo's.")] = None,
    planted_after: Annotated[str, typer.Option(help="How many healthy steps of a run, with commas.")] = "2,5,10",
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Count false rejections, and faults caught."""
    if model is None:
        torch.set_num_threads(1)
    base = model or base_policy(Path(platformdirs.user_cache_dir("clawstream")))
    policy = Policy(base, SETTINGS if model is None else OF_A_MODEL, pretrained=model is not None)
    planted = {int(number) for number in planted_after.split(",")}
    rejected: list[str] = []
    caught: dict[str, list[int | None]] = {name: [] for name in (*policy.faults, "always +1")}
    shares: list[float] = []
    steps = 0
    while steps < num_null:
        trainer, students = policy.trainer(), policy.people(seed)
        for version in range(1, min(STEPS_A_RUN, num_null - steps) + 1):
            samples = students.samples(trainer, version=version - 1)
            with tempfile.TemporaryDirectory() as kept:
                keep(trainer, Path(kept))
                if version - 1 in planted:
                    for name, steps_until in caught.items():
                        steps_until.append(_until_caught(policy, Path(kept), name, version, seed))
                try:
                    took_s = _timed(trainer, samples, version, gated=True)
                except StepRefused as why:
                    rejected.append(f"run {seed} version {version}: {why}")
                    trainer = policy.trainer(Path(kept))
                else:
                    plain_s = _timed(policy.trainer(Path(kept)), samples, version, gated=False)
                    shares.append(1 - plain_s / took_s)
            steps += 1
        seed += 1
    report(
        {
            "model": policy.base.name if policy.pretrained else "the demo's",
            "null_steps": num_null,
            "false_rejections": len(rejected),
            "false_rejections_why": rejected,
            "caught_within": {name: {"tried": len(found), "steps": found} for name, found in caught.items()},
            "gate_share_of_step": sorted(shares)[len(shares) // 2],
        },
        json_file,
    )


def _until_caught(policy: Policy, kept: Path, fault: str, version: int, seed: int) -> int | None:
    """Return at which step the fault was caught, from 1 on; None: it was not."""
    trainer, students = policy.trainer(kept), policy.people(1000 + 100 * seed + version)
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
    """Take the step; return the processor time that it took, in seconds."""
    began_s = time.process_time()
    trainer.update(samples, version=version, seed=version, gated=gated)
    return time.process_time() - began_s
