"""How far runs with simulated people are: a bar each on a terminal, else a line for each change, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

if TYPE_CHECKING:
    from clawstream.simulation.runs.run import RunProgress as Step

    Tell = Callable[[str, Step], None]


@contextmanager
def shown(console: Console, updates: int, unit: str = "updates") -> "Iterator[Tell]":
    """Yield what shows a step of the run of a name, of so many of a unit; a run with no name is the only one."""
    if not console.is_terminal:
        yield ProgressLines(updates, unit)
        return
    with Progress(*columns(unit), console=console, expand=True) as bars:
        yield ProgressBars(bars, updates)


@contextmanager
def waiting(console: Console) -> "Iterator[Callable[[str], None]]":
    """Yield what says what goes on: a terminal sees the last of it and since when, all the while."""
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
    """Return what is shown of each run; where the line is too short, its phase and counts at the end are cut."""
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
        """Show `step`."""
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
    """Says each update in a line on stderr, for whoever has no terminal to see a bar on."""

    def __init__(self, updates: int, unit: str = "updates") -> None:
        self._updates, self._unit = updates, unit
        self._said: dict[str, tuple[str, int, float | None]] = {}

    def __call__(self, name: str, step: "Step") -> None:
        """Say `step`, unless only its counts are new."""
        told = (step.phase, step.update, step.score)
        if told == self._said.get(name):
            return
        self._said[name] = told
        score = "" if step.score is None else f", score {step.score:.2f}"
        requests = "" if step.requests is None else f", {step.requests} requests"
        typer.echo(f"{_named(name, step.phase)}: {step.update}/{self._updates} {self._unit}{score}{requests}", err=True)


def _named(name: str, phase: str) -> str:
    return f"{name}: {phase}" if name else phase
