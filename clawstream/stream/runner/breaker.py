"""Whether a peer is to be called at all: closed, open for a while, or letting one call through to see. Pure.

A peer that fails call after call is left alone for a while, and that time counts against no call's deadline. One call
that keeps failing does not open the breaker: `FAILING_CALLS` different ones have to fail in a row.
"""

from dataclasses import dataclass, field

FAILING_CALLS = 3  # different calls, with no success between them
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


@dataclass(slots=True)
class Breaker:
    """One worker's view of the peer that its calls go to; seconds of one steady clock come in as arguments."""

    first_wait_s: float = FIRST_WAIT_S
    _failing: set[int] = field(default_factory=set)  # numbers of the calls that failed since the last success
    _opened_at_s: float | None = None
    _wait_s: float = 0.0
    _probe_at_s: float = 0.0
    _probing: int | None = None
    _open_before_s: float = 0.0  # how long it was open in all before its current opening

    @property
    def is_open(self) -> bool:
        """Whether calls wait."""
        return self._opened_at_s is not None

    @property
    def opened_at_s(self) -> float | None:
        """When the breaker opened; None: it is closed."""
        return self._opened_at_s

    def open_for_s(self, now_s: float) -> float:
        """Return how long the breaker has been open in all."""
        return self._open_before_s + (0.0 if self._opened_at_s is None else now_s - self._opened_at_s)

    def wait_s(self, now_s: float) -> float | None:
        """Return how long a call has to wait before asking again; 0: it may go; None: until the probe returns."""
        if self._opened_at_s is None:
            return 0.0
        return None if self._probing is not None else max(0.0, self._probe_at_s - now_s)

    def start(self, call: int) -> None:
        """Note that the call is made; while the breaker is open it is the probe."""
        if self.is_open:
            assert self._probing is None, "one call at a time finds out"
            self._probing = call

    def succeed(self, now_s: float) -> bool:
        """Note that the peer answered; True: the breaker was open and is closed now."""
        was_open = self.is_open
        self._open_before_s = self.open_for_s(now_s)
        self._failing.clear()
        self._opened_at_s = self._probing = None
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
        self._opened_at_s = now_s
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
