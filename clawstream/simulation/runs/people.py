"""The people of a scenario and their questions, written where the programs that simulate them read them.

This module is apart from run.py because it imports what base policies are made of, which a run does not need.
"""

import random
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import orjson

from clawstream.simulation.policy.lessons import HINT
from clawstream.simulation.problems import Chain, ChainTask, SumSet, of_group
from clawstream.simulation.runs.run import People
from clawstream.simulation.runs.scenarios import CASTS, SCENARIOS, SCORED_FLIPPED, write

NUM_TRIED, NUM_HELD_OUT = 1500, 300


def people_of(name: str, folder: Path, *, problems: Path | None = None) -> People:
    """Return the people of a scenario; `problems` are real ones in place of sums. Raises UnusableProblems."""
    if CASTS[name].attempts is not None:
        return _agents(name, folder)
    scenario = SCENARIOS[name]
    asked, scored = write(scenario, folder, problems=problems)
    return People(
        scenario=name,
        hint_share=scenario.hint_share,
        asked=asked.absolute(),
        scored=scored.absolute(),
        scored_flipped=scored.with_name(SCORED_FLIPPED).absolute(),
    )


def _agents(name: str, folder: Path) -> People:
    """Return the agents, who need no hints; the same tasks each time."""
    tried, held_out = folder / "tasks.jsonl", folder / "scored.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    _write(tried, islice(of_group(SumSet.STUDENTS, random.Random("tried")), NUM_TRIED))
    _write(held_out, islice(of_group(SumSet.SCORED, random.Random("scored")), NUM_HELD_OUT))
    return People(
        scenario=name,
        hint_share=0.0,
        asked=tried.absolute(),
        scored=held_out.absolute(),
        scored_flipped=held_out.absolute(),  # whose wishes can't be exchanged
    )


def _write(path: Path, chains: Iterable[Chain]) -> None:
    asked = [ChainTask(question=chain.text, answer=str(chain.result), hint=HINT) for chain in chains]
    path.write_bytes(b"".join(orjson.dumps(asdict(task)) + b"\n" for task in asked))
