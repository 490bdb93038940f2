"""`clawstream up` runs every part of one installation until Ctrl-C; `clawstream launch` does so on a machine's GPUs.

The options of `launch` can also be given by environment variables, named as in the scripts of OpenClaw-RL.
"""

import asyncio
import contextlib
import json
import os
import shlex
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from clawstream.cli.openclaw import called, connecting, wants_key
from clawstream.cli.plan import what_is_planned
from clawstream.cli.process import Context, harmless, log_to_stderr, run_until_stopped
from clawstream.cli.topics import our_own, which_model
from clawstream.config import EXAMPLE_KEY, Settings, inherited_environment
from clawstream.errors import ConfigError, OperatorError, PartUnavailable, TryLater
from clawstream.events import (
    Event,
    PolicyActivated,
    PolicyEvent,
    PolicyRejected,
    StepRejected,
    StepTaken,
    is_of_policy,
    key_of_policy,
)
from clawstream.local.servers.jars import refuse_what_is_missing
from clawstream.local.servers.sglang_servers import (
    Assignment,
    Launch,
    SglangServer,
    adapter_flags,
    assign,
    servers,
    settings_for,
    share_out,
)

if TYPE_CHECKING:
    from clawstream.local.installation import Installation
    from clawstream.local.supervisor import Supervisor

_SAME: dict[str | None, str] = {"combine": "combined", "rl": "binary"}  # names of the original's scripts
TOLD_AGAIN_S = 5.0  # before the log is read again after an error
SGLANG = "uv run --no-project --isolated --python 3.11 --with sglang==0.5.23 python -m sglang.launch_server"
LOADED_WITHIN_S = 1800.0  # a large model from a slow disk


def up(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="The policy's Hugging Face folder; or smollm2, which is served where the settings name none; or tiny.",
            metavar="FOLDER",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Empty the embedded broker and database first.")] = False,
    backend: Annotated[
        Literal["local", "tinker"] | None,
        typer.Option(help="Who trains and samples: this machine, or a Tinker service (tinker.url, TINKER_API_KEY)."),
    ] = None,
    method: Annotated[
        Literal["combined", "combine", "binary", "rl", "opd", "topk", "stepwise"] | None,
        typer.Option(help="In place of training.method; combine is combined, and rl is binary."),
    ] = None,
) -> None:
    """Run everything on this machine, until Ctrl-C: broker, database, engine, gateway, judges' caller, trainer."""
    options = Context.of(context)
    settings = chosen(options.settings(), backend, method)
    log_to_stderr("up", level=30)
    console = Console(stderr=True)
    if settings.rewards.heuristic_function is not None:
        from clawstream.judging.stage import heuristic_named

        heuristic_named(settings.rewards.heuristic_function)
    named = None if settings.training.by_service else which_model(model, settings.engine)
    refuse_what_is_missing(settings)
    if named is None:
        from clawstream.inference.tinker_service import key_for, with_base

        key_for(settings)  # without an SDK or a key nothing is fetched or started
        model_path, settings = with_base(settings, model)
    elif isinstance(named, Path):
        model_path = checked_model(named)
    else:
        model_path, settings = our_own(named, settings, console, is_asked=model is not None)
    run_until_stopped(
        lambda stop: serve_until_stopped(settings, model_path, console, stop, config=options.config, fresh=fresh)
    )


def chosen(settings: Settings, backend: str | None, method: str | None) -> Settings:
    """Return the settings with what the options say in place of theirs; raises ConfigError where that can't be."""
    wanted = {"trainer": {"tinker": "tinker", "local": "torch"}.get(backend or ""), "method": _SAME.get(method, method)}
    if backend == "local" and not settings.training.by_service:
        wanted["trainer"] = None
    training = settings.training
    said = {key: getattr(training, key) for key in training.model_fields_set}
    try:
        asked = type(training)(**said | {key: value for key, value in wanted.items() if value is not None})
    except ValidationError as error:
        why = "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors())
        raise ConfigError(f"--backend and --method, with the settings' others: {why}. Nothing was started") from error
    changed = settings.model_copy(update={"training": asked})  # a service tells log-probs at temperature 1 alone
    return changed.where_unset({"gateway": {"default_temperature": 1.0}}) if asked.by_service else changed


def checked_model(folder: Path) -> Path:
    """Return the folder; raises ConfigError where it holds no model."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json. Nothing was started; name another")
    return folder


async def serve_until_stopped(
    settings: Settings,
    model_path: Path,
    console: Console,
    stop: asyncio.Event,
    *,
    config: Path | None,
    fresh: bool = False,
    beside: "Supervisor | None" = None,
) -> None:
    """Run an installation until `stop`; `beside` supervises further processes that it needs.

    Raises PartUnavailable when a part of either can't be kept up.
    """
    from clawstream.local.installation import installation

    async with installation(settings, model_path=model_path, say=console.print, fresh=fresh) as running:
        _greet(console, running, model_path, await _context_tokens(running), config, await _test_vote(settings))
        telling = asyncio.create_task(tell_versions(console, running.settings))
        supervisors = [running.supervisor, *([beside] if beside is not None else [])]
        waits = [asyncio.create_task(event.wait()) for event in (stop, *(one.failed for one in supervisors))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in (*waits, telling):
            task.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        for supervisor in supervisors:
            if supervisor.failed.is_set() and not stop.is_set():
                raise PartUnavailable(supervisor.failure())
    console.print("stopped; nothing was lost: the log, the database and the weights are kept for the next start")


async def _context_tokens(running: "Installation") -> int:
    """Ask the first engine how long a conversation may be."""
    import aiohttp

    from clawstream.inference.clients import engine_client

    async with aiohttp.ClientSession() as session:
        engine = engine_client(running.settings.engine)(session, running.addresses.engines[0])
        return (await engine.server_info()).context_length_tokens


async def tell_versions(console: Console, settings: Settings) -> None:
    """Print for each new version that it is served, or why it is not; never returns."""
    from clawstream.stream import topics
    from clawstream.stream.kafka.connect import connected
    from clawstream.stream.runner.calling import until_done
    from clawstream.stream.stage import Record

    told = VersionNews(settings.policy.id)

    async def tell() -> None:
        async with connected(settings.kafka, client_id="up") as log:
            async for records in log.follow([topics.POLICY], "latest"):
                for record in records:
                    if isinstance(record, Record) and (line := told.line(record.event)) is not None:
                        console.print(harmless(line), soft_wrap=True)

    waits, again_on = TOLD_AGAIN_S, (TryLater, OperatorError)
    await until_done(tell, "versions=unread", retry_s=waits, longest_s=waits, again_on=again_on)


async def _test_vote(settings: Settings) -> str | None:
    """Ask the judge for a test vote; return why it gives none, also noted for `clawstream status`.

    None: the judge votes, or none is set. A silent judge stops nothing: it is asked about each turn for some minutes.
    """
    from clawstream.inference import reward_model
    from clawstream.inference.judge_client import judge_name, problem_with
    from clawstream.local.running import JudgeNotes

    if settings.judge.url is None:
        return None
    rates = settings.judge.reward_above is not None
    trial = reward_model.problem_with(settings.judge) if rates else problem_with(settings.judge, settings.judge.url)
    problem = await trial
    JudgeNotes(settings.data_dir, judge_name(settings.judge.model, settings.judge.url)).heard(problem)
    return problem


def _greet(
    console: Console,
    running: "Installation",
    model_path: Path,
    context_tokens: int,
    config: Path | None,
    no_vote: str | None,
) -> None:
    from clawstream.local.openclaw_config import too_few

    settings, addresses = running.settings, running.addresses
    console.print(f"\n[bold green]clawstream is up[/]: {addresses.gateway}/v1 serves {settings.policy.served_model}")
    where = f"  policy   {model_path}\n  Kafka    {addresses.kafka}\n  logs     {settings.data_dir / 'logs'}"
    console.print(where, soft_wrap=True)
    if settings.judge.url is None:
        console.print(
            "  [yellow]no judge is set (judge.url): thumbs and words of POST /v1/feedback teach, what is said next "
            "does not[/]",
            soft_wrap=True,
        )
    elif no_vote is None:
        console.print(f"  judge    {settings.judge.model} at {settings.judge.url}", soft_wrap=True)
    else:
        console.print(f"  [red]the judge gives no vote[/]: {harmless(no_vote)}", soft_wrap=True)
        console.print(
            f"  each turn is put to it for {settings.judge.deadline_s:g} s, and then not judged; "
            "`clawstream status` says when it answers",
            soft_wrap=True,
        )
    if settings.training.corrects:
        console.print(
            '  words are trained on at once (training.cadence = "correction"): '
            f"{called(config)} feedback ANSWER --hint WORDS",
            soft_wrap=True,
        )
    console.print(f"\nPoint OpenClaw here: [bold]{connecting(settings, addresses.gateway, config)}[/]", soft_wrap=True)
    if wants_key(settings):
        console.print("  with [bold]--key[/] and a key in force (`clawstream keys add NAME` makes one)", soft_wrap=True)
    if (warning := too_few(context_tokens)) is not None:
        console.print(f"  [yellow]{warning}[/]")
    console.print("Ctrl-C stops everything.")


class VersionNews:
    """The events of a policy, and of those of keys that began with it, as lines for the terminal."""

    def __init__(self, policy_id: str) -> None:
        self._policy_id = policy_id
        self._steps: dict[tuple[str, int], StepTaken] = {}
        self._served: dict[str, int] = {}  # by policy, the newest version that was reported; the base is never reported

    def line(self, event: Event) -> str | None:
        """Return the line that reports the event; None: it is not reported."""
        if not isinstance(event, PolicyEvent) or not is_of_policy(event.policy_id, self._policy_id):
            return None
        key, news = key_of_policy(event.policy_id), self._news(event)
        return news if key is None or news is None else f"{key}: {news}"

    def _news(self, event: PolicyEvent) -> str | None:
        match event:
            case StepTaken():
                self._steps[event.policy_id, event.policy_version] = event
            case StepRejected():
                return f"step {event.policy_version} was rejected, and the version before it stays: {event.reason}"
            case PolicyRejected():
                return f"{event.engine} did not take version {event.policy_version} over: {event.reason}"
            case PolicyActivated(policy_id=of, policy_version=version) if version > self._served.get(of, 0):
                self._served[of] = version
                return f"version {version} is served{self._learned(of, version)}"
        return None

    def _learned(self, policy_id: str, version: int) -> str:
        step = self._steps.pop((policy_id, version), None)
        if step is None:
            return ""
        reward = "" if step.mean_reward is None else f" with a mean reward of {step.mean_reward:.2f}"
        return f": it learned from {step.num_samples} samples{reward}, {step.num_hinted} of them with a hint"


def launch(
    context: typer.Context,
    hf_ckpt: Annotated[Path, typer.Option(envvar="HF_CKPT", metavar="FOLDER", help="The policy's model folder.")],
    num_gpus: Annotated[int, typer.Option(envvar="NUM_GPUS", min=1, help="GPUs of this machine.")] = 8,
    actor_gpus: Annotated[int | None, typer.Option(envvar="ACTOR_GPUS", min=1, help="To train; else half.")] = None,
    rollout_gpus: Annotated[int | None, typer.Option(envvar="ROLLOUT_GPUS", min=1, help="To serve; a quarter.")] = None,
    prm_gpus: Annotated[
        int | None,
        typer.Option(envvar="PRM_GPUS", min=0, help="To judge; else what is left, at most a quarter. 0: judge.url"),
    ] = None,
    tp: Annotated[int, typer.Option(envvar="TP", min=1, help="GPUs of one engine.")] = 1,
    prm_tp: Annotated[int, typer.Option(envvar="PRM_TP", min=1, help="GPUs of one judge.")] = 1,
    prm_model_path: Annotated[
        Path | None, typer.Option(envvar="PRM_MODEL_PATH", metavar="FOLDER", help="The judge's; else HF_CKPT.")
    ] = None,
    save_ckpt: Annotated[
        Path | None, typer.Option(envvar="SAVE_CKPT", metavar="FOLDER", help="Where versions are kept.")
    ] = None,
    sglang_api_key: Annotated[
        str | None, typer.Option(envvar="SGLANG_API_KEY", metavar="KEY", help="What clients have to show.")
    ] = None,
    port: Annotated[int | None, typer.Option(envvar="PORT", help="The gateway's; else gateway.port.")] = None,
    sglang: Annotated[str, typer.Option(metavar="COMMAND", help="What starts an SGLang server.")] = SGLANG,
    gpu_gb: Annotated[
        float | None, typer.Option(envvar="GPU_GB", min=1, help="Memory of each GPU; else the driver is asked.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print it all as JSON and start nothing.")] = False,
) -> None:
    """Share this machine's GPUs out to actor, rollout and judge, and run everything on them until Ctrl-C."""
    options = Context.of(context)
    if sglang_api_key == EXAMPLE_KEY:
        raise ConfigError(f"SGLANG_API_KEY is {EXAMPLE_KEY!r}, which everybody knows. Nothing was started; set another")
    counts = share_out(num_gpus, actor_gpus, rollout_gpus, prm_gpus)
    if prm_gpus is None and not counts.judge:
        typer.echo(f"no GPU of {num_gpus} is left for a judge (PRM_GPUS): judge.url names one elsewhere", err=True)
    asked = options.settings()
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
        adapter_flags=adapter_flags(asked),
    )
    found = what_is_planned(asked, wanted, counts, gpu_gb)
    wanted = replace(wanted, memory_share=found.static_share if found and counts.side_by_side else None)
    settings = settings_for(wanted, asked)
    if dry_run:
        commands = {server.name: shlex.join(server.command) for server in servers(wanted, settings.engine.port)}
        shown = asdict(wanted.assignment) | {"processes": settings.training.processes, "commands": commands}
        typer.echo(json.dumps(shown, indent=1))
        return
    console = Console(stderr=True)
    console.print(_table(wanted.assignment))
    used = wanted.assignment.actor[: settings.training.processes]
    if used != wanted.assignment.actor:
        console.print(f"[yellow]the trainer uses GPU {_numbers(used)} alone, one for each of training.processes[/]")
    _run(settings, wanted, console, options.config)


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

    # For the trainer, the only part of ours that uses a GPU; SGLang's servers are given theirs separately.
    os.environ["CUDA_VISIBLE_DEVICES"] = _numbers(wanted.assignment.actor)
    run_until_stopped(main)


@contextlib.asynccontextmanager
async def _running(
    settings: Settings, wanted: tuple[SglangServer, ...], console: Console
) -> "AsyncIterator[Supervisor]":
    """Run SGLang's servers during the block, which begins once all are ready. Raises PartUnavailable."""
    import aiohttp

    from clawstream.local.servers.server_process import answers
    from clawstream.local.supervisor import Part, Patience, Supervisor

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
        parts = [
            Part(name=server.name, command=server.command, missing=answers(http, f"{server.url}/health"))
            for server in wanted
        ]
        await supervisor.start(parts)
        yield supervisor
