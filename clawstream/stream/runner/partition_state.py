"""What a worker knows of one partition number: its keys' states, its clock, and which records are not done.

The one rule: a record is done when its events are acknowledged, its calls have returned, and the events of those calls
are acknowledged; or when it stands in the dead-letter queue.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from clawstream.stream.log import Arrived, Commit, PartitionId, digest_in
from clawstream.stream.runner.clock import Dating, LogClock, capped
from clawstream.stream.runner.fold import Fold, Note, Watermark, read_note
from clawstream.stream.stage import Record, Stage

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")


@dataclass(slots=True, kw_only=True)
class PendingRecord:
    """The work that follows from one record, or from one tick; done when `left` is 0."""

    place: PartitionId | None  # None: a tick
    offset: int
    key: str = ""
    traceparent: str | None = None
    left: int = 0  # how many parts of the work are not done
    attempt: int = 1
    rebuild_offsets: Mapping[str, int] = field(default_factory=dict)
    released: asyncio.Event | None = None  # of a replayed dead letter: set when all that follows from it has ended


class PartitionState(Generic[S, C]):
    """One partition number of all topics of a stage, from when it is given to this worker until it is taken away."""

    def __init__(
        self,
        stage: Stage[S, C],
        number: int,
        committed: Mapping[PartitionId, Commit | None],
        begins: Mapping[PartitionId, int],
        *,
        machine_ms: Callable[[], int],
    ) -> None:
        self.number = number
        self.places = tuple(PartitionId(topic, number) for topic in stage.reads)
        self.live = False  # whether the rebuild has ended
        self.gone = False  # whether the partition went to another worker
        self.tasks: set[asyncio.Task[None]] = set()
        self.copying = asyncio.Lock()
        self.starts = {place: _start(committed[place], begins[place]) for place in self.places}
        self.fold = Fold(stage)
        self._stage = stage
        self._clock = LogClock(stage.reads)
        self._dating = Dating(stage.reads)
        self._machine_ms = machine_ms
        self._notes = {place: _note(committed[place], self.starts[place]) for place in self.places}
        self._digests = {place: {self.starts[place] - 1: note.last} for place, note in self._notes.items()}
        self._watermarks = {place: Watermark(start) for place, start in self.starts.items()}
        self._committed: dict[PartitionId, tuple[int, int]] = {}  # offset, rebuild_from
        self.nothing_open = asyncio.Event()  # set while every record that was read is done
        self.nothing_open.set()

    @property
    def num_open(self) -> int:
        """How many records were read and are not done yet."""
        return sum(mark.num_open for mark in self._watermarks.values())

    def to_rebuild(self) -> dict[PartitionId, tuple[int, int]]:
        """Return the offsets [first, end) of each partition to fold again before this partition goes live."""
        ranges = {place: (self._notes[place].rebuild_from, self.starts[place]) for place in self.places}
        return {place: (first, end) for place, (first, end) in ranges.items() if first < end}

    def restart_rebuild(self) -> None:
        """Drop what was rebuilt, so that the rebuild begins again."""
        self.fold = Fold(self._stage)
        self._dating = Dating(self._stage.reads)

    def remember(self, records: Sequence[Record], at_s: float, *, unused: Callable[[Record], bool]) -> None:
        """Fold records that are done already, in order, without writing or calling anything; skip `unused` ones."""
        for found in records:
            record = self._dated(found)
            if not unused(record):
                # These records are done: a failure here leaves the state as it is, and sets nothing aside.
                with contextlib.suppress(Exception):
                    self.fold.apply(record)
            self._see(record, at_s)
            self._expire(record.timestamp_ms)

    def go_live(self, at_s: float) -> None:
        """End the rebuild; records read from now on lead to events and calls."""
        clock_ms = capped(max(note.clock_ms for note in self._notes.values()), self._machine_ms())
        self._clock.resume(clock_ms, at_s)
        self._expire(clock_ms)
        self.live = True

    def read(self, place: PartitionId, found: Arrived, at_s: float) -> Arrived:
        """Note a record that was read, open until `done`; return it with its append time corrected if need be."""
        record = self._dated(found) if isinstance(found, Record) else found
        self._watermarks[place].read(record.offset)
        digest = digest_in(record)
        self._digests[place][record.offset] = None if digest is None else digest.hex()
        self._see(record, at_s)
        self.nothing_open.clear()
        return record

    def read_up_to(self, place: PartitionId) -> int:
        """Return the offset of the partition's next record."""
        return self._watermarks[place].next_offset

    def done(self, place: PartitionId, offset: int) -> None:
        """Note that the record is done."""
        self._watermarks[place].done(offset)
        if not self.num_open:
            self.nothing_open.set()

    def clock_ms(self, caught_up: Callable[[PartitionId], bool], at_s: float) -> int | None:
        """Return the log's time; None: it is not known yet."""
        return self._clock.now_ms([place.topic for place in self.places if not caught_up(place)], at_s)

    def commits(self, now_ms: int | None) -> dict[PartitionId, Commit]:
        """Return the commits to make: those whose offset or `rebuild_from` differs from what the group has."""
        if now_ms is not None:
            self._expire(now_ms)
        commits: dict[PartitionId, Commit] = {}
        for place, mark in self._watermarks.items():
            offset = mark.committable
            note = Note(self.fold.rebuild_from(place.topic, offset), now_ms or 0, self._last_before(place, offset))
            if self._committed.get(place) != (offset, note.rebuild_from):
                commits[place] = Commit(offset, note.written())
        return commits

    def committed(self, commits: Mapping[PartitionId, Commit]) -> None:
        """Note that the group has these commits."""
        for place, commit in commits.items():
            if place in self._watermarks:
                self._committed[place] = (commit.offset, read_note(commit.note, commit.offset).rebuild_from)

    def _last_before(self, place: PartitionId, offset: int) -> str | None:
        """Return the digest of the last record that was read before `offset`; forget the digests before that one."""
        digests = self._digests[place]
        before = max((at for at in digests if at < offset), default=None)
        for at in [at for at in digests if before is not None and at < before]:
            del digests[at]
        return None if before is None else digests[before]

    def end(self) -> None:
        """Give the partition up: the work under way for it is cancelled."""
        self.gone = True
        for task in self.tasks:
            task.cancel()

    def _dated(self, record: Record) -> Record:
        if self._stage.clock is not None:
            return record
        taken_ms, fault = self._dating.date(record.topic, record.timestamp_ms, self._machine_ms())
        if fault is not None:
            log.warning("stage=%s partition=%s-%d %s", self._stage.name, record.topic, self.number, fault)
        return record if taken_ms == record.timestamp_ms else record._replace(timestamp_ms=taken_ms)

    def _see(self, record: Arrived, at_s: float) -> None:
        if self._stage.clock is None:
            self._clock.see(record.topic, capped(record.timestamp_ms, self._machine_ms()), at_s)
        elif isinstance(record, Record) and (clock_ms := self._stage.clock(record)) is not None:
            self._clock.see(record.topic, clock_ms, at_s)

    def _expire(self, now_ms: int) -> None:
        self.fold.expire(now_ms, {place.topic: mark.committable for place, mark in self._watermarks.items()})


def _start(committed: Commit | None, begin: int) -> int:
    return begin if committed is None else max(committed.offset, begin)


def _note(committed: Commit | None, start: int) -> Note:
    return Note(start, 0) if committed is None else read_note(committed.note, start)
