"""`clawstream dlq`: records that a stage could not use, the reason, and what is to become of them."""

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clawstream import layout
from clawstream.cli.process import AsJson, Context, ask_log, log_to_stderr

if TYPE_CHECKING:
    from clawstream.stream.kafka.kafka_log import KafkaLog
    from clawstream.stream.log import Fate

T = TypeVar("T")

dlq = typer.Typer(name="dlq", help="Records that a stage set aside, and what becomes of them.", no_args_is_help=True)
_ID = Annotated[str, typer.Argument(help="stage/topic/partition/offset, as `list` prints it.", metavar="DEAD_LETTER")]
_STAGE = Annotated[str | None, typer.Option(help="Only this stage's.")]


@dlq.command("list")
def list_dead_letters(
    context: typer.Context,
    stage: _STAGE = None,
    every: Annotated[bool, typer.Option("--all", help="Also those that wait no more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is set aside, the oldest first."""
    from clawstream.stream.quarantine import dead_letters, plain

    found = _with_log(context, dead_letters)
    wanted = [one for one in found if (every or one.waits) and stage in (None, one.id.group)]
    if as_json:
        typer.echo(json.dumps([plain(one) for one in wanted]))
        return
    table = Table("dead letter", "session", "reason", "fate")
    for row in map(plain, wanted):
        table.add_row(*(Text(_text(row[column])) for column in ("dead_letter", "key", "reason", "fate")))
    layout.show(Console(), table)


@dlq.command()
def show(context: typer.Context, dead_letter: _ID, as_json: AsJson = False) -> None:
    """Show one record: what is known of it, its headers, and its bytes as far as they can be read."""
    from clawstream.stream.quarantine import shown

    found = _with_log(context, lambda log: shown(log, dead_letter))
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, value in found.items():
        typer.echo(f"{name}: {json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else _text(value)}")


@dlq.command()
def replay(
    context: typer.Context,
    dead_letter: Annotated[str | None, typer.Argument(help="As `list` prints it; without it, all of --stage.")] = None,
    stage: _STAGE = None,
    as_json: AsJson = False,
) -> None:
    """Have the stage use the record where it stood, then what waits behind it, in order."""
    from clawstream.stream.log import Fate

    _ruled(context, dead_letter, stage, Fate.REPLAY, None, as_json)


@dlq.command()
def discard(
    context: typer.Context,
    dead_letter: _ID,
    reason: Annotated[str, typer.Option(prompt=True, help="Why it may be left out; the queue keeps it.")],
    as_json: AsJson = False,
) -> None:
    """Leave the record out for good; what waits behind it is used, in order."""
    from clawstream.stream.log import Fate

    _ruled(context, dead_letter, None, Fate.DISCARD, reason, as_json)


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _ruled(
    context: typer.Context, dead_letter: str | None, stage: str | None, fate: "Fate", because: str | None, as_json: bool
) -> None:
    from clawstream.stream.quarantine import plain, rule

    found = _with_log(context, lambda log: rule(log, fate, dead_letter=dead_letter, stage=stage, because=because))
    if as_json:
        typer.echo(json.dumps([plain(one) for one in found]))
    names = ", ".join(sorted({one.id.group for one in found}))
    Console(stderr=True).print(
        f"{len(found)} to {fate.value}: {names} does it as soon as it runs; `clawstream dlq list` shows it until then",
        soft_wrap=True,
    )


def _with_log(context: typer.Context, main: "Callable[[KafkaLog], Awaitable[T]]") -> T:
    log_to_stderr("dlq", level=30)
    return ask_log(Context.of(context).settings(), "dlq", main)
