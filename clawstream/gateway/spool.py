"""The spool's file: records that the broker has not acknowledged, on this machine's disk. Blocks; one thread uses it.

One file a gateway, appended to while records wait. What the log has taken is noted in the file itself, and once that is
all, the file is emptied: no segments, no second file with a position. What is noted is not fsynced, so after a loss of
power the log may get a record a second time; its id is the same, and the first counts.

A record that a bad disk has changed is put aside, byte for byte (NAME.cut), and those behind it are handed on.

The one rule: `append` returns when the bytes are on the disk, and where it raises the file is as it was before.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from clawstream.errors import PartUnavailable
from clawstream.gateway.frames import (
    BEGINS_BYTES,
    Contents,
    Spooled,
    beginnings,
    contents,
    damaged_frames,
    frame_bytes,
    taken_frame,
)

LOG = logging.getLogger(__name__)
FOLDER = "spool"
Fsync = Callable[[int], None]
_GROUP_BYTES = 2**19  # handed to the log at a time
_WINDOW_BYTES = 2**24  # looked through at a time
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
        self.damaged_bytes = 0  # put aside since it was opened
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

    def append(self, frames: Sequence[bytes]) -> list[int | None]:
        """Return, once they are on the disk, where each of `frames` ends; None: it found no room.

        Raises OSError, and then none is kept.
        """
        kept: list[bytes] = []
        ends: list[int | None] = []
        end = self._end
        for frame in frames:
            fits = end + len(frame) <= self._max_bytes
            if fits:
                kept.append(frame)
                end += len(frame)
            ends.append(end if fits else None)
        if kept:
            self._keep(b"".join(kept), self._fsync)
        return ends

    def next_group(self) -> Sequence[Spooled]:
        """Return the oldest records that the log has not taken; empty when it has taken all, and then the file is."""
        while self._taken < self._end:
            found = self._at(self._taken)
            if found.records:
                return found.records
            self._taken = self._after(self._taken, found)  # nothing but notes
        os.ftruncate(self._fd, 0)
        self._taken = self._end = 0
        return ()

    def taken_to(self, place: int) -> None:
        """The log has every record up to `place`."""
        self._taken = place
        if not self.next_group():
            return
        try:
            self._keep(taken_frame(place), lambda _fd: None)
        except OSError as error:
            LOG.debug("spool=not_noted place=%d reason=%s", place, error)

    def waiting(self) -> Iterator[Spooled]:
        """Yield every record that the log has not taken."""
        place = self._taken
        while place < self._end:
            found = self._at(place)
            yield from found.records
            place = self._after(place, found)

    def _after(self, place: int, found: Contents) -> int:
        """Return where to go on after what was `found` at `place`: behind what the disk has changed, if it has."""
        if found.end > place:
            return found.end
        end = self._next_whole(place, self._end)
        self._put_aside(place, end)
        return end

    def _at(self, place: int) -> Contents:
        """Return what stands at `place`: one whole frame at least, unless the frame there is not whole."""
        data = os.pread(self._fd, _GROUP_BYTES, place)
        size = frame_bytes(data)
        if size > len(data):
            data = os.pread(self._fd, size, place)
        return contents(data, begins_at=place)

    def _next_whole(self, place: int, end: int) -> int:
        """Return where the first whole frame behind `place` begins, or `end`."""
        at = place + 1
        while at < end:
            window = os.pread(self._fd, min(_WINDOW_BYTES, end - at), at)
            for offset in beginnings(window):
                if self._at(at + offset).end > at + offset:
                    return at + offset
            at += max(1, len(window) - BEGINS_BYTES)
        return end

    def _put_aside(self, begin: int, end: int) -> None:
        """Copy what can't be read, and let frames that say nothing stand in its place; raises OSError."""
        data = self._copy_aside(begin, end)
        self._write(damaged_frames(data), begin)
        os.fsync(self._fd)
        self.damaged_bytes += len(data)
        LOG.error(
            "spool=damaged path=%s at_byte=%d bytes=%d put_aside=%s; the records there are lost to the log, those "
            "behind them are not. Look at the disk",
            self.path, begin, len(data), self._aside,
        )  # fmt: skip

    def _copy_aside(self, begin: int, end: int) -> bytes:
        """Return the bytes, once they are on the disk beside the spool."""
        data = os.pread(self._fd, end - begin, begin)
        with self._aside.open("ab") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())
        return data

    @property
    def _aside(self) -> Path:
        return self.path.with_suffix(".cut")

    def _keep(self, data: bytes, fsync: Fsync) -> None:
        try:
            self._write(data, self._end)
            fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def _write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, at)
            at, view = at + written, view[written:]

    def _read(self) -> None:
        """Learn what stands in the file; it consists of whole frames from now on."""
        num_bytes = os.fstat(self._fd).st_size
        while self._end < num_bytes:
            found = self._at(self._end)
            if found.end > self._end:
                self._end = found.end
                self._taken = self._taken if found.taken is None else found.taken
                continue
            begins = self._next_whole(self._end, num_bytes)
            try:
                if begins == num_bytes:
                    self._cut(num_bytes)
                    return
                self._put_aside(self._end, begins)
            except OSError as error:
                raise PartUnavailable(
                    f"{self.path} has {begins - self._end} bytes at {self._end} that are no record, and they can't be "
                    f"put into {self._aside} ({error.strerror}). Nothing was started. Make room on that disk"
                ) from error
            self._end = begins

    def _cut(self, num_bytes: int) -> None:
        """Cut what follows the last whole record: half an append that nobody was promised, or what a bad disk left."""
        self._copy_aside(self._end, num_bytes)
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)
        LOG.warning("spool=cut path=%s from_bytes=%d to_bytes=%d rest=%s", self.path, num_bytes, self._end, self._aside)


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
