"""Whether the log is quick enough to be waited for, by its last acknowledgements. Pure.

A moving mean, so that one late acknowledgement among many is not taken for a slow broker; and none counts for more than
a few bounds, so that a broker that is quick again is found to be so within some ten acknowledgements. What a busy event
loop of ours adds to each is not the broker's: it is measured beside, and taken off.
"""

from dataclasses import dataclass, replace

_WEIGHT = 0.1  # of the newest acknowledgement
_AT_MOST = 4  # times the bound
_OURS_AT_MOST = 10  # times the bound; a process that was stopped measures the stop


@dataclass(frozen=True, slots=True, kw_only=True)
class AckPace:
    """How long the log's acknowledgements take, and how long one of them is waited for."""

    bound_s: float
    mean_s: float = 0.0  # of acknowledgements, less what is ours
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
        """Return the pace while this process adds so much to each acknowledgement, or ten bounds where that is more."""
        return replace(self, own_s=min(own_s, _OURS_AT_MOST * self.bound_s))

    def quick(self, waited_s: float) -> bool:
        """Return whether the log may be waited for, while its oldest missing acknowledgement is waited for so long."""
        return not self.slow and waited_s <= self.patience_s
