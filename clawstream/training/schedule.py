"""The learning rate of each update. Pure."""

from math import sqrt


def learning_rate(update: int, *, peak: float, constant_updates: int) -> float:
    """Return the rate of the n-th update (from 1): `peak` at first, then falling with the inverse square root.

    The two pieces meet: update `constant_updates` has the peak by either rule.
    """
    assert update >= 1
    return peak * min(1.0, sqrt(constant_updates / update))
