"""`clawstream launch`: one machine's GPUs shared out between actor, rollout and judge, and everything run on them.

Its options go by the variables that users of OpenClaw-RL have in their scripts.
"""

import asyncio
import contextlib
import json
import os
import shlex
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from clawstream.cli.process import Context, log_to_stderr, run_until_stopped
from clawstream.cli.up import checked_model, serve_until_stopped
from clawstream.config import EXAMPLE_KEY, Settings, inherited_environment
from clawstream.errors import ConfigError
from clawstream.local.gpus import Assignment, assign, share_out
from clawstream.local.servers.sglang_servers import Launch, SglangServer, servers, settings_for

if TYPE_CHECKING:
    import aiohttp

    from clawstream.local.supervisor import Part, Supervisor

SGLANG = "uv run --no-project --isolated --python 3.11 --with sglang==0.5.23 python -m sglang.launch_server"
LOADED_WITHIN_S = 1800.0  # a large model from a slow disk


def launch(
    context: typer.Context,
    hf_ckpt: Annotated[Path, typer.Option(envvar="HF_CKPT", metavar="FOLDER", help="The policy's model folder.")],
    num_gpus: Annotated[int, typer.Option(envvar="NUM_GPUS", min=1, help="GPUs of this machine.")] = 8,
    actor_gpus: Annotated[
        int | None, typer.Option(envvar="ACTOR_GPUS", min=1, help="To train; if unsaid, half.")
    ] = None,
    rollout_gpus: Annotated[int | None, typer.Option(envvar="ROLLOUT_GPUS", min=1, help="To serve; a quarter.")] = None,
    prm_gpus: Annotated[
        int | None,
        typer.Option(envvar="PRM_GPUS", min=0, help="To judge; what is left, at most a quarter. 0: judge.url"),
    ] = None,
    tp: Annotated[int, typer.Option(envvar="TP", min=1, help="GPUs of one engine.")] = 1,
    prm_tp: Annotated[int, typer.Option(envvar="PRM_TP", min=1, help="GPUs of one judge.")] = 1,
    prm_model_path: Annotated[
        Path | None, typer.Option(envvar="PRM_MODEL_PATH", metavar="FOLDER", help="The judge's; if unsaid, HF_CKPT.")
    ] = None,
    save_ckpt: Annotated[
        Path | None, typer.Option(envvar="SAVE_CKPT", metavar="FOLDER", help="Where versions are kept.")
    ] = None,
    sglang_api_key: Annotated[
        str | None, typer.Option(envvar="SGLANG_API_KEY", metavar="KEY", help="What clients have to show.")
    ] = None,
    port: Annotated[int | None, typer.Option(envvar="PORT", help="The gateway's; if unsaid, gateway.port.")] = None,
    sglang: Annotated[str, typer.Option(metavar="COMMAND", help="What starts an SGLang server.")] = SGLANG,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print it all as JSON and start nothing.")] = False,
) -> None:
    """Share this machine's GPUs out to actor, rollout and judge, and run everything on them until Ctrl-C."""
    assert isinstance(context.obj, Context)
    if sglang_api_key == EXAMPLE_KEY:
        raise ConfigError(f"SGLANG_API_KEY is {EXAMPLE_KEY!r}, which everybody knows. Nothing was started; set another")
    counts = share_out(num_gpus, actor_gpus, rollout_gpus, prm_gpus)
    if prm_gpus is None and not counts.judge:
        typer.echo(f"no GPU of {num_gpus} is left for a judge (PRM_GPUS): judge.url names one elsewhere", err=True)
    wanted = Launch(
        assignment=assign(counts, rollout_tp=tp, judge_tp=prm_tp),
        sglang=tuple(shlex.split(sglang)),
        model_path=checked_model(hf_ckpt),
        judge_path=checked_model(prm_model_path or hf_ckpt),
        rollout_tp=tp,
        judge_tp=prm_tp,
        save_dir=save_ckpt,
        api_key=sglang_api_key,
        port=port,
    )
    settings = settings_for(wanted, context.obj.settings())
    if dry_run:
        commands = {server.name: shlex.join(server.command) for server in servers(wanted, settings.engine.port)}
        typer.echo(json.dumps(asdict(wanted.assignment) | {"commands": commands}, indent=1))
        return
    console = Console(stderr=True)
    console.print(_table(wanted.assignment))
    if len(wanted.assignment.actor) > 1:
        console.print(f"[yellow]the trainer uses one GPU so far: {wanted.assignment.actor[0]}[/]")
    _run(settings, wanted, console, context.obj.config)


def _table(assignment: Assignment) -> Table:
    table = Table("role", "GPUs", title="Who has which GPUs", title_justify="left")
    table.add_row("actor (trains)", _numbers(assignment.actor))
    for number, gpus in enumerate(assignment.rollout):
        table.add_row(f"rollout (engine-{number})", _numbers(gpus))
    table.add_row("judge", _numbers(assignment.judge) or "none: judge.url, if it is set")
    return table


def _numbers(gpus: tuple[int, ...]) -> str:
    return ",".join(map(str, gpus))


def _run(settings: Settings, wanted: Launch, console: Console, config: Path | None) -> None:
    log_to_stderr("launch", level=30)

    async def main(stop: asyncio.Event) -> None:
        async with _running(settings, servers(wanted, settings.engine.port), console) as supervisor:
            await serve_until_stopped(settings, wanted.model_path, console, stop, config=config, beside=supervisor)

    # For the trainer, the one part of ours that asks for a GPU; SGLang's servers are told their own.
    os.environ["CUDA_VISIBLE_DEVICES"] = _numbers(wanted.assignment.actor)
    run_until_stopped(main)


@contextlib.asynccontextmanager
async def _running(
    settings: Settings, wanted: tuple[SglangServer, ...], console: Console
) -> "AsyncIterator[Supervisor]":
    """Run SGLang's servers for the length of the block, which begins when each is ready. Raises PartUnavailable."""
    import aiohttp

    from clawstream.local.supervisor import Patience, Supervisor

    folder = settings.data_dir / "servers"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
        Supervisor(
            folder,
            environment=inherited_environment(),
            say=console.print,
            patience=Patience(ready_within_s=LOADED_WITHIN_S),
        ) as supervisor,
    ):
        console.print(f"starting SGLang; it loads for minutes, its logs are in {folder / 'logs'}", soft_wrap=True)
        await supervisor.start([_part(server, http) for server in wanted])
        yield supervisor


def _part(server: SglangServer, http: "aiohttp.ClientSession") -> "Part":
    from clawstream.local.servers.server_process import answers
    from clawstream.local.supervisor import Part

    return Part(name=server.name, command=server.command, missing=answers(http, f"{server.url}/health"))
