"""`clawstream plan`: what each GPU of a machine would hold, before anything is started."""

import json
import shlex
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from clawstream.cli.process import Context
from clawstream.errors import ConfigError
from clawstream.inference.model_folder import text_config
from clawstream.layout import show
from clawstream.local.servers.gpu_plan import (
    MOST_GPUS,
    ROOM,
    STATIC_SHARE,
    STEP_ANSWERS,
    STEP_TOKENS,
    GpuPlan,
    Gpus,
    GpuUse,
    plan_for,
    what_fits,
)
from clawstream.training.footprint import Decoder, decoder_of

_SAID = ("trainer", "processes", "lora_rank", "dtype", "gradient_checkpointing", "micro_batch_tokens")


def plan(
    context: typer.Context,
    base: Annotated[Path, typer.Option(metavar="FOLDER", help="The policy's model folder; config.json is enough.")],
    gpus: Annotated[str, typer.Option(metavar="4x24GB", help="How many there are, and of what size.")],
    judge: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The judge's; else --base.")] = None,
    context_tokens: Annotated[int, typer.Option(min=1, help="Of the longest conversation.")] = 16_384,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what each GPU would hold, and which way of training fits; nothing is started."""
    machine = Gpus.of(gpus)
    if machine is None:
        raise ConfigError(
            f"--gpus {gpus}: expected a number up to {MOST_GPUS} and a size, such as 4x24GB. Nothing was planned"
        )
    settings = Context.of(context).settings()
    model, judging = _decoder(base), _decoder(judge or base)
    for folder, one in ((base, model), (judge or base, judging)):
        if context_tokens > one.context_tokens:
            raise ConfigError(
                f"--context-tokens {context_tokens}: {folder} has a context of {one.context_tokens}. Nothing was "
                "planned; name no more than that"
            )
    found = plan_for(model, judging, machine, settings, context_tokens=context_tokens)
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=1))
    else:
        _print(found, model, machine, context_tokens)
    if not any(use.role == "judge" for use in found.uses) and (judge is not None or settings.judge.url is None):
        typer.echo("no GPU is left for a judge: judge.url names one elsewhere", err=True)
    if not found.fits:
        would = what_fits(model, judging, machine, settings, context_tokens=context_tokens)
        instead = f"{MOST_GPUS} of them would not do either" if would is None else f"{would} would do"
        raise ConfigError(f"{base} does not fit on {machine}: {_fullest(found)}; {instead}. Nothing was started")


def _decoder(folder: Path) -> Decoder:
    config = text_config(folder)
    if config is None:
        raise ConfigError(f"{folder} has no config.json that can be read. Nothing was planned; name a model's folder")
    return decoder_of(folder, config)


def _fullest(found: GpuPlan) -> str:
    use = max(found.uses, key=lambda one: one.peak_bytes)
    ways = ["larger GPUs", "a smaller model", "a smaller --context-tokens"]
    if use.role == "judge":
        ways.append("a smaller --judge")
    elif "actor" in use.role and found.training.gate:
        ways.append("training.gate = false, which holds one copy less")
    need = f"GPU {use.number} ({use.role}) would need {use.peak_bytes / 1e9:.1f} GB of {use.of_bytes / 1e9:g}"
    return f"{need}. Take {', '.join(ways)}, or more GPUs"


def _plain(found: GpuPlan) -> dict[str, Any]:
    return {
        "fits": found.fits,
        "idle": found.idle,
        "gpus": [asdict(use) | {"fits": use.fits} for use in found.uses],
        "training": {name: getattr(found.training, name) for name in _SAID},
        "engine": {
            "tensor_parallel": found.tensor_parallel,
            "cache_tokens": found.cache_tokens,
            "mem_fraction_static": round(found.static_share, 2),
            "options": found.engine_flags,
        },
        "judge": {"tensor_parallel": found.judge_tensor_parallel},
        "step_operations": found.step_operations,
        "version_bytes": found.version_bytes,
        "state_bytes": found.state_bytes,
    }


def _print(found: GpuPlan, model: Decoder, gpus: Gpus, context_tokens: int) -> None:
    console = Console()
    table = Table("GPUs", "role", "each holds, in GB", "peak", "of", title=f"{model.numbers / 1e9:.2f} billion numbers")
    for role, alike in groupby(found.uses, key=lambda use: use.role):
        first, *_, last = [*alike] * 2
        numbers = f"{first.number}" if first == last else f"{first.number}-{last.number}"
        peak = f"{first.peak_bytes / 1e9:.1f}" + ("" if first.fits else " (too much)")
        table.add_row(numbers, role, _held(first), peak, f"{first.of_bytes / 1e9:g}")
    show(console, table)
    if found.idle:
        numbers = ", ".join(map(str, found.idle))
        typer.echo(f"Left idle, as training.processes is {found.training.processes}: GPU {numbers}.")
    typer.echo(
        f"A trainer's peak is {ROOM:g} times what its tensors have, as torch reserves more; an engine's weights and "
        f"cache get {STATIC_SHARE:.0%} of its peak."
    )
    if not found.fits:
        return
    typer.echo("\n[training]")
    for name in _SAID:
        if (value := getattr(found.training, name)) is not None:
            typer.echo(f"{name} = {json.dumps(value)}")
    tp, judge_tp = found.tensor_parallel, found.judge_tensor_parallel
    if gpus.count == 1:
        share = f"--mem-fraction-static {found.static_share:.2f}"
        typer.echo(f"\nStart SGLang beside it: {shlex.join(found.engine_flags)} {share}")
    else:
        typer.echo(f"\nWith these settings: NUM_GPUS={gpus.count} TP={tp} PRM_TP={judge_tp} clawstream launch")
    typer.echo(
        f"An engine's cache holds {found.cache_tokens:,} tokens, {context_tokens:,} were asked for.\n"
        f"A step on {STEP_ANSWERS} answers of {STEP_TOKENS:,} tokens is {found.step_operations / 1e12:,.0f} TFLOP "
        "in its passes; what is computed again, scores and the gate are not counted.\n"
        f"A version is {found.version_bytes / 1e9:.2f} GB that engines read, and {found.state_bytes / 1e9:.2f} GB "
        "beside it, to go on from."
    )


def _held(use: GpuUse) -> str:
    return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in use.bytes_by_use.items() if value)
