"""The heuristics stage: turns -> feedback by a function that an installed package brings.

The one rule: the function is an entry point of the group `clawstream.heuristics`, and its name there is what the log
knows it by: a function that says something else from now on takes another name.
"""

from importlib.metadata import entry_points

from clawstream.errors import ConfigError
from clawstream.judging.heuristics import Heuristic, Watched, observe
from clawstream.stream.stage import Record, Stage, Step

GROUP = "clawstream.heuristics"
READS = ("clawstream.exchanges.v1", "clawstream.turns.v1")


def heuristic_named(name: str) -> Heuristic:
    """Return the installed function of this name. Raises ConfigError where there is none that can be called."""

    def refused(found: str, advice: str) -> ConfigError:
        return ConfigError(f"rewards.heuristic_function is {name!r}: {found}. No turn is scored by it. {advice}")

    installed = entry_points(group=GROUP)
    points = [point for point in installed if point.name == name]
    if len(points) != 1:
        there = ", ".join(sorted(point.name for point in installed)) or "none"
        raise refused(
            f"{len(points)} installed packages have an entry point of that name in the group {GROUP}, expected 1",
            f"There are {there}; name one of them, or install the package beside clawstream",
        )
    try:
        score = points[0].load()
    except Exception as error:  # whatever somebody else's module raises
        raise refused(f"{points[0].value} can't be imported, {error!r}", "Mend the package, or name another") from error
    if not callable(score):
        raise refused(f"{points[0].value} is {score!r}, expected a function", "Name a function in the package")
    return Heuristic(name, score)


def heuristics_stage(heuristic: Heuristic) -> Stage[Watched, None]:
    """Return the stage that has each finished turn scored by `heuristic`."""

    def step(session: Watched | None, record: Record) -> Step[Watched, None]:
        return Step(*observe(session, record.event, heuristic))

    return Stage(name="heuristics", reads=READS, step=step)
