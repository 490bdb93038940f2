"""The spool: records on this machine's disk that the broker has not acknowledged. Blocks; one thread uses it.

Each gateway appends to one file while records wait. Notes in the file say what the log has taken. Once the log has
taken all, the file is emptied. Once the taken part is as large as the waiting one, and an eighth of the room, the file
is rewritten without it if the disk has room (spool_file.py), in steps, so that no append waits for long. Notes are not
fsynced, so after a loss of power the log may get a record a second time; its id is the same, and the first counts.

A record that a bad disk has changed is put aside, byte for byte (NAME.cut), and the records behind it are delivered.

The one rule: `append` returns when the bytes are on the disk, and where it raises the file is as it was before.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from clawstream.errors import PartUnavailable
from clawstream.gateway.outbox.frames import (
    BEGINS_BYTES,
    Contents,
    Spooled,
    beginnings,
    contents,
    damaged_frames,
    frame_bytes,
    taken_frame,
    without_notes,
)
from clawstream.gateway.outbox.spool_file import Fsync, SpoolFile

LOG = logging.getLogger(__name__)
GROUP_BYTES = 2**19  # handed to the log at a time
LARGE_GROUP_BYTES = 2**22  # while the log is slow
_STEP_BYTES = 2 * LARGE_GROUP_BYTES  # rewritten at a time: more than is appended while the log takes a group
_WINDOW_BYTES = 2**24  # searched at a time for the next frame
_KEPT_FREE = 8  # 1 / _KEPT_FREE of the room is for the answers under way
_WORTH = 8  # a rewrite pays once the log has taken 1 / _WORTH of the room
_WORTH_BYTES = GROUP_BYTES  # and at least so much


class Spool:
    """One gateway's spool, from `opened` to the end of its block."""

    def __init__(self, file: SpoolFile, *, max_bytes: int, fsync: Fsync) -> None:
        self.path = file.path
        self._file = file
        self._successor: SpoolFile | None = None
        self._copied = 0  # the successor has the waiting records up to here
        self._max_bytes = max_bytes
        self._worth_from = max(max_bytes // _WORTH, _WORTH_BYTES)
        self._fsync = fsync
        self._taken = 0
        self._end = 0
        self.damaged_bytes = 0  # put aside since the spool was opened
        self._read()

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, name: str, *, max_bytes: int, fsync: Fsync = os.fsync) -> "Iterator[Spool]":
        """Yield the spool `name`, with what a predecessor left in it; raises PartUnavailable if another has it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with SpoolFile.opened(folder / f"{name}.spool") as file:
            spool = cls(file, max_bytes=max_bytes, fsync=fsync)
            try:
                yield spool
            finally:
                spool._leave_successor()

    @property
    def num_bytes(self) -> int:
        """How much of the file waits for the log."""
        taken = self._taken  # read before the end, since the spool's thread moves both
        return self._end - taken

    def problem(self) -> str | None:
        """Why no more answers should be begun, None: they may; the last eighth of the room is for those under way."""
        reserve = self._max_bytes // _KEPT_FREE
        if self._max_bytes - (num_bytes := self.num_bytes) < reserve:
            return f"its spool is full: {num_bytes} of {self._max_bytes} bytes (gateway.spool_bytes)"
        free = self._free_bytes()
        if free < reserve:
            return f"the disk of its spool is full: {free} bytes are free, and {reserve} are wanted"
        return None

    def append(self, frames: Sequence[bytes]) -> list[int | None]:
        """Write `frames` to the disk; return where each ends, None for one that found no room.

        Raises OSError, and then none is kept.
        """
        kept: list[bytes] = []
        ends: list[int | None] = []
        end = self._end
        for frame in frames:
            fits = end + len(frame) <= self._taken + self._max_bytes
            if fits:
                kept.append(frame)
                end += len(frame)
            ends.append(end if fits else None)
        if kept:
            self._keep(b"".join(kept), synced=True)
        return ends

    def next_group(self, num_bytes: int = GROUP_BYTES) -> Sequence[Spooled]:
        """Return the oldest records that the log has not taken; where it has taken all, empty the file."""
        while self._taken < self._end:
            found = self._at(self._taken, num_bytes)
            if found.records:
                return found.records
            self._taken = self._after(self._taken, found)  # nothing but notes
        self._empty()
        return ()

    def taken_to(self, place: int) -> None:
        """Note that the log has every record up to `place`."""
        self._taken = place
        if place == self._end:
            self._empty()
            return
        try:
            self._keep(taken_frame(place - self._file.begin), synced=False)
        except OSError as error:
            LOG.debug("spool=not_noted place=%d reason=%s", place, error)
        self._shorten()

    def waiting(self) -> Iterator[Spooled]:
        """Yield every record that the log has not taken."""
        place = self._taken
        while place < self._end:
            found = self._at(place)
            yield from found.records
            place = self._after(place, found)

    def _empty(self) -> None:
        self._leave_successor()
        self._file.empty(self._end)
        self._taken = self._end

    def _shorten(self) -> None:
        """Copy some of the waiting records to a new file, if that pays; with all of them it replaces this one."""
        try:
            if self._successor is None:
                if not self._worth():
                    return
                self._successor = self._file.successor(self._taken)
                self._copied = self._taken
            self._copy(self._successor)
            if self._copied == self._end:
                self._change_over(self._successor)
        except OSError as error:
            self._leave_successor()
            LOG.debug("spool=not_shortened path=%s reason=%s; it goes on as it is", self.path, error)

    def _worth(self) -> bool:
        taken = self._taken - self._file.begin
        room = self._free_bytes() - self._max_bytes // _KEPT_FREE
        return taken >= max(self._worth_from, self.num_bytes) and room >= self.num_bytes

    def _copy(self, successor: SpoolFile) -> None:
        """Copy some waiting records to the successor and fsync it, without notes, as they name old places."""
        whole = without_notes(self._data_at(self._copied, _STEP_BYTES))
        if not whole:
            self._put_aside(self._copied, self._next_whole(self._copied, self._end))
        successor.write(whole, self._copied)
        successor.sync(self._fsync)
        self._copied += len(whole)

    def _change_over(self, successor: SpoolFile) -> None:
        """Put the successor in the file's place."""
        note = taken_frame(self._taken - successor.begin)
        successor.write(note, self._end)
        successor.sync(self._fsync)
        self._file.become(successor)
        self._successor = None
        self._end += len(note)

    def _leave_successor(self) -> None:
        successor, self._successor = self._successor, None
        if successor is not None:
            successor.remove()

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.path.parent).free

    def _after(self, place: int, found: Contents) -> int:
        """Return where to go on after what was `found` at `place`; put bytes aside that the disk has changed."""
        if found.end > place:
            return found.end
        end = self._next_whole(place, self._end)
        self._put_aside(place, end)
        return end

    def _at(self, place: int, num_bytes: int = GROUP_BYTES) -> Contents:
        return contents(self._data_at(place, num_bytes), begins_at=place)

    def _data_at(self, place: int, num_bytes: int) -> bytes:
        """Return the bytes at `place`: one whole frame at least, unless the frame there is not whole."""
        data = self._file.read(num_bytes, place)
        size = frame_bytes(data)
        return data if size <= len(data) else self._file.read(size, place)

    def _next_whole(self, place: int, end: int) -> int:
        """Return where the first whole frame behind `place` begins, or `end`."""
        at = place + 1
        while at < end:
            window = self._file.read(min(_WINDOW_BYTES, end - at), at)
            for offset in beginnings(window):
                if self._at(at + offset).end > at + offset:
                    return at + offset
            at += max(1, len(window) - BEGINS_BYTES)
        return end

    def _put_aside(self, begin: int, end: int) -> None:
        """Copy damaged bytes to NAME.cut, and put meaningless frames in their place; raises OSError."""
        data = self._copy_aside(begin, end)
        self._file.write(damaged_frames(data), begin)
        self._file.sync()
        self.damaged_bytes += len(data)
        LOG.error(
            "spool=damaged path=%s at_byte=%d bytes=%d put_aside=%s; the records there are lost to the log, those "
            "behind them are not. Look at the disk",
            self.path, begin, len(data), self._aside,
        )  # fmt: skip

    def _copy_aside(self, begin: int, end: int) -> bytes:
        """Return the bytes, once a copy is on the disk beside the spool."""
        data = self._file.read(end - begin, begin)
        with self._aside.open("ab") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())
        return data

    @property
    def _aside(self) -> Path:
        return self.path.with_suffix(".cut")

    def _keep(self, data: bytes, *, synced: bool) -> None:
        try:
            self._file.write(data, self._end)
            if synced:
                self._file.sync(self._fsync)
        except OSError:
            self._file.cut(self._end)
            raise
        self._end += len(data)

    def _read(self) -> None:
        """Read what the file holds; cut it so that it consists of whole frames."""
        num_bytes = self._file.end
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
        """Cut the bytes behind the last whole frame: half an append that was never acknowledged, or damage."""
        self._copy_aside(self._end, num_bytes)
        self._file.cut(self._end)
        self._file.sync()
        LOG.warning("spool=cut path=%s from_bytes=%d to_bytes=%d rest=%s", self.path, num_bytes, self._end, self._aside)
