"""`python -m tests.chaos --seconds 60 --seed 1 --json FILE`: everything goes wrong, and nothing is lost."""

import asyncio
import json
import shutil
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawstream.cli.process import hide_torch
from tests.chaos.guards import Guard
from tests.chaos.oracle import counts, findings
from tests.chaos.plan import random_faults
from tests.chaos.trials import directed
from tests.chaos.verdict import Status, floor, verdict

if TYPE_CHECKING:
    from tests.chaos.rig import Run

_SHOWN = 40
_SECONDS = 60.0


def chaos(
    seconds: Annotated[float | None, typer.Option(min=1, help="If unsaid, 60, or as the directed faults take.")] = None,
    seed: Annotated[int, typer.Option(help="Of the schedule of faults.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="If unsaid, as many as the run is made for.")] = None,
    patience_s: Annotated[float, typer.Option(min=1, help="How long nothing may move before the drain ends.")] = 90,
    broken: Annotated[Guard | None, typer.Option("--break", help="Take this guard out; the run must fail.")] = None,
    faults_of: Annotated[Guard | None, typer.Option(help="Have the faults that reach this guard, and keep it.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the run's folder here.")] = None,
) -> None:
    """Run the whole pipeline under faults, and say from outside whether every promise was kept.

    Exits with 0 where all were; 1 where one was not; 2 where none was seen broken and the run does not show it: a part
    crashed, work was left, directed faults missed, or it did less than 1,000 exchanges or 30 faults of 6 kinds a
    minute; 3 where the rig broke.
    """
    guard = broken or faults_of
    plan = random_faults(seed, seconds or _SECONDS) if guard is None else directed(guard)
    plan = replace(plan, without=broken, seconds=seconds or plan.seconds, clients=clients or plan.clients)
    if "train" not in plan.stages:
        hide_torch()
    from tests.chaos.rig import perform

    typer.echo(f"seed {seed}, {len(plan.faults)} faults", err=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-")) if keep is None else keep
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run = asyncio.run(perform(plan, folder, patience_s=patience_s))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    times_broken = judged(run)
    report = {
        "seed": seed,
        "faults": dict(sorted(run.applied.items())),
        "exchanges_acknowledged": len(run.tally.seen),
    } | times_broken
    text = json.dumps(report)
    typer.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    found = verdict(
        times_broken,
        acknowledged=len(run.tally.seen),
        applied=run.applied,
        crashes=run.crashes,
        left=run.drained.left,
        reached=run.reached,
        least=floor(plan.seconds) if guard is None else None,
    )
    for reason in found.reasons:
        typer.echo(f"{found.status.name.lower()}: {reason}", err=True)
    sys.exit(found.status)


def judged(run: "Run") -> dict[str, int]:
    """Return how often each promise was not kept; what it was goes to stderr in words."""
    broken = findings(run.collected)
    for finding in broken[:_SHOWN]:
        typer.echo(f"{finding.promise}: {finding.what}", err=True)
    tally = run.tally
    typer.echo(
        f"cut {tally.cut}, stated 503 {tally.unavailable}, no room {tally.refused_for_want_of_room}; "
        f"records {len(run.collected.records)}; drained in {run.drained.took_s:.0f} s: {run.drained.left or 'all'}; "
        f"crashed: {run.crashes or 'none'}",
        err=True,
    )
    return counts(broken)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(chaos)
    try:
        app()
    except Exception:  # noqa: BLE001  # whatever it is, it says nothing about promises
        traceback.print_exc()
        sys.exit(Status.RIG_FAILED)
