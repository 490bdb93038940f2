"""Processes of tests that are forks of one that has imported what takes each of them seconds of CPU.

A worker has one of these, whichever test asks first. All forks have one seed of hashes: whether two processes have a
set in one order is told by others alone.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from clawstream.local.servers.server_process import die_with_parent

_IMPORTED = ("clawstream.training.megatron.model", "clawstream.local.engine.server", "tests.parts.training.victim")


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


def _serve(arguments: Sequence[str], log: Path) -> None:
    from clawstream.local.engine.__main__ import main

    die_with_parent()
    words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(words, stream)
    os.close(words)
    sys.argv = ["clawstream.local.engine", *arguments]
    sys.exit(main())
