"""One cell of a grid as a process: a run, then scores of the versions it published; outcome.json holds the result.

Run as `python -m clawstream.simulation.learn.cell FOLDER`, where FOLDER/order.json says what to run. A line of JSON on
stdout says how far it is. Exit code 2 means that it failed, and stderr says why.
"""

import asyncio
import hashlib
import json
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import clawstream
from clawstream.config import load
from clawstream.errors import OperatorError, TryLater
from clawstream.simulation.learn.grid import Cell
from clawstream.simulation.learn.outcome import CellOutcome, read_as, update_of
from clawstream.simulation.learn.scoring import TEMPERATURE, CheckpointScoring, room
from clawstream.simulation.runs.figures import VersionScore, at_share
from clawstream.simulation.runs.run import People, Plan, RunProgress, RunRecord, simulate

ORDER, OUTCOME = "order.json", "outcome.json"


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
        temperature=TEMPERATURE,
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
        print(_first(failed), file=sys.stderr)
        outcome = None
    if outcome is None:
        return 2
    written = folder / f"{OUTCOME}.new"
    written.write_text(json.dumps(asdict(outcome), indent=1))
    written.rename(folder / OUTCOME)  # so the file is whole or missing; if it is there, the cell is not run again
    return 0


def _first(failed: BaseExceptionGroup[BaseException]) -> str:
    first = failed.exceptions[0]
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return f"{type(first).__name__}: {first}"


if __name__ == "__main__":
    sys.exit(main())
