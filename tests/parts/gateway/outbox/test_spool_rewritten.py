"""A spool that never is empty: its file is rewritten without what was taken, whatever happens meanwhile."""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.outbox import spool as module
from clawstream.gateway.outbox.frames import record_frame
from clawstream.gateway.outbox.spool import Spool
from clawstream.gateway.outbox.spool_file import SpoolInUse, spools_in
from clawstream.stream.log import Sealed
from tests.examples import examples
from tests.parts.gateway.running_gateway import full_disk

MAX_BYTES = 4000
GROUP_BYTES = 300


def sealed(number: int, size: int = 100) -> Sealed:
    return Sealed("t", b"a", f"{number}:".encode() + bytes(size), ())


def frame(record: Sealed) -> bytes:
    return record_frame(record, 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what was taken be worth a step at once, and each step be some records."""
    monkeypatch.setattr(module, "_WORTH_BYTES", 0)
    monkeypatch.setattr(module, "_STEP_BYTES", 2 * GROUP_BYTES)


def take(spool: Spool) -> Sequence[Sealed]:
    """Have the log take a group."""
    group = spool.next_group(GROUP_BYTES)
    if group:
        spool.taken_to(group[-1].end)
    return [spooled.record for spooled in group]


def left_in(folder: Path) -> Sequence[Sealed]:
    with Spool.opened(folder, "g", max_bytes=MAX_BYTES) as spool:
        return [spooled.record for spooled in spool.waiting()]


def half_taken(spool: Spool, *, until: Callable[[], bool]) -> Sequence[Sealed]:
    """Put records in and take others out, so that some always wait; return what waits once `until` says so."""
    waiting: list[Sealed] = []
    for number in range(1000):
        waiting.append(sealed(number))
        assert None not in spool.append([frame(waiting[-1])])
        while len(waiting) > 6:
            taken = take(spool)
            assert taken == waiting[: len(taken)]
            del waiting[: len(taken)]
        if until():
            return waiting
    raise AssertionError("it never was")


def test_a_spool_that_never_is_empty_is_as_large_as_what_waits(tmp_path: Path) -> None:
    largest = []
    with Spool.opened(tmp_path / "spool", "g", max_bytes=MAX_BYTES) as spool:
        path = tmp_path / "spool" / "g.spool"

        def looked() -> bool:
            largest.append(path.stat().st_size)
            assert spool.problem() is None
            assert spools_in(tmp_path) == {"g": spool.num_bytes}
            return len(largest) == 300

        waiting = half_taken(spool, until=looked)
        assert 0 < spool.num_bytes < 1200
        assert len(largest) * len(frame(sealed(0))) > 8 * MAX_BYTES
    assert max(largest) < 3000
    assert left_in(tmp_path / "spool") == waiting


class Cut(NamedTuple):
    """What is left where a process ends before a system call."""

    killed: dict[str, bytes]  # files by name
    without_power: dict[str, bytes]
    promised: int  # so many records' appends had returned
    taken: int  # the log had so many
    noted: int  # and the spool was told of so many


class Disk:
    """A folder, as it is before each system call that changes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cuts: list[Cut] = []
        self.promised = self.taken = self.noted = 0
        self._files: dict[int, bytes] = {}  # on the disk, by inode
        self._names: dict[str, int] = {}  # on the disk

    def look(self) -> None:
        """Keep what a process that ends now would leave."""
        self.cuts.append(
            Cut(
                {path.name: path.read_bytes() for path in self.folder.iterdir()},
                {name: self._files.get(inode, b"") for name, inode in self._names.items()},
                self.promised, self.taken, self.noted,
            )
        )  # fmt: skip

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look before each call."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "pwrite", "ftruncate", "replace", "unlink", "close", "fsync"):
                patch.setattr(os, name, self._after_a_look(getattr(os, name)))
            patch.setattr(os, "fsync", self._fsynced(os.fsync))
            yield
        self.look()

    def _after_a_look(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self.look()
            found = call(*args, **options)
            if call.__name__ == "open" and args[1] & os.O_TRUNC:
                self._files[os.fstat(found).st_ino] = b""
            return found

        return called

    def _fsynced(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        def called(fd: int) -> None:
            fsync(fd)
            about = os.fstat(fd)
            if stat.S_ISDIR(about.st_mode):
                self._names = {path.name: path.stat().st_ino for path in self.folder.iterdir()}
            else:
                self._files[about.st_ino] = os.pread(fd, about.st_size, 0)

        return called


OPS = st.lists(st.one_of(st.just("take"), st.lists(st.integers(0, 300), min_size=1, max_size=3)), max_size=40)


@pytest.mark.slow
@examples(0.4)
@given(OPS)
def test_a_process_that_ends_at_any_system_call_loses_nothing_and_repeats_at_most_what_was_being_sent(
    ops: list[str | list[int]],
) -> None:
    records: list[Sealed] = []
    with TemporaryDirectory() as name:
        disk = Disk(Path(name))
        with (
            disk.watched(),
            Spool.opened(disk.folder, "g", max_bytes=MAX_BYTES, fsync=lambda fd: os.fsync(fd)) as spool,
        ):
            for op in ops:
                if isinstance(op, str):
                    group = spool.next_group(GROUP_BYTES)
                    disk.taken += len(group)
                    if group:
                        spool.taken_to(group[-1].end)
                    disk.noted = disk.taken
                else:
                    new = [sealed(len(records) + number, size) for number, size in enumerate(op)]
                    if spool.num_bytes + sum(len(frame(one)) for one in new) < MAX_BYTES:
                        records += new
                        spool.append([frame(one) for one in new])
                        disk.promised = len(records)
        for cut in disk.cuts:
            left = left_after(cut.killed)
            assert left == [record for record in records if record in left]
            assert not set(left) & set(records[: cut.noted])
            for found in (left, left_after(cut.without_power)):
                firsts = list(dict.fromkeys([*records[: cut.taken], *found]))
                assert firsts[: cut.promised] == records[: cut.promised]
                assert firsts == records[: len(firsts)]


def left_after(files: dict[str, bytes]) -> Sequence[Sealed]:
    """What the next process finds."""
    with TemporaryDirectory() as name:
        for file, data in files.items():
            (Path(name) / file).write_bytes(data)
        left = left_in(Path(name))
        assert not (Path(name) / "g.spool.new").exists()
        return left


def test_while_the_file_is_rewritten_a_spool_still_has_one_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock, asked = tmp_path / "g.spool", fcntl.flock, []

    with Spool.opened(tmp_path, "g", max_bytes=MAX_BYTES) as spool, ExitStack() as stack:
        inode = path.stat().st_ino

        def late(fd: int, how: int) -> None:
            """Have the file change places between its opening and its lock."""
            monkeypatch.setattr(fcntl, "flock", flock)
            half_taken(spool, until=lambda: path.stat().st_ino != inode)
            asked.append(fd)
            flock(fd, how)

        monkeypatch.setattr(fcntl, "flock", late)
        with pytest.raises(SpoolInUse):
            stack.enter_context(Spool.opened(tmp_path, "g", max_bytes=MAX_BYTES))
        assert asked
        with pytest.raises(SpoolInUse):
            stack.enter_context(Spool.opened(tmp_path, "g", max_bytes=MAX_BYTES))


def test_a_disk_that_has_no_room_for_a_second_file_keeps_the_first(tmp_path: Path) -> None:
    full: list[bool] = []

    def fsync(fd: int) -> None:
        if full and Path(f"/proc/self/fd/{fd}").readlink().suffix == ".new":
            full_disk(fd)
        os.fsync(fd)

    path = tmp_path / "g.spool"
    with Spool.opened(tmp_path, "g", max_bytes=MAX_BYTES, fsync=fsync) as spool:
        full.append(True)
        half_taken(spool, until=lambda: path.stat().st_size > 2 * MAX_BYTES)
        assert [file.name for file in tmp_path.iterdir()] == ["g.spool"]
        full.clear()
        while take(spool):
            pass
        waiting = half_taken(spool, until=lambda: path.stat().st_size < MAX_BYTES)
    assert left_in(tmp_path) == waiting


def test_a_disk_with_little_free_is_left_to_the_answers_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - MAX_BYTES // 8, MAX_BYTES // 8))
    path = tmp_path / "g.spool"
    with Spool.opened(tmp_path, "g", max_bytes=MAX_BYTES) as spool:
        half_taken(spool, until=lambda: path.stat().st_size > 2 * MAX_BYTES)


def test_a_record_that_the_disk_changed_before_it_was_rewritten_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "g.spool"
    with Spool.opened(tmp_path, "g", max_bytes=MAX_BYTES) as spool:
        records = [sealed(number) for number in range(20)]
        spool.append([frame(record) for record in records])
        data = bytearray(path.read_bytes())
        data[data.index(b"17:")] ^= 255
        path.write_bytes(data)
        inode, log = path.stat().st_ino, list[Sealed]()
        while path.stat().st_ino == inode and (group := take(spool)):
            log += group
        assert path.stat().st_ino != inode
        assert spool.damaged_bytes == len(frame(records[17]))
    assert [*log, *left_in(tmp_path)] == records[:17] + records[18:]


def test_no_note_of_the_file_that_was_counts_in_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "g.spool"
    with Spool.opened(tmp_path, "g", max_bytes=MAX_BYTES) as spool:
        inode = path.stat().st_ino
        waiting = half_taken(spool, until=lambda: path.stat().st_ino != inode)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the only note that does
    path.write_bytes(data)
    assert left_in(tmp_path)[-len(waiting) :] == waiting
