"""The spool's file: records that the broker has not acknowledged, on this machine's disk. Blocks; one thread uses it.

One file a gateway, appended to while records wait. What the log has taken is noted in the file itself, and once that is
all, the file is emptied: no segments, no second file with a position. What is noted is not fsynced, so after a loss of
power the log may get a record a second time; its id is the same, and the first counts.

The one rule: `append` returns when the bytes are on the disk, and where it raises the file is as it was before.
"""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from clawstream.errors import PartUnavailable
from clawstream.gateway.frames import Contents, Spooled, contents, frame_bytes, taken_frame

LOG = logging.getLogger(__name__)
FOLDER = "spool"
Fsync = Callable[[int], None]
_GROUP_BYTES = 2**19  # handed to the log at a time
_KEPT_FREE = 8  # one part in so many is for the answers under way


class SpoolInUse(PartUnavailable):
    """Another gateway has the spool."""


class Spool:
    """One gateway's spool, from `opened` to the end of its block."""

    def __init__(self, path: Path, fd: int, *, max_bytes: int, fsync: Fsync) -> None:
        self.path = path
        self._fd = fd
        self._max_bytes = max_bytes
        self._fsync = fsync
        self._taken = 0
        self._end = 0
        self._read()

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, name: str, *, max_bytes: int, fsync: Fsync = os.fsync) -> "Iterator[Spool]":
        """Yield the spool `name`, with what a predecessor left in it; raises PartUnavailable if another has it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{name}.spool"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, path)
            _fsync_folder(folder)
            yield cls(path, fd, max_bytes=max_bytes, fsync=fsync)
        finally:
            os.close(fd)

    @property
    def num_bytes(self) -> int:
        """How long the file is."""
        return self._end

    def problem(self) -> str | None:
        """Why no more answers should be begun; those under way have the last eighth of the room."""
        reserve = self._max_bytes // _KEPT_FREE
        if self._max_bytes - self._end < reserve:
            return f"its spool is full: {self._end} of {self._max_bytes} bytes (gateway.spool_bytes)"
        free = shutil.disk_usage(self.path.parent).free
        if free < reserve:
            return f"the disk of its spool is full: {free} bytes are free, and {reserve} are wanted"
        return None

    def append(self, frames: Sequence[bytes]) -> list[bool]:
        """Return, once they are on the disk, which of `frames` found room; raises OSError, and then none is kept."""
        kept: list[bytes] = []
        fits: list[bool] = []
        left = self._max_bytes - self._end
        for frame in frames:
            fits.append(len(frame) <= left)
            if fits[-1]:
                kept.append(frame)
                left -= len(frame)
        if kept:
            self._keep(b"".join(kept), self._fsync)
        return fits

    def next_group(self) -> Sequence[Spooled]:
        """Return the oldest records that the log has not taken; empty when it has taken all."""
        while self._taken < self._end:
            found = self._whole_at(self._taken)
            if found.records:
                return found.records
            self._taken = found.end  # nothing but notes
        return ()

    def taken_to(self, place: int) -> None:
        """The log has every record up to `place`."""
        self._taken = place
        if not self.next_group():
            os.ftruncate(self._fd, 0)
            self._taken = self._end = 0
            return
        try:
            self._keep(taken_frame(place), lambda _fd: None)
        except OSError as error:
            LOG.debug("spool=not_noted place=%d reason=%s", place, error)

    def waiting(self) -> Iterator[Spooled]:
        """Yield every record that the log has not taken."""
        place = self._taken
        while place < self._end:
            found = self._whole_at(place)
            yield from found.records
            place = found.end

    def _whole_at(self, place: int) -> Contents:
        """Return what stands at `place`; raises OSError where the disk has lost what it had: the next start cuts it."""
        found = self._at(place)
        if found.end == place:
            raise OSError(errno.EIO, f"{self.path} is damaged at byte {place} of {self._end}")
        return found

    def _at(self, place: int) -> Contents:
        """Return what stands at `place`: one whole frame at least, unless the frame there is not whole."""
        data = os.pread(self._fd, _GROUP_BYTES, place)
        size = frame_bytes(data)
        if size > len(data):
            data = os.pread(self._fd, size, place)
        return contents(data, begins_at=place)

    def _keep(self, data: bytes, fsync: Fsync) -> None:
        try:
            self._write(data)
            fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def _write(self, data: bytes) -> None:
        at = self._end
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, at)
            at, view = at + written, view[written:]

    def _read(self) -> None:
        """Learn what stands in the file; it ends with a whole frame from now on."""
        num_bytes = os.fstat(self._fd).st_size
        while self._end < num_bytes:
            found = self._at(self._end)
            if found.end == self._end:
                self._cut(num_bytes)
                return
            self._end = found.end
            self._taken = self._taken if found.taken is None else found.taken

    def _cut(self, num_bytes: int) -> None:
        """Cut what follows the last whole frame: half an append that nobody was promised, or what a bad disk left."""
        kept = self.path.with_suffix(".cut")
        try:
            with self.path.open("rb") as source, kept.open("ab") as target:
                source.seek(self._end)
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise PartUnavailable(
                f"{self.path} ends with {num_bytes - self._end} bytes that are no record, and they can't be put into "
                f"{kept} ({error.strerror}). Nothing was started or changed. Make room on that disk"
            ) from error
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)
        LOG.warning("spool=cut path=%s from_bytes=%d to_bytes=%d rest=%s", self.path, num_bytes, self._end, kept)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SpoolInUse(
            f"{path} is the spool of a gateway that runs. Nothing was started. Stop that one, or give each gateway of "
            "this data folder a name of its own (kafka.instance)"
        ) from error


def _fsync_folder(folder: Path) -> None:
    """A file that is new stays, also after a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def spools_in(data_dir: Path) -> dict[str, int]:
    """Return how many bytes wait in each spool of the data folder, by its name; those that are empty are left out."""
    found = {path.stem: path.stat().st_size for path in sorted((data_dir / FOLDER).glob("*.spool"))}
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}
