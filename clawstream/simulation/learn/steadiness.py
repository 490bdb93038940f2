"""Whether a long run keeps what it learned, and learns again where preferences flip. Pure.

Every check is of one run; all but the last look at the run up to the flip. A check without figures is left open
(`holds` is None).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from clawstream.simulation.learn.grid import ANEW_WITHIN
from clawstream.simulation.learn.outcome import ReportRow, StepFigures
from clawstream.simulation.runs.casting import CASTS

LAST_BELOW_BEST = 0.06
SETTLED_AFTER = 16  # updates
LATE_BELOW_BEST = 0.15
REJECTED_SHARE = 0.05
ENTROPY, LENGTH = (0.1, 3.0), (0.7, 1.4)  # as a share of the first batch's, which the base answered
FLIPPED_SHARE = 0.6  # of the ceiling
_EPSILON = 1e-9  # shares of some 500, as floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadinessCheck:
    """A requirement on a run: what was found, and whether it holds; None: there are no figures for it."""

    wanted: str
    found: tuple[float, ...] | None
    holds: bool | None


def steadiness(row: ReportRow) -> tuple[SteadinessCheck, ...]:
    """Return the lines of a run with people that was scored after update SETTLED_AFTER or has flipped; of any other,
    and of a control, there are none.
    """
    if CASTS[row.cell.scenario].attempts is not None:  # agents' runs count rounds, of several updates each
        return ()
    long = row.cell.flip_after is not None or any(update > SETTLED_AFTER for update in row.cell.score_at)
    if row.cell.control is not None or row.outcome is None or not long:
        return ()
    until = row.cell.updates if row.cell.flip_after is None else row.cell.flip_after
    scores = {u: s.score for u in row.cell.score_at if u <= until and (s := row.score(u)) is not None}
    steps = [step for step in row.outcome.steps if step.update <= until]
    rejected = row.rejected_share(until)
    lines = (
        _below(scores, [until], LAST_BELOW_BEST, f"last score at least the best - {LAST_BELOW_BEST}"),
        _below(
            scores, [u for u in scores if u > SETTLED_AFTER], LATE_BELOW_BEST,
            f"none after {SETTLED_AFTER} below the best - {LATE_BELOW_BEST}",
        ),
        SteadinessCheck(
            wanted=f"at most {REJECTED_SHARE:.0%} of steps rejected",
            found=None if rejected is None else (rejected,),
            holds=None if rejected is None else rejected <= REJECTED_SHARE,
        ),
        _within(steps, "entropy", ENTROPY),
        _within(steps, "mean_length", LENGTH),
    )  # fmt: skip
    return lines if row.cell.flip_after is None else (*lines, _learned_anew(row, row.cell.flip_after))


def with_lines(row: ReportRow) -> dict[str, Any]:
    """Return the row's object in the report, with its checks, if any, under `wanted`."""
    lines = {line.wanted: {"found": line.found, "holds": line.holds} for line in steadiness(row)}
    return row.as_json() | ({"wanted": lines} if lines else {})


def _below(scores: Mapping[int, float], at: Sequence[int], allowed: float, wanted: str) -> SteadinessCheck:
    """Check how far the worst score at these updates is below the best of all."""
    late = [scores[update] for update in at if update in scores]
    if not late:
        return SteadinessCheck(wanted=wanted, found=None, holds=None)
    below = max(scores.values()) - min(late)
    return SteadinessCheck(wanted=wanted, found=(below,), holds=below <= allowed + _EPSILON)


_NAMES = MappingProxyType({"entropy": "entropy", "mean_length": "length"})


def _within(steps: Sequence[StepFigures], name: str, bounds: tuple[float, float]) -> SteadinessCheck:
    """Check the least and the greatest of a figure over all steps, as shares of the first step's."""
    wanted = f"{_NAMES[name]} within {list(bounds)} of the start"
    found = [getattr(step, name) for step in steps]
    known = [value for value in found if value is not None]
    if not found or not found[0]:
        return SteadinessCheck(wanted=wanted, found=None, holds=None)
    low, high = min(known) / found[0], max(known) / found[0]
    is_within = bounds[0] <= low and high <= bounds[1]
    return SteadinessCheck(
        wanted=wanted, found=(low, high), holds=None if is_within and len(known) < len(found) else is_within
    )


def _learned_anew(row: ReportRow, after: int) -> SteadinessCheck:
    """Check the best share of the ceiling after the flip; score and ceiling are by the flipped wishes."""
    wanted = f"{FLIPPED_SHARE} of the ceiling within {ANEW_WITHIN} of the flip"
    since = [u for u in row.cell.score_at if after < u <= after + ANEW_WITHIN]
    scores = [s.score for u in since if (s := row.score(u)) is not None]
    ceiling = None if row.reference.flipped is None else row.reference.flipped.ceiling.score
    if not scores or not ceiling:
        return SteadinessCheck(wanted=wanted, found=None, holds=None)
    share = max(scores) / ceiling
    has_learned, is_over = share >= FLIPPED_SHARE - _EPSILON, row.score(after + ANEW_WITHIN) is not None
    return SteadinessCheck(wanted=wanted, found=(share,), holds=has_learned if has_learned or is_over else None)
