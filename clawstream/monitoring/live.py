"""What the monitor knows at this moment, and its report of that. Pure: the time comes in as an argument.

While the last hour is still being read, `rebuilt` is False: the report then covers only a part of the hour.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clawstream.monitoring.alarm import starved
from clawstream.monitoring.policy import PolicyBoard
from clawstream.monitoring.windows import MINUTE_MS, AppendTimes, BrokerClock, EventCounts, Windows, total
from clawstream.monitoring.windows import alarm as clock_alarm
from clawstream.stream.log import Arrived
from clawstream.stream.stage import Record

JUDGED_WITHIN_MINUTES = 20  # a vote may take 16, by the default judge.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """A minute or an hour, with the counts of its events."""

    start_ms: int  # since the epoch, UTC
    seconds: float  # how much of it has passed
    tally: EventCounts

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens per second, by the exchanges on the log; None: no time has passed."""
        return self.tally.output_tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReport:
    """What the monitor answers with."""

    at_ms: int
    rebuilt: bool  # False: the last hour is still being read
    published_version: int | None
    active_versions: Mapping[str, int]  # by engine
    samples_waiting: int
    oldest_waiting_s: float | None  # None: no sample waits
    alarm: str | None  # why learning stands still; None: it does not
    clock_off_ms: int | None  # by how much the broker's clock is ahead (negative: behind); None: not known
    clock_alarm: str | None  # says that the broker's clock is wrong; None: nothing indicates that it is
    hour: TimeSpan
    minutes: tuple[TimeSpan, ...]  # in order; the last one is not over


class Live:
    """The windows and the policy's state, as far as the log has been read."""

    def __init__(self, board: PolicyBoard, unread: Mapping[tuple[str, int], int], *, judged: bool = True) -> None:
        self._windows = Windows()
        self._judged = judged
        self._board = board
        self._clock, self._append_times = BrokerClock(), AppendTimes()
        self._unread = dict(unread)  # the end of each partition when reading began, until that is reached

    def receive(self, found: Arrived, now_ms: int) -> None:
        """Take in one record that was read at `now_ms`."""
        self._clock.learn(found)
        arrived = self._append_times.corrected(found, now_ms)
        place = (arrived.topic, arrived.partition)
        if arrived.offset + 1 >= self._unread.get(place, 0):
            self._unread.pop(place, None)
        if self._windows.record(arrived) and isinstance(arrived, Record):
            self._board.learn(arrived)

    def report(self, now_ms: int) -> MonitorReport:
        """Return the report as of now."""
        windows = self._windows.last_hour(now_ms)
        oldest_ms = self._board.oldest_ms
        start_ms = windows[0].start_ms
        of_hour = total(windows)
        off_ms = self._clock.off_ms(now_ms)
        return MonitorReport(
            at_ms=now_ms,
            rebuilt=not self._unread,
            published_version=self._board.published_version,
            active_versions=dict(self._board.active_versions),
            samples_waiting=self._board.num_waiting,
            oldest_waiting_s=None if oldest_ms is None else max(0, now_ms - oldest_ms) / 1000,
            alarm=self._board.alarm(now_ms)
            or starved(of_hour, total(windows[:-JUDGED_WITHIN_MINUTES]), judged=self._judged),
            clock_off_ms=off_ms,
            clock_alarm=clock_alarm(off_ms),
            hour=TimeSpan(start_ms=start_ms, seconds=(now_ms - start_ms) / 1000, tally=of_hour),
            minutes=tuple(
                TimeSpan(
                    start_ms=window.start_ms,
                    seconds=min(MINUTE_MS, now_ms - window.start_ms) / 1000,
                    tally=window.tally,
                )
                for window in windows
            ),
        )


def as_json(report: MonitorReport) -> dict[str, Any]:
    """Return the report as plain values; what is not known is null."""
    return asdict(report) | {"hour": _span(report.hour), "minutes": [_span(minute) for minute in report.minutes]}


def _span(span: TimeSpan) -> dict[str, Any]:
    tally = span.tally
    return {
        "start_ms": span.start_ms,
        "seconds": span.seconds,
        **asdict(tally),
        "tokens_per_s": span.tokens_per_s,
        "mean_score": tally.mean_score,
        "unreadable_share": tally.unreadable_share,
        "failed_share": tally.failed_share,
    }
