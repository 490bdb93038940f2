"""How many examples a property is tried on: a multiple of what the Hypothesis profile in force says."""

from typing import Any

from hypothesis import settings

QUICK, FULL = "quick", "ci"
_AT_LEAST = 3


def register() -> None:
    """Both profiles are known, and the quick one holds until `--hypothesis-profile` names another."""
    settings.register_profile(QUICK, deadline=None, max_examples=10)
    settings.register_profile(FULL, deadline=None, max_examples=100, derandomize=True)
    settings.load_profile(QUICK)


def examples(times: float, **more: Any) -> settings:
    """Return the settings of a property that is tried so many times as often as the profile says.

    Below 1 where an example is dear (a database, an engine), above 1 where the states are many. `more` is Hypothesis's.
    """
    return settings(max_examples=max(_AT_LEAST, round(times * settings().max_examples)), **more)
