"""The learning rate, update by update."""

import pytest

from clawstream.training.schedule import learning_rate


def test_the_rate_is_constant_and_then_falls_with_the_inverse_square_root() -> None:
    rates = [learning_rate(u, peak=2e-4, constant_updates=8) for u in (1, 8, 32, 128)]

    assert rates == pytest.approx([2e-4, 2e-4, 1e-4, 5e-5])


def test_the_rate_never_rises() -> None:
    rates = [learning_rate(u, peak=1.0, constant_updates=8) for u in range(1, 100)]

    assert rates == sorted(rates, reverse=True)
