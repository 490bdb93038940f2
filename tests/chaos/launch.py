"""clawstream's command line in a process that can be broken; what `parts.py` starts.

A gateway's spool is on a disk that is full while `disk` is there, and that keeps of a killed process what was fsynced
and no more, as a loss of power would. A guard can be taken out of the process (guards.py).

Python's imports take seconds each, and a run starts dozens of processes. So all of them are forked from one that has
imported everything and done nothing: preloading.py.
"""

import errno
import functools
import os
import sys
from pathlib import Path

from clawstream.cli import main as clawstream
from clawstream.cli.process import hide_torch
from clawstream.gateway.outbox.spool_file import FOLDER, Fsync
from clawstream.local.servers.server_process import die_with_parent
from tests.chaos.guards import Guard, remove, watch

_DURABLE = ".durable"


def launch(stage: str, *, config: Path, disk: Path, log: Path, without: Guard | None) -> None:
    """Run a stage of clawstream to its end; what it says goes to `log`."""
    die_with_parent()
    os.setsid()  # as `clawstream up` starts its parts
    words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(words, stream)
    os.close(words)
    if stage == "gateway":
        hide_torch()
        _put_on_disk(disk, disk.parent / FOLDER / f"slot-{config.stem}.spool")
    watch(stage)
    if without is not None:
        remove(without, stage)
    sys.argv = ["clawstream", "--config", str(config), stage]
    clawstream()


def _put_on_disk(disk: Path, spool: Path) -> None:
    """Have the gateway of this process trust our disk; of others' spools nothing is lost, they may be running."""
    from clawstream.gateway import app

    kept = spool.with_name(spool.name + _DURABLE)
    if kept.exists():
        _lose_power(spool, int(kept.read_text()))
    app.serve = functools.partial(app.serve, fsync=_fsync_unless(disk))


def _lose_power(path: Path, durable_bytes: int) -> None:
    if path.exists() and path.stat().st_size > durable_bytes:
        os.truncate(path, durable_bytes)


def _fsync_unless(full: Path) -> Fsync:
    def fsync(fd: int) -> None:
        if full.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = os.fstat(fd).st_size
        os.fsync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        written = path.with_name(path.name + ".writing")
        written.write_text(str(size))
        written.rename(path.with_name(path.name + _DURABLE))  # at once: a kill in between must not lose all of it

    return fsync
