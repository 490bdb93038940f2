"""The learning rate of each update. Pure.

The rate falls while the policy comes nearer to what people want, and starts again at its peak where they want something
else: once the score of the last `WINDOW_REWARDS` answers is `RESTART_DROP` below the best that it has been.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

CONSTANT_UPDATES = 8  # at the peak; after these the rate falls with the inverse square root
WINDOW_REWARDS = 128
RESTART_DROP = 0.5  # of a mean of -1 and 1: more than five standard deviations of so many tosses of a coin


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Where the rate's fall began, and how the policy has fared since."""

    num_updates: int = 0  # updates since then, without rejected steps; a rollback restores it
    last_rewards: tuple[float, ...] = ()  # rewards since then, the newest last
    best_mean: float | None = None  # None: there are fewer rewards than a window's

    def after(self, rewards: Sequence[float]) -> "Schedule":
        """Return the schedule for one more step, whose samples have these rewards."""
        last, num_updates = (*self.last_rewards, *rewards)[-WINDOW_REWARDS:], self.num_updates + 1
        if len(last) < WINDOW_REWARDS:
            return Schedule(num_updates=num_updates, last_rewards=last, best_mean=self.best_mean)
        mean = sum(last) / len(last)
        best = mean if self.best_mean is None else max(self.best_mean, mean)
        if mean <= best - RESTART_DROP:
            return Schedule(num_updates=1)
        return Schedule(num_updates=num_updates, last_rewards=last, best_mean=best)

    def learning_rate(self, *, peak: float) -> float:
        """Return the rate of the newest step: `peak` at first, then falling with the inverse square root.

        The two pieces meet: update `CONSTANT_UPDATES` has the peak by either rule.
        """
        return peak * min(1.0, sqrt(CONSTANT_UPDATES / max(1, self.num_updates)))
