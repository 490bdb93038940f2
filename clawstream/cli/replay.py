"""`clawstream replay`: reads the log again, with the votes on it or a judge's new ones; live topics do not change."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clawstream import layout
from clawstream.cli.process import (
    AsJson,
    Context,
    broker,
    learns_from,
    log_to_stderr,
    run_until_stopped,
    unless_stopped,
)
from clawstream.config import Settings
from clawstream.errors import ConfigError, OperatorError
from clawstream.events import ReplayEnded, ReplayStarted, VotesFrom
from clawstream.locks import locked
from clawstream.stream.stage import now_ms

if TYPE_CHECKING:
    from clawstream.replay.comparing import Comparison
    from clawstream.replay.running import ReplayRequest
    from clawstream.replay.work import ReplayProgress, WorkerResult
    from clawstream.stream.kafka.kafka_log import KafkaLog

T = TypeVar("T")

RETENTION_MS = 30 * 86_400_000  # of a replay's topics: all on them but new votes can be made again
NEWS_EVERY_S = 2.0

replay = typer.Typer(name="replay", help="Read the log again; live topics do not change.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A replay, as `replay list` has it.")]


@replay.command()
def start(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="Of the replay and its topics; one that was begun goes on.")],
    since: Annotated[str | None, typer.Option("--from", help="An offset, 90s, 5m, 2h, 1d ago, or an ISO time.")] = None,
    until: Annotated[str | None, typer.Option("--to", help="The same; without it, where the log ends now.")] = None,
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    votes_from: Annotated[VotesFrom, typer.Option(help="Votes as they were cast, or a judge's new ones.")] = (
        VotesFrom.LOG
    ),
    judge: Annotated[str | None, typer.Option(metavar="URL", help="Whom to ask, or whose votes alone count.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="In place of judge.model.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; without it, one for each core.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.1, help="Exchanges a second at most.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read frozen ranges of the log again, fold them as the stages do, and write the results to the replay's topics.

    A replay that was killed can be started again under its name. It then reads the range of its first run from the
    beginning, with the same results; new votes that had arrived are on its topic, and are not asked for again.
    """
    from clawstream.inference.judge_client import judge_name
    from clawstream.replay.running import ReplayRequest

    settings = _settings(context)
    changes = {"url": judge or settings.judge.url, "model": judge_model or settings.judge.model}
    settings = settings.model_copy(update={"judge": settings.judge.model_copy(update=changes)})
    asked = judge is not None or judge_model is not None or votes_from is VotesFrom.NEW
    if asked and settings.judge.url is None:
        raise ConfigError("no judge is named: add --judge URL, such as http://127.0.0.1:8000/v1, or set judge.url")
    wanted = ReplayRequest(
        name=name,
        since=since,
        until=until,
        session_id=session,
        votes_from=votes_from,
        judge=judge_name(settings.judge.model, settings.judge.url or "") if asked else None,
    )
    num_workers = workers or len(os.sched_getaffinity(0))
    with broker(settings) as reached, _alone(settings, name):
        ended = _run(reached, lambda log: work_on(reached, log, wanted, num_workers=num_workers, rate=rate))
    _print(ended, as_json=as_json)


@replay.command(name="list")
def list_(context: typer.Context, as_json: AsJson = False) -> None:
    """Say which replays there are, what came of them, and which is promoted."""
    from clawstream.replay.registry import Registry

    settings = _settings(context)
    found = _run(settings, Registry.read)
    pointer = found.pointer(settings.policy.id)
    rows = [_row(started, found.ended.get(name), promoted=name == pointer) for name, started in found.started.items()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("name", "votes from", "judge", "exchanges", "samples", "samples sha256", "state", "topics")
    for row in rows:
        table.add_row(*("-" if value is None else escape(str(value)) for value in row.values()))
    layout.show(Console(), table)


@replay.command()
def compare(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Compare a replay's verdicts with the live ones; a CSV of all turns and a plot go into the data folder."""
    from clawstream.replay.registry import Registry
    from clawstream.replay.running import compared, write_csv, write_plot

    settings = _settings(context)
    folder = folder_of(settings, name)

    async def main(log: "KafkaLog") -> "Comparison":
        registry = await Registry.read(log)
        registry.finished(name)
        return await compared(log, registry.started[name])

    found = _run(settings, main)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(found, folder / "turns.csv")
    write_plot(found, folder / "scores.png")
    figures, files = found.figures(), {"csv": str(folder / "turns.csv"), "plot": str(folder / "scores.png")}
    if as_json:
        typer.echo(json.dumps(figures | files))
        return
    table = Table("", name, title="Replayed against live", title_justify="left")
    for label, value in figures.items():
        table.add_row(label.replace("_", " "), _shown(value))
    layout.show(Console(), table)
    typer.echo(f"Each turn: {files['csv']}\nPlot: {files['plot']}")


@replay.command()
def promote(context: typer.Context, name: Name) -> None:
    """Have the policy trained on a replay's samples, from its next batch on."""
    from clawstream.replay.registry import promote as promoted

    settings = _settings(context)
    if settings.policy.by_key:
        raise ConfigError(
            f"policy.adapters is {settings.policy.adapters!r}: a replay's samples are of all adapters, and would train "
            "the shared policy alone. Nothing was promoted. `clawstream train --samples` makes a policy of its own of "
            "them"
        )
    _run(settings, lambda log: promoted(log, name, policy_id=settings.policy.id, now_ms=now_ms()))
    typer.echo(f"{settings.policy.id} is trained on the samples of replay {name} from its next batch on")


@replay.command()
def rollback(context: typer.Context) -> None:
    """Undo the newest promotion: the samples before it are trained on again."""
    from clawstream.replay.registry import rollback as rolled_back

    settings = _settings(context)
    event = _run(settings, lambda log: rolled_back(log, policy_id=settings.policy.id, now_ms=now_ms()))
    said = "its live samples" if event.replay is None else f"the samples of replay {event.replay}"
    typer.echo(f"{settings.policy.id} is trained on {said} from its next batch on")


async def work_on(
    settings: Settings, log: "KafkaLog", wanted: "ReplayRequest", *, num_workers: int, rate: float | None
) -> ReplayEnded:
    """Begin the replay, or find it begun, and return how it ended."""
    from clawstream.inference.judge_client import name_of_teacher
    from clawstream.replay.processes import in_processes, prepare
    from clawstream.replay.registry import num_records
    from clawstream.replay.running import begin, work_through
    from clawstream.stream import topics
    from clawstream.stream.kafka import admin
    from clawstream.stream.topics import replay_topics

    teacher = name_of_teacher(settings)
    learns = learns_from(settings.training, settings.rewards)
    grouped = settings.training.method == "stepwise"
    started, ended = await begin(
        log, wanted, settings.judge, settings.rewards, learns=learns, grouped=grouped, teacher=teacher
    )
    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    if ended is not None:
        say(f"replay {wanted.name} has ended before; nothing was done")
        return ended
    prepare("clawstream.cli.replay_worker")
    partitions = 1 + max(part.partition for part in started.ranges)
    await admin.create(
        settings.kafka.address,
        settings.kafka.prefix,
        replay_topics(wanted.name, partitions=partitions, retention_ms=RETENTION_MS),
        security=settings.kafka,
    )
    tell = _progress_line(num_records(started.ranges, topics.EXCHANGES), say)

    async def work(begun: ReplayStarted) -> "list[WorkerResult]":
        return await in_processes(settings, begun, num_workers=num_workers, exchanges_per_s=rate, on_progress=tell)

    return await work_through(log, started, work)


def _progress_line(num_records: int, say: Callable[[str], None]) -> "Callable[[ReplayProgress], None]":
    """Return a function that says every few seconds how far a replay is."""
    began_s = said_s = time.monotonic()

    def tell(progress: "ReplayProgress") -> None:
        nonlocal said_s
        now_s = time.monotonic()
        if now_s - said_s >= NEWS_EVERY_S:
            said_s = now_s
            say(
                f"{progress.num_exchanges} exchanges of {num_records} records, {progress.num_samples} samples, "
                f"{progress.num_calls} calls in {now_s - began_s:.0f} s"
            )

    return tell


@contextmanager
def _alone(settings: Settings, name: str) -> Iterator[None]:
    """Keep other processes from working on the same replay during the block."""
    folder = folder_of(settings, name)
    folder.mkdir(parents=True, exist_ok=True)
    words = f"replay {name!r} is being worked on by another process; wait for it, or end it"
    with locked(folder / "lock", within_s=0, in_use=words):
        yield


def folder_of(settings: Settings, name: str) -> Path:
    """Return the folder of a replay's files."""
    from clawstream.replay.running import refuse_name

    refuse_name(name)
    return settings.data_dir / "replays" / name


def _row(started: ReplayStarted, ended: ReplayEnded | None, *, promoted: bool) -> dict[str, str | int | None]:
    return {
        "name": started.replay,
        "votes_from": started.votes_from.value,
        "judge": started.judge,
        "exchanges": None if ended is None else ended.num_exchanges,
        "samples": None if ended is None else ended.num_samples,
        "samples_sha256": None if ended is None else ended.samples_sha256,
        "state": "promoted" if promoted else "begun" if ended is None else "ended",
        "topics": f"clawstream.replay.{started.replay}.*",
    }


def _print(ended: ReplayEnded, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(ended)))
        return
    for name, value in asdict(ended).items():
        typer.echo(f"{name.removeprefix('num_'):<16}{value}")


def _shown(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else escape(str(value))


def _run(settings: Settings, main: "Callable[[KafkaLog], Coroutine[None, None, T]]") -> T:
    """Return what `main` returns, given the installation's log; a signal ends it with an OperatorError."""
    from clawstream.stream.kafka.connect import connected

    found: list[T] = []

    async def until_stopped(stop: asyncio.Event) -> None:
        async with connected(reached.kafka, client_id="replay") as log:
            found.append(await unless_stopped(main(log), stop))

    try:
        with broker(settings) as reached:
            run_until_stopped(until_stopped)
    except asyncio.CancelledError:
        raise OperatorError("stopped before it was done; start it again under its name") from None
    return found[0]


def _settings(context: typer.Context) -> Settings:
    log_to_stderr("replay", level=30)
    return Context.of(context).settings_of_what_ran()
