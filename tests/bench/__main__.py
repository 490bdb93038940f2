"""Measurements that README, docs/ and the issues quote: `python -m tests.bench NAME --json FILE`."""

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

COMMANDS = (
    "ttft",
    "gateway",
    "swap",
    "replicas",
    "rebuild",
    "replay",
    "restart",
    "trainer",
    "gate",
    "sketch",
    "everyday",
    "screen",
    "survey",
    "speed",
    "serving",
)  # each in its module


def bench() -> None:
    """Measure; figures go to stdout, and to a file as JSON."""


def app(arguments: Sequence[str]) -> typer.Typer:
    """Return the application; where the arguments name a command, with that alone: another's may import torch."""
    found = typer.Typer(no_args_is_help=True, callback=bench)
    for name in [a for a in arguments[:1] if a in COMMANDS] or COMMANDS:
        found.command(name)(getattr(import_module(f"tests.bench.{name}"), name))
    return found


if __name__ == "__main__":
    app(sys.argv[1:])()
