"""What `clawstream learn` prints: scores, methods against each other, and whether the controls hold."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from clawstream.simulation.outcome import Reference, Row
from clawstream.simulation.report import Check, Curve, Gain, Mean, Point, checks, curves, gains

FILE_COLUMNS = 200


def tables(rows: Sequence[Row], reference: Reference) -> list[Table]:
    """Return the tables that there is something to say in."""
    compared, held = gains(rows), checks(rows)
    return [
        _scores(curves(rows), reference),
        *([_gains(compared)] if compared else []),
        *([_controls(held)] if held else []),
    ]


def show(tables: Sequence[Table]) -> None:
    """Print them on stdout; a file gets whole lines, however long."""
    console = Console()
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    console.print(*tables, sep="\n\n")


def _scores(curves: list[Curve], reference: Reference) -> Table:
    problems = reference.baseline.num_problems
    table = Table(
        title=f"Right and as wanted, of {problems} held-out problems: mean over seeds (95 %; after 0 over problems), "
        "share of the ceiling",
        title_justify="left",
    )
    updates = sorted({point.update for curve in curves for point in curve.points})
    for name in ("", "seeds", *(f"after {update}" for update in updates), "s to the policy"):
        table.add_column(name, justify="left" if not name else "right")
    for curve in curves:
        points = {point.update: point for point in curve.points}
        seeds = max((point.score.num_seeds for point in curve.points), default=0)
        cells = [_scored(points[u]) if u in points else "-" for u in updates]
        seconds = "-" if curve.correction_to_policy_s is None else f"{curve.correction_to_policy_s:.1f}"
        failed = f" ({curve.num_failed} failed)" if curve.num_failed else ""
        table.add_row(curve.name, f"{seeds}{failed}", *cells, seconds)
    table.add_section()
    ceiling = reference.ceiling
    table.add_row("hint in the prompt", "", f"{ceiling.score:.2f} ({ceiling.low:.2f}-{ceiling.high:.2f})")
    return table


def _scored(point: Point) -> str:
    return _interval(point.score) + ("" if point.share is None else f"  [dim]{point.share:.0%}[/]")


def _interval(mean: Mean) -> str:
    return f"{mean.mean:.2f}" if mean.low is None else f"{mean.mean:.2f} ({mean.low:.2f}-{mean.high:.2f})"


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


def _held(check: Check) -> str:
    if check.holds is None:
        return f"unknown ({len(check.rise_S)} of {check.num_seeds} seeds)"
    return "yes" if check.holds else "no"
