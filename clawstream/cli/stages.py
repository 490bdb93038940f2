"""One command per stage, each a process of its own; `clawstream up` runs them all."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawstream.cli.process import (
    Context,
    broker,
    hide_torch,
    learns_from,
    leave_what_is_loaded,
    log_to_stderr,
    pulse,
    run_until_stopped,
)
from clawstream.config import Settings, share_cores
from clawstream.errors import ConfigError

if TYPE_CHECKING:
    from clawstream.stream.kafka.kafka_log import KafkaLog
    from clawstream.stream.stage import Stage
    from clawstream.training.processes import Ranks


def engine(
    context: typer.Context,
    port: Annotated[int | None, typer.Option(help="In place of engine.port: another replica on this machine.")] = None,
) -> None:
    """Serve the policy in SGLang's dialect: on the CPU, or as a Tinker service samples it."""
    settings = _settings(context, "engine")
    if settings.training.by_service:
        from clawstream.inference.tinker_service import TinkerService
        from clawstream.local.engine import tinker

        base, at = settings.engine.base_policy, settings.engine.port if port is None else port
        run_until_stopped(lambda stop: tinker.serve(TinkerService(settings), base, port=at, stop=stop))
        return
    from clawstream.local.engine.server import serve

    serve(
        model_path=str(settings.engine.base_policy),
        port=settings.engine.port if port is None else port,
        weight_version="0",  # the base's; the weights stage brings the engine up to date
        dtype="float32" if settings.training.lora_rank is None else "float16",  # under an adapter no weight changes
    )


def gateway(context: typer.Context) -> None:
    """Answer OpenAI requests by the engine; write every exchange to the log."""
    settings = _settings(context, "gateway")
    hide_torch()
    from clawstream.gateway.app import serve
    from clawstream.local.installation import name_base
    from clawstream.stream.kafka.connect import connected_once_there

    async def main(stop: asyncio.Event) -> None:
        async with connected_once_there(settings.kafka, client_id="gateway", stop=stop) as log:
            if log is not None:
                await name_base(log, settings)
                await serve(settings, log, stop=stop, started=leave_what_is_loaded)

    run_until_stopped(main)


def turns(context: typer.Context) -> None:
    """Pair each answer with what happened next: exchanges -> turns."""
    settings = _settings(context, "turns")
    from clawstream.turns.stage import turns_stage

    _run_stage(settings, turns_stage())


def judging(context: typer.Context) -> None:
    """Ask the judges about each turn: turns -> votes, verdicts, hints."""
    settings = _settings(context, "judging")
    if settings.judge.url is None:
        raise ConfigError(
            "judge.url is not set: name an OpenAI-compatible endpoint, for example http://127.0.0.1:8000/v1"
        )
    from clawstream.judging.stage import judge_at, judging_stage
    from clawstream.local.running import JudgeNotes

    learns = learns_from(settings.training, settings.rewards)

    async def main(log: "KafkaLog", stop: asyncio.Event) -> None:
        async with judge_at(settings.judge) as judge:
            notes = JudgeNotes(settings.data_dir, judge.name)
            await _run(judging_stage(settings.judge, judge, learns=learns, heard=notes.heard), settings, log, stop)

    _with_log(settings, "judging", main)


def heuristics(context: typer.Context) -> None:
    """Have a function of yours score finished turns: turns -> feedback."""
    settings = _settings(context, "heuristics")
    from clawstream.judging.stage import heuristic_named, heuristics_stage
    from clawstream.stream.stage import HEARD_MS

    if settings.rewards.heuristic_function is None:
        raise ConfigError(
            "rewards.heuristic_function is not set: name an entry point of the group clawstream.heuristics"
        )
    heuristic = heuristic_named(settings.rewards.heuristic_function)
    _run_stage(settings, heuristics_stage(heuristic, heard_ms=HEARD_MS))


def samples(context: typer.Context) -> None:
    """Join turns, verdicts, hints and feedback into samples for the trainer: -> samples."""
    settings = _settings(context, "samples")
    hide_torch()
    from clawstream.events import RewardWeights
    from clawstream.inference.judge_client import name_of_teacher, teaching
    from clawstream.rendering.renderer import PromptRenderer
    from clawstream.samples.joining import SampleRules, TeacherRule
    from clawstream.samples.stage import asking_stage, samples_stage
    from clawstream.stream.stage import HEARD_MS

    renderer = PromptRenderer.of(settings.policy, settings.engine.base_policy)
    teacher = name_of_teacher(settings)
    asks = None if teacher is None else TeacherRule(teacher)
    rules = SampleRules(
        renderer,
        RewardWeights(**settings.rewards.weights),
        judged=settings.judge.url is not None,
        asks=asks,
        grouped=settings.training.method == "stepwise",
        interrupted=settings.samples.interrupted,
        learns=learns_from(settings.training, settings.rewards),
    )
    stage = samples_stage(rules, retain_ms=HEARD_MS)
    if asks is None:
        _run_stage(settings, stage)
        return

    async def main(log: "KafkaLog", stop: asyncio.Event) -> None:
        async with teaching(settings, renderer.marker_ids) as asked:
            await _run(asking_stage(stage, asked), settings, log, stop)

    _with_log(settings, "samples", main)


def refresh(context: typer.Context) -> None:
    """Have the policy answer prompts of the past again, unseen: samples -> answers."""
    settings = _settings(context, "refresh")
    hide_torch()
    from clawstream.inference.clients import engine_client, engine_session
    from clawstream.inference.model_folder import num_embeddings
    from clawstream.refresh.answering import Refresher
    from clawstream.refresh.stage import refresh_stage
    from clawstream.rendering.renderer import PromptRenderer
    from clawstream.stream.stage import HEARD_MS

    renderer = PromptRenderer.of(settings.policy, settings.engine.base_policy)
    num_token_ids = num_embeddings(settings.engine.base_policy)
    num_answers = settings.training.answers_per_hint

    async def main(log: "KafkaLog", stop: asyncio.Event) -> None:
        async with engine_session(settings.engine) as session:
            client = engine_client(settings.engine)
            engines = [client(session, url, num_token_ids=num_token_ids) for url in settings.engine.addresses]
            stage = refresh_stage(
                Refresher(engines, renderer),
                settings.policy.id,
                by_key=settings.policy.by_key,
                answers_per_hint=num_answers,
                heard_ms=HEARD_MS,
            )
            await _run(stage, settings, log, stop)

    _with_log(settings, "refresh", main)


def groups(context: typer.Context) -> None:
    """Weigh the steps of several attempts at one task against each other: samples -> groups."""
    settings = _settings(context, "groups")
    from clawstream.events import RewardWeights
    from clawstream.groups.stage import groups_stages
    from clawstream.stream.stage import HEARD_MS

    weights, wait_s = RewardWeights(**settings.rewards.weights), settings.training.group_wait_s
    _run_stages(settings, "groups", groups_stages(weights, wait_s=wait_s, retain_ms=HEARD_MS))


def train(
    context: typer.Context,
    samples_of: Annotated[
        str | None, typer.Option("--samples", metavar="REPLAY", help="Train another policy on its samples, then end.")
    ] = None,
    from_policy: Annotated[
        int, typer.Option(min=0, metavar="VERSION", help="With --samples: the version to start from; 0: the base.")
    ] = 0,
) -> None:
    """Train on samples in micro-batches; publish a version after each step."""
    settings = _settings(context, "train")
    from clawstream.training.processes import ranks_of

    with ranks_of(settings.training) or nullcontext() as ranks:
        if ranks is not None and ranks.rank > 0:
            ranks.serve()
        else:
            _lead(settings, samples_of, from_policy, ranks)


def _lead(settings: Settings, samples_of: str | None, from_policy: int, ranks: "Ranks | None") -> None:
    from clawstream.local.installation import name_base
    from clawstream.training.loop import train as loop

    if samples_of is None:
        if settings.weights.url is not None:
            raise ConfigError(
                "weights.url is set: this policy's trainer runs elsewhere, and two trainers would take different steps "
                "under one version's name. Nothing is trained here; take weights.url out to train here"
            )
        from clawstream.training.checkpoints import offering

        async def live(log: "KafkaLog", stop: asyncio.Event) -> None:
            await name_base(log, settings)
            async with offering(settings.weights, settings.checkpoints_dir):
                await loop(settings, log, stop=stop, ranks=ranks)

        _with_log(settings, "train", live)
        return
    name = samples_of
    from clawstream.replay.registry import Registry
    from clawstream.training.batches.following import retraining

    own, what = retraining(settings, replay=name, from_version=from_policy)

    async def main(log: "KafkaLog", stop: asyncio.Event) -> None:
        (await Registry.read(log)).finished(name)
        await name_base(log, own)
        await loop(own, log, stop=stop, retraining=what, ranks=ranks)

    with broker(settings) as reached:
        _with_log(reached, "train", main)
    _say_where_it_is(own, of=settings)


def _say_where_it_is(own: Settings, *, of: Settings) -> None:
    from clawstream.training.checkpoints import latest

    newest = latest(own.checkpoints_dir)
    if newest is None:
        typer.echo(f"no step was taken: no sample could be trained on. {of.policy.id} is as it was")
        return
    typer.echo(
        f"{own.policy.id} is at version {newest.version}: {newest.path}\n"
        f'`clawstream up` serves it in place of {of.policy.id} with policy.id = "{own.policy.id}"'
    )


def weights(context: typer.Context) -> None:
    """Let the engines take over each published version while they serve."""
    settings = _settings(context, "weights")
    from clawstream.inference.clients import engine_client, engine_session
    from clawstream.weights.fetching import Fetcher
    from clawstream.weights.stage import keep_current

    base, fetched = settings.engine.model_path, settings.data_dir / "fetched" / settings.policy.id

    async def main(log: "KafkaLog", stop: asyncio.Event) -> None:
        async with (
            engine_session(settings.engine) as session,
            Fetcher.open(settings.weights, fetched, base) as fetcher,
        ):
            engines = [engine_client(settings.engine)(session, url) for url in settings.engine.addresses]
            await keep_current(
                engines,
                log,
                policy_id=settings.policy.id,
                by_key=settings.policy.by_key,
                stop=stop,
                model_path=base,
                fetcher=fetcher,
            )

    _with_log(settings, "weights", main)


def project(context: typer.Context) -> None:
    """Keep Postgres equal to the log."""
    settings = _settings(context, "project")
    from clawstream.projections.write.stage import project as projector

    if settings.postgres.url is None:
        raise ConfigError("postgres.url is not set: name a database, or run `clawstream up`, which starts one")
    url, instance_id = settings.postgres.url.get_secret_value(), _instance(settings, "project")
    _with_log(settings, "project", lambda log, stop: projector(url, log, stop=stop, instance_id=instance_id))


def monitor(context: typer.Context) -> None:
    """Watch rates, scores and queue ages in one-minute windows."""
    settings = _settings(context, "monitor")
    from clawstream.monitoring.app import serve

    run_until_stopped(lambda stop: serve(settings, stop=stop))


def _settings(context: typer.Context, stage: str) -> Settings:
    settings = Context.of(context).settings()
    log_to_stderr(stage)
    share_cores()
    return settings


def _instance(settings: Settings, stage: str) -> str | None:
    return None if settings.kafka.instance is None else f"{settings.kafka.prefix}{stage}-{settings.kafka.instance}"


async def _run(stage: "Stage[Any, Any]", settings: Settings, log: "KafkaLog", stop: asyncio.Event) -> None:
    from clawstream.stream.runner.hosting import run

    await run(stage, log, stop=stop, instance_id=_instance(settings, stage.name))


def _run_stage(settings: Settings, stage: "Stage[Any, Any]") -> None:
    _run_stages(settings, stage.name, [stage])


def _run_stages(settings: Settings, client_id: str, stages: "Sequence[Stage[Any, Any]]") -> None:
    async def main(log: "KafkaLog", stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for stage in stages:
                    tasks.create_task(_run(stage, settings, log, stop))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    _with_log(settings, client_id, main)


def _with_log(settings: Settings, client_id: str, main: Callable[["KafkaLog", asyncio.Event], Awaitable[None]]) -> None:
    """Connect to the broker, refuse topics that are not as they should be, and run until a signal."""
    from clawstream.stream.kafka.connect import connected

    async def connected_main(stop: asyncio.Event) -> None:
        async with (
            pulse(settings.data_dir / "alive" / client_id),
            connected(settings.kafka, client_id=client_id) as log,
        ):
            await main(log, stop)

    run_until_stopped(connected_main)


COMMANDS: tuple[Callable[..., None], ...] = (
    engine, gateway, turns, judging, heuristics, samples, refresh, groups, train, weights, project, monitor,
)  # fmt: skip
