"""The cells of a grid: each is a process, its run and then the scores of its versions; outcome.json keeps the result.

A cell with an outcome is not run again. One that fails gives a row with its error, and the others go on; it is run
again when the grid is started again. A cell is run as `python -m clawstream.simulation.learn.cell FOLDER`, where
FOLDER/order.json says what to run. A line of JSON on stdout says how far it is. Exit code 2 means that it failed, and
stderr says why.
"""

import asyncio
import hashlib
import json
import logging
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import clawstream
from clawstream.config import Settings, dump, load
from clawstream.errors import OperatorError, TryLater, first_of
from clawstream.local.servers.accounts import write_private
from clawstream.simulation.learn.grid import Cell
from clawstream.simulation.learn.outcome import CellOutcome, Reference, ReportRow, read_as, update_of
from clawstream.simulation.learn.scoring import CheckpointScoring, room
from clawstream.simulation.runs.figures import VersionScore, at_share
from clawstream.simulation.runs.people import People
from clawstream.simulation.runs.programs import program
from clawstream.simulation.runs.run import Plan, RunProgress, RunRecord, simulate

log = logging.getLogger(__name__)
T = TypeVar("T")

ORDER, OUTCOME = "order.json", "outcome.json"
LOG_TAIL_LINES = 5
Tell = Callable[[Cell, RunProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A cell to run, and its inputs."""

    cell: Cell
    people: People
    base: Path
    cache_dir: Path
    own: Path | None = None  # a person's settings as `dump` writes them; None: all parts are simulated

    def write(self, folder: Path) -> None:
        (folder / ORDER).write_text(json.dumps(asdict(self), indent=1, default=str))


async def run_cell(order: Order, folder: Path) -> CellOutcome:
    """Return the cell's outcome; raises the errors of `simulate` and `CheckpointScoring.score`."""
    cell = order.cell
    plan = Plan(
        people=order.people,
        method=cell.method,  # type: ignore[arg-type]
        updates=cell.updates,
        seed=cell.seed,
        control=cell.control,
        temperature=order.people.cast.temperature,
        training=cell.training,
        patient=not cell.hurry,
        flip_after=cell.flip_after,
        votes_together=cell.votes_together,
        wordy_hints=cell.wordy_hints,
        adapters=cell.adapters,
        base=order.base,
        cache_dir=order.cache_dir,
        folder=folder,
        own=None if order.own is None else load(order.own),
    )
    record = await simulate(plan, tell=_tell)
    return _outcome(record, *await _scores(order, folder, record), code=code_sha())


def _outcome(
    record: RunRecord, scores: dict[int, VersionScore], at_flip: VersionScore | None, *, code: str
) -> CellOutcome:
    counts = record.counts
    took_s = counts.correction_to_policy_s
    return CellOutcome(
        scores=scores,
        interactions={
            update: counts.interactions[version]
            for update, version in enumerate(record.versions)
            if update in scores and version in counts.interactions
        },
        turns=counts.turns,
        samples=counts.samples,
        corrections=counts.corrections,
        refusals=counts.refusals,
        correction_to_policy_s=statistics.median(took_s) if took_s else None,
        correction_to_policy_p90_s=at_share(took_s, 0.9) if took_s else None,
        correction_to_served_s=statistics.median(counts.correction_to_served_s)
        if counts.correction_to_served_s
        else None,
        correction_to_served_max_s=max(counts.correction_to_served_s, default=None),
        steps=tuple(update_of(step, update) for update, step in enumerate(record.steps, 1)),
        rejected=record.num_rejected,
        at_flip=at_flip,
        requests_failed=sum(chat.failed for chat in record.chats),
        environment_steps=record.environment_steps,
        run_s=record.wall_s,
        code=code,
    )


async def _scores(order: Order, folder: Path, record: RunRecord) -> tuple[dict[int, VersionScore], VersionScore | None]:
    """Score the published versions that the cell names; only their weights are kept afterwards.

    A version is scored by the wishes at the time it learned; the version at the flip also by the wishes after it.
    """
    cell, scores, at_flip = order.cell, dict[int, VersionScore](), None
    own = None if order.own is None else load(order.own)
    key = cell.blocks[0].talker if cell.by_key else None
    async with room(folder / "scoring", order.people, order.cache_dir, own=own, key=key) as asking:
        asking_flipped = replace(asking, problems=order.people.scored_flipped)

        async def scored(update: int, room: CheckpointScoring) -> VersionScore:
            _tell(RunProgress(phase=f"scoring update {update} in a fresh engine", update=cell.updates))
            version = record.versions[update]
            checkpoint = record.published[version] if version else order.base
            found = replace(await room.score(checkpoint, version, base=order.base), update=update)
            _tell(RunProgress(phase=f"update {update} is scored", update=cell.updates, score=found.score))
            return found

        for update, by_flipped in cell.scorings:
            found = await scored(update, asking_flipped if by_flipped else asking)
            if by_flipped and update == cell.flip_after:
                at_flip = found
            else:
                scores[update] = found
    named = {record.versions[update] for update in cell.score_at}
    for version, path in record.published.items():
        if version and version not in named:
            shutil.rmtree(path)
    return scores, at_flip


def _tell(progress: RunProgress) -> None:
    print(json.dumps(asdict(progress)), flush=True)


def code_sha() -> str:
    """Return a hash of this package's source, since figures of different code should not be compared unchecked."""
    package = Path(clawstream.__file__).parent
    material = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        material.update(source.relative_to(package).as_posix().encode() + source.read_bytes())
    return material.hexdigest()[:12]


def main() -> int:
    """Run the cell of the folder that the command line names; return the exit code, 2 where the run failed."""
    folder = Path(sys.argv[1])
    try:
        outcome = asyncio.run(run_cell(read_as(Order, (folder / ORDER).read_text()), folder))
    except* (OperatorError, TryLater, OSError, TimeoutError) as failed:
        first = first_of(failed)
        print(f"{type(first).__name__}: {first}", file=sys.stderr)
        outcome = None
    if outcome is None:
        return 2
    written = folder / f"{OUTCOME}.new"
    written.write_text(json.dumps(asdict(outcome), indent=1))
    written.rename(folder / OUTCOME)  # so the file is whole or missing; if it is there, the cell is not run again
    return 0


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
                say("scoring the base; that takes a minute or more, and it is kept")
                baseline = await asking.score(self._base, 0, base=self._base, hinted=False)
                say(f"the base scores {baseline.score:.2f}; scoring it with the hint in its prompt")
                ceiling = await asking.score(self._base, 0, base=self._base, hinted=True)
                held_out = None
                if self._people.scored_held_out is not None:
                    say(f"with the hint it scores {ceiling.score:.2f}; scoring it with the hint in words held out")
                    others = replace(asking, problems=self._people.scored_held_out)
                    held_out = await others.score(self._base, 0, base=self._base, hinted=True)
                found = Reference(baseline=baseline, ceiling=ceiling, ceiling_held_out=held_out)
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


if __name__ == "__main__":
    sys.exit(main())
