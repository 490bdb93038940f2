"""The weights that tests of takeovers publish."""

from tests.unit.weights.conftest import weights

__all__ = ["weights"]
