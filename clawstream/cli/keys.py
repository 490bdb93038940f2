"""`clawstream keys`: who may ask the gateway. A key is shown once; the file keeps its hash."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from clawstream.cli.process import Context

keys = typer.Typer(help="The keys by which clients ask the gateway, each with a name.", no_args_is_help=True)
_JSON = Annotated[bool, typer.Option("--json", help="For programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(keys, name="keys", rich_help_panel="Prepare")


@keys.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose key it is; it stands in the audit trail.")],
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    as_json: _JSON = False,
) -> None:
    """Make a key and print it, this once; a running gateway knows it within 2 s."""
    from clawstream.gateway.key_file import add_key
    from clawstream.gateway.keys import Allowance

    path = _file(context)
    allowance = Allowance(max_concurrent=max_concurrent, requests_per_minute=requests_per_minute)
    shown = add_key(path, name, allowance)
    typer.echo(json.dumps({"name": name, "key": shown}) if as_json else shown)
    Console(stderr=True).print(
        f"the key of {name} is kept nowhere else: copy it now ({path} has its hash)", soft_wrap=True
    )


@keys.command("list")
def list_keys(context: typer.Context, as_json: _JSON = False) -> None:
    """Show the keys there are and were."""
    from clawstream.gateway.key_file import read_keys
    from clawstream.gateway.keys import Key

    found = read_keys(_file(context)).keys

    def plain(key: Key) -> dict[str, Any]:
        return {
            "name": key.name,
            "created_at": key.created_at,
            "revoked_at": key.revoked_at,
            "max_concurrent": key.allowance.max_concurrent,
            "requests_per_minute": key.allowance.requests_per_minute,
        }

    rows = [plain(key) for key in found]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("name", "created", "revoked", "at once", "a minute")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(table)


@keys.command()
def revoke(context: typer.Context, name: Annotated[str, typer.Argument()], as_json: _JSON = False) -> None:
    """Let a key open nothing any more; a running gateway knows it within 2 s."""
    from clawstream.gateway.key_file import revoke_key

    revoke_key(_file(context), name)
    if as_json:
        typer.echo(json.dumps({"name": name, "revoked": True}))
    Console(stderr=True).print(f"the key of {name} is revoked")


def _file(context: typer.Context) -> Path:
    assert isinstance(context.obj, Context)
    return context.obj.settings().keys_file
