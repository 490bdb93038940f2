"""What folds of a session's facts share: facts read twice, lives that are over, and second looks at turns. Pure.

Only the turns that preceded `TurnsSettled` on the topic count for a second look, so the same turn is chosen whatever
else has arrived. Facts of a past life that a killed stage writes again don't count in the session's next life.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from clawstream.events.base import Event
from clawstream.events.judging import HintAbsent, HintFound, TeacherScored, VerdictReached, VoteCast
from clawstream.events.turns import TurnPaired, TurnsSettled

Hint = HintFound | HintAbsent
Over = Mapping[str, None]  # ids of past lives' turns, and of exchanges they were settled after, the oldest first

REMEMBERED_OVER = 1024  # ids; a restarted stage writes at most so many uncommitted facts again

_K = TypeVar("_K")
_V = TypeVar("_V")
_State = TypeVar("_State", bound=tuple[object, ...])


def with_first(known: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    """Return the mapping with the entry; the same object where it has the key: of two facts the first counts."""
    return known if key in known else with_entry(known, key, value)


def with_entry(known: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    """Return the mapping with the entry, which replaces one of the same key."""
    return MappingProxyType({**known, key: value})


def only(known: Mapping[_K, _V], wanted: Callable[[_K], bool]) -> Mapping[_K, _V]:
    """Return the entries with a wanted key."""
    return MappingProxyType({key: value for key, value in known.items() if wanted(key)})


def changed(before: _State, after: _State) -> _State:
    """Return `after`; `before` where all fields are the same objects, so that nothing was learned."""
    return before if all(map(operator.is_, before, after)) else after


class SettledTurns(NamedTuple):
    """A TurnsSettled: it came after `num_turns` of the session's turns, of which the first `start` are of an earlier
    life of the session, one that the client had said was done.
    """

    settled: TurnsSettled
    start: int
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLook:
    """A turn to be looked at again, in view of the session's first `num_turns` turns."""

    turn_id: str
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLooks:
    """The second looks due, in order, and whether all facts for them are known."""

    due: tuple[SecondLook, ...]
    settled: bool


def buried(over: Over, marks: Iterable[SettledTurns], turn_ids: Iterable[str]) -> Over:
    """Return `over` with the ids of a life that just ended; the newest `REMEMBERED_OVER` of them."""
    ids = [*over, *turn_ids, *(mark.settled.after_exchange_id for mark in marks)]
    return MappingProxyType(dict.fromkeys(list(dict.fromkeys(ids))[-REMEMBERED_OVER:]))


def is_over(over: Over, event: Event) -> bool:
    """Return whether the event belongs to a past life of the session, and so was read before."""
    match event:
        case TurnsSettled():
            return event.after_exchange_id in over
        case TurnPaired() | VoteCast() | VerdictReached() | HintFound() | HintAbsent() | TeacherScored():
            return event.turn_id in over
    return False


def marked(marks: tuple[SettledTurns, ...], settled: TurnsSettled, num_turns: int) -> tuple[SettledTurns, ...]:
    """Return the marks with `settled` added; the same tuple where it is known."""
    if any(mark.settled == settled for mark in marks):
        return marks
    start = max((mark.num_turns for mark in marks if mark.settled.done), default=0)
    return (*marks, SettledTurns(settled, start, num_turns))


def second_looks(
    turns: Sequence[TurnPaired],
    marks: Sequence[SettledTurns],
    verdicts: Mapping[str, VerdictReached],
    hints: Mapping[str, Hint],
    looks: Mapping[str, VerdictReached],
) -> SecondLooks:
    """Return the second looks that a session is due.

    `turns` are its paired turns in topic order; `verdicts` and `hints` are of revision 0, `looks` of revision 1.
    At each mark a session without a sample gets one more look, but no turn gets two. Interrupted answers don't count
    here, since the settings decide whether they have samples.
    """
    due: dict[str, SecondLook] = {}
    served: set[int] = set()
    for mark in marks:
        seen = turns[mark.start : mark.num_turns]
        if any(turn.turn_id not in verdicts or turn.turn_id not in hints for turn in seen):
            return SecondLooks(due=tuple(due.values()), settled=False)
        whole = [turn.turn_id for turn in seen if not turn.interrupted]
        if any(isinstance(hints[turn], HintFound) or verdicts[turn].score in (-1, 1) for turn in whole):
            continue
        # Most readable votes for or against it; of equals `max` keeps the earliest.
        best = max(whole, key=lambda turn: verdicts[turn].num_positive + verdicts[turn].num_negative, default=None)
        if best is None or best in due or mark.start in served:
            continue
        due[best] = SecondLook(turn_id=best, num_turns=mark.num_turns)
        if best not in looks:
            return SecondLooks(due=tuple(due.values()), settled=False)
        if looks[best].score in (-1, 1):
            served.add(mark.start)
    return SecondLooks(due=tuple(due.values()), settled=True)
