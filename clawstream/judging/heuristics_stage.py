"""The heuristics stage: turns -> feedback by a function that an installed package brings.

The function is an entry point of the group `clawstream.heuristics`, and the log records it by its name there. A
function that scores differently from now on must take another name.
"""

import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from clawstream.errors import ConfigError
from clawstream.events import Event
from clawstream.judging.heuristics import DueTurn, Heuristic, Watched, feedback, observe
from clawstream.stream import topics
from clawstream.stream.stage import Record, Stage, Step

GROUP = "clawstream.heuristics"
READS = (topics.EXCHANGES, topics.TURNS)


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


def heuristics_stage(
    heuristic: Heuristic, *, heard_ms: int, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
) -> Stage[Watched, DueTurn]:
    """Return the stage that has each finished turn scored by `heuristic`.

    Turns older than `heard_ms` are not scored, since feedback on them is ignored; so the first start on a long log does
    not score all of it. Where the function breaks on a turn, the record that completed the turn is set aside.
    """

    async def perform(due: DueTurn) -> Sequence[Event]:
        given = feedback(due, heuristic) if now_ms() - due.at_ms <= heard_ms else None
        return [] if given is None else [given]

    return Stage(
        name="heuristics", reads=READS, step=lambda session, record: observe(session, record.event), perform=perform
    )


def scored_again(heuristic: Heuristic) -> Stage[Watched, None]:
    """Return the stage as a replay hosts it: every turn is scored, however old."""

    def step(session: Watched | None, record: Record) -> Step[Watched, None]:
        known, _, due = observe(session, record.event)
        return Step(known, [given for one in due if (given := feedback(one, heuristic)) is not None])

    return Stage(name="heuristics", reads=READS, step=step)
