"""A breaker, which says whether a peer is called at all, and the share of recent records that could not be used. Pure.

A peer that fails call after call is not called for a while. One call that keeps failing does not open the breaker:
`FAILING_CALLS` different calls have to fail without a success between.
A few bad records are set aside; too many stop the stage, since then the stage or its source is wrong.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from clawstream.errors import TooManyFailures

FAILING_CALLS = 3  # different calls, with no success between them
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
WINDOW_S = 300.0
LARGEST_SHARE = 0.01
FEWEST = 10  # bad records; with fewer, their share means nothing
_SLOT_S = 1.0


@dataclass(slots=True)
class Breaker:
    """One worker's view of the peer that its calls go to; all arguments in seconds are of one steady clock."""

    first_wait_s: float = FIRST_WAIT_S
    opened_at_s: float | None = None  # None: the breaker is closed, so calls may go
    _failing: set[int] = field(default_factory=set)  # numbers of the calls that failed since the last success
    _wait_s: float = 0.0
    _probe_at_s: float = 0.0
    _probing: int | None = None
    _open_before_s: float = 0.0  # how long it was open in all before its current opening

    @property
    def is_open(self) -> bool:
        """Whether all calls but a probe wait."""
        return self.opened_at_s is not None

    def open_for_s(self, now_s: float) -> float:
        """Return how long the breaker has been open in all."""
        return self._open_before_s + (0.0 if self.opened_at_s is None else now_s - self.opened_at_s)

    def wait_s(self, now_s: float) -> float | None:
        """Return how long a call has to wait before asking again; 0: it may go; None: until the probe returns."""
        if self.opened_at_s is None:
            return 0.0
        return None if self._probing is not None else max(0.0, self._probe_at_s - now_s)

    def start(self, call: int) -> None:
        """Note that the call is made; while the breaker is open it is the probe."""
        if self.is_open:
            assert self._probing is None, "one probe at a time"
            self._probing = call

    def succeed(self, now_s: float) -> bool:
        """Note that the peer answered; True: the breaker was open and is closed now."""
        was_open = self.is_open
        self._open_before_s = self.open_for_s(now_s)
        self._failing.clear()
        self.opened_at_s = self._probing = None
        self._wait_s = 0.0
        return was_open

    def fail(self, call: int, now_s: float, *, retry_after_s: float = 0.0) -> bool:
        """Note that the peer did not answer; True: the breaker was closed and is open now."""
        self._failing.add(call)
        if self.is_open:
            if self._probing == call:
                self._probing = None
                self._wait(now_s, retry_after_s)
            return False
        if len(self._failing) < FAILING_CALLS:
            return False
        self.opened_at_s = now_s
        self._wait(now_s, retry_after_s)
        return True

    def abandon(self, call: int) -> None:
        """Note that the call was cut off, so it says nothing about the peer."""
        self._failing.discard(call)
        if self._probing == call:
            self._probing = None

    def _wait(self, now_s: float, retry_after_s: float) -> None:
        self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s) or self.first_wait_s
        self._probe_at_s = now_s + max(self._wait_s, retry_after_s)


def flooded(stage: str, bad: int, read: int) -> TooManyFailures:
    """Return the error that stops the stage."""
    return TooManyFailures(
        f"{stage} set {bad} of the last {read} records aside within {WINDOW_S / 60:g} minutes, more than "
        f"{LARGEST_SHARE:.0%}: it stops, since so many point to a fault in the stage or its source. None is lost: "
        f"they are in the dead-letter queues. Look at `clawstream dlq list --stage {stage}`, mend the fault, start the "
        "stage, and have the records used with `clawstream dlq replay`"
    )


class FailureRate:
    """Counts the records read and the records set aside in the last five minutes; parked records do not count."""

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
        """Return (bad, read) of the window where too many records are bad; None: not too many."""
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
