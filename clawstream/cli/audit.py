"""`clawstream audit` and `clawstream projection`: compare the database with the log, and rebuild it."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from clawstream.cli.process import AsJson, Context, broker, database, leave_what_is_loaded, log_to_stderr
from clawstream.errors import OperatorError
from clawstream.layout import show

if TYPE_CHECKING:
    from clawstream.projections.rebuild.rebuilding import Tell
    from clawstream.projections.rebuild.verifying import Audit
    from clawstream.stream.kafka.kafka_log import KafkaLog

T = TypeVar("T")

audit = typer.Typer(name="audit", help="Whether the database says what the log says.", no_args_is_help=True)
projection = typer.Typer(name="projection", help="The database's tables as a whole.", no_args_is_help=True)
_STAGES = ("turns", "judging", "heuristics", "samples", "refresh", "groups")  # whose offsets the broker keeps


@audit.command()
def verify(
    context: typer.Context,
    sample: Annotated[int | None, typer.Option(min=1, help="Compare the rows of so many sessions only.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the sample; by default a random one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read the log again as far as the database has; compare the hash chain, and every row both ways.

    Exits with 2 where they differ. The projector goes on meanwhile.
    """
    from clawstream.projections.rebuild.verifying import Sample
    from clawstream.projections.rebuild.verifying import verify as check

    if seed is not None and sample is None:
        raise OperatorError("--seed chooses a sample: name its size with --sample")
    chosen = None if sample is None else Sample(keys=sample, seed=secrets.randbelow(2**32) if seed is None else seed)
    if chosen is not None:
        Console(stderr=True).print(f"a sample of {chosen.keys} sessions and policies, --seed {chosen.seed}")
    found = _with_both(context, "audit", lambda url, log, tell: check(url, log, sample=chosen, tell=tell))
    if as_json:
        typer.echo(json.dumps(found.as_dict() | {"seed": None if chosen is None else chosen.seed}))
    else:
        _show(found)
    if not found.ok:
        raise OperatorError(found.verdict)


@projection.command()
def rebuild(
    context: typer.Context,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the old tables in a schema of their own.")] = False,
    forget_expired: Annotated[
        bool,
        typer.Option("--forget-expired", help="Go on where the log has lost its beginning; that part's rows are lost."),
    ] = False,
    trust_log: Annotated[
        bool,
        typer.Option(
            "--trust-log", help="Go on where the log contradicts recorded offsets or hashes; keep the old tables."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make every table again from the log, beside the tables that people read, and then swap them.

    Readers and the projector go on meanwhile; the projector goes on with the new tables.
    With --trust-log, stages and trainers that have read beyond the log's end are put back too: stop them first. From
    then on `audit verify` says of which partitions offset and hash chain were overruled, and when.
    """
    from clawstream.projections.rebuild.rebuilding import Rebuilt
    from clawstream.projections.rebuild.rebuilding import rebuild as make
    from clawstream.stream.runner.offset_reset import put_back
    from clawstream.training.batches.bookmark import put_trainers_back

    async def work(url: str, log: "KafkaLog", tell: "Tell") -> tuple[Rebuilt, dict[str, list[str]]]:
        rebuilt = await make(url, log, keep=keep, forget_expired=forget_expired, trust_log=trust_log, tell=tell)
        back = {stage: await put_back(log, stage) for stage in _STAGES} if trust_log else {}
        back |= await put_trainers_back(log) if trust_log else {}
        return rebuilt, {stage: [str(one) for one in wrong] for stage, wrong in back.items() if wrong}

    made, back = _with_both(context, "rebuild", work)
    if as_json:
        typer.echo(json.dumps(asdict(made) | {"put_back": back}))
    console = Console(stderr=True)
    for stage, wrong in back.items():
        console.print(f"{stage} goes on from where the log was cut: {'; '.join(wrong)}", highlight=False)
    console.print(f"the tables are made of {made.records:,} records of the log")
    if made.records_set_aside:
        console.print(
            f"{made.records_set_aside:,} of them are set aside and have no row; `clawstream dlq list` names them"
        )
    if made.records_unread:
        console.print(f"{made.records_unread:,} of them can't be read and have no row")
    if made.overruled:
        console.print(
            f"offset and hash chain of {', '.join(made.overruled)} were overruled; the table `overruled` has both"
        )
    if made.fenced:
        console.print(
            f"{len(made.fenced)} partitions have another chain now. A projector that runs says `state=lost` at their "
            "next record, and goes on from the new tables; it need not be started again"
        )
    if made.kept_schema is not None:
        console.print(f"the old tables are in the schema {made.kept_schema}: {made.kept_because}", highlight=False)


def _with_both(context: typer.Context, client_id: str, work: "Callable[[str, KafkaLog, Tell], Awaitable[T]]") -> T:
    """Do `work` on the database and the log, its progress on stderr."""
    settings = Context.of(context).settings()
    log_to_stderr(client_id, level=30)
    from clawstream.stream.kafka.connect import connected

    with database(settings) as url, broker(settings) as found, _progress() as tell:

        async def main() -> T:
            await leave_what_is_loaded(url)
            async with connected(found.kafka, client_id=client_id) as log:
                return await work(url, log, tell)

        return asyncio.run(main())


@contextmanager
def _progress() -> "Iterator[Tell]":
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("connecting", total=None)
        yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)


def _show(found: "Audit") -> None:
    console = Console()
    facts = Table.grid(padding=(0, 2))
    facts.add_row("records read", f"{found.records:,}")
    facts.add_row("compared with the chain", f"{found.records_chained:,}")
    facts.add_row("hash chain", _chain(found))
    if found.records_set_aside:
        facts.add_row("set aside", f"{found.records_set_aside:,}")
    if found.records_unread:
        facts.add_row("others that can't be read", f"{found.records_unread:,}")
    if found.keys is not None:
        facts.add_row("sessions and policies in the sample", f"{found.keys:,}")
    facts.add_row("rows compared", f"{found.rows:,}")
    facts.add_row(
        "rows that differ", f"{found.rows_differ:,}" if not found.rows_differ else f"[red]{found.rows_differ:,}[/]"
    )
    if found.answers_without_outcome:
        facts.add_row(
            "answers without an outcome",
            f"{found.answers_without_outcome:,}: their session has a later answer, or a day has passed, and no turn or "
            f"orphan says what became of them. For example {', '.join(found.without_outcome[:3])}",
        )
    for overruled in found.overruled:
        facts.add_row(
            f"{overruled.place.topic} partition {overruled.place.partition}",
            f"offset and hash chain overruled on {overruled.at:%Y-%m-%d %H:%M:%S}; the tables of before: "
            f"{overruled.kept_schema}",
        )
    for place, offset in found.expired.items():
        facts.add_row(
            f"{place.topic} partition {place.partition}", f"the log begins at {offset}; not checked before it"
        )
    console.print(facts)
    if found.breaks:
        table = Table("topic", "partition", "offset", "what", title="Breaks of the hash chain", title_justify="left")
        for one in found.breaks:
            last = "" if one.end_offset <= one.first_offset + 1 else f" to {one.end_offset - 1}"
            table.add_row(one.place.topic, str(one.place.partition), f"{one.first_offset}{last}", one.what)
        show(console, table)
    if found.differences:
        names = ("table", "key", "what", "column", "by the log", "in the database")
        table = Table(
            *names, title=f"Rows that differ, {len(found.differences)} of {found.rows_differ}", title_justify="left"
        )
        for row in found.differences:
            values = (row.table, row.key, row.what, row.column, row.expected, row.found)
            table.add_row(*(Text(_cell(value, row.column)) for value in values))
        show(console, table)


def _chain(found: "Audit") -> str:
    if found.breaks:
        return f"[red]{len(found.breaks)} breaks[/]"
    if found.unchained:
        return f"[red]none in {len(found.unchained)} partitions[/]"
    return "holds" if found.chain_ok else "no record could be compared"


def _cell(value: str | None, column: str | None) -> str:
    return ("NULL" if column else "") if value is None else value
