"""What the tests of commands share."""

import importlib
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _torch_is_there() -> None:
    """Commands hide torch from their process unless it is loaded; in this one later tests need it."""
    importlib.import_module("torch")


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    """Commands that run in this process set up logging, and tests that come later read what is logged."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
