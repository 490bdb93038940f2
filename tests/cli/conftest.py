"""What the tests of commands share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    """Commands that run in this process set up logging, and tests that come later read what is logged."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
