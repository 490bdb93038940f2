"""`clawstream status`, `sql`, `tail` and `export`: look at an installation without changing it."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from clawstream.cli.process import (
    AsJson,
    Context,
    Key,
    broker,
    database,
    harmless,
    log_to_stderr,
    run_until_stopped,
    unless_stopped,
)
from clawstream.config import JudgeSettings, KafkaSettings, Settings
from clawstream.errors import OperatorError
from clawstream.layout import show

if TYPE_CHECKING:
    from clawstream.local.running import Addresses, PartState
    from clawstream.monitoring.alarm import JudgeReachability, ReadVotes
    from clawstream.monitoring.policy import LearnedFrom
    from clawstream.monitoring.status import LogStatus, Status

FEW_VOTES = 6  # fewer replies say nothing of a judge: one turn has as many by default
UNREAD_SHARE = 0.1  # of its replies


def status(
    context: typer.Context,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say which parts run, how far each stage is behind, and how the policy fares."""
    settings = Context.of(context).settings_of_key(key)
    log_to_stderr("status", level=40)
    from clawstream.gateway.outbox.spool_file import spools_in
    from clawstream.local.running import addresses_of, read_parts

    addresses = addresses_of(settings.data_dir)
    spools = spools_in(settings.data_dir)
    parts = () if addresses is None else read_parts(settings.data_dir)
    found = asyncio.run(_ask(settings, addresses))
    judge = _judge(settings, found)
    if as_json:
        told = plain(settings.data_dir, addresses, parts, found)
        typer.echo(json.dumps(told | {"judge": judge and asdict(judge), "spool_bytes": spools}))
    else:
        console, now_ms = Console(), int(time.time() * 1000)
        for block in blocks(settings.data_dir, addresses, parts, found, now_ms=now_ms):
            show(console, block) if isinstance(block, Table) else console.print(block, soft_wrap=True)
        console.print(judge_line(settings.judge, judge, now_ms), soft_wrap=True)
        if (unread := unread_line(settings.judge, None if found.log is None else found.log.votes)) is not None:
            console.print(unread, soft_wrap=True)
        for name, num_bytes in spools.items():
            console.print(f"[yellow]spool {harmless(name)}:[/] {num_bytes} bytes wait for Kafka, and for its gateway")


async def _ask(settings: Settings, addresses: "Addresses | None") -> "Status":
    from clawstream.inference.judge_client import name_of
    from clawstream.local.servers.accounts import address_in
    from clawstream.local.servers.kafka import access_to
    from clawstream.monitoring.status import GROUPED, REFRESHING, due_of
    from clawstream.monitoring.status import status as asked

    folder, kafka = settings.data_dir / "kafka", settings.kafka
    running = addresses.kafka if addresses is not None else address_in(folder)
    if kafka.bootstrap is None and running is not None:
        kafka = kafka.model_copy(update=access_to(folder, running))
    monitor_url = None if addresses is None else addresses.monitor
    grouped = GROUPED if settings.training.method == "stepwise" else ()
    optional = (*(REFRESHING if settings.training.refreshes else ()), *grouped)
    return await asked(
        kafka,
        policy_id=settings.policy.id,
        optional=optional,
        monitor_url=monitor_url,
        due=due_of(settings.training),
        judge=name_of(settings.judge),
    )


def _judge(settings: Settings, found: "Status") -> "JudgeReachability | None":
    """Return the newest that is known of the judge, from the log or from this machine's judging stage."""
    from clawstream.inference.judge_client import name_of
    from clawstream.local.running import judge_of
    from clawstream.monitoring.alarm import newest

    name = name_of(settings.judge)
    by_log = None if found.log is None else found.log.judge
    return None if name is None else newest(by_log, judge_of(settings.data_dir), judge=name)


def judge_line(settings: JudgeSettings, judge: "JudgeReachability | None", now_ms: int) -> str:
    """Return how the judge fares, in words."""
    if settings.url is None:
        return "judge: none is set (judge.url): thumbs, and words given as feedback, teach; what is said next does not"
    if judge is None:
        return f"judge: {harmless(settings.model)} at {harmless(settings.url)} was not asked yet"
    heard = f"asked last {_ago(judge.heard_ms, now_ms)}"
    if judge.error is None:
        return f"judge: {harmless(judge.judge)} answers, {heard}"
    silent = _ago(judge.since_ms, now_ms).removesuffix(" ago")
    who, why = harmless(judge.judge), harmless(judge.error)
    return f"[red]judge: {who} has given no answer for {silent}[/], {heard}: {why}"


def unread_line(settings: JudgeSettings, votes: "ReadVotes | None") -> str | None:
    """Return what keeps the judge's votes from being read and what helps, in words; None: nearly all are read."""
    unread = 0 if votes is None else votes.cut + votes.without + votes.broken
    if votes is None or votes.replies < FEW_VOTES or unread < UNREAD_SHARE * votes.replies:
        return None
    named: list[str] = []
    if votes.cut_tokens is not None:
        raised = settings.max_tokens > votes.cut_tokens
        shorter = "" if settings.thinking is False else ", or set judge.thinking = false"
        helps = f"it is {settings.max_tokens} by now" if raised else f"raise it{shorter}"
        named.append(f"{votes.cut} were cut at judge.max_tokens = {votes.cut_tokens}: {helps}")
    if votes.without:
        named.append(f"{votes.without} end without \\boxed{{}}: a larger judge.model may heed the prompt")
    if votes.broken:
        named.append(f"{votes.broken} were too long or never ended: votes.error says which")
    return f"[yellow]judge: {unread} of its last {votes.replies} replies are no votes[/]; {'; '.join(named)}"


def plain(
    data_dir: Path, addresses: "Addresses | None", parts: "tuple[PartState, ...]", found: "Status"
) -> dict[str, Any]:
    """Return everything as plain values; what is absent is null."""
    return {
        "data_dir": str(data_dir),
        "running": addresses is not None,
        "parts": [asdict(part) for part in parts],
        "addresses": None if addresses is None else shown(addresses),
        **asdict(found),
    }


def shown(addresses: "Addresses") -> dict[str, Any]:
    """Return the addresses without the database's password."""
    return asdict(addresses) | {"postgres": _without_password(addresses.postgres)}


def blocks(
    data_dir: Path,
    addresses: "Addresses | None",
    parts: "tuple[PartState, ...]",
    found: "Status",
    *,
    now_ms: int,
) -> "Iterator[Table | str]":
    """Yield what a person sees, from top to bottom."""
    if addresses is None:
        yield f"[yellow]nothing runs[/] on {harmless(str(data_dir))}; `clawstream up` starts it"
    else:
        yield _parts(parts, now_ms)
        yield _pairs("Addresses", {name: _words(where) for name, where in shown(addresses).items()})
    if found.log is not None:
        yield _pairs("Records behind", {stage: _or_none(lag) for stage, lag in found.log.lag_records.items()})
        yield _pairs("Policy", _policy(found.log, now_ms))
        yield _verdicts(found.log, now_ms)
    if found.monitor is not None:
        yield _monitor(found.monitor)
    for alarm in _alarms(found, "alarm"):
        yield f"[red]learning stands still:[/] {harmless(alarm)}"
    for alarm in _alarms(found, "clock_alarm")[:1]:  # one is enough: log and monitor give other figures
        yield f"[red]the broker's clock is wrong:[/] {harmless(alarm)}"
    for problem in found.problems:
        yield f"[yellow]not known:[/] {harmless(problem)}"


def _alarms(found: "Status", name: str) -> list[str]:
    """Return an alarm's texts from the log and the monitor, each once."""
    said = (None if found.log is None else getattr(found.log, name), (found.monitor or {}).get(name))
    return list(dict.fromkeys(alarm for alarm in said if alarm is not None))


def _parts(parts: "tuple[PartState, ...]", now_ms: int) -> Table:
    table = Table("part", "state", "pid", "restarts", "since", title="Parts", title_justify="left")
    for part in parts:
        state = "[green]runs[/]" if part.pid is not None else "[red]down[/]"
        state = state if part.failure is None else f"[red]{harmless(part.failure)}[/]"
        table.add_row(part.name, state, _or_none(part.pid), str(part.restarts), _ago(part.since_ms, now_ms))
    return table


def _policy(log: "LogStatus", now_ms: int) -> dict[str, str]:
    oldest = "" if log.oldest_waiting_at_ms is None else f", the oldest {_ago(log.oldest_waiting_at_ms, now_ms)}"
    active = {f"active at {engine}": str(version) for engine, version in log.active_versions.items()}
    rejected = {} if log.rejected_because is None else {f"rejected {log.rejected_version}": log.rejected_because}
    return {
        "published": _or_none(log.published_version),
        **rejected,
        **active,
        "samples waiting": f"{log.samples_waiting}{oldest}",
        **_learned(log.learned_from),
        "trainer": "never heard of" if log.trainer is None else f"{log.trainer.what} {_ago(log.trainer.at_ms, now_ms)}",
    }


def _learned(told: "LearnedFrom | None") -> dict[str, str]:
    if told is None or not told.samples:
        return {}
    return {
        "learned from": f"{told.samples} samples: {told.with_feedback} with feedback, {told.judged} judged, "
        f"{told.hinted} with a hint"
    }


def _verdicts(log: "LogStatus", now_ms: int) -> Table:
    table = Table("session", "turn", "score", "status", "when", title="Last verdicts", title_justify="left")
    for verdict in log.last_verdicts:
        when = _ago(verdict.at_ms, now_ms)
        table.add_row(harmless(verdict.session_id), verdict.turn_id, _or_none(verdict.score), verdict.status, when)
    return table


def _monitor(told: Mapping[str, Any]) -> Table:
    hour, minute = told["hour"], told["minutes"][-2]
    title = "Monitor" if told["rebuilt"] else "Monitor (still reading the last hour)"
    table = Table("", "last minute", "last hour", title=title, title_justify="left")
    rows: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
        "exchanges": lambda part: sum(part["exchanges"].values()),
        "failed exchanges": lambda part: sum(n for kind, n in part["exchanges"].items() if kind != "completed"),
        "turns paired": lambda part: part["turns_paired"],
        "tokens/s": lambda part: part["tokens_per_s"],
        "mean score": lambda part: part["mean_score"],
        "votes unreadable": lambda part: part["unreadable_share"],
        "votes failed": lambda part: part["failed_share"],
        "samples": lambda part: part["samples"],
        "samples refused": lambda part: sum(part["refusals"].values()),
        "steps rejected": lambda part: part["steps_rejected"],
        "activations": lambda part: part["activations"],
        "longest pause, ms": lambda part: part["pause_ms_max"],
    }
    for name, value_of in rows.items():
        table.add_row(name, _or_none(value_of(minute)), _or_none(value_of(hour)))
        if name == "samples refused":
            _by_kind(table, "refusals", told)
    if hour["refreshed"]:
        table.add_row("answers given again", "", "")
        _by_kind(table, "refreshed", told)
    return table


def _by_kind(table: Table, what: str, told: Mapping[str, Any]) -> None:
    for kind, count in sorted(told["hour"][what].items()):
        table.add_row(f"  {harmless(kind)}", str(told["minutes"][-2][what].get(kind, 0)), str(count))


def _pairs(title: str, values: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        table.add_row(harmless(name), harmless(value))
    return table


def _or_none(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def _ago(then_ms: int, now_ms: int) -> str:
    seconds = max(0, now_ms - then_ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _words(where: object) -> str:
    return ", ".join(map(str, where)) if isinstance(where, (list, tuple)) else str(where)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")).geturl()


def sql(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="One statement that reads.")],
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask the database: one query that reads, printed as a table."""
    from clawstream.projections.look.sql import RowFormat, print_query

    if csv and as_json:
        raise OperatorError("--csv and --json exclude each other: name one")
    form = RowFormat.CSV if csv else RowFormat.JSON if as_json else RowFormat.TABLE
    with database(Context.of(context).settings()) as url:
        print_query(url, query, form=form, out=sys.stdout)


def tail(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="A topic, whole (clawstream.turns.v1) or short (turns).")],
    session: Annotated[str | None, typer.Option(help="Only this session's.")] = None,
    since: Annotated[str | None, typer.Option("--from", help="90s, 5m, 2h, 1d ago, or an ISO time.")] = None,
    until_end: Annotated[bool, typer.Option("--until-end", help="Stop where the topic ends now.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show a topic's events as they come, as people read them."""
    from clawstream.projections.look.tail import tail as show
    from clawstream.projections.look.tail import tail_options
    from clawstream.stream.kafka.connect import connected

    what = tail_options(topic, session_id=session, since=since, until_end=until_end, now_ms=int(time.time() * 1000))

    async def main(kafka: KafkaSettings, stop: asyncio.Event) -> None:
        async with connected(kafka, client_id="tail") as log:
            with suppress(asyncio.CancelledError):
                await unless_stopped(show(log, what, out=sys.stdout, as_json=as_json), stop)

    with broker(Context.of(context).settings()) as settings:
        run_until_stopped(lambda stop: main(settings.kafka, stop))


def export(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    form: Annotated[Literal["jsonl", "parquet"], typer.Option("--format", help="What kind of files.")] = "jsonl",
) -> None:
    """Write conversations, judgements, feedback, samples, steps and versions to files."""
    from clawstream.projections.look.export import FileFormat
    from clawstream.projections.look.export import export as write

    with database(Context.of(context).settings()) as url:
        counts = write(url, folder, form=FileFormat(form))
    for name, count in counts.items():
        Console(stderr=True).print(f"{count:>8} {name}")


COMMANDS: tuple[Callable[..., None], ...] = (status, sql, tail, export)
