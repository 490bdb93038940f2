"""Which events go through the spool and which straight to the log, by session and by the log's pace. Pure.

While a record of a session waits in the spool, the session's further records go through the spool too, so that the
first copies on the log are in the order of the gateway's answers. Other sessions go straight to the log. Once the log
has failed to take a record, no session does, until the log takes one from the spool or the spool is empty.

The pace is a moving mean of acknowledgement times, so that a single late one does not make a broker count as slow. A
time longer than four times the bound counts as four times the bound, so that a broker that is quick again is recognised
after some fifteen acknowledgements. The time that our own busy event loop adds to each is measured and subtracted.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

_WEIGHT = 0.1  # of the newest acknowledgement
_AT_MOST = 4  # times the bound
_OWN_AT_MOST = 10  # times the bound; a process that was suspended would measure hours


class SpooledSessions:
    """The numbers of records that wait in the spool, by key."""

    def __init__(self) -> None:
        self._waiting: Counter[bytes] = Counter()
        self._failed = False

    @property
    def num_records(self) -> int:
        """How many records wait."""
        return self._waiting.total()

    @property
    def failing(self) -> bool:
        """Whether records wait, and the log failed and has taken none of them since."""
        return self._failed and bool(self._waiting)

    def straight(self, key: bytes, *, healthy: bool) -> bool:
        """Return whether the key's next records may go straight to a log that is `healthy` as far as is known."""
        return healthy and key not in self._waiting and not self.failing

    def failed(self) -> None:
        """Note that the log did not take records that went straight to it."""
        self._failed = True

    def enter(self, keys: Iterable[bytes]) -> None:
        """Note that a record of each key is about to be in the spool."""
        self._waiting.update(keys)

    def leave(self, keys: Iterable[bytes]) -> None:
        """Note that the spool did not take the records."""
        for key in keys:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def taken(self, keys: Iterable[bytes]) -> None:
        """Note that the log has the records now."""
        self.leave(keys)
        self._failed = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AckPace:
    """How long the log's acknowledgements take, and how long one of them is waited for."""

    bound_s: float
    mean_s: float = 0.0  # of acknowledgements, less `own_s`
    own_s: float = 0.0  # what this process adds to each, when last measured

    @property
    def patience_s(self) -> float:
        """How long an acknowledgement is waited for."""
        return self.bound_s + self.own_s

    @property
    def slow(self) -> bool:
        """Whether acknowledgements take more than the bound, on the mean."""
        return self.mean_s > self.bound_s

    def after(self, latency_s: float) -> "AckPace":
        """Return the pace after one more acknowledgement."""
        counted_s = min(max(0.0, latency_s - self.own_s), _AT_MOST * self.bound_s)
        return replace(self, mean_s=self.mean_s + _WEIGHT * (counted_s - self.mean_s))

    def with_own_delay(self, own_s: float) -> "AckPace":
        """Return the pace with `own_s`, at most ten bounds, as what this process adds to each acknowledgement."""
        return replace(self, own_s=min(own_s, _OWN_AT_MOST * self.bound_s))

    def quick(self, waited_s: float) -> bool:
        """Return whether to wait for the log, whose oldest missing acknowledgement is `waited_s` old."""
        return not self.slow and waited_s <= self.patience_s
