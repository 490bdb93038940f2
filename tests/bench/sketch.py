"""What a method learns from the scenario `all` in one process, a run in half a minute: to choose rates and passes by.

No servers and no staleness: `clawstream learn` says what comes of it on the pipeline.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import platformdirs
import torch
import typer

from clawstream.config import TrainingSettings
from clawstream.errors import StepRefused
from clawstream.simulation.policy.base import base_policy
from clawstream.simulation.problems import scored
from clawstream.training.step.trainer import Trainer
from tests.bench.people import People
from tests.bench.report import report

Method = Literal["combined", "binary", "opd", "topk"]
Teacher = Literal["reference", "ema", "current"]
SCORED_WITH = 99


def sketch(
    methods: Annotated[str, typer.Option(help="With commas.")] = "combined",
    seeds: Annotated[str, typer.Option(help="With commas.")] = "0,1,2",
    updates: Annotated[int, typer.Option(help="Of each run; rejected steps count too.")] = 16,
    epochs: Annotated[int, typer.Option(help="Passes over each batch.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Of the first updates.")] = 1.5e-3,
    lora_rank: Annotated[int, typer.Option(help="0: all weights are trained.")] = 16,
    base: Annotated[str, typer.Option(help="standard or hard.")] = "standard",
    teacher: Annotated[str, typer.Option(help="reference, ema or current.")] = "reference",
    w_topk: Annotated[float, typer.Option(help="Of combined: of the teacher's whole distribution.")] = 1.0,
    flip_after: Annotated[int | None, typer.Option(help="Updates: then each wants what another wanted.")] = None,
    score_every: Annotated[int | None, typer.Option(help="Updates; none: half of all.")] = None,
    num_scored: Annotated[int, typer.Option(help="Held-out problems.")] = 240,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Train each method with each seed, and score it on the way; after the flip by what is wanted then."""
    torch.set_num_threads(1)
    folder = base_policy(Path(platformdirs.user_cache_dir("clawstream")), base)
    rows = []
    for method in methods.split(","):
        settings = TrainingSettings(
            method=cast("Method", method), epochs=epochs, learning_rate=learning_rate, lora_rank=lora_rank or None,
            teacher=cast("Teacher", teacher), w_topk=w_topk if method == "combined" else None,
        )  # fmt: skip
        for seed in map(int, seeds.split(",")):
            row = _run(
                folder, settings, seed, updates=updates, num_scored=num_scored, flip_after=flip_after,
                score_every=score_every or max(1, updates // 2),
            )  # fmt: skip
            rows.append({"method": method, "seed": seed} | row)
            typer.echo(rows[-1], err=True)
    report(
        {
            "epochs": epochs,
            "learning_rate": learning_rate,
            "lora_rank": lora_rank,
            "base": base,
            "teacher": teacher,
            "w_topk": w_topk,
            "flip_after": flip_after,
            "rows": rows,
        },
        json_file,
    )


def _run(
    base: Path, settings: TrainingSettings, seed: int, *, updates: int, num_scored: int,
    flip_after: int | None, score_every: int,
) -> dict[str, Any]:  # fmt: skip
    trainer = Trainer(base, settings)
    people = People(seed, scenario="all", hint_share=0.5, temperature=1.0)
    sums = scored(num_scored)
    scores = {0: people.score(trainer, sums, seed=SCORED_WITH)}
    rejected: list[str] = []
    in_a_row = 0
    for version in range(1, updates + 1):
        samples = people.samples(
            trainer, version=version - 1, count=settings.batch_samples, hinted_alone=settings.method in ("opd", "topk")
        )
        with tempfile.TemporaryDirectory() as kept:
            trainer.save(Path(kept))
            try:
                trainer.update(samples, version=version, seed=version, gated=True, num_rejected=in_a_row)
                in_a_row = 0
            except StepRefused as why:
                rejected.append(f"{version}: {why}")
                in_a_row += 1
                trainer.restore(Path(kept))
        if version % score_every == 0 or version == updates:
            scores[version] = people.score(trainer, sums, seed=SCORED_WITH)
        if version == flip_after:
            people.flip()
    return {"scores": scores, "answers": people.num_asked, "rejected": rejected}
