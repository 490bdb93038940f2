"""What the gateways' figures mean, held against what is wanted of ours. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

Figures = Mapping[str, float]


def ratios(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return each wanted ratio by concurrency, the most that is wanted of it, and whether that is met everywhere.

    A ratio to an arm that was not measured is left out; one that no measured concurrency has is met: None.
    """
    found = {
        "cpu_per_request_without_rendering_to_tensorzero": _compared(
            arms, "tensorzero", 2.0, lambda ours, theirs: _without_rendering(ours) / theirs["cpu_ms_per_request"]
        ),
        "cpu_per_request_to_litellm": _compared(arms, "litellm", 1 / 5, _cpu),
        "cpu_per_request_to_buffering": _compared(arms, "buffering", 1 / 10, _cpu),
        "cpu_per_chunk_to_tensorzero": _compared(
            arms, "tensorzero", 1.5, lambda ours, theirs: ours["cpu_us_per_chunk"] / theirs["cpu_us_per_chunk"]
        ),
        "rendering_of_a_continued_request_to_a_first_ones": _compared(
            arms, "clawstream", 1 / 5,
            lambda ours, _: ours["render_ms_per_continued_request"] / ours["render_ms_per_request"],
        ),
        "added_ttft_ms_beyond_rendering": _compared(
            arms, "direct", 1.5,
            lambda ours, theirs: ours["ttft_ms_p50"] - theirs["ttft_ms_p50"] - ours["render_ms_per_request"],
            ("1",),
        ),
        "failed_of_200_streams": _compared(arms, "clawstream", 0.0, lambda ours, _: ours["failed"], ("200",)),
    }  # fmt: skip
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def _compared(
    arms: Mapping[str, Mapping[str, Any]],
    other: str,
    wanted: float,
    ratio: Callable[[Figures, Figures], float],
    concurrencies: tuple[str, ...] = ("1", "16", "32", "200"),
) -> dict[str, Any] | None:
    ours, theirs = arms.get("clawstream"), arms.get(other)
    if ours is None or theirs is None:
        return None
    by = {name: ratio(ours[name], theirs[name]) for name in concurrencies if name in ours and name in theirs}
    met = all(value <= wanted for value in by.values()) if by else None
    return {"by_concurrency": by, "wanted_at_most": wanted, "met": met}


def _cpu(ours: Figures, theirs: Figures) -> float:
    return ours["cpu_ms_per_request"] / theirs["cpu_ms_per_request"]


def _without_rendering(ours: Figures) -> float:
    return ours["cpu_ms_per_request"] - ours["render_ms_per_request"]
