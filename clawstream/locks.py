"""Lock files: the holder has sole use of what the lock stands for, until it lets go or its process ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawstream.errors import PartUnavailable

_LOOK_EVERY_S = 0.05


@contextmanager
def locked(
    path: Path, *, within_s: float, shared: bool = False, create: bool = True, in_use: str | None = None
) -> Iterator[int]:
    """Hold the lock file `path` and yield its descriptor; the lock lasts while any process has it open.

    Raises PartUnavailable (its message is `in_use`, if given) where another process still holds it after `within_s`.
    """
    lock_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        deadline = time.monotonic() + within_s
        while not _lock(lock_fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise PartUnavailable(
                    in_use
                    or f"{path.parent} has been in use by another clawstream for more than {within_s:g} s. "
                    "Nothing was started. Stop that one, or choose another folder"
                )
            time.sleep(_LOOK_EVERY_S)
        yield lock_fd
    finally:
        os.close(lock_fd)


def _lock(lock_fd: int, kind: int) -> bool:
    try:
        fcntl.flock(lock_fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
