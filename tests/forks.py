"""Processes of tests that are forks of one that has imported what takes each of them seconds of CPU.

A worker has one of these, whichever test asks first. All forks have one seed of hashes: whether two processes have a
set in one order is told by others alone.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from clawstream.local.servers.server_process import die_with_parent

_IMPORTED = (
    "clawstream.training.megatron.model",
    "clawstream.local.engine.server",
    "clawstream.projections.rebuild.rebuilding",
    "tests.parts.training.victim",
)


def forking() -> ForkServerContext:
    """Return the context whose processes are such forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return context


def forked_engine(arguments: Sequence[str], log: Path) -> ForkServerProcess:
    """Return a CPU engine that has just begun, given the arguments of `python -m clawstream.local.engine`."""
    process = forking().Process(target=_serve, args=(arguments, log), daemon=True)
    process.start()
    return process


def forked_command(folder: Path, *arguments: str, within_s: float = 90.0) -> "subprocess.CompletedProcess[str]":
    """Return how a command of clawstream ended, and what it said; `folder` keeps that."""
    said = [folder / f"{stream}.said" for stream in ("stdout", "stderr")]
    process = forking().Process(target=_command, args=(arguments, said), daemon=True)
    process.start()
    process.join(within_s)
    assert process.exitcode is not None, f"{arguments} has not ended after {within_s} s: {said[1].read_text()}"
    stdout, stderr = (path.read_text() for path in said)
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


def _serve(arguments: Sequence[str], log: Path) -> None:
    from clawstream.local.engine.__main__ import main

    _begin(["clawstream.local.engine", *arguments], [log, log])
    sys.exit(main())


def _command(arguments: Sequence[str], said: Sequence[Path]) -> None:
    from clawstream.cli import main

    for path in said:
        path.write_bytes(b"")
    for name in [name for name in os.environ if name.startswith("CLAWSTREAM_")]:
        del os.environ[name]
    _begin(["clawstream", *arguments], said)
    main()


def _begin(argv: Sequence[str], said: Sequence[Path]) -> None:
    die_with_parent()
    sys.argv = [*argv]
    for stream, path in enumerate(said, 1):
        words = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(words, stream)
        os.close(words)
