"""When the records of a partition number were appended, as far as the broker's clock can be believed. Pure.

The one rule: a broker's clock that was set wrong ends no key's history. A record dated far ahead of this machine's
clock is dated now, and no record is dated before the one that precedes it in its partition: the log is in append order.
"""

from collections.abc import Iterable
from typing import NamedTuple

BELIEVED_MS = 600_000  # clocks that are set right differ by less


class Doubt(NamedTuple):
    """The broker's clock went wrong by `off_ms`, or is believed again."""

    by_ms: int  # ahead of this machine's where positive, behind the record before where negative; 0: believed

    def __str__(self) -> str:
        if not self.by_ms:
            return "clock=believed reason=records are dated as they should be again"
        words = "ahead of this machine's clock" if self.by_ms > 0 else "behind the record before them"
        return (
            f"clock=doubted records are dated {abs(self.by_ms) / 1000:,.0f} s {words}. They are taken to be of now, so "
            "no session is taken to be over; set the clocks of broker and machine"
        )


class Dating:
    """The newest append time believed, by topic."""

    def __init__(self, topics: Iterable[str]) -> None:
        self._newest_ms: dict[str, int | None] = dict.fromkeys(topics)
        self._in_doubt: set[str] = set()

    def date(self, topic: str, timestamp_ms: int, machine_ms: int) -> tuple[int, Doubt | None]:
        """Return when the next record of `topic` was appended; and a `Doubt` to report, where doubt begins or ends."""
        newest = self._newest_ms[topic]
        ahead_ms, behind_ms = timestamp_ms - machine_ms, 0 if newest is None else newest - timestamp_ms
        taken = capped(timestamp_ms, machine_ms)
        taken = taken if newest is None else max(taken, newest)
        self._newest_ms[topic] = taken
        by_ms = ahead_ms if ahead_ms > BELIEVED_MS else -behind_ms if behind_ms > BELIEVED_MS else 0
        if bool(by_ms) is (topic in self._in_doubt):
            return taken, None
        (self._in_doubt.add if by_ms else self._in_doubt.discard)(topic)
        return taken, Doubt(by_ms)


def capped(time_ms: int, machine_ms: int) -> int:
    """Return the time, or this machine's time where it lies too far ahead of that to be believed."""
    return machine_ms if time_ms > machine_ms + BELIEVED_MS else time_ms
