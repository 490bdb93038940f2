"""Processes of tests that are forks of one that has imported what takes each of them seconds of CPU.

A worker has one of these, whichever test asks first. All forks have one seed of hashes: whether two processes have a
set in one order is told by others alone.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

_IMPORTED = ("clawstream.training.megatron.model", "clawstream.local.engine.server", "tests.parts.training.victim")


def forking() -> ForkServerContext:
    """Return the context whose processes are such forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return context
