"""clawstream's command line in a process that can be broken: `python -m tests.chaos.launch --disk FILE -- ARGUMENTS`.

A gateway's spool is on a disk that is full while FILE is there, and that keeps of a killed process what was fsynced and
no more, as a loss of power would. `--without GUARD` takes one guard out of the process (guards.py).
"""

import errno
import functools
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from clawstream.cli import main as clawstream
from clawstream.cli.process import hide_torch
from clawstream.gateway.spool import FOLDER, Fsync
from tests.chaos.guards import Guard, remove

_DURABLE = ".durable"


def launch(
    arguments: list[str],
    disk: Annotated[Path, typer.Option()],
    without: Annotated[Guard | None, typer.Option()] = None,
) -> None:
    """Run clawstream with these arguments."""
    stage = arguments[-1]
    if stage == "gateway":
        hide_torch()
        _put_on_disk(disk)
    if without is not None:
        remove(without, stage)
    sys.argv = ["clawstream", *arguments]
    clawstream()


def _put_on_disk(disk: Path) -> None:
    """Have every gateway of this process trust our disk."""
    from clawstream.gateway import app

    for kept in (disk.parent / FOLDER).glob(f"*.spool{_DURABLE}"):
        _lose_power(kept.with_suffix(""), int(kept.read_text() or 0))
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
        path.with_name(path.name + _DURABLE).write_text(str(size))

    return fsync


if __name__ == "__main__":
    typer.run(launch)
