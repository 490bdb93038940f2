"""Which runs a comparison is made of, and by which name each is known. Pure.

The one rule: two cells with the same plan have the same name, and whatever changes a plan changes the name.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clawstream.simulation.casting import CASTS
from clawstream.simulation.controls import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a grid."""

    scenario: str
    base: str
    base_sha: str  # of the recipe that the base policy was built by
    problems_sha: str  # of all that is asked
    method: str
    seed: int
    control: Control | None
    updates: int
    learning_rate: float
    epochs: int  # passes over each batch
    lora_rank: int | None  # None: all weights are trained
    hurry: bool  # people do not wait for the policy that learned from what they said
    score_at: tuple[int, ...]  # updates, ascending

    @property
    def name(self) -> str:
        """Its folder's name."""
        plan = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(plan.encode()).hexdigest()[:8]
        control = () if self.control is None else (self.control.value,)
        return "-".join((self.scenario, self.base, self.method, *control, f"seed{self.seed}", digest))

    @property
    def title(self) -> str:
        """How people are told of it."""
        control = "" if self.control is None else f" {self.control.value}"
        return f"{self.method}{control} seed {self.seed}"

    def as_json(self) -> dict[str, Any]:
        """What `cell_of` reads."""
        return asdict(self)


def cell_of(plan: dict[str, Any]) -> Cell:
    """Return the cell that was written as `as_json`."""
    control = None if plan["control"] is None else Control(plan["control"])
    return Cell(**plan | {"control": control, "score_at": tuple(plan["score_at"])})


def grid(
    *, scenario: str, base: str, base_sha: str, problems_sha: str, methods: Sequence[str], seeds: Sequence[int],
    controls: Sequence[Control], updates: int, learning_rate: float, epochs: int,
    lora_rank: int | None, hurry: bool, score_at: Sequence[int],
) -> tuple[Cell, ...]:  # fmt: skip
    """Return every cell, seed by seed, so that a grid that is cut short has all methods with the same seeds."""
    return tuple(
        Cell(
            scenario=scenario,
            base=base,
            base_sha=base_sha,
            problems_sha=problems_sha,
            method=method,
            seed=seed,
            control=control,
            updates=updates,
            learning_rate=learning_rate,
            epochs=epochs,
            lora_rank=lora_rank,
            hurry=hurry,
            score_at=tuple(sorted({0, *score_at, updates})),
        )
        for seed in dict.fromkeys(seeds)
        for control in (None, *dict.fromkeys(controls))
        for method in dict.fromkeys(methods)
        if control is None or method in CASTS[scenario].controls[control]
    )
