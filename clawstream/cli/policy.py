"""`clawstream policy`: the versions of a policy, what one is made of, and back to an earlier one."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clawstream.cli.process import Context, log_to_stderr
from clawstream.cli.servers import broker
from clawstream.config import KafkaSettings, Settings
from clawstream.errors import OperatorError

if TYPE_CHECKING:
    from clawstream.events import Event
    from clawstream.monitoring.versions import Version
    from clawstream.stream.kafka import KafkaLog

policy = typer.Typer(help="The versions of the policy, and back to an earlier one.", no_args_is_help=True)
_JSON = Annotated[bool, typer.Option("--json", help="For programs.")]
_VERSION = Annotated[int, typer.Argument(min=0, help="Its number; 0 is the base.")]
POLICY_TOPIC = "clawstream.policy.v1"
CONTROL_TOPIC = "clawstream.control.v1"
MANIFEST = "manifest.json"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(policy, name="policy", rich_help_panel="Look")


@policy.command("list")
def list_versions(context: typer.Context, as_json: _JSON = False) -> None:
    """Show every version: what became of it and why, what it was trained on, and when."""
    rows = [row(one) for one in _versions(_settings(context)).values()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("version", "from", "standing", "samples", "mean reward", "when", "why")
    for one in rows:
        at = None if one["at_ms"] is None else datetime.fromtimestamp(one["at_ms"] / 1000).astimezone()
        when = "-" if at is None else at.isoformat(" ", timespec="seconds")
        names = ("version", "parent_version", "standing", "num_samples", "mean_reward")
        table.add_row(*(_shown(one[name]) for name in names), when, escape(one["why"] or ""))
    Console(width=None if Console().is_terminal else 200).print(table)


@policy.command()
def show(context: typer.Context, version: _VERSION, as_json: _JSON = False) -> None:
    """Show one version: the figures of its step, the samples of its plan, and the versions that it was made of."""
    from clawstream.monitoring.versions import ancestors

    known = _versions(_settings(context))
    one = _known(known, version)
    step = {} if one.step is None else asdict(one.step)
    told = row(one) | {
        "path": None if one.published is None else one.published.path,
        "engines": one.engines,
        "made_of": list(ancestors(known, version)),
        "step": {name: value for name, value in step.items() if name not in ("policy_id", "policy_version")} or None,
        "sample_ids": [] if one.plan is None else list(one.plan.sample_ids),
    }
    if as_json:
        typer.echo(json.dumps(told))
        return
    table = Table(show_header=False)
    for name, value in (told | (told["step"] or {})).items():
        if name not in ("step", "sample_ids"):
            table.add_row(name, _shown(value))
    table.add_row("sample_ids", "\n".join(told["sample_ids"]) or "-")
    Console(width=None if Console().is_terminal else 200).print(table)


@policy.command()
def rollback(context: typer.Context, version: _VERSION, as_json: _JSON = False) -> None:
    """Have engines serve an earlier version's weights again, and training go on from them.

    The trainer does it, as soon as its step is done, or when it is started: its next version has those weights, with
    their optimizer, under a number of its own. Nothing is stopped, and nothing that was said is taken back.
    """
    from clawstream.events import RollbackAsked
    from clawstream.monitoring.versions import newest, versions

    settings = _settings(context)

    async def main(kafka: KafkaSettings) -> RollbackAsked:
        from clawstream.stream.connect import connected

        async with connected(kafka, client_id="policy") as log:
            known = versions(await _read(log, POLICY_TOPIC), settings.policy.id)
            _refuse_gone(_known(known, version), is_here=settings.weights.url is None)
            if version == newest(known):
                raise OperatorError(f"version {version} is the newest: there is nothing to go back from")
            asked = [e for e in await _read(log, CONTROL_TOPIC) if isinstance(e, RollbackAsked)]
            number = max((e.number for e in asked if e.policy_id == settings.policy.id), default=0) + 1
            event = RollbackAsked(
                policy_id=settings.policy.id, number=number, to_version=version, asked_at_ms=time.time_ns() // 1_000_000
            )
            await log.append([event])
            return event

    with broker(settings) as kafka:
        event = asyncio.run(main(kafka))
    if as_json:
        typer.echo(json.dumps(asdict(event)))
        return
    typer.echo(
        f"rollback {event.number} is asked for: the trainer's next version has the weights of version {version}. "
        "`clawstream policy list` shows it once it is published"
    )


def row(one: "Version") -> dict[str, Any]:
    """Return a version as plain values; what is absent is null."""
    num_samples = None if one.plan is None else len(one.plan.sample_ids)
    return {
        "version": one.version,
        "parent_version": one.parent_version,
        "standing": one.standing.value,
        "why": one.why,
        "num_samples": num_samples,
        "mean_reward": None if one.step is None else one.step.mean_reward,
        "at_ms": one.at_ms,
    }


def _known(known: "dict[int, Version]", version: int) -> "Version":
    if version not in known:
        there = f"0 to {max(known)}" if known else "none"
        raise OperatorError(f"there is no version {version}: there are {there}. See `clawstream policy list`")
    return known[version]


def _refuse_gone(one: "Version", *, is_here: bool) -> None:
    """Refuse a version whose weights are nowhere; of one that lies on the trainer's machine the trainer says so."""
    if one.published is None:
        why = "" if one.why is None else f": {one.why}"
        raise OperatorError(f"version {one.version} is {one.standing.value}{why}. It has no weights to go back to")
    if not is_here:
        return
    folder = Path(one.published.path)
    if not folder.is_dir() or (one.published.manifest_sha256 is not None and not (folder / MANIFEST).exists()):
        raise OperatorError(
            f"version {one.version} was published and is not on disk any more: {folder} is gone. "
            "training.keep_checkpoints says how many are kept. Go back to a newer one, or restore it from a backup"
        )


def _versions(settings: Settings) -> "dict[int, Version]":
    from clawstream.monitoring.versions import versions

    async def main(kafka: KafkaSettings) -> "Sequence[Event]":
        from clawstream.stream.connect import connected

        async with connected(kafka, client_id="policy") as log:
            return await _read(log, POLICY_TOPIC)

    with broker(settings) as kafka:
        return versions(asyncio.run(main(kafka)), settings.policy.id)


async def _read(log: "KafkaLog", topic: str) -> "list[Event]":
    from clawstream.stream.stage import Record

    return [
        record.event
        async for records in log.follow([topic], "earliest", until_end=True)
        for record in records
        if isinstance(record, Record)
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else escape(str(value))


def _settings(context: typer.Context) -> Settings:
    assert isinstance(context.obj, Context)
    log_to_stderr("policy", level=40)
    return context.obj.settings_of_what_ran()
