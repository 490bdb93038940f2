"""Whether the log is quick enough to be waited for, by its last acknowledgements. Pure.

The measure is a moving mean, so that one late acknowledgement among many does not make a slow broker. Each counts as a
few bounds at most, so that a broker that is quick again is recognised within some ten acknowledgements. The time that
our own busy event loop adds to each is measured separately and subtracted.
"""

from dataclasses import dataclass, replace

_WEIGHT = 0.1  # of the newest acknowledgement
_AT_MOST = 4  # times the bound
_OURS_AT_MOST = 10  # times the bound; a process that was stopped measures the stop


@dataclass(frozen=True, slots=True, kw_only=True)
class AckPace:
    """How long the log's acknowledgements take, and how long one of them is waited for."""

    bound_s: float
    mean_s: float = 0.0  # of acknowledgements, without our own share
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

    def beside(self, own_s: float) -> "AckPace":
        """Return the pace with `own_s`, at most ten bounds, as what this process adds to each acknowledgement."""
        return replace(self, own_s=min(own_s, _OURS_AT_MOST * self.bound_s))

    def quick(self, waited_s: float) -> bool:
        """Return whether to wait for the log, whose oldest missing acknowledgement is `waited_s` old."""
        return not self.slow and waited_s <= self.patience_s
