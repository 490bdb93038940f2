"""`clawstream hints`: what the policy was taught and holds on to, and what it is to let go of."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from clawstream import layout
from clawstream.cli.process import AsJson, Context, Key, ask_log, harmless, log_to_stderr
from clawstream.config import Settings
from clawstream.errors import OperatorError
from clawstream.stream.stage import now_ms

if TYPE_CHECKING:
    from clawstream.events import PolicyEvent
    from clawstream.stream.kafka.kafka_log import KafkaLog
    from clawstream.training.batches.memory import HeldHint, HintMemory

hints = typer.Typer(name="hints", help="What the policy was taught and holds on to.", no_args_is_help=True)
ID_CHARACTERS = 8  # of an id in the table: enough to name one of a few hundred hints


@hints.command("list")
def list_hints(context: typer.Context, key: Key = None, as_json: AsJson = False) -> None:
    """Show every hint that is rehearsed: whose words, since when, and how far the policy is from following it."""
    found = ask_log(settings := _settings(context, key), "hints", lambda log: _held(settings, log))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found]))
        return
    table = Table("id", "hint", "by", "key", "since", "prompts", "nats a token from it")
    for one in found:
        since = datetime.fromtimestamp(one.held_since_ms / 1000).astimezone().isoformat(" ", timespec="seconds")
        table.add_row(
            one.hint_id[:ID_CHARACTERS], harmless(one.hint), "a person" if one.hint_by_person else "a judge",
            harmless(one.key_name or "-"), since, str(one.num_prompts),
            "-" if one.open_nats is None else f"{one.open_nats:.3f}",
        )  # fmt: skip
    layout.show(Console(), table)


@hints.command()
def retire(
    context: typer.Context,
    hint_id: Annotated[str, typer.Argument(help="Its id, or the beginning of it.")],
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse a hint no more, until somebody says it again. What was learned from it is not unlearned."""
    settings = _settings(context, key)

    async def main(log: "KafkaLog") -> "HeldHint":
        from clawstream.events import HintRetired, Retired

        found = [one for one in await _held(settings, log) if one.hint_id.startswith(hint_id)]
        if len(found) != 1 or not hint_id:
            raise OperatorError(
                f"{len(found)} held hints have an id that begins with {hint_id!r}, and one is expected. Nothing was "
                "retired. See `clawstream hints list`"
            )
        event = HintRetired(
            policy_id=settings.policy.id, hint_id=found[0].hint_id, reason=Retired.ASKED, retired_at_ms=now_ms()
        )
        await log.append([event])
        return found[0]

    one = ask_log(settings, "hints", main)
    typer.echo(json.dumps(asdict(one)) if as_json else f"retired: {harmless(one.hint)}")


async def _held(settings: Settings, log: "KafkaLog") -> "tuple[HeldHint, ...]":
    from clawstream.stream import topics
    from clawstream.stream.log import policy_events

    policy_id = settings.policy.id
    said = await policy_events(log, topics.MEMORY, policy_id)
    return memory_of(policy_id, said, await policy_events(log, topics.POLICY, policy_id)).held


def memory_of(policy_id: str, said: "Iterable[PolicyEvent]", taken: "Iterable[PolicyEvent]") -> "HintMemory":
    """Return what a policy holds on to, by the events of the memory topic and of the policy topic."""
    from clawstream.events import HintHeld, HintRetired, StepTaken
    from clawstream.training.batches.memory import HintMemory

    memory = HintMemory()
    for event in said:
        if event.policy_id == policy_id and isinstance(event, HintHeld | HintRetired):
            memory.learn(event)
    for event in taken:
        if event.policy_id == policy_id and isinstance(event, StepTaken):
            memory.note(event)
    return memory


def _settings(context: typer.Context, key: str | None) -> Settings:
    log_to_stderr("hints", level=40)
    return Context.of(context).settings_of_key(key)
