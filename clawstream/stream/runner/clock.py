"""The log's clock for one partition number of several topics, as far as the broker's clock can be trusted. Pure.

The clock never passes the append time of a record that is still to be read. While records are unread it shows the time
of the topic that was read least far; once all are read it runs on, by this machine's steady clock.

A broker's wrong clock must not end a key's history. So a record dated far ahead of this machine's clock counts as
appended now. And no record counts as older than the one before it in its partition, as the log is in append order.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

BELIEVED_MS = 600_000  # two clocks that are set right differ by less than this


class LogClock:
    """The log's clock, from the newest append time seen of each topic."""

    def __init__(self, topics: Iterable[str]) -> None:
        self._seen_ms: dict[str, int | None] = dict.fromkeys(topics)
        self._newest_ms: int | None = None
        self._newest_at_s = 0.0
        self._last_ms: int | None = None

    def see(self, topic: str, timestamp_ms: int, at_s: float) -> None:
        """Note a record of `topic`, appended at `timestamp_ms` and read at `at_s` of this machine's steady clock."""
        self._seen_ms[topic] = max(timestamp_ms, self._seen_ms[topic] or 0)
        self._advance(timestamp_ms, at_s)

    def resume(self, clock_ms: int, at_s: float) -> None:
        """Go on from `clock_ms`, the log's time when this partition was last worked on."""
        if clock_ms > 0:
            self._advance(clock_ms, at_s)
            self._last_ms = max(clock_ms, self._last_ms or 0)

    def now_ms(self, behind: Collection[str], at_s: float) -> int | None:
        """Return the log's time; `behind` are the topics with records still to read. None: it is not known yet."""
        if self._newest_ms is None:
            return self._last_ms
        if behind:
            times = [time for topic in behind if (time := self._seen_ms[topic]) is not None]
            now = min(times) if len(times) == len(behind) else None
        else:
            now = self._newest_ms + int((at_s - self._newest_at_s) * 1000)
        if now is not None:
            self._last_ms = max(now, self._last_ms or 0)
        return self._last_ms

    def _advance(self, timestamp_ms: int, at_s: float) -> None:
        if self._newest_ms is None or timestamp_ms > self._newest_ms:
            self._newest_ms, self._newest_at_s = timestamp_ms, at_s


class ClockFault(NamedTuple):
    """The broker's clock is found to be wrong, or right again."""

    by_ms: int  # positive: ahead of this machine's clock; negative: behind the record before; 0: right again

    def __str__(self) -> str:
        if not self.by_ms:
            return "clock=believed reason=the records' append times are plausible again"
        words = "ahead of this machine's clock" if self.by_ms > 0 else "behind the record before them"
        return (
            f"clock=doubted records are dated {abs(self.by_ms) / 1000:,.0f} s {words}. Their times are corrected, so "
            "that no session ends early; set the clocks of broker and machine"
        )


class Dating:
    """Corrects the append times of records that can't be right, by topic."""

    def __init__(self, topics: Iterable[str]) -> None:
        self._newest_ms: dict[str, int | None] = dict.fromkeys(topics)
        self._in_doubt: set[str] = set()

    def date(self, topic: str, timestamp_ms: int, machine_ms: int) -> tuple[int, ClockFault | None]:
        """Return when the next record of `topic` counts as appended, and a fault to report where one begins or ends."""
        newest = self._newest_ms[topic]
        ahead_ms, behind_ms = timestamp_ms - machine_ms, 0 if newest is None else newest - timestamp_ms
        taken = capped(timestamp_ms, machine_ms)
        taken = taken if newest is None else max(taken, newest)
        self._newest_ms[topic] = taken
        by_ms = ahead_ms if ahead_ms > BELIEVED_MS else -behind_ms if behind_ms > BELIEVED_MS else 0
        if bool(by_ms) is (topic in self._in_doubt):
            return taken, None
        (self._in_doubt.add if by_ms else self._in_doubt.discard)(topic)
        return taken, ClockFault(by_ms)


def capped(time_ms: int, machine_ms: int) -> int:
    """Return `time_ms`, or this machine's time if `time_ms` is too far ahead of it to be believed."""
    return machine_ms if time_ms > machine_ms + BELIEVED_MS else time_ms
