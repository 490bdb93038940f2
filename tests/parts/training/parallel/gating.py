"""What tests of the gate ask of each process of a team, or of one that is whole."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import distributed as dist

from clawstream.events import SampleAssembled
from clawstream.training import gating
from tests.parts.training.planted import FAULTS


def figures(state: dict[str, Any], samples: list[SampleAssembled], version: int) -> dict[str, Any]:
    """Take a step that is not refused; return what was measured of it.

    Each process would draw other tokens than the first.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: dict[str, Any] = {}
    with ExitStack() as listening:
        for name in ("harm", "astray", "misspoken"):
            listening.enter_context(_heard(name, found))
        state["trainer"].update(samples, version=version, seed=version + rank, gated=True)
    return found


def plant(state: dict[str, Any], fault: str) -> None:
    """Have a fault from here on."""
    state["healthy"] = state["trainer"]._settings
    FAULTS[fault](state["trainer"])


def clear(state: dict[str, Any]) -> None:
    """Have it no more; what it did is there."""
    trainer = state["trainer"]
    trainer._settings = state["healthy"]
    vars(trainer).pop("_step", None)
    vars(trainer._loss).pop("of", None)


@contextmanager
def _heard(name: str, found: dict[str, Any]) -> Iterator[None]:
    own = getattr(gating, name)

    def decided(*args: Any, **options: Any) -> Any:
        found[name] = args
        return own(*args, **options)

    with patch.object(gating, name, decided):
        yield
