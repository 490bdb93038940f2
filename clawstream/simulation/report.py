"""What a grid shows: means over seeds with their intervals, and whether the controls stay where they started. Pure.

A cell that failed counts nowhere but among the failed. S seeds.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, combinations_with_replacement
from math import factorial, prod, sqrt
from statistics import fmean, stdev

from clawstream.simulation.controls import Control
from clawstream.simulation.outcome import Row

CONTROL_RISE = 0.10  # a control may end so far above the base
CONTROL_GAP = 0.40  # and its method ends at least so far above it
# Student's t: 97.5 % of the draws with 1, 2, ... degrees of freedom lie below.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL975 = 1.960


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over seeds with its 95 % interval by Student's t; None: one seed has none."""

    mean: float
    low: float | None
    high: float | None
    num_seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A method, or a control of it, at one update."""

    update: int
    score: Mean
    share: Mean  # of the ceiling
    interactions: float  # mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A method, or a control of it, over all seeds."""

    method: str
    control: Control | None
    points: tuple[Point, ...]
    num_failed: int
    correction_to_policy_s: float | None  # mean over seeds

    @property
    def name(self) -> str:
        """How tables call it."""
        return self.method if self.control is None else f"{self.method}, {self.control.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether a control did what it had to: nothing. At the last update, seed by seed."""

    method: str
    control: Control
    rise_S: tuple[float, ...]  # of the control above the base
    gap_S: tuple[float, ...]  # of the method above its control

    @property
    def holds(self) -> bool:
        """Whether no seed's control rose, and each seed's method is far above it."""
        return max(self.rise_S) <= CONTROL_RISE and min(self.gap_S) >= CONTROL_GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How far a method is above another at one update, seed by seed, with the 90 % interval of the mean."""

    method: str
    over: str
    update: int
    gain_S: tuple[float, ...]
    low: float
    high: float

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.gain_S)


def mean_of(values: Sequence[float], *, bounds: tuple[float, float] = (0.0, 1.0)) -> Mean:
    """Return the mean of at least one value with its interval, cut to what can be."""
    mean, number = fmean(values), len(values)
    if number == 1:
        return Mean(mean=mean, low=None, high=None, num_seeds=1)
    freedom = number - 1
    half = (_T975[freedom - 1] if freedom <= len(_T975) else _NORMAL975) * stdev(values) / sqrt(number)
    return Mean(mean=mean, low=max(bounds[0], mean - half), high=min(bounds[1], mean + half), num_seeds=number)


def curves(rows: Iterable[Row]) -> list[Curve]:
    """Return a curve for each method and each control of it, in the order in which they first come."""
    grouped: dict[tuple[str, Control | None], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.cell.method, row.cell.control), []).append(row)
    return [_curve(method, control, group) for (method, control), group in grouped.items()]


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return a check for each control whose method was run with a seed of its own; seeds without both are left out."""
    last = {(row.cell.method, row.cell.control, row.cell.seed): row for row in rows if row.outcome is not None}
    found: dict[tuple[str, Control], list[tuple[float, float]]] = {}
    for (method, control, seed), row in last.items():
        real = last.get((method, None, seed))
        if control is None or real is None:
            continue
        end = _last(row)
        found.setdefault((method, control), []).append((end - row.reference.baseline.score, _last(real) - end))
    return [
        Check(method=method, control=control, rise_S=tuple(r for r, _ in pairs), gap_S=tuple(g for _, g in pairs))
        for (method, control), pairs in found.items()
    ]


def gains(rows: Sequence[Row]) -> list[Gain]:
    """Compare each two methods, at each update, on the seeds that both have; controls are compared by `checks`."""
    real = {(row.cell.method, row.cell.seed): row for row in rows if row.cell.control is None and row.outcome}
    methods = tuple(dict.fromkeys(method for method, _ in real))
    found = []
    for over, method in combinations(methods, 2):
        seeds = [seed for known, seed in real if known == method and (over, seed) in real]
        for update in sorted({at for _, row in real.items() for at in row.cell.score_at} - {0}):
            pairs = [(real[method, seed].score(update), real[over, seed].score(update)) for seed in seeds]
            gain_S = tuple(a.score - b.score for a, b in pairs if a is not None and b is not None)
            if gain_S:
                low, high = bootstrap90(gain_S)
                found.append(Gain(method=method, over=over, update=update, gain_S=gain_S, low=low, high=high))
    return found


def bootstrap90(values: Sequence[float]) -> tuple[float, float]:
    """Return the 5th and 95th percentile of the means of all samples with replacement of these values.

    Every sample is counted, none is drawn: 126 different ones of five values, and too many to wait for above twelve.
    """
    number = len(values)
    means = sorted(
        (fmean(sample), factorial(number) / prod(factorial(times) for times in Counter(picked).values()))
        for picked in combinations_with_replacement(range(number), number)
        for sample in [[values[index] for index in picked]]
    )
    reached = list(accumulate(weight for _, weight in means))
    low, high = (
        next(m for (m, _), r in zip(means, reached, strict=True) if r >= q * reached[-1]) for q in (0.05, 0.95)
    )
    return low, high


def _curve(method: str, control: Control | None, rows: Sequence[Row]) -> Curve:
    whole = [row for row in rows if row.outcome is not None]
    updates = whole[0].cell.score_at if whole else ()
    seconds = [s for row in whole if row.outcome and (s := row.outcome.correction_to_policy_s) is not None]
    return Curve(
        method=method,
        control=control,
        points=tuple(_point(update, whole) for update in updates),
        num_failed=len(rows) - len(whole),
        correction_to_policy_s=fmean(seconds) if seconds else None,
    )


def _point(update: int, rows: Sequence[Row]) -> Point:
    scored = [(score.score, row) for row in rows if (score := row.score(update)) is not None]
    shares = [score / row.reference.ceiling.score for score, row in scored if row.reference.ceiling.score > 0]
    return Point(
        update=update,
        score=mean_of([score for score, _ in scored]),
        share=mean_of(shares or [0.0], bounds=(0.0, float("inf"))),
        interactions=fmean(row.outcome.interactions.get(update, 0) for _, row in scored if row.outcome is not None),
    )


def _last(row: Row) -> float:
    score = row.score(row.cell.updates)
    assert score is not None, "a cell that is whole is scored at its last update"
    return score.score
