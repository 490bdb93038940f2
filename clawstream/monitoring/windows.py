"""One-minute windows over the log, by the log's own clock, for the last hour. Pure.

A record counts once, however often it is delivered, and so does an event that was written twice within the hour.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add

from clawstream.events import Event
from clawstream.monitoring.tallies import NOTHING, UNDECODABLE, EventCounts, tally
from clawstream.stream.log import Arrived
from clawstream.stream.stage import Record

MINUTE_MS = 60_000
KEPT_MINUTES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A minute of the log."""

    start_ms: int  # since the epoch, UTC
    tally: EventCounts


class Windows:
    """The windows of the last hour; memory grows with the events of an hour and no further."""

    def __init__(self) -> None:
        self._tallies: dict[int, EventCounts] = {}  # by start
        self._ids: dict[int, set[int]] = {}  # of the events of each window, hashed
        self._next_offsets: dict[tuple[str, int], int] = {}
        self._oldest_ms = 0

    def record(self, arrived: Arrived) -> bool:
        """Count a record in its minute; return whether it is new: not a redelivered record or a repeated event."""
        place = (arrived.topic, arrived.partition)
        if arrived.offset < self._next_offsets.get(place, 0):
            return False
        self._next_offsets[place] = arrived.offset + 1
        start_ms = arrived.timestamp_ms - arrived.timestamp_ms % MINUTE_MS
        self._forget_before(start_ms - (KEPT_MINUTES - 1) * MINUTE_MS)
        if start_ms < self._oldest_ms:
            return True
        if isinstance(arrived, Record) and self._repeated(arrived.event, start_ms):
            return False
        added = tally(arrived.event) if isinstance(arrived, Record) else UNDECODABLE
        self._tallies[start_ms] = self._tallies.get(start_ms, NOTHING) + added
        return True

    def last_hour(self, now_ms: int) -> tuple[Window, ...]:
        """Return the last hour's windows in order, empty ones included; the last one holds `now_ms`."""
        newest = now_ms - now_ms % MINUTE_MS
        starts = range(newest - (KEPT_MINUTES - 1) * MINUTE_MS, newest + 1, MINUTE_MS)
        return tuple(Window(start_ms=start, tally=self._tallies.get(start, NOTHING)) for start in starts)

    def _repeated(self, event: Event, start_ms: int) -> bool:
        name = hash(event.event_id)
        if any(name in ids for ids in self._ids.values()):
            return True
        self._ids.setdefault(start_ms, set()).add(name)
        return False

    def _forget_before(self, oldest_ms: int) -> None:
        if oldest_ms <= self._oldest_ms:
            return
        self._oldest_ms = oldest_ms
        for kept in (self._tallies, self._ids):
            for start_ms in [start for start in kept if start < oldest_ms]:
                del kept[start_ms]


def total(windows: Iterable[Window]) -> EventCounts:
    """Return the sum of `windows`."""
    return reduce(add, (window.tally for window in windows), NOTHING)
