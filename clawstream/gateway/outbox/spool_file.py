"""A spool's file: locked, rewritten without its beginning, and measured by other processes. Blocks.

Places are counted from where the file began when it was opened, and stay valid when it is rewritten. The successor is
written beside the file (NAME.spool.new) and takes its name only once it is whole and on the disk. So after a kill at
any point one of the two is there, with every record that was acknowledged.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from clawstream.errors import PartUnavailable
from clawstream.gateway.outbox.frames import taken_up_to

Fsync = Callable[[int], None]
FOLDER = "spool"


class SpoolInUse(PartUnavailable):
    """Another gateway has the spool."""


class SpoolFile:
    """A spool file that this process has locked."""

    def __init__(self, path: Path, fd: int, *, begin: int = 0) -> None:
        self.path = path
        self.begin = begin
        self._fd = fd
        self._renamed = False  # its folder is not fsynced yet, so a loss of power may undo the renaming

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> "Iterator[SpoolFile]":
        """Yield the file, which may be new; raises SpoolInUse if another process has it."""
        file = cls(path, _locked(path))
        try:
            _beside(path).unlink(missing_ok=True)  # left by a process that was killed
            fsync_folder(path.parent)
            yield file
        finally:
            file.close()

    @property
    def end(self) -> int:
        """Where the file ends."""
        return self.begin + os.fstat(self._fd).st_size

    def read(self, num_bytes: int, place: int) -> bytes:
        """Return at most so many bytes from `place` on."""
        return os.pread(self._fd, num_bytes, place - self.begin)

    def write(self, data: bytes, place: int) -> None:
        """Write all of the data at `place`; raises OSError, and then a part may be there."""
        view, at = memoryview(data), place - self.begin
        while view:
            written = os.pwrite(self._fd, view, at)
            at, view = at + written, view[written:]

    def cut(self, place: int) -> None:
        """Let the file end at `place`."""
        os.ftruncate(self._fd, place - self.begin)

    def empty(self, place: int) -> None:
        """Let the file be empty, and begin at `place`."""
        os.ftruncate(self._fd, 0)
        self.begin = place

    def sync(self, fsync: Fsync = os.fsync) -> None:
        """Return once the file is on the disk, under its name; raises OSError."""
        if self._renamed:
            fsync_folder(self.path.parent)
            self._renamed = False
        fsync(self._fd)

    def successor(self, begin: int) -> "SpoolFile":
        """Return an empty file that can replace this one and begins at place `begin`; the caller closes it."""
        path = _beside(self.path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return SpoolFile(path, fd, begin=begin)

    def become(self, successor: "SpoolFile") -> None:
        """Become the successor, which is on the disk; raises OSError where it does not get the name."""
        successor.path.replace(self.path)
        self.close()
        self._fd, self.begin = successor._fd, successor.begin  # noqa: SLF001 - of the same class
        self._renamed = True

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._fd)

    def remove(self) -> None:
        """Close the file and delete it."""
        self.close()
        self.path.unlink(missing_ok=True)


def spools_in(data_dir: Path) -> dict[str, int]:
    """Return how many bytes wait in each spool of the data folder, by its name, without the empty ones."""
    found = {path.stem: _num_waiting_bytes(path) for path in sorted((data_dir / FOLDER).glob("*.spool"))}
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def fsync_folder(folder: Path) -> None:
    """Fsync the folder, so that a new file in it survives a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _num_waiting_bytes(path: Path) -> int:
    with path.open("rb") as file:
        taken = taken_up_to(file)
        return max(0, os.fstat(file.fileno()).st_size - taken)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _locked(path: Path) -> int:
    """Return the file's descriptor, with its lock."""
    while True:
        with ExitStack() as closing:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            closing.callback(os.close, fd)
            _lock(fd, path)
            with suppress(FileNotFoundError):  # gone if another file took the name since
                if os.path.samestat(os.fstat(fd), path.stat()):
                    closing.pop_all()
                    return fd


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SpoolInUse(
            f"{path} is the spool of a gateway that runs. Nothing was started. Stop that one, or give each gateway of "
            "this data folder a name of its own (kafka.instance)"
        ) from error
