"""The score by update as a picture: points with their 95 % intervals, between the start and the hinted ceiling."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from clawstream.simulation.learn.outcome import Reference
from clawstream.simulation.learn.report import Curve, Lasting, Mean, Point
from clawstream.simulation.runs.figures import Figures

COLOURS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0e7490", "#57606a")
DASHES = {None: "-", "shuffled": "--", "coin": ":", "frozen": "-."}


def plot_scores(figures: Figures, path: Path) -> None:
    """Write a PNG of the score at each update, beside the ceiling."""
    plt = _pyplot()
    updates = [score.update for score in figures.scores]
    values = [score.score for score in figures.scores]
    below = [max(0.0, score.score - score.low) for score in figures.scores]
    above = [max(0.0, score.high - score.score) for score in figures.scores]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.axhline(figures.ceiling_score, color="#888888", linestyle="--", linewidth=1)
    axes.annotate(
        f"with the hint in the prompt: {figures.ceiling_score:.2f}", (0.01, figures.ceiling_score), xytext=(0, 4),
        xycoords=("axes fraction", "data"), textcoords="offset points", color="#555555", fontsize=9,
    )  # fmt: skip
    axes.errorbar(updates, values, yerr=[below, above], color="#1f6feb", marker="o", capsize=3, linewidth=2)
    axes.annotate(f"{values[0]:.2f}", (updates[0], values[0]), xytext=(6, -14), textcoords="offset points")
    axes.annotate(
        f"{values[-1]:.2f}", (updates[-1], values[-1]), xytext=(-4, -18), textcoords="offset points", ha="right"
    )
    axes.set(
        xlabel=f"weight updates (micro-batches; {figures.samples} samples in all)",
        ylabel="right and in the wanted style",
        title=f"{figures.method}, seed {figures.seed}: first answers to {figures.problems} held-out problems",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    _frame(axes)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_curves(
    curves: Sequence[Curve], reference: Reference, title: str, path: Path, *, unit: str = "updates"
) -> None:
    """Write a PNG with the mean score of each method and control, by `unit` and by interactions."""
    figure = curves_figure(curves, reference, title, unit=unit)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)


def curves_figure(curves: Sequence[Curve], reference: Reference, title: str, *, unit: str) -> Any:
    """Return the picture of `plot_curves` as a figure of matplotlib; the caller closes it."""
    figure, both = _pyplot().subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    colours = dict(zip(dict.fromkeys(curve.method for curve in curves), cycle(COLOURS), strict=False))
    for axes, label in zip(both, (unit, "answers that were got (mean over seeds)"), strict=True):
        by_update = label == unit
        for curve in (curve for curve in curves if curve.points):
            alpha = 1.0 if curve.control is None else 0.6
            for number, points in enumerate(_pieces(curve)):
                found = [(point.update if by_update else point.interactions, point.score) for point in points]
                places = [place for place, _ in found if place is not None]
                means = [mean for place, mean in found if place is not None]
                axes.errorbar(
                    places, [mean.mean for mean in means], yerr=_bars(means), marker="o", capsize=3, alpha=alpha,
                    label=f"_{curve.name}" if number else curve.name, color=colours[curve.method],
                    linestyle=DASHES[curve.control],
                )  # fmt: skip
        flips = [curve.flip.update if by_update else curve.flip.interactions for curve in curves if curve.flip]
        start, end = axes.get_xlim()
        flip = min((place for place in flips if place is not None), default=end)
        for score, left, right in _ceilings(reference, start, flip, end):
            axes.hlines(score, left, right, color="#888888", linestyle="--", linewidth=1)
        axes.set(xlabel=label, xlim=(start, end))
        _frame(axes)
    for after in {curve.flip.update for curve in curves if curve.flip is not None}:
        both[0].axvline(after, color="#888888", linestyle=":", linewidth=1)
        both[0].annotate(
            "each wants what\nanother wanted", (after, 0), xytext=(4, 4), textcoords="offset points", color="#555555",
            fontsize=9,
        )  # fmt: skip
    both[0].set_ylabel("score; dashed: the base with the hint in its prompt")
    both[0].xaxis.get_major_locator().set_params(integer=True)
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, len(labels)) or 1, frameon=False, fontsize=9
    )
    figure.suptitle(title)
    return figure


def plot_people(found: Sequence[Lasting], reference: Reference, title: str, path: Path) -> None:
    """Write a PNG with each person's mean score by update, and who talked when: a row for each method or control."""
    figure = people_figure(found, reference, title)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)


def people_figure(found: Sequence[Lasting], reference: Reference, title: str) -> Any:
    """Return the picture of `plot_people` as a matplotlib figure, its legend below the lines; the caller closes it."""
    number = max(1, len(found))
    figure, grid = _pyplot().subplots(
        number, 1, figsize=(8, 1.2 + 3.2 * number), layout="constrained", sharex=True, squeeze=False
    )
    people = [who for one in found for who in one.scores]
    colours = dict(zip(dict.fromkeys(people), cycle(COLOURS), strict=False))
    for axes, one in zip(grid[:, 0], found, strict=False):
        for who, scores in one.scores.items():
            axes.errorbar(
                list(scores), [mean.mean for mean in scores.values()], yerr=_bars(list(scores.values())), marker="o",
                capsize=3, label=who, color=colours[who],
            )  # fmt: skip
        begin = 0
        for block in one.blocks:
            axes.axvline(block.end, color="#888888", linestyle=":", linewidth=1)
            axes.annotate(
                f"{block.talker} talks" if block.talker in colours else block.talker,
                ((begin + block.end) / 2, 1.0), xycoords=("data", "axes fraction"),
                xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9,
                color=colours.get(block.talker, "#555555"),
            )  # fmt: skip
            begin = block.end
        axes.axhline(reference.ceiling.score, color="#888888", linestyle="--", linewidth=1)
        axes.set_ylabel(one.name)
        _frame(axes)
    grid[-1, 0].set(xlabel="updates; dashed: the base with the hint in its prompt")
    grid[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False, fontsize=9,
        title="each person's score",
    )  # fmt: skip
    figure.suptitle(title)
    return figure


def _ceilings(reference: Reference, start: float, flip: float, end: float) -> list[tuple[float, float, float]]:
    """Return each ceiling's score, and where its line begins and ends: after a flip another ceiling holds."""
    flipped = [] if reference.flipped is None else [(reference.flipped.ceiling.score, flip, end)]
    return [(reference.ceiling.score, start, flip if flipped else end), *flipped]


def _pieces(curve: Curve) -> list[Sequence[Point]]:
    """Return the points before and after a flip; the version at the flip is in both, with a score for each."""
    if curve.flip is None:
        return [curve.points]
    after = curve.flip.update
    return [
        [p for p in curve.points if p.update <= after],
        [curve.flip, *(p for p in curve.points if p.update > after)],
    ]


def _frame(axes: Any) -> None:
    axes.set_ylim(0, 1.05)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(means: Sequence[Mean]) -> list[list[float]]:
    below = [0.0 if mean.low is None else mean.mean - mean.low for mean in means]
    above = [0.0 if mean.high is None else mean.high - mean.mean for mean in means]
    return [below, above]


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
