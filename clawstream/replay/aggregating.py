"""What votes on the log come to, for every judge that has voted. Pure.

The one rule: each judge's facts are folded as if that judge were the only one, whenever its first vote came; a state
that another judge is done with is still there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from clawstream.events import Event, HintAbsent, HintFound, VerdictReached, VoteCast
from clawstream.stream.stage import Record, Stage, Step

NOBODY = ""


class Voter(NamedTuple):
    """Whose votes are counted together."""

    judge: str
    prompt_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """A session as nobody has judged it, and as each judge that has voted on it sees it."""

    unjudged: Any = None
    of: Mapping[Voter, Any] = field(default_factory=lambda: MappingProxyType({}))


def every_voter(stage_of: Callable[[Voter], Stage[Any, Any]], only: str | None) -> Stage[_Sides, Any]:
    """Return the stage that folds everybody's votes, verdicts and hints, or those of the judge `only`.

    `stage_of` returns the stage that folds those of one.
    """
    stage_of = cache(stage_of)
    nobodys = stage_of(Voter(NOBODY, NOBODY))

    def judged(sides: _Sides, voter: Voter, record: Record) -> Step[_Sides, Any]:
        after = stage_of(voter).step(sides.of.get(voter, sides.unjudged), record)
        return Step(
            _Sides(unjudged=sides.unjudged, of=MappingProxyType({**sides.of, voter: after.state})), after.events
        )

    def step(state: _Sides | None, record: Record) -> Step[_Sides, Any]:
        sides = _Sides() if state is None else state
        event = record.event
        if isinstance(event, VoteCast | VerdictReached | HintFound | HintAbsent):
            voter = Voter(event.judge, event.prompt_version)
            return judged(sides, voter, record) if only in (None, voter.judge) else Step(state)
        unjudged = nobodys.step(sides.unjudged, record)
        events: list[Event] = list(unjudged.events)
        of: dict[Voter, Any] = {}
        for voter, session in sides.of.items():
            after = stage_of(voter).step(session, record)
            of[voter] = after.state
            events += [event for event in after.events if event not in unjudged.events]
        return Step(_Sides(unjudged=unjudged.state, of=MappingProxyType(of)), events)

    return Stage(name=nobodys.name, reads=nobodys.reads, step=step)
