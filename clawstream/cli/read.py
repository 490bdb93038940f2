"""`clawstream sql`, `tail` and `export`: looking at what is there, without changing it."""

import asyncio
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from clawstream.cli.process import Context, broker, database, run_until_stopped
from clawstream.config import KafkaSettings
from clawstream.errors import OperatorError


class Format(StrEnum):
    """What kind of files."""

    JSONL = "jsonl"
    PARQUET = "parquet"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (sql, tail, export):
        app.command(command.__name__, rich_help_panel="Look")(command)


def sql(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="One statement that reads.")],
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask the database: one query that reads, printed as a table."""
    assert isinstance(context.obj, Context)
    from clawstream.projections.look.sql import RowFormat, print_query

    if csv and as_json:
        raise OperatorError("--csv and --json exclude each other: name one")
    form = RowFormat.CSV if csv else RowFormat.JSON if as_json else RowFormat.TABLE
    with database(context.obj.settings()) as url:
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
    assert isinstance(context.obj, Context)
    from clawstream.projections.look.tail import tail as show
    from clawstream.projections.look.tail import wanted
    from clawstream.stream.kafka.connect import connected

    what = wanted(topic, session_id=session, since=since, until_end=until_end, now_ms=int(time.time() * 1000))

    async def main(kafka: KafkaSettings, stop: asyncio.Event) -> None:
        async with connected(kafka, client_id="tail") as log:
            showing = asyncio.create_task(show(log, what, out=sys.stdout, as_json=as_json))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait([showing, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not showing.done():
                showing.cancel()
                await asyncio.gather(showing, return_exceptions=True)
                return
            await showing

    with broker(context.obj.settings()) as kafka:
        run_until_stopped(lambda stop: main(kafka, stop))


def export(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    form: Annotated[Format, typer.Option("--format", help="What kind of files.")] = Format.JSONL,
) -> None:
    """Write conversations, judgements, feedback, samples, steps and versions to files."""
    assert isinstance(context.obj, Context)
    from clawstream.projections.look.export import FileFormat
    from clawstream.projections.look.export import export as write

    with database(context.obj.settings()) as url:
        counts = write(url, folder, form=FileFormat(form.value))
    for name, count in counts.items():
        Console(stderr=True).print(f"{count:>8} {name}")
