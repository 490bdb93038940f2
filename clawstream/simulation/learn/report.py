"""The results of a grid: mean scores with intervals, checks of controls, and checks of long runs. Pure.

Controls must not rise, and long runs must keep what they learned. Each check of a long run looks at that run alone; all
checks but the last leave out what came after the flip. A check without figures is left open (`holds` is None). A failed
cell is counted as failed and used for nothing else. Axis: S seeds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Any

from clawstream.simulation.learn.grid import AGAIN_WITHIN
from clawstream.simulation.learn.outcome import Reference, ReportRow, StepFigures, kept, newest, others_lost
from clawstream.simulation.opinions import Control
from clawstream.simulation.runs.figures import GeneralScore, general_mean
from clawstream.simulation.runs.scenarios import CASTS, Block

LAST_BELOW_BEST = 0.06
SETTLED_AFTER = 16  # updates
LATE_BELOW_BEST = 0.15
REJECTED_SHARE = 0.05
ENTROPY, LENGTH = (0.1, 3.0), (0.7, 1.4)  # relative to the first batch, which the base answered
FLIPPED_SHARE = 0.6  # of the ceiling
_EPSILON = 1e-9  # for rounding errors: scores are shares of some 500 problems, as floats
CONTROL_RISE = 0.10  # a control may end at most this far above the base
CONTROL_GAP = 0.40  # and its method has to end at least this far above the control
# The 0.95 and 0.975 quantiles of Student's t with 1, 2, ... 30 degrees of freedom: NIST/SEMATECH e-Handbook of
# Statistical Methods, 1.3.6.7.2. Above 30 degrees the last one is used, which makes intervals 4 % too wide at most.
T950 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746,
    1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadinessCheck:
    """A requirement on a run, the figures found, and whether it holds; None: there are no figures."""

    wanted: str
    found: tuple[float, ...] | None = None
    holds: bool | None = None


def steadiness(row: ReportRow) -> tuple[SteadinessCheck, ...]:
    """Return the checks of a long run with people: one scored after update SETTLED_AFTER, or with a flip.

    Other runs, and controls, have none.
    """
    if CASTS[row.cell.scenario].attempts is not None:  # agents' runs count rounds, of several updates each
        return ()
    if row.cell.blocks:  # a score is over all people, and in each block one of them talks
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
    return lines if row.cell.flip_after is None else (*lines, _learned_again(row, row.cell.flip_after))


def with_lines(row: ReportRow) -> dict[str, Any]:
    """Return the row's object in the report, with its checks, if any, under `wanted`."""
    lines = {line.wanted: {"found": line.found, "holds": line.holds} for line in steadiness(row)}
    return row.as_json() | ({"wanted": lines} if lines else {})


def _below(scores: Mapping[int, float], at: Sequence[int], allowed: float, wanted: str) -> SteadinessCheck:
    """Check how far the worst score at the updates `at` is below the best score of all."""
    late = [scores[update] for update in at if update in scores]
    if not late:
        return SteadinessCheck(wanted=wanted)
    below = max(scores.values()) - min(late)
    return SteadinessCheck(wanted=wanted, found=(below,), holds=below <= allowed + _EPSILON)


def _within(steps: Sequence[StepFigures], name: str, bounds: tuple[float, float]) -> SteadinessCheck:
    """Check the least and the greatest value of a figure over all steps, relative to the first step's."""
    wanted = f"{name.removeprefix('mean_')} within {list(bounds)} of the start"
    found = [getattr(step, name) for step in steps]
    known = [value for value in found if value is not None]
    if not found or not found[0]:
        return SteadinessCheck(wanted=wanted)
    low, high = min(known) / found[0], max(known) / found[0]
    is_within = bounds[0] <= low and high <= bounds[1]
    return SteadinessCheck(
        wanted=wanted, found=(low, high), holds=None if is_within and len(known) < len(found) else is_within
    )


def _learned_again(row: ReportRow, after: int) -> SteadinessCheck:
    """Check the best score after the flip, as a share of the ceiling; both are by the wishes after the flip."""
    wanted = f"{FLIPPED_SHARE} of the ceiling within {AGAIN_WITHIN} of the flip"
    since = [u for u in row.cell.score_at if after < u <= after + AGAIN_WITHIN]
    scores = [s.score for u in since if (s := row.score(u)) is not None]
    ceiling = None if row.reference.flipped is None else row.reference.flipped.ceiling.score
    if not scores or not ceiling:
        return SteadinessCheck(wanted=wanted)
    share = max(scores) / ceiling
    has_learned, is_over = share >= FLIPPED_SHARE - _EPSILON, row.score(after + AGAIN_WITHIN) is not None
    return SteadinessCheck(wanted=wanted, found=(share,), holds=has_learned if has_learned or is_over else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over seeds with its 95 % interval by Student's t; `low` and `high` are None for a single seed.

    The base is the same policy for all seeds, so its interval is over problems.
    """

    mean: float
    low: float | None
    high: float | None
    num_seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A method, or a control of it, at one update."""

    update: int
    score: Mean
    share: float | None  # of the ceiling, mean; None: the ceiling is 0
    closed: float | None  # of the gap between base and ceiling, mean; None: there is no gap
    interactions: float | None  # mean; None: they were not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A method, or a control of it, over all seeds."""

    method: str  # a cell's `arm`, here and below
    control: Control | None
    points: tuple[Point, ...]  # each scored by what people wanted while that version learned
    num_failed: int
    correction_to_policy_s: float | None  # mean over seeds
    flip: Point | None = None  # the version at the flip, scored by the wishes after it; None: no flip

    @property
    def name(self) -> str:
        return self.method if self.control is None else f"{self.method}, {self.control.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """A method, or a control of it, over all seeds, where people talk one after the other."""

    name: str
    blocks: tuple[Block, ...]
    scores: Mapping[str, Mapping[int, Mean]]  # by person and update
    kept: Mean | None
    newest: Mean | None
    others_lost: Mean | None  # None, here and above: no run has one
    num_seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A control's scores at the last update, by seed; the check holds if the control learned nothing.

    With everyday requests, rise and gap are shares of what the hint adds to the base's score.
    """

    method: str
    control: Control
    rise_S: tuple[float, ...]  # of the control above the base
    gap_S: tuple[float, ...]  # of the method above its control
    num_seeds: int  # that were planned

    @property
    def holds(self) -> bool | None:
        """Whether in each seed the control did not rise and its method is far above it; None: seeds are missing."""
        rises = any(round(rise, 6) > CONTROL_RISE for rise in self.rise_S)  # rounded: shares as floats
        if rises or any(round(gap, 6) < CONTROL_GAP for gap in self.gap_S):
            return False
        return True if len(self.rise_S) == self.num_seeds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How far a method is above another at one update, by seed, with the mean's 90 % interval by Student's t.

    `low` and `high` are None for a single seed.
    """

    method: str
    over: str
    update: int
    gain_S: tuple[float, ...]
    low: float | None
    high: float | None

    @property
    def mean(self) -> float:
        return fmean(self.gain_S)


def mean_of(values: Sequence[float], *, bounds: tuple[float, float] = (0.0, 1.0)) -> Mean:
    """Return the mean of one or more values with its interval, cut to `bounds`."""
    mean, number = fmean(values), len(values)
    half = _half(values, T975)
    if half is None:
        return Mean(mean=mean, low=None, high=None, num_seeds=number)
    return Mean(mean=mean, low=max(bounds[0], mean - half), high=min(bounds[1], mean + half), num_seeds=number)


def _half(values: Sequence[float], quantiles: Sequence[float]) -> float | None:
    """Return half the width of the interval around the mean of the values; None for a single value."""
    number = len(values)
    return None if number < 2 else quantiles[min(number - 1, len(quantiles)) - 1] * stdev(values) / sqrt(number)


def curves(rows: Iterable[ReportRow]) -> list[Curve]:
    """Return a curve for each method and each control of it, in the order in which they first come."""
    grouped: dict[tuple[str, Control | None], list[ReportRow]] = {}
    for row in rows:
        grouped.setdefault((row.cell.arm, row.cell.control), []).append(row)
    return [_curve(method, control, group) for (method, control), group in grouped.items()]


def lasting(rows: Iterable[ReportRow]) -> list[Lasting]:
    """Return each method and control whose people talk one after the other and which has a complete run."""
    grouped: dict[tuple[str, Control | None], list[ReportRow]] = {}
    for row in rows:
        if row.cell.blocks and row.outcome is not None:
            grouped.setdefault((row.cell.arm, row.cell.control), []).append(row)
    return [_lasting(group) for group in grouped.values()]


def _lasting(rows: Sequence[ReportRow]) -> Lasting:
    cell, found = rows[0].cell, [row.by_person() for row in rows]
    scored = {who for each in found for scores in each.values() for who in scores}
    talkers = [block.talker for block in cell.blocks if block.talker in scored]
    people = [*talkers, *sorted(scored - {*talkers})]  # the scores of people who never talked may fall
    all_kept = [share for each in found if (share := kept(cell.blocks, each)) is not None]
    all_newest = [score for each in found if (score := newest(cell.blocks, each)) is not None]
    all_lost = [loss for each in found if (loss := others_lost(cell.blocks, each)) is not None]
    return Lasting(
        name=cell.arm if cell.control is None else f"{cell.arm}, {cell.control.value}",
        blocks=cell.blocks,
        scores={
            who: {
                update: mean_of([each[update][who] for each in found if who in each.get(update, ())])
                for update in cell.score_at
                if any(who in each.get(update, ()) for each in found)
            }
            for who in people
        },
        kept=mean_of(all_kept, bounds=(0.0, inf)) if all_kept else None,
        newest=mean_of(all_newest) if all_newest else None,
        others_lost=mean_of(all_lost, bounds=(-1.0, 1.0)) if all_lost else None,
        num_seeds=len(rows),
    )


def checks(rows: Sequence[ReportRow]) -> list[Check]:
    """Return a check for each control that leaves nothing to learn from.

    It uses the seeds for which both the control's run and its method's run are complete.
    """
    silenced = [row.cell for row in rows if _arm(row) is None]
    return [_check(*held, rows) for held in dict.fromkeys((c.arm, c.control) for c in silenced if c.control)]


def _check(method: str, control: Control, rows: Sequence[ReportRow]) -> Check:
    ours = [row for row in rows if row.cell.arm == method and row.cell.control in (None, control)]
    whole = {(row.cell.control, row.cell.seed): row for row in ours if row.outcome is not None}
    seeds = dict.fromkeys(row.cell.seed for row in ours)
    pairs = [(whole[control, s], whole[None, s]) for s in seeds if (control, s) in whole and (None, s) in whole]
    return Check(
        method=method,
        control=control,
        rise_S=tuple(rise for controlled, _ in pairs if (rise := _risen(controlled)) is not None),
        gap_S=tuple(
            above - rise
            for controlled, real in pairs
            if (rise := _risen(controlled)) is not None and (above := _risen(real)) is not None
        ),
        num_seeds=len(seeds),
    )


def _risen(row: ReportRow) -> float | None:
    """Return how far the last score is above the base; None: it is a share of a gap that does not exist."""
    last = _last(row)
    return row.reference.closed(last) if CASTS[row.cell.scenario].everyday else last - row.reference.baseline.score


def general(rows: Iterable[ReportRow]) -> dict[str, dict[int, GeneralScore]]:
    """Return what each method and control still knows of what nobody asked for, by update: means over seeds."""
    found: dict[str, dict[int, list[GeneralScore]]] = {}
    for row in rows:
        for update in row.cell.score_at if row.outcome is not None else ():
            if (score := row.score(update)) is not None and score.general is not None:
                name = row.cell.arm if row.cell.control is None else f"{row.cell.arm}, {row.cell.control.value}"
                found.setdefault(name, {}).setdefault(update, []).append(score.general)
    return {name: {u: general_mean(each) for u, each in by_update.items()} for name, by_update in found.items()}


def gains(rows: Sequence[ReportRow]) -> list[Gain]:
    """Compare each pair of arms at each update, on the seeds that both have.

    A control that leaves nothing to learn from is no arm; see `checks`.
    """
    last = sorted(rows, key=lambda row: row.cell.control is None)  # controls come first, hence in `over`
    real = {(arm, row.cell.seed): row for row in last if row.outcome and (arm := _arm(row))}
    methods = tuple(dict.fromkeys(method for method, _ in real))
    found = []
    for over, method in combinations(methods, 2):
        seeds = [seed for known, seed in real if known == method and (over, seed) in real]
        for update in sorted({at for row in real.values() for at in row.cell.score_at} - {0}):
            pairs = [(real[method, seed].score(update), real[over, seed].score(update)) for seed in seeds]
            gain_S = tuple(a.score - b.score for a, b in pairs if a is not None and b is not None)
            if gain_S:
                mean, half = fmean(gain_S), _half(gain_S, T950)
                low, high = (None, None) if half is None else (mean - half, mean + half)
                found.append(Gain(method=method, over=over, update=update, gain_S=gain_S, low=low, high=high))
    return found


def _arm(row: ReportRow) -> str | None:
    """Return the arm that a row belongs to in comparisons; None: a control that leaves nothing to learn from."""
    cell = row.cell
    if cell.control is None:
        return cell.arm
    silenced = CASTS[cell.scenario].silenced.get(cell.control, ())
    return None if cell.method in silenced else f"{cell.arm}, {cell.control.value}"


def _curve(method: str, control: Control | None, rows: Sequence[ReportRow]) -> Curve:
    whole = [row for row in rows if row.outcome is not None]
    updates = whole[0].cell.score_at if whole else ()
    seconds = [s for row in whole if row.outcome and (s := row.outcome.correction_to_policy_s) is not None]
    return Curve(
        method=method,
        control=control,
        points=tuple(_point(update, whole) for update in updates),
        flip=_at_flip(whole),
        num_failed=len(rows) - len(whole),
        correction_to_policy_s=fmean(seconds) if seconds else None,
    )


def _point(update: int, rows: Sequence[ReportRow]) -> Point:
    found = [(score.score, row.reference_at(update), row) for row in rows if (score := row.score(update)) is not None]
    base = rows[0].reference.baseline
    point = _mean_point(update, found)
    if update == 0:
        point = replace(point, score=replace(point.score, mean=base.score, low=base.low, high=base.high))
    return point


def _at_flip(rows: Sequence[ReportRow]) -> Point | None:
    found = [
        (row.outcome.at_flip.score, row.reference.flipped or row.reference, row)
        for row in rows
        if row.outcome is not None and row.outcome.at_flip is not None
    ]
    return _mean_point(found[0][2].cell.flip_after or 0, found) if found else None


def _mean_point(update: int, found: Sequence[tuple[float, Reference, ReportRow]]) -> Point:
    shares = [score / reference.ceiling.score for score, reference, _ in found if reference.ceiling.score > 0]
    closed = [share for score, reference, _ in found if (share := reference.closed(score)) is not None]
    counted = [number for *_, row in found if (number := row.interactions(update)) is not None]
    return Point(
        update=update,
        score=mean_of([score for score, *_ in found]),
        share=fmean(shares) if shares else None,
        closed=fmean(closed) if closed else None,
        interactions=fmean(counted) if counted else None,
    )


def _last(row: ReportRow) -> float:
    score = row.score(row.cell.updates)
    assert score is not None, "a cell that is whole is scored at its last update"
    return score.score
