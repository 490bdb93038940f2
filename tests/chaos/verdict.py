"""What the figures of a run come to: the command's exit status, and why, in words. Pure.

The one rule: a promise that was broken is told apart from a run that does not show that all were kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

_FLOOR_OF_S = 60.0
_EXCHANGES = 1000  # in that time
_FAULTS = 30
_KINDS = 6


class Status(IntEnum):
    """How the command exits."""

    KEPT = 0
    BROKEN = 1  # the oracle saw a promise broken
    UNPROVEN = 2  # it saw none broken, and the run is not one that shows them kept
    RIG_FAILED = 3  # there is no report, or none that could be written: the rig itself broke


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What a run has to have done to show anything."""

    exchanges: int
    faults: int
    kinds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The exit status, and every reason for it that is not 0."""

    status: Status
    reasons: tuple[str, ...]


def floor(seconds: float) -> Floor:
    """Return the floor of a run under faults drawn at random: 1,000 exchanges and 30 faults of 6 kinds a minute.

    A longer run does more in proportion, of no more kinds; a shorter one less.
    """
    share = seconds / _FLOOR_OF_S
    return Floor(
        exchanges=int(_EXCHANGES * share), faults=int(_FAULTS * share), kinds=min(_KINDS, max(1, int(_KINDS * share)))
    )


def verdict(
    broken: Mapping[str, int],
    *,
    acknowledged: int,
    applied: Mapping[str, int],
    crashes: Mapping[str, int],
    left: str,
    reached: bool,
    least: Floor | None,
) -> Verdict:
    """Return what it comes to; `broken` is how often each promise was, `least` None where faults were directed.

    `reached` is false where directed faults did not do what they are for.
    """
    red = [f"{name}: {number}" for name, number in broken.items() if number]
    short = [
        f"{name} crashed {number} times: its words are in the run's logs (--keep)" for name, number in crashes.items()
    ]
    short += [f"not drained: {left}"] if left else []
    short += [] if reached else ["the faults did not reach the guard"]
    if least is not None:
        figures = (
            ("exchanges acknowledged", acknowledged, least.exchanges),
            ("faults", sum(applied.values()), least.faults),
            ("kinds of faults", len(applied), least.kinds),
        )
        short += [
            f"{found} {what}, and a run of this length has at least {bound}"
            for what, found, bound in figures
            if found < bound
        ]
    status = Status.BROKEN if red else Status.UNPROVEN if short else Status.KEPT
    return Verdict(status=status, reasons=(*red, *short))
