"""`clawstream policy`: lists and shows a policy's versions, keeps some, and goes back to an earlier one."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from clawstream import layout
from clawstream.cli.process import AsJson, Context, Key, ask_log, harmless, log_to_stderr
from clawstream.config import Settings
from clawstream.errors import ConfigError, OperatorError
from clawstream.stream.stage import now_ms

if TYPE_CHECKING:
    from clawstream.events import HintHeld, PolicyEvent, RollbackAsked, VersionPinned
    from clawstream.monitoring.policy import VersionFacts
    from clawstream.stream.kafka.kafka_log import KafkaLog

Asked = TypeVar("Asked", "RollbackAsked", "VersionPinned")
policy = typer.Typer(
    name="policy", help="The versions of the policy, and back to an earlier one.", no_args_is_help=True
)
_VERSION = Annotated[int, typer.Argument(min=0, help="Its number; 0 is the base.")]
MANIFEST = "manifest.json"


@policy.command("list")
def list_versions(context: typer.Context, key: Key = None, as_json: AsJson = False) -> None:
    """Show every version: what became of it and why, what it was trained on, and when."""
    settings = _settings(context, key)
    known, kept = _versions_and_pins(settings)
    reached = None if settings.weights.url is not None else _reached(known)
    rows = [
        row(one) | {"reached": None if reached is None else one.version in reached, "pinned": one.version in kept}
        for one in known.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("version", "from", "standing", "samples", "mean reward", "when", "why")
    for one in rows:
        at = None if one["at_ms"] is None else datetime.fromtimestamp(one["at_ms"] / 1000).astimezone()
        when = "-" if at is None else at.isoformat(" ", timespec="seconds")
        names = ("version", "parent_version", "standing", "num_samples", "mean_reward")
        table.add_row(*(_shown(one[name]) for name in names), when, harmless(one["why"] or ""))
    layout.show(Console(), table)
    typer.echo(_reach(settings, reached, kept))


@policy.command("keys")
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """Show each adapter but the shared one: whose it is, how far it came, and what it was trained on.

    It is of an API key, of an agent that requests' metadata names, or of KEY+AGENT (policy.adapters).
    """
    from clawstream.events import key_of_policy
    from clawstream.monitoring.policy import newest, versions
    from clawstream.stream import topics
    from clawstream.stream.log import policy_events

    settings = _settings(context, None)
    told = ask_log(settings, "policy", lambda log: policy_events(log, topics.POLICY, settings.policy.id, by_key=True))
    rows = []
    for policy_id in sorted({event.policy_id for event in told} - {settings.policy.id}):
        known = versions(told, policy_id)
        steps = [one.step for one in known.values() if one.step is not None]
        serving = [number for number, one in known.items() if one.engines]
        rows.append({
            "key": key_of_policy(policy_id), "began_with": min(known), "newest": newest(known),
            "served": max(serving, default=None), "updates": len(steps), "samples": sum(s.num_samples for s in steps),
            "mean_reward": steps[-1].mean_reward if steps else None,
        })  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("whose", "began with", "newest version", "served", "updates", "samples", "mean reward")
    for row_of_key in rows:
        table.add_row(*map(_shown, row_of_key.values()))
    layout.show(Console(), table)


@policy.command()
def merge(
    context: typer.Context,
    at_least: Annotated[
        int | None, typer.Option(min=2, help="In so many of the other adapters; by default in more than half.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Have the policy that all share learn what most other adapters were taught: the hints that they hold alike.

    The trainer has that policy answer the hints' prompts, and takes steps on the answers, each past the gate, until it
    follows them. New adapters begin with it; those that are there stay as they are.
    """
    settings = _settings(context, None)
    if not (settings.training.rehearsed_share or settings.training.corrects):
        raise ConfigError(
            f"training.method = {settings.training.method!r}, rehearsal_share = {settings.training.rehearsed_share:g}: "
            "hints are not held, so none can be merged. Nothing was merged"
        )

    async def main(log: "KafkaLog") -> "tuple[int, list[list[HintHeld]]]":
        from clawstream.cli.hints import memory_of
        from clawstream.events import key_of_policy
        from clawstream.monitoring.policy import newest, versions
        from clawstream.stream import topics
        from clawstream.stream.log import policy_events
        from clawstream.training.batches.memory import common, merged_into

        own = settings.policy.id
        said = await policy_events(log, topics.MEMORY, own, by_key=True)
        taken = await policy_events(log, topics.POLICY, own, by_key=True)
        keys = sorted({event.policy_id for event in taken if key_of_policy(event.policy_id) is not None})
        if not keys:
            raise OperatorError(
                f"no key has an adapter (policy.adapters is {settings.policy.adapters!r}). Nothing was merged. With "
                "policy.adapters = 'by_key' or 'metadata.NAME' each gets one with its first step"
            )
        least = at_least or max(2, len(keys) // 2 + 1)
        found = common([memory_of(key, said, taken) for key in keys], own, at_least=least)
        at_ms, version = now_ms(), newest(versions(taken, own)) or 0
        held = [[merged_into(one, version, at_ms) for one in prompts] for prompts in found]
        if not held:
            raise OperatorError(
                f"no hint is held in {least} of {len(keys)} adapters. Nothing was merged. See `clawstream policy "
                "keys`, and `clawstream hints list --key NAME`; --at-least takes fewer"
            )
        await log.append([one for prompts in held for one in prompts])
        return len(keys), held

    num_keys, merged = ask_log(settings, "policy", main)
    if as_json:
        typer.echo(json.dumps([{"hint_id": one[0].hint_id, "hint": one[0].hint} for one in merged]))
        return
    for prompts in merged:
        typer.echo(f"merged: {harmless(prompts[0].hint)}")
    told = "`clawstream hints list` shows how far the shared policy is from following them"
    typer.echo(f"of {num_keys} adapters. {told}")


@policy.command()
def show(context: typer.Context, version: _VERSION, key: Key = None, as_json: AsJson = False) -> None:
    """Show one version: the figures of its step, the samples of its plan, and the versions that it was made of."""
    from clawstream.monitoring.policy import ancestors

    known, _ = _versions_and_pins(_settings(context, key))
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
    layout.show(Console(), table)


@policy.command()
def rollback(context: typer.Context, version: _VERSION, key: Key = None, as_json: AsJson = False) -> None:
    """Have engines serve an earlier version's weights again, and training go on from them.

    The trainer does it once its present step is done, or when it is started: its next version has the earlier weights
    and optimizer state, under a number of its own. Nothing is stopped, and nothing is removed from the log.
    """
    from clawstream.events import RollbackAsked
    from clawstream.monitoring.policy import newest

    settings = _settings(context, key)

    def asking(known: "dict[int, VersionFacts]", asked: "Sequence[PolicyEvent]") -> RollbackAsked:
        _refuse_gone(settings, known, version)
        if version == newest(known):
            raise OperatorError(f"version {version} is the newest: there is nothing to go back from")
        number = _next_number(event for event in asked if isinstance(event, RollbackAsked))
        return RollbackAsked(policy_id=settings.policy.id, number=number, to_version=version, asked_at_ms=now_ms())

    event = _ask(settings, asking)
    if as_json:
        typer.echo(json.dumps(asdict(event)))
        return
    typer.echo(
        f"rollback {event.number} is asked for: the trainer's next version has the weights of version {version}. "
        "`clawstream policy list` shows it once it is published"
    )


@policy.command()
def pin(context: typer.Context, version: _VERSION, key: Key = None, as_json: AsJson = False) -> None:
    """Keep a version's weights for a rollback, however many come after it."""
    _pin(context, version, key, as_json=as_json, pinned=True)
    if not as_json:
        typer.echo(f"version {version} is kept until `clawstream policy unpin {version}`; a rollback reaches it")


@policy.command()
def unpin(context: typer.Context, version: _VERSION, key: Key = None, as_json: AsJson = False) -> None:
    """Let a version's weights be deleted once newer versions take its place."""
    _pin(context, version, key, as_json=as_json, pinned=False)
    if not as_json:
        typer.echo(f"version {version} is kept no longer than others: while it is one of the newest")


def _pin(context: typer.Context, version: int, key: str | None, *, as_json: bool, pinned: bool) -> None:
    from clawstream.events import VersionPinned

    settings = _settings(context, key)

    def asking(known: "dict[int, VersionFacts]", asked: "Sequence[PolicyEvent]") -> VersionPinned:
        if pinned:
            _refuse_gone(settings, known, version)
        _known(known, version)
        number = _next_number(event for event in asked if isinstance(event, VersionPinned))
        return VersionPinned(
            policy_id=settings.policy.id, number=number, policy_version=version, pinned=pinned, asked_at_ms=now_ms()
        )

    event = _ask(settings, asking)
    if as_json:
        typer.echo(json.dumps(asdict(event)))


def row(one: "VersionFacts") -> dict[str, Any]:
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


def _known(known: "dict[int, VersionFacts]", version: int) -> "VersionFacts":
    if version not in known:
        there = f"0 to {max(known)}" if known else "none"
        raise OperatorError(f"there is no version {version}: there are {there}. See `clawstream policy list`")
    return known[version]


def _refuse_gone(settings: Settings, known: "dict[int, VersionFacts]", version: int) -> None:
    """Refuse a version whose weights are gone; where the trainer is on another machine, only the trainer can tell."""
    one = _known(known, version)
    if one.published is None:
        why = "" if one.why is None else f": {one.why}"
        raise OperatorError(f"version {one.version} is {one.standing.value}{why}. It has no weights to go back to")
    if settings.weights.url is None and not _is_there(one):
        there = ", ".join(map(str, _reached(known))) or "none"
        raise OperatorError(
            f"version {one.version} was published and is not on disk any more: {one.published.path} is gone. A "
            f"rollback reaches the newest {settings.training.keep_checkpoints} versions (training.keep_checkpoints), "
            "the base and those that were pinned in time (`clawstream policy pin VERSION`), which are: "
            f"{there}. Go back to one of these, or restore it from a backup"
        )


def _is_there(one: "VersionFacts") -> bool:
    if one.published is None:
        return False
    folder = Path(one.published.path)
    return folder.is_dir() and (one.published.manifest_sha256 is None or (folder / MANIFEST).exists())


def _reached(known: "dict[int, VersionFacts]") -> list[int]:
    """Return the versions that can be gone back to."""
    return [number for number, one in known.items() if _is_there(one)]


def _reach(settings: Settings, reached: "Sequence[int] | None", kept: frozenset[int]) -> str:
    where = "what the trainer's machine has" if reached is None else ", ".join(map(str, reached)) or "none"
    pins = ", ".join(map(str, sorted(kept))) or "none"
    return (
        f"A rollback reaches the newest {settings.training.keep_checkpoints} versions (training.keep_checkpoints), the "
        f"base and what is pinned ({pins}): {where}. `clawstream policy pin VERSION` keeps one."
    )


def _versions_and_pins(settings: Settings) -> "tuple[dict[int, VersionFacts], frozenset[int]]":
    """Return the policy's versions, and which of them are pinned."""
    from clawstream.events import VersionPinned
    from clawstream.events.control import pinned

    known, asked = ask_log(settings, "policy", lambda log: _both(settings, log))
    return known, pinned(event for event in asked if isinstance(event, VersionPinned))


def _ask(settings: Settings, asking: "Callable[[dict[int, VersionFacts], Sequence[PolicyEvent]], Asked]") -> "Asked":
    """Append the event that `asking` returns for the policy's versions and the operators' earlier orders."""

    async def main(log: "KafkaLog") -> "Asked":
        event = asking(*await _both(settings, log))
        await log.append([event])
        return event

    return ask_log(settings, "policy", main)


async def _both(settings: Settings, log: "KafkaLog") -> "tuple[dict[int, VersionFacts], list[PolicyEvent]]":
    from clawstream.monitoring.policy import versions
    from clawstream.stream import topics
    from clawstream.stream.log import policy_events

    policy_id = settings.policy.id
    told = await policy_events(log, topics.POLICY, policy_id)
    return versions(told, policy_id), await policy_events(log, topics.CONTROL, policy_id)


def _next_number(asked: "Iterable[RollbackAsked | VersionPinned]") -> int:
    return max((event.number for event in asked), default=0) + 1


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else harmless(str(value))


def _settings(context: typer.Context, key: str | None) -> Settings:
    log_to_stderr("policy", level=40)
    return Context.of(context).settings_of_key(key)
