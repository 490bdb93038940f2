"""The people of a scenario, and what they ask, written where the programs that simulate them read it.

Apart from the run, which needs no tokenizer: what base policies are made of is imported here.
"""

from pathlib import Path

from clawstream.simulation.run import People
from clawstream.simulation.scenarios import SCENARIOS, SCORED_FLIPPED, write


def people_of(name: str, folder: Path, *, problems: Path | None = None) -> People:
    """Return the people of a scenario; `problems` are real ones in place of sums. Raises UnusableProblems."""
    scenario = SCENARIOS[name]
    asked, scored = write(scenario, folder, problems=problems)
    return People(
        scenario=name,
        hint_share=scenario.hint_share,
        asked=asked.absolute(),
        scored=scored.absolute(),
        scored_flipped=scored.with_name(SCORED_FLIPPED).absolute(),
    )
