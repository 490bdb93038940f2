"""Which programs simulate the people of a scenario, and how a run with them goes.

Everything that a run has to know of a scenario is here; what is asked in it stands in `scenarios`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The programs of a scenario."""

    asks: str = "clawstream.simulation.student"  # modules
    scores: str = "clawstream.simulation.scorer"
    methods: tuple[str, ...] = ("binary", "opd", "combined", "topk")
    bases: tuple[str, ...] = ("standard", "hard", "demo")
    votes: int = 3  # on each answer
    attempts: int | None = None  # at each task, which are a group; None: people talk, and nobody tries anything
    batch_samples: int = 16


STEPS_A_ROUND = 96  # of an environment, between two scores at least: arms differ in updates, never in these
_PEOPLE = Cast()
CASTS: Mapping[str, Cast] = MappingProxyType(
    {
        "student": _PEOPLE,
        "all": _PEOPLE,
        "tools": Cast(
            asks="clawstream.simulation.agent",
            scores="clawstream.simulation.agent_scorer",
            methods=("stepwise", "outcome"),
            bases=("tools",),
            votes=1,  # so that as many verdicts are wrong as votes
            attempts=4,
            batch_samples=32,
        ),
    }
)
