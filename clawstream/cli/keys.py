"""`clawstream keys`: who may ask the gateway. A key is shown once; the file keeps its hash."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from clawstream import layout
from clawstream.cli.process import AsJson, Context

keys = typer.Typer(
    name="keys", help="The keys by which clients ask the gateway, each with a name.", no_args_is_help=True
)
_YES = Annotated[bool, typer.Option("--yes", help="Don't ask on a terminal.")]


@keys.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose key it is; it stands in the audit trail.")],
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    yes: _YES = False,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once; a running gateway knows it within 2 s.

    From the first key on, requests without a key are refused.
    """
    from clawstream.gateway.access.key_file import add_key, read_keys
    from clawstream.gateway.access.keys import Allowance

    path = _file(context)
    if not read_keys(path).in_force and not _has_default(context):
        _say_before(
            "this is the first key: from now on a request without a key gets a 401, on this machine too (the way back: "
            "clawstream keys revoke, then clawstream keys open)",
            yes=yes,
        )
    allowance = Allowance(max_concurrent=max_concurrent, requests_per_minute=requests_per_minute)
    shown = add_key(path, name, allowance)
    typer.echo(json.dumps({"name": name, "key": shown}) if as_json else shown)
    Console(stderr=True).print(
        f"the key of {name} is kept nowhere else: copy it now ({path} has its hash)", soft_wrap=True
    )


@keys.command("list")
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """Show all keys, the revoked ones included."""
    from clawstream.gateway.access.key_file import read_keys

    rows = [
        {
            "name": key.name,
            "created_at": key.created_at,
            "revoked_at": key.revoked_at,
            "max_concurrent": key.allowance.max_concurrent,
            "requests_per_minute": key.allowance.requests_per_minute,
        }
        for key in read_keys(_file(context)).keys
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("name", "created", "revoked", "at once", "a minute")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    layout.show(Console(), table)


@keys.command()
def revoke(
    context: typer.Context, name: Annotated[str, typer.Argument()], yes: _YES = False, as_json: AsJson = False
) -> None:
    """Refuse a key from now on; a running gateway knows it within 2 s."""
    from clawstream.gateway.access.key_file import read_keys, revoke_key

    path = _file(context)
    if [key.name for key in read_keys(path).in_force] == [name] and not _has_default(context):
        _say_before(
            "this is the last key: from now on everybody gets a 401, with a key or without (clawstream keys add NAME "
            "lets somebody in, clawstream keys open all programs of this machine)",
            yes=yes,
        )
    revoke_key(path, name)
    if as_json:
        typer.echo(json.dumps({"name": name, "revoked": True}))
    Console(stderr=True).print(f"the key of {name} is revoked")


@keys.command("open")
def open_to_this_machine(context: typer.Context) -> None:
    """Let programs of this machine in without a key again, once all keys are revoked; a running gateway knows in 2 s.

    The next key that is added ends this. A gateway that listens to the network asks for keys all the same.
    """
    from clawstream.gateway.access.key_file import open_door

    open_door(_file(context))
    shut = " (but not while gateway.api_key is set)" if _has_default(context) else ""
    Console(stderr=True).print(f"programs of this machine need no key any more{shut}", soft_wrap=True)


def _say_before(words: str, *, yes: bool) -> None:
    """Say what will follow; on a terminal, go on only with a yes."""
    Console(stderr=True).print(words, soft_wrap=True)
    if not yes and sys.stdin.isatty():
        typer.confirm("go on?", abort=True, err=True)


def _has_default(context: typer.Context) -> bool:
    return Context.of(context).settings().gateway.api_key is not None


def _file(context: typer.Context) -> Path:
    return Context.of(context).settings().keys_file
