"""The learning rate of each update. Pure.

The one rule: it falls while the policy comes nearer to what people want, and starts anew where they want other things:
once the score of the last `WINDOW_REWARDS` answers is `RESTART_DROP` below the best that it has been.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

WINDOW_REWARDS = 128
RESTART_DROP = 0.5  # of a mean of -1 and 1: more than five standard deviations of so many tosses of a coin


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Where the rate's fall began, and how the policy has fared since."""

    began_after: int = 0  # a version: the next update is the first
    last_rewards: tuple[float, ...] = ()  # since then, the newest last
    best_mean: float | None = None  # None: there were fewer than a window's

    def before(self, version: int, rewards: Sequence[float]) -> "Schedule":
        """Return the schedule by which the step that makes `version` is taken, its samples having these rewards."""
        last = (*self.last_rewards, *rewards)[-WINDOW_REWARDS:]
        if len(last) < WINDOW_REWARDS:
            return Schedule(began_after=self.began_after, last_rewards=last, best_mean=self.best_mean)
        mean = sum(last) / len(last)
        best = mean if self.best_mean is None else max(self.best_mean, mean)
        if mean <= best - RESTART_DROP:
            return Schedule(began_after=version - 1)
        return Schedule(began_after=self.began_after, last_rewards=last, best_mean=best)

    def learning_rate(self, version: int, *, peak: float, constant_updates: int) -> float:
        """Return the rate of the step that makes `version`: `peak` at first, then falling with the inverse square root.

        The two pieces meet: update `constant_updates` has the peak by either rule.
        """
        update = version - self.began_after
        assert update >= 1
        return peak * min(1.0, sqrt(constant_updates / update))
