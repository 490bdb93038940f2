"""Which programs simulate the people of a scenario, and how a run with them goes.

Everything that a run has to know of a scenario is here; its questions are in `scenarios`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from clawstream.simulation.learn.controls import Control

_OF_PEOPLE, _OF_AGENTS = ("binary", "opd", "combined", "topk"), ("outcome", "stepwise")  # methods


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPrograms:
    """The programs of a scenario."""

    asks: str = "clawstream.simulation.student"  # modules
    scores: str = "clawstream.simulation.scorer"
    methods: tuple[str, ...] = _OF_PEOPLE
    bases: tuple[str, ...] = ("standard", "hard", "demo", "own")
    votes: int = 3  # on each answer
    attempts: int | None = None  # at each task, which are a group; None: people talk, and nobody tries anything
    batch_samples: int = 16
    unit: str = "updates"  # that a run counts
    controls: Mapping[Control, tuple[str, ...]]  # the methods that each changes
    silenced: Mapping[Control, tuple[str, ...]]  # those it leaves nothing to learn from; others are compared


STEPS_A_ROUND = 96  # of an environment, between two scores at least: arms differ in updates, never in these
_PEOPLE = ScenarioPrograms(
    controls=MappingProxyType(  # by hints alone no verdict counts
        {Control.SHUFFLED: _OF_PEOPLE, Control.COIN: ("binary", "combined"), Control.FROZEN: _OF_PEOPLE}
    ),
    silenced=MappingProxyType(  # hints teach whatever the verdicts are
        {Control.SHUFFLED: _OF_PEOPLE, Control.COIN: ("binary",), Control.FROZEN: _OF_PEOPLE}
    ),
)
CASTS: Mapping[str, ScenarioPrograms] = MappingProxyType(
    {
        "student": _PEOPLE,
        "all": _PEOPLE,
        "tools": ScenarioPrograms(
            asks="clawstream.simulation.agent",
            scores="clawstream.simulation.agent_scorer",
            methods=_OF_AGENTS,
            bases=("tools",),
            votes=1,  # so that as many verdicts are wrong as votes
            attempts=4,
            batch_samples=32,
            unit="rounds",
            controls=MappingProxyType(  # with outcomes alone no verdict counts
                {Control.SHUFFLED: ("stepwise",), Control.COIN: ("stepwise",), Control.FROZEN: _OF_AGENTS}
            ),
            silenced=MappingProxyType({Control.FROZEN: _OF_AGENTS}),  # outcomes teach whatever the verdicts are
        ),
    }
)
