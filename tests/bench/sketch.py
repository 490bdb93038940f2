"""What a method learns from people in one process, a run in half a minute: to choose rates and passes by.

No servers and no staleness: `clawstream learn` says what comes of it on the pipeline.
"""

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, cast

import platformdirs
import torch
import typer

from clawstream.config import TrainingSettings
from clawstream.errors import StepRefused
from clawstream.simulation.learn.outcome import kept, newest
from clawstream.simulation.policy.recipe import base_policy
from clawstream.simulation.problems import scored
from clawstream.simulation.runs.scenarios import CASTS, SCENARIOS, blocks_of
from clawstream.training.step.trainer import Trainer
from tests.bench.people import People
from tests.bench.report import report
from tests.keeping import keep

Method = Literal["combined", "binary", "opd", "topk"]
Teacher = Literal["contrast", "reference"]
Scenario = Literal["all", "blocks", "unrelated"]
SCORED_WITH = 99


def sketch(
    methods: Annotated[str, typer.Option(help="With commas.")] = "combined",
    seeds: Annotated[str, typer.Option(help="With commas.")] = "0,1,2",
    scenario: Annotated[Scenario, typer.Option(help="Who talks, as for `clawstream learn`.")] = "all",
    updates: Annotated[
        int | None, typer.Option(help="Of each run, as for `clawstream learn`; rejected steps count too.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over each batch.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Of the first updates.")] = 1.5e-3,
    lora_rank: Annotated[int, typer.Option(help="0: all weights are trained.")] = 16,
    base: Annotated[str, typer.Option(help="standard or hard.")] = "standard",
    teacher: Annotated[str | None, typer.Option(help="contrast or reference.")] = None,
    w_topk: Annotated[float, typer.Option(help="Of combined: of the teacher's whole distribution.")] = 1.0,
    flip_after: Annotated[int | None, typer.Option(help="Updates: then each wants what another wanted.")] = None,
    score_every: Annotated[int | None, typer.Option(help="Updates; none: half of all.")] = None,
    num_scored: Annotated[int, typer.Option(help="Held-out problems.")] = 240,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Train each method with each seed, and score it on the way; after the flip by what is wanted then."""
    torch.set_num_threads(1)
    folder = base_policy(Path(platformdirs.user_cache_dir("clawstream")), base)
    count = (updates or CASTS[scenario].updates) + CASTS[scenario].unrelated_updates
    rows = []
    for method in methods.split(","):
        settings = TrainingSettings(
            method=cast("Method", method), epochs=epochs, learning_rate=learning_rate, lora_rank=lora_rank or None,
            teacher=cast("Teacher | None", teacher), w_topk=w_topk if method == "combined" else None,
        )  # fmt: skip
        for seed in map(int, seeds.split(",")):
            row = _run(
                folder, settings, seed, scenario=scenario, updates=count, num_scored=num_scored,
                flip_after=flip_after, score_every=score_every or max(1, count // 2),
            )  # fmt: skip
            rows.append({"method": method, "seed": seed} | row)
            typer.echo(rows[-1], err=True)
    report(
        {
            "scenario": scenario,
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
    base: Path, settings: TrainingSettings, seed: int, *, scenario: str, updates: int, num_scored: int,
    flip_after: int | None, score_every: int,
) -> dict[str, Any]:  # fmt: skip
    trainer = Trainer(base, settings)
    people = People(seed, scenario=scenario, hint_share=SCENARIOS[scenario].hint_share, temperature=1.0)
    sums, blocks = scored(num_scored), blocks_of(scenario, updates)
    ends = [block.end for block in blocks]
    late = {ends[-2] + number for number in CASTS[scenario].scored_after}
    by_person = {0: people.score_by_person(trainer, sums, seed=SCORED_WITH)}
    rejected: list[str] = []
    in_a_row = 0
    for version in range(1, updates + 1):
        if blocks:
            people.talk(next(block.talker for block in blocks if version <= block.end))
        samples = people.samples(
            trainer, version=version - 1, count=settings.batch_samples, hinted_alone=settings.method in ("opd", "topk")
        )
        with tempfile.TemporaryDirectory() as folder:
            keep(trainer, Path(folder))
            try:
                trainer.update(samples, version=version, seed=version, gated=True, num_rejected=in_a_row)
                in_a_row = 0
            except StepRefused as why:
                rejected.append(f"{version}: {why}")
                in_a_row += 1
                trainer.restore(Path(folder))
        if version % score_every == 0 or version in {*ends, *late, updates}:
            by_person[version] = people.score_by_person(trainer, sums, seed=SCORED_WITH)
        if version == flip_after:
            people.flip()
    found: dict[str, Any] = {"scores": {version: fmean(each.values()) for version, each in by_person.items()}}
    if blocks:
        found |= {"by_person": by_person, "kept": kept(blocks, by_person), "newest": newest(blocks, by_person)}
    return found | {"answers": people.num_asked, "rejected": rejected}
