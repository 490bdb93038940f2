"""The log's clock for one partition of several topics. Pure: this machine's seconds come in as arguments.

The one rule: the clock never passes the append time of a record that is still to be read. It stands where the slowest
topic stands, and runs on only once every record on the log has been read.
"""

from collections.abc import Collection, Iterable


class LogClock:
    """The log's clock, from the newest append times seen by topic."""

    def __init__(self, topics: Iterable[str]) -> None:
        self._seen_ms: dict[str, int | None] = dict.fromkeys(topics)
        self._newest_ms: int | None = None
        self._newest_at_s = 0.0
        self._said_ms: int | None = None

    def see(self, topic: str, timestamp_ms: int, at_s: float) -> None:
        """Note a record of `topic`, appended at `timestamp_ms` and read at `at_s` of this machine's steady clock."""
        self._seen_ms[topic] = max(timestamp_ms, self._seen_ms[topic] or 0)
        self._advance(timestamp_ms, at_s)

    def resume(self, clock_ms: int, at_s: float) -> None:
        """Go on from `clock_ms`, the log's time when this partition was last worked on."""
        if clock_ms > 0:
            self._advance(clock_ms, at_s)
            self._said_ms = max(clock_ms, self._said_ms or 0)

    def now_ms(self, behind: Collection[str], at_s: float) -> int | None:
        """Return the log's time; `behind` are the topics with records to read. None: the time is not known yet."""
        if self._newest_ms is None:
            return self._said_ms
        if behind:
            seen = [self._seen_ms[topic] for topic in behind]
            times = [time for time in seen if time is not None]
            now = min(times) if len(times) == len(seen) else None
        else:
            now = self._newest_ms + int((at_s - self._newest_at_s) * 1000)
        if now is not None:
            self._said_ms = max(now, self._said_ms or 0)
        return self._said_ms

    def _advance(self, timestamp_ms: int, at_s: float) -> None:
        if self._newest_ms is None or timestamp_ms > self._newest_ms:
            self._newest_ms, self._newest_at_s = timestamp_ms, at_s
