"""Runs the cells of a grid, each as a process, and keeps their outcomes; a cell with an outcome is not run again.

A cell that fails gives a row with its error, and the others go on. It is run again when the grid is started again.
"""

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from clawstream.config import Settings, dump
from clawstream.local.servers.accounts import write_private
from clawstream.simulation.learn.cell import OUTCOME, Order
from clawstream.simulation.learn.grid import Cell
from clawstream.simulation.learn.outcome import CellOutcome, Reference, ReportRow, read_as
from clawstream.simulation.learn.scoring import room
from clawstream.simulation.runs.programs import program
from clawstream.simulation.runs.run import People, RunProgress

log = logging.getLogger(__name__)
T = TypeVar("T")

LOG_TAIL_LINES = 5
Tell = Callable[[Cell, RunProgress], None]


class Grid:
    """A folder of cells: `cells/NAME/outcome.json` is there once a cell is whole."""

    def __init__(
        self, folder: Path, people: People, base: Path, cache_dir: Path, *, base_sha: str, own: Settings | None = None
    ) -> None:
        self._folder, self._people, self._base, self._cache_dir = folder, people, base, cache_dir
        self._base_sha, self._own = base_sha, own

    async def reference(self, *, flips: bool = False, say: Callable[[str], None] = lambda _: None) -> Reference:
        """Return the base's scores without and with each person's hint; they are taken once for all cells on it."""
        found = await self._reference("reference", self._people.scored, say)
        if not flips:
            return found
        return replace(found, flipped=await self._reference("flipped", self._people.scored_flipped, say))

    async def _reference(self, kind: str, problems: Path, say: Callable[[str], None]) -> Reference:
        kept = self._folder / f"{kind}-{self._people.scenario}-{self._people.sha}-{self._base_sha}.json"
        found = _read(kept, Reference)
        if found is None:
            async with room(self._folder / "scoring", self._people, self._cache_dir, own=self._own) as scoring:
                asking = replace(scoring, problems=problems)
                say("scoring the base; that takes a minute or two, and it is kept")
                baseline = await asking.score(self._base, 0, base=self._base, hinted=False)
                say(f"the base scores {baseline.score:.2f}; scoring it with the hint in its prompt")
                ceiling = await asking.score(self._base, 0, base=self._base, hinted=True)
                found = Reference(baseline=baseline, ceiling=ceiling)
            kept.write_text(json.dumps(asdict(found), indent=1))
        return found

    async def run(self, cells: Sequence[Cell], reference: Reference, *, at_once: int, tell: Tell) -> list[ReportRow]:
        """Return a row for each cell, in their order."""
        slots = asyncio.Semaphore(at_once)

        async def row(cell: Cell) -> ReportRow:
            async with slots:
                return await self._row(cell, reference, tell)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(row(cell)) for cell in cells]
        return [task.result() for task in tasks]

    def kept(self, cell: Cell) -> CellOutcome | None:
        """Return the cell's outcome; None: it is still to be run."""
        return _read(self.folder_of(cell) / OUTCOME, CellOutcome)

    def folder_of(self, cell: Cell) -> Path:
        """Return the folder of a cell's log, database and weights."""
        return self._folder / "cells" / cell.name

    async def _row(self, cell: Cell, reference: Reference, tell: Tell) -> ReportRow:
        error = None
        if self.kept(cell) is None:
            tell(cell, RunProgress(phase="starting"))
            error = await self._run(cell, tell)
        tell(cell, RunProgress(phase="failed" if error else "done", update=cell.updates))
        return ReportRow(cell=cell, reference=reference, outcome=self.kept(cell), error=error)

    async def _run(self, cell: Cell, tell: Tell) -> str | None:
        """Run the cell from the beginning; return why it failed."""
        folder = self.folder_of(cell)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "logs").mkdir(parents=True)
        own = None if self._own is None else folder / "settings-own.json"
        if own is not None and self._own is not None:
            write_private(own, dump(self._own))
        Order(cell=cell, people=self._people, base=self._base, cache_dir=self._cache_dir, own=own).write(folder)
        words = folder / "logs" / "cell.log"
        async with program("clawstream.simulation.learn.cell", str(folder), log=words) as process:
            assert process.stdout is not None
            async for line in process.stdout:
                tell(cell, RunProgress(**json.loads(line)))
            code = await process.wait()
        if code == 0:
            return None
        last = words.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"exit code {code}; {words} ends with:", *last])


def _read(file: Path, kind: type[T]) -> T | None:
    """Return the file's content; None: there is no file, or an unreadable one, which is reported."""
    if not file.exists():
        return None
    try:
        return read_as(kind, file.read_text())
    except (OSError, ValueError) as error:
        log.warning("file=%s found=%r expected=what an earlier run wrote next=it is run again", file, error)
        return None
