"""`clawstream topics`, `db`, `model` and `config`: the topics, the tables, a model's folder and the settings."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from rich.console import Console

from clawstream.cli.process import AsJson, Context, broker, database, database_address, hide_torch
from clawstream.config import EngineSettings, Settings
from clawstream.errors import ConfigError, OperatorError, PartUnavailable

T = TypeVar("T")

topics = typer.Typer(
    name="topics", help="The topics as topics/*.yaml says; nothing else creates them.", no_args_is_help=True
)
db = typer.Typer(name="db", help="The database's tables.", no_args_is_help=True)
model = typer.Typer(name="model", help="A small model to serve and to teach.", no_args_is_help=True)
Own = Literal["smollm2", "tiny"]  # the models that nobody has to have
_OWN: tuple[Own, ...] = ("smollm2", "tiny")
# Settings under [training] that say when a step is taken, or that go with no step on a correction alone.
_STEPS = frozenset({"cadence", "batch_samples", "max_wait_s", "method", "recipe", "teacher", "hint_choice"})


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


def which_model(asked: str | None, engine: EngineSettings) -> Path | Own:
    """Return the folder to serve, or which of our own models: SmolLM2, where neither --model nor the settings name one.

    Raises ConfigError where the engines are somebody else's and it is not said what they serve.
    """
    if asked is not None:
        return next((own for own in _OWN if own == asked), Path(asked))
    if engine.model_path is not None:
        return engine.model_path
    if engine.urls:
        raise ConfigError(
            f"engine.urls names {', '.join(engine.urls)}, and engine.model_path is not set. Nothing was started. Name "
            "the folder of the model that is served there; or take engine.urls out, and an engine of our own is started"
        )
    return "smollm2"


def our_own(name: Own, settings: Settings, console: Console, *, is_asked: bool) -> tuple[Path, Settings]:
    """Return the folder of one of our own models, fetched if need be, and the settings that suit it."""
    hide_torch()
    from clawstream.inference.model_folder import base_in
    from clawstream.local.packaged_model import SMOLLM2, packaged_model
    from clawstream.simulation.policy.recipe import base_policy

    if not is_asked:
        what = f"serving {SMOLLM2.title}; [bold]--model tiny[/] serves the demo's tiny policy"
        console.print(f"no model is set (engine.model_path or --model): {what}", soft_wrap=True)
    try:
        folder = base_policy(settings.cache_dir) if name == "tiny" else packaged_model(settings.cache_dir, SMOLLM2)
    except PartUnavailable as error:
        if name == "tiny":
            raise
        raise PartUnavailable(
            f"{error}. Or serve another model: --model FOLDER, one that you have; --model tiny, the demo's policy, "
            "which comes with clawstream"
        ) from error
    fingerprint = base_in(folder, settings.cache_dir).model_sha256
    assert fingerprint is not None, f"{folder} is whole, so it has weights"
    return folder, suited(settings, name, fingerprint)


def suited(settings: Settings, name: Own, fingerprint: str) -> Settings:
    """Return the settings with what suits one of our own models, wherever none is set, and an id of the policy's own.

    The id has the model's fingerprint. It keeps what is said to this model out of the training of the one that is
    served next from the same data folder.
    """
    from clawstream.local.packaged_model import SMOLLM2
    from clawstream.simulation.policy.recipe import LEARNING_RATE

    suits: Mapping[str, Mapping[str, object]] = SMOLLM2.suits
    if name == "tiny":  # which was built without thinking
        suits = {"policy": {"enable_thinking": False}, "training": {"learning_rate": LEARNING_RATE}}
    chosen = {section: dict(values) for section, values in suits.items()}
    chosen.setdefault("policy", {})["id"] = f"{name}-{fingerprint[:8]}"
    if name == "smollm2" and settings.judge.url is None and not settings.training.model_fields_set & _STEPS:
        chosen["training"]["cadence"] = "correction"  # one person's words would wait an hour for a batch
    return settings.where_unset(chosen)


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
