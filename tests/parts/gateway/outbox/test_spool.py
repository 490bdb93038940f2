"""The spool's bytes and its file: cut anywhere, damaged, full, left behind; and what goes through it, in any order."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from clawstream.gateway.outbox.frames import contents, damaged_frames, record_frame, taken_frame
from clawstream.gateway.outbox.spool import Spool
from clawstream.gateway.outbox.spool_file import SpoolInUse, spools_in
from clawstream.gateway.outbox.spooled_sessions import SpooledSessions
from clawstream.stream.log import Sealed
from tests.examples import examples
from tests.parts.gateway.running_gateway import full_disk

NAMES = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=8)
RECORDS = st.builds(
    Sealed,
    topic=NAMES,
    key=st.binary(max_size=12),
    value=st.binary(max_size=60),
    headers=st.lists(st.tuples(NAMES, st.binary(max_size=12)), max_size=3).map(tuple),
)


def sealed(key: str, number: int, size: int = 0) -> Sealed:
    return Sealed("t", key.encode(), f"{key}{number}".encode() + bytes(size), (("ce_id", f"{key}{number}".encode()),))


def frame(record: Sealed) -> bytes:
    return record_frame(record, 1)


def left_in(folder: Path) -> list[Sealed]:
    with Spool.opened(folder, "g", max_bytes=2**20) as spool:
        return [spooled.record for spooled in spool.waiting()]


@given(st.lists(RECORDS, max_size=4))
def test_a_file_cut_at_any_byte_has_every_record_that_ends_before(records: list[Sealed]) -> None:
    frames = [frame(record) for record in records]
    data = b"".join(frames)
    ends = [sum(map(len, frames[: n + 1])) for n in range(len(frames))]
    for cut in range(len(data) + 1):
        found = contents(data[:cut])
        whole = [record for record, end in zip(records, ends, strict=True) if end <= cut]
        assert [spooled.record for spooled in found.records] == whole
        assert found.end == max([0, *(end for end in ends if end <= cut)])


@given(RECORDS, st.data())
def test_a_changed_byte_is_no_record(record: Sealed, data: st.DataObject) -> None:
    whole = bytearray(frame(record))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    assert contents(bytes(whole)).records == []


def test_zeros_that_a_crash_left_are_no_record() -> None:
    assert contents(frame(sealed("a", 1)) + bytes(4096)).end == len(frame(sealed("a", 1)))


def test_every_cut_of_the_file_opens_with_what_is_whole_and_can_be_appended_to(tmp_path: Path) -> None:
    records = [sealed("a", 1), sealed("b", 2), sealed("a", 3)]
    data = b"".join(map(frame, records))
    ends = [len(data[: data.index(frame(record)) + len(frame(record))]) for record in records]
    for cut in range(len(data) + 1):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "g.spool").write_bytes(data[:cut])
        whole = [record for record, end in zip(records, ends, strict=True) if end <= cut]
        with Spool.opened(folder, "g", max_bytes=2**20) as spool:
            assert [spooled.record for spooled in spool.waiting()] == whole
            spool.append([frame(sealed("c", 4))])
        assert left_in(folder) == [*whole, sealed("c", 4)]


def test_a_record_that_a_bad_disk_changed_is_put_aside_and_those_behind_it_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (frame(sealed("a", number)) for number in range(3))
    (tmp_path / "g.spool").write_bytes(first + b"\xff" + second[1:] + third)
    assert left_in(tmp_path) == [sealed("a", 0), sealed("a", 2)]
    assert "spool=damaged" in caplog.text
    assert left_in(tmp_path) == [sealed("a", 0), sealed("a", 2)]
    assert (tmp_path / "g.cut").read_bytes() == b"\xff" + second[1:]  # once


@given(st.data())
def test_whichever_byte_a_bad_disk_changes_every_other_record_is_handed_on_in_order(data: st.DataObject) -> None:
    records = data.draw(st.lists(RECORDS, min_size=1, max_size=5))
    frames = [frame(record) for record in records]
    at = data.draw(st.integers(0, sum(map(len, frames)) - 1))
    ends = [sum(map(len, frames[: number + 1])) for number in range(len(frames))]
    [hit] = [number for number, end in enumerate(ends) if end - len(frames[number]) <= at < end]
    others = records[:hit] + records[hit + 1 :]
    changed = data.draw(st.integers(1, 255))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "g.spool"
        with Spool.opened(Path(folder), "g", max_bytes=2**20) as spool:
            spool.append(frames)
            damaged = bytearray(path.read_bytes())
            damaged[at] ^= changed
            path.write_bytes(damaged)
            if data.draw(st.booleans(), label="while it is open"):
                assert handed_on(spool) == others
                assert spool.num_bytes == 0
                return
        assert left_in(Path(folder)) == others
        begin = ends[hit] - len(frames[hit])
        assert (Path(folder) / "g.cut").read_bytes() == damaged[begin : ends[hit]]
        with Spool.opened(Path(folder), "g", max_bytes=2**20) as spool:
            spool.append([frame(sealed("z", 1))])
            assert handed_on(spool) == [*others, sealed("z", 1)]


def handed_on(spool: Spool) -> list[Sealed]:
    """What the log is given until the spool is empty."""
    log: list[Sealed] = []
    while group := spool.next_group():
        log += [spooled.record for spooled in group]
        spool.taken_to(group[-1].end)
    return log


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 5, 8, 9, 20, 2**26 + 1, 2**26 + 8, 2**26 + 9, 2**27 + 5])
def test_frames_that_say_nothing_are_as_long_as_what_they_stand_for(size: int) -> None:
    made = damaged_frames(bytes(size))
    assert len(made) == size
    assert contents(made) == ([], None, size if size > 8 else 0)


def test_records_that_the_log_took_are_not_there_after_a_restart(tmp_path: Path) -> None:
    big = [sealed("a", number, 400_000) for number in range(4)]
    with Spool.opened(tmp_path, "g", max_bytes=2**22) as spool:
        spool.append(list(map(frame, big)))
        group = spool.next_group()
        spool.taken_to(group[-1].end)
    assert left_in(tmp_path) == big[len(group) :]


@pytest.mark.parametrize("num_taken", range(5))
def test_killed_between_the_logs_word_and_the_note_it_repeats_and_loses_nothing(tmp_path: Path, num_taken: int) -> None:
    big = [sealed("a", number, 400_000) for number in range(4)]
    with Spool.opened(tmp_path, "g", max_bytes=2**22) as spool:
        spool.append(list(map(frame, big)))
        log: list[Sealed] = []
        for _ in range(num_taken):
            group = spool.next_group()
            log += [spooled.record for spooled in group]
            if group and len(log) // len(group) < num_taken:
                spool.taken_to(group[-1].end)
    log += left_in(tmp_path)
    assert list(dict.fromkeys(log)) == big


def test_an_emptied_spool_takes_no_room(tmp_path: Path) -> None:
    with Spool.opened(tmp_path / "spool", "g", max_bytes=2**20) as spool:
        for number in range(3):
            spool.append([frame(sealed("a", number))])
        assert spools_in(tmp_path) == {"g": 3 * len(frame(sealed("a", 0)))}
        spool.taken_to(spool.next_group()[-1].end)
        assert (spool.num_bytes, spool.next_group(), spools_in(tmp_path)) == (0, (), {})


def test_where_the_disk_fails_the_file_is_as_it_was(tmp_path: Path) -> None:
    outcome: list[Callable[[int], None]] = [os.fsync, full_disk, os.fsync]
    with Spool.opened(tmp_path, "g", max_bytes=2**20, fsync=lambda fd: outcome.pop(0)(fd)) as spool:
        spool.append([frame(sealed("a", 1))])
        with pytest.raises(OSError, match="No space left"):
            spool.append([frame(sealed("a", 2)), frame(sealed("b", 2))])
        spool.append([frame(sealed("a", 3))])
    assert left_in(tmp_path) == [sealed("a", 1), sealed("a", 3)]


def test_what_has_no_room_is_refused_and_what_has_is_kept(tmp_path: Path) -> None:
    with Spool.opened(tmp_path, "g", max_bytes=1000) as spool:
        found = spool.append([frame(sealed("a", 1, 500)), frame(sealed("b", 1, 500)), frame(sealed("c", 1, 50))])
    ends = [len(frame(sealed("a", 1, 500))), None, len(frame(sealed("a", 1, 500))) + len(frame(sealed("c", 1, 50)))]
    assert found == ends
    assert left_in(tmp_path) == [sealed("a", 1, 500), sealed("c", 1, 50)]


def test_the_last_eighth_is_for_answers_under_way(tmp_path: Path) -> None:
    with Spool.opened(tmp_path, "g", max_bytes=8000) as spool:
        spool.append([frame(sealed("a", 1, 6800))])
        assert spool.problem() is None
        spool.append([frame(sealed("b", 1, 200))])
        assert "its spool is full" in str(spool.problem())
        assert None not in spool.append([frame(sealed("c", 1, 300))])


def test_a_disk_with_less_than_an_eighth_free_takes_no_new_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 1000

    def disk_usage(path: Path) -> tuple[int, int, int]:
        assert path == tmp_path
        return usage(10**9, 10**9 - free_bytes, free_bytes)

    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with Spool.opened(tmp_path, "g", max_bytes=8000) as spool:
        assert spool.problem() is None
        free_bytes = 999
        assert spool.problem() == "the disk of its spool is full: 999 bytes are free, and 1000 are wanted"


def test_a_spool_has_one_gateway(tmp_path: Path) -> None:
    with Spool.opened(tmp_path, "g", max_bytes=1000), ExitStack() as stack:
        with pytest.raises(SpoolInUse, match=r"kafka\.instance"):
            stack.enter_context(Spool.opened(tmp_path, "g", max_bytes=1000))
        stack.enter_context(Spool.opened(tmp_path, "h", max_bytes=1000))
    assert left_in(tmp_path) == []


@dataclass(slots=True)
class _Session:
    next_number: int = 0
    acknowledged: list[Sealed] = field(default_factory=list)


class Gateways(RuleBasedStateMachine):
    """One gateway after another over a log that fails as logs do; a session asks for one thing at a time.

    The file is bytes here; whatever happens, the log and the bytes together hold what was acknowledged, and of each
    session the first copies stand on the log in the order of the acknowledgements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Sealed] = []
        self.late: list[Sealed] = []  # sent, not acknowledged, and not yet on the log
        self.file = b""
        self.spooled_sessions = SpooledSessions()
        self.sessions = {key: _Session() for key in "ab"}

    @rule(
        key=st.sampled_from("ab"),
        healthy=st.booleans(),
        fate=st.sampled_from(["acknowledged", "lost", "late", "heard late"]),
    )
    def answer(self, key: str, healthy: bool, fate: str) -> None:
        session = self.sessions[key]
        record = sealed(key, session.next_number)
        session.next_number += 1
        if self.spooled_sessions.straight(record.key, healthy=healthy):
            if fate == "acknowledged":
                self.log += [*self.late, record]  # a producer sends in order
                self.late = []
                session.acknowledged.append(record)
                return
            if fate == "heard late":  # and nothing failed
                self.log += [*self.late, record]
                self.late = []
            else:
                self.late += [record] * (fate == "late")
                self.spooled_sessions.failed()
        self.spooled_sessions.enter([record.key])
        self.file += frame(record)
        session.acknowledged.append(record)

    @rule(num_records=st.integers(1, 3), noted=st.booleans())
    def drain(self, num_records: int, noted: bool) -> None:
        found = contents(self.file)
        left = [spooled for spooled in found.records if spooled.end > (found.taken or 0)][:num_records]
        self.log += [*self.late, *(spooled.record for spooled in left)]
        self.late = []
        if not noted:
            self.crash(0)
            return
        if left:
            emptied = left[-1].end == found.records[-1].end
            self.file = b"" if emptied else self.file + taken_frame(left[-1].end)
            self.spooled_sessions.taken(spooled.record.key for spooled in left)

    @rule(torn=st.integers(0, 30))
    def crash(self, torn: int) -> None:
        unpromised = frame(sealed("a", 10_000))[:torn]  # half of an append that nobody was told of
        found = contents(self.file + unpromised)
        self.file = self.file[: found.end]
        self.spooled_sessions = SpooledSessions()
        self.spooled_sessions.enter(spooled.record.key for spooled in found.records if spooled.end > (found.taken or 0))

    @invariant()
    def nothing_is_lost_and_sessions_keep_their_order(self) -> None:
        found = contents(self.file)
        spooled = [one.record for one in found.records if one.end > (found.taken or 0)]
        firsts = list(dict.fromkeys([*self.log, *spooled]))
        for key, session in self.sessions.items():
            mine: Sequence[Sealed] = [record for record in firsts if record.key == key.encode()]
            assert mine == session.acknowledged


Gateways.TestCase.settings = examples(3, stateful_step_count=30)
test_any_run_of_gateways_keeps_what_was_answered_in_order = Gateways.TestCase
