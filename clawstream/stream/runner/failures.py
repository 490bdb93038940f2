"""How many of the latest records could not be used. Pure: the clock is the caller's.

The one rule: a few bad records are set aside, a flood stops the stage, since then the stage or its source is wrong.
"""

from collections import deque
from collections.abc import Callable

from clawstream.errors import TooManyFailures

WINDOW_S = 300.0
LARGEST_SHARE = 0.01
FEWEST = 10  # bad records; with fewer, their share means nothing
_SLOT_S = 1.0


def flooded(stage: str, bad: int, read: int) -> TooManyFailures:
    """Return the error that stops the stage."""
    return TooManyFailures(
        f"{stage} set {bad} of the last {read} records aside within {WINDOW_S / 60:g} minutes, more than "
        f"{LARGEST_SHARE:.0%}: it stops, as then it is not the records that are at fault. Nothing is lost: they are in "
        f"the dead-letter queues. Look at `clawstream dlq list --stage {stage}`, mend what it says, start the stage, "
        "and have them used with `clawstream dlq replay`"
    )


class FailureRate:
    """Records read and records set aside in the last five minutes; parked ones are not counted."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._slots: deque[tuple[float, int, int]] = deque()  # (start of the slice, records, bad records)

    def read(self) -> None:
        """Count a record that was read."""
        self._add(1, 0)

    def set_aside(self) -> None:
        """Count a record that was set aside."""
        self._add(0, 1)

    def too_many(self) -> tuple[int, int] | None:
        """Return (bad, read) of the window where there are too many bad ones; None: there are not."""
        while self._slots and self._slots[0][0] <= self._now_s() - WINDOW_S:
            self._slots.popleft()
        num_read = sum(slot[1] for slot in self._slots)
        num_bad = sum(slot[2] for slot in self._slots)
        return (num_bad, num_read) if num_bad >= FEWEST and num_bad > LARGEST_SHARE * num_read else None

    def _add(self, num_read: int, num_bad: int) -> None:
        now_s = self._now_s()
        if self._slots and now_s - self._slots[-1][0] < _SLOT_S:
            since_s, read, bad = self._slots.pop()
            self._slots.append((since_s, read + num_read, bad + num_bad))
        else:
            self._slots.append((now_s, num_read, num_bad))
