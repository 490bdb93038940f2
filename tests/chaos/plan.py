"""What a run is to be: its faults, its load, and which parts there are."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.guards import Guard
from tests.chaos.oracle import STAGES
from tests.chaos.schedule import Fault, schedule

PARTS = {"gateway": 2, "turns": 2, "judging": 2, "samples": 2, "project": 2, "train": 1, "weights": 1}
NAMES = tuple(f"{stage}-{number}" if slots > 1 else stage for stage, slots in PARTS.items() for number in range(slots))
_AFTERWARDS_S = 5.0  # under load, when the last fault has passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run from when every part is ready."""

    faults: Sequence[Fault]
    seconds: float
    clients: int = 24
    partition: int | None = None  # that all sessions are on; None: they are on all
    stages: frozenset[str] = STAGES
    without: Guard | None = None
    stale_writer: bool = False  # a projector comes to write what another has written

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the processes."""
        return tuple(name for name in NAMES if name.partition("-")[0] in self.stages)


def random_faults(seed: int, seconds: float) -> Plan:
    """Return the run of a seed."""
    return Plan(faults=schedule(seed, seconds, NAMES), seconds=seconds)


def over_s(faults: Sequence[Fault]) -> float:
    """Return how long a run with these faults takes."""
    return max(fault.at_s + fault.lasts_s for fault in faults) + _AFTERWARDS_S
