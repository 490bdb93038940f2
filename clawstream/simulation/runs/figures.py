"""The measurements of a demonstration run, as one value; the score's plot and table come from it.

Pure: lists of measurements in, figures out. A figure that was not measured is None.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralScore:
    """What a policy knows that nobody asks for in a run."""

    facts: float  # share of them that it says
    sums: float
    perplexity: float | None = None  # of a text; None: it was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionScore:
    """Share of held-out problems whose first answer is right and in the wanted style, at one policy version.

    Where a language model grades the answers, it is their mean grade.
    """

    update: int
    score: float
    low: float  # 95 % interval
    high: float
    num_problems: int
    num_right: int | None  # in whatever style; None: a language model graded the answers
    num_styled: int | None  # right or not; None: the same, or agents answered, who are asked for no style
    by_persona: Mapping[str, float] | None  # each person's share; None: agents answered
    num_ungraded: int = 0  # answers that the language model gave no grade; they are none of the problems
    general: GeneralScore | None = None  # None: it was not asked for
    prompt_tokens: float | None = None  # of a scored request, the mean; None: agents answered, or it was not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What one request of a student looked like from outside."""

    finished_at_ms: float
    ttft_ms: float | None
    gaps: tuple[tuple[float, float], ...]  # (when the gap ended, its length in ms), between chunks of content
    failed: bool
    first_answer: bool
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The content of `demo.json`."""

    method: str
    seed: int
    baseline_score: float
    ceiling_score: float
    scores: tuple[VersionScore, ...]
    sessions: int
    turns: int
    samples: int
    policy_versions: int
    requests: int
    requests_failed: int
    max_stream_gap_ms_during_swap: float | None
    ttft_ms: Percentiles
    exchange_to_row_ms: Percentiles
    problems: int
    samples_first_answer: int
    versions_behind_mean: float
    versions_behind_max: int
    peak_mb: float
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        """The figures under the names that `demo.json` has."""
        found = asdict(self)
        behind = {"mean": found.pop("versions_behind_mean"), "max": found.pop("versions_behind_max")}
        return found | {"versions_behind": behind}


def general_mean(scores: Sequence[GeneralScore]) -> GeneralScore:
    """Return the mean of at least one score; a perplexity that is missing anywhere is missing in it."""
    perplexities = [one.perplexity for one in scores if one.perplexity is not None]
    return GeneralScore(
        facts=fmean(one.facts for one in scores),
        sums=fmean(one.sums for one in scores),
        perplexity=fmean(perplexities) if len(perplexities) == len(scores) else None,
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the nearest-rank percentiles of at least one value."""
    return Percentiles(p50=at_share(values, 0.50), p99=at_share(values, 0.99))


def at_share(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank value that `share` of them do not exceed; there has to be one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def longest_gap_during(chats: Sequence[Chat], swaps: Sequence[tuple[float, float]]) -> float | None:
    """Return the longest gap in any stream that overlaps a swap (start, end in ms); None where none does."""
    gaps = [
        length
        for chat in chats
        for end, length in chat.gaps
        if any(end - length < swap_end and swap_start < end for swap_start, swap_end in swaps)
    ]
    return max(gaps, default=None)
