"""`clawstream plan`: what each GPU of a machine would hold, before anything is started; `launch` asks the same."""

import json
import shlex
import subprocess
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from clawstream.cli.process import Context
from clawstream.config import Settings
from clawstream.errors import ConfigError
from clawstream.inference.model_folder import text_config
from clawstream.layout import show
from clawstream.local.servers.gpu_plan import (
    CONTEXT_TOKENS,
    MOST_GPUS,
    ROOM,
    STATIC_SHARE,
    STEP_ANSWERS,
    STEP_TOKENS,
    GpuPlan,
    Gpus,
    GpuUse,
    plan_as_set,
    plan_for,
    what_fits,
)
from clawstream.local.servers.sglang_servers import GpuCounts, Launch, memory_flags, settings_for
from clawstream.training.footprint import Decoder, decoder_of

_DRIVER_S = 20.0


def plan(
    context: typer.Context,
    base: Annotated[Path, typer.Option(metavar="FOLDER", help="The policy's model folder; config.json is enough.")],
    gpus: Annotated[str, typer.Option(metavar="4x24GB", help="How many there are, and of what size.")],
    judge: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The judge's; else --base.")] = None,
    context_tokens: Annotated[int, typer.Option(min=1, help="Of the longest conversation.")] = CONTEXT_TOKENS,
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


def what_is_planned(asked: Settings, wanted: Launch, counts: GpuCounts, gpu_gb: float | None) -> GpuPlan | None:
    """Return what each GPU of a launch would hold by the plan's arithmetic; None: it can't tell, and stderr says why.

    `gpu_gb` is the memory of each GPU; None: the driver is asked. Raises ConfigError where it would not fit, with what
    would, and where trainer and engine share a GPU and nothing can be told of their shares.
    """
    size_bytes = _smallest_gpu() if gpu_gb is None else gpu_gb * 1e9
    if size_bytes is None:
        _untold("nvidia-smi does not say how large a GPU is (GPU_GB)", counts)
        return None
    gpus = Gpus(count=counts.machine, size_bytes=size_bytes)
    try:
        model, judge = _decoder(wanted.model_path), _decoder(wanted.judge_path)
        tokens = min(CONTEXT_TOKENS, model.context_tokens, judge.context_tokens)
        found = plan_as_set(
            model, judge, gpus, settings_for(wanted, asked), counts,
            tp=wanted.rollout_tp, judge_tp=wanted.judge_tp, context_tokens=tokens,
        )  # fmt: skip
    except ConfigError as error:
        _untold(str(error), counts)
        return None
    if not found.fits:
        instead = f"`clawstream plan --base {wanted.model_path} --gpus {gpus}` says what would"
        with suppress(ConfigError):
            better = plan_for(model, judge, gpus, asked, context_tokens=tokens)
            instead = _would(better) if better.fits else instead
        raise ConfigError(
            f"{wanted.model_path} does not fit on {gpus}: {found.fullest}. {instead}. Nothing was started"
        )
    return found


def _untold(why: str, counts: GpuCounts) -> None:
    if counts.side_by_side:
        raise ConfigError(
            f"trainer and engine would share one GPU, and how much each may take of it is not known: {why}. Nothing "
            "was started. Start SGLang yourself with --mem-fraction-static, and `clawstream up` with engine.urls"
        )
    typer.echo(f"whether it fits is not checked: {why}", err=True)


def _would(better: GpuPlan) -> str:
    said = ", ".join(f"training.{n} = {json.dumps(value)}" for n, value in better.said.items() if value is not None)
    tps = f"TP={better.tensor_parallel} PRM_TP={better.judge_tensor_parallel}"
    return f"With ACTOR_GPUS, ROLLOUT_GPUS and PRM_GPUS left out, {tps} and {said} it would"


def _smallest_gpu() -> float | None:
    """Return the bytes of the smallest GPU of this machine, as its driver says; None: there is no driver to ask."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=_DRIVER_S, check=True).stdout
        return min(float(line) * 2**20 for line in said.splitlines())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


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
    return f"{found.fullest}. Take {', '.join(ways)}, or more GPUs"


def _plain(found: GpuPlan) -> dict[str, Any]:
    return {
        "fits": found.fits,
        "idle": found.idle,
        "gpus": [asdict(use) | {"fits": use.fits} for use in found.uses],
        "training": found.said,
        "engine": {
            "tensor_parallel": found.tensor_parallel,
            "cache_tokens": found.cache_tokens,
            "mem_fraction_static": float(memory_flags(found.static_share)[-1]),
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
    for name, value in found.said.items():
        if value is not None:
            typer.echo(f"{name} = {json.dumps(value)}")
    tp, judge_tp = found.tensor_parallel, found.judge_tensor_parallel
    typer.echo(f"\nWith these settings: NUM_GPUS={gpus.count} TP={tp} PRM_TP={judge_tp} clawstream launch")
    if gpus.count == 1:
        share = shlex.join(memory_flags(found.static_share))
        typer.echo(f"The trainer has the GPU too, so its engine is started with {share}.")
    typer.echo(
        f"An engine's cache holds {found.cache_tokens:,} tokens, {context_tokens:,} were asked for.\n"
        f"A step on {STEP_ANSWERS} answers of {STEP_TOKENS:,} tokens is {found.step_operations / 1e12:,.0f} TFLOP "
        "in its passes; what is computed again, scores and the gate are not counted.\n"
        f"A version is {found.version_bytes / 1e9:.2f} GB that engines read, and {found.state_bytes / 1e9:.2f} GB "
        "beside it, to go on from."
    )


def _held(use: GpuUse) -> str:
    return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in use.bytes_by_use.items() if value)
