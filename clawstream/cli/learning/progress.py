"""Prints the progress of runs with simulated people, on stderr, and the tables of `clawstream learn`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from clawstream import layout
from clawstream.simulation.learn.outcome import Reference, ReportRow
from clawstream.simulation.learn.report import (
    Check,
    Curve,
    Gain,
    Lasting,
    Mean,
    Point,
    SteadinessCheck,
    checks,
    curves,
    gains,
    general,
    lasting,
    steadiness,
)
from clawstream.simulation.runs.figures import GeneralScore, VersionScore

if TYPE_CHECKING:
    from clawstream.simulation.runs.run import RunProgress as Step

    Tell = Callable[[str, Step], None]


@contextmanager
def shown(console: Console, updates: int, unit: str = "updates") -> "Iterator[Tell]":
    """Yield a function that shows how far a run is, of `updates` counted in `unit`; a single run is named ""."""
    if not console.is_terminal:
        yield ProgressLines(updates, unit)
        return
    with Progress(*columns(unit), console=console, expand=True) as bars:
        yield ProgressBars(bars, updates)


@contextmanager
def waiting(console: Console) -> "Iterator[Callable[[str], None]]":
    """Yield a function that prints a message; a terminal shows the newest one and how long ago it came."""
    if not console.is_terminal:
        yield console.print
        return
    with Progress(SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console) as shows:
        now: list[TaskID] = []

        def say(what: str) -> None:
            for task in now:
                shows.stop_task(task)
            now[:] = [shows.add_task(what, total=None)]

        yield say


def columns(unit: str) -> list[ProgressColumn]:
    """Return the columns of a run's line; where the terminal is too narrow, the phase and counts at its end are cut."""
    return [
        TextColumn("[bold]{task.description}"),
        TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}"),
        TextColumn("score {task.fields[score]}"),
        TimeElapsedColumn(),
        BarColumn(bar_width=10),
        TextColumn(
            "{task.fields[phase]}, {task.fields[requests]} requests, {task.fields[rate]:.0f} tokens/s",
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
    ]


class ProgressBars:
    """Shows each step of a run on its bar."""

    def __init__(self, bars: Progress, updates: int) -> None:
        self._bars, self._updates = bars, updates
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, name: str, step: "Step") -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(
                name, total=self._updates, phase="starting", score="-", requests=0, rate=0.0
            )
        fields = {
            "score": None if step.score is None else f"{step.score:.2f}",
            "requests": step.requests,
            "rate": step.tokens_per_s,
        }
        known: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        self._bars.update(self._tasks[name], completed=step.update, phase=step.phase, **known)


class ProgressLines:
    """Prints each step of a run as a line on stderr, where no terminal can show a bar."""

    def __init__(self, updates: int, unit: str = "updates") -> None:
        self._updates, self._unit = updates, unit
        self._said: dict[str, tuple[str, int, float | None]] = {}

    def __call__(self, name: str, step: "Step") -> None:
        """Print `step`, unless only its counts are new."""
        state = (step.phase, step.update, step.score)
        if state == self._said.get(name):
            return
        self._said[name] = state
        score = "" if step.score is None else f", score {step.score:.2f}"
        requests = "" if step.requests is None else f", {step.requests} requests"
        named = f"{name}: {step.phase}" if name else step.phase
        typer.echo(f"{named}: {step.update}/{self._updates} {self._unit}{score}{requests}", err=True)


def tables(rows: Sequence[ReportRow], reference: Reference) -> list[Table]:
    """Return the tables that have rows."""
    compared, held, lasts = gains(rows), checks(rows), lasting(rows)
    lines = [(row, found) for row in rows if (found := steadiness(row))]
    return [
        _scores(curves(rows), reference),
        *(_of_pretrained(rows, reference) if general(rows) else []),
        *([_lasting(lasts)] if lasts else []),
        *([_gains(compared)] if compared else []),
        *([_controls(held)] if held else []),
        *([_steady(lines, rows)] if lines else []),
    ]


def show(tables: Sequence[Table]) -> None:
    console = Console()
    for number, table in enumerate(tables):
        if number:
            console.print()
        layout.show(console, table)


def _scores(curves: list[Curve], reference: Reference) -> Table:
    problems = reference.baseline.num_problems
    table = Table(
        title=f"Right and as wanted, of {problems} held-out problems: mean over seeds (95 % interval; that of update 0 "
        "is over problems), share of the ceiling",
        title_justify="left",
    )
    updates = sorted({point.update for curve in curves for point in curve.points})
    flips = {curve.flip.update for curve in curves if curve.flip is not None}
    columns = [(u, is_flip) for u in updates for is_flip in ((False, True) if u in flips else (False,))]
    titles = [f"after {update}{', flipped' if is_flip else ''}" for update, is_flip in columns]
    for name in ("", "seeds", *titles, "s to the policy"):
        table.add_column(name, justify="left" if not name else "right")
    for curve in curves:
        points = {(point.update, False): point for point in curve.points}
        points |= {} if curve.flip is None else {(curve.flip.update, True): curve.flip}
        seeds = max((point.score.num_seeds for point in curve.points), default=0)
        cells = [_scored(points[column]) if column in points else "-" for column in columns]
        seconds = "-" if curve.correction_to_policy_s is None else f"{curve.correction_to_policy_s:.1f}"
        failed = f" ({curve.num_failed} failed)" if curve.num_failed else ""
        table.add_row(curve.name, f"{seeds}{failed}", *cells, seconds)
    table.add_section()
    table.add_row("hint in the prompt", "", _of_base(reference.ceiling))
    if reference.ceiling_held_out is not None:
        table.add_row("hint in words held out", "", _of_base(reference.ceiling_held_out))
    if reference.flipped is not None:
        table.add_row("the base, flipped", "", _of_base(reference.flipped.baseline))
        table.add_row("hint in the prompt, flipped", "", _of_base(reference.flipped.ceiling))
    return table


def _of_pretrained(rows: Sequence[ReportRow], reference: Reference) -> list[Table]:
    """Return what was learned, as a share of what the hint adds to the base, and what was kept beside it."""
    closed, kept = (
        Table(title=title, title_justify="left")
        for title in (
            "Share of the gap closed between the base and the base with the hint (mean over seeds)",
            "What nobody asked for (means over seeds): perplexity of a text, share of facts, share of sums",
        )
    )
    updates = sorted({update for found in general(rows).values() for update in found})
    for table in (closed, kept):
        for name in ("", *(f"after {update}" for update in updates)):
            table.add_column(name, justify="right" if name else "left")
    for curve in curves(rows):
        shares = {point.update: point.closed for point in curve.points}
        closed.add_row(curve.name, *("-" if (s := shares.get(u)) is None else f"{s:.0%}" for u in updates))
    plain, hinted = reference.baseline.prompt_tokens, reference.ceiling.prompt_tokens
    if plain is not None and hinted is not None:
        closed.caption = f"A request has {plain:.0f} tokens; with the hint in its prompt it has {hinted:.0f}"
    for name, scores in general(rows).items():
        kept.add_row(name, *(_known(scores[u]) if u in scores else "-" for u in updates))
    return [closed, kept]


def _known(score: GeneralScore) -> str:
    perplexity = "-" if score.perplexity is None else f"{score.perplexity:.1f}"
    return f"{perplexity}, {score.facts:.2f}, {score.sums:.2f}"


def _of_base(score: VersionScore) -> str:
    return f"{score.score:.2f} ({score.low:.2f}-{score.high:.2f})"


def _scored(point: Point) -> str:
    return _interval(point.score) + ("" if point.share is None else f"  [dim]{point.share:.0%}[/]")


def _interval(mean: Mean) -> str:
    return f"{mean.mean:.2f}" if mean.low is None else f"{mean.mean:.2f} ({mean.low:.2f}-{mean.high:.2f})"


def _lasting(found: Sequence[Lasting]) -> Table:
    table = Table(
        title="What is kept: each person's score when their block ended, and at the end (means over seeds; 95 %)",
        title_justify="left",
    )
    talkers = [block.talker for block in found[0].blocks if any(block.talker in one.scores for one in found)]
    for name in ("", "seeds", *talkers, "kept", "newest", "others lost"):
        table.add_column(name, justify="right" if name else "left")
    for one in found:
        last = one.blocks[-1].end
        ends = {block.talker: block.end for block in one.blocks}
        scores = [
            " to ".join(f"{mean.mean:.2f}" for at in dict.fromkeys((ends[who], last)) if (mean := of_who.get(at)))
            for who in talkers
            for of_who in [one.scores.get(who, {})]
        ]
        shares = ["-" if mean is None else _interval(mean) for mean in (one.kept, one.newest, one.others_lost)]
        table.add_row(one.name, str(one.num_seeds), *scores, *shares)
    return table


def _gains(gains: list[Gain]) -> Table:
    table = Table(title="The same seeds with another method: mean difference (90 %, paired t)", title_justify="left")
    for name in ("", "after", "difference"):
        table.add_column(name, justify="right" if name else "left")
    for gain in gains:
        shown_as = f"{gain.mean:+.2f}" + ("" if gain.low is None else f" ({gain.low:+.2f}, {gain.high:+.2f})")
        table.add_row(f"{gain.method} above {gain.over}", str(gain.update), shown_as)
    return table


def _controls(checks: list[Check]) -> Table:
    table = Table(title="Controls, at the last update: the worst seed", title_justify="left")
    for name in ("", "control above the base", "method above the control", "holds"):
        table.add_column(name, justify="left" if not name else "right")
    for check in checks:
        table.add_row(
            f"{check.method}, {check.control.value}",
            f"{max(check.rise_S):+.2f}" if check.rise_S else "-",
            f"{min(check.gap_S):+.2f}" if check.gap_S else "-",
            _held(check),
        )
    return table


def _steady(lines: list[tuple[ReportRow, tuple[SteadinessCheck, ...]]], rows: Sequence[ReportRow]) -> Table:
    table = Table(title="What is wanted of each long run, and what was found", title_justify="left")
    table.add_column("")
    for line in lines[0][1]:
        table.add_column(line.wanted, justify="right")
    for row, found in lines:
        table.add_row(row.cell.title, *(_line(line) for line in found))
    table.add_section()
    real = [row for row in rows if row.cell.control is None]
    for arm in dict.fromkeys(row.cell.arm for row in real):
        of_arm = [row for row in real if row.cell.arm == arm]
        num_failed = sum(row.outcome is None for row in of_arm)
        held = [[line.holds for line in found] for row, found in lines if row.cell.arm == arm]
        columns = [*zip(*held, strict=True)] or [()] * len(lines[0][1])
        failed = f" ({num_failed} failed)" if num_failed else ""
        table.add_row(f"{arm}, runs{failed}", *(_counted(column, len(of_arm)) for column in columns))
    return table


def _counted(held: Sequence[bool | None], num_runs: int) -> str:
    unknown = held.count(None)
    return f"{held.count(True)} of {num_runs}{f' ({unknown} unknown)' if unknown else ''}"


def _line(line: SteadinessCheck) -> str:
    if line.found is None:
        return "unknown"
    found = " to ".join(f"{value:.2f}" for value in line.found)
    return f"{'unknown' if line.holds is None else 'yes' if line.holds else 'no'} ({found})"


def _held(check: Check) -> str:
    if check.holds is None:
        return f"unknown ({len(check.rise_S)} of {check.num_seeds} seeds)"
    return "yes" if check.holds else "no"
