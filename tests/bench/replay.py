"""How fast a recorded log is replayed with the votes that were cast, and that the samples are the same bytes.

The log stands on a real broker, on 12 partitions and on 1; broker and workers share the machine. A run is timed from
its command line to its end: processes start, tokenizers load, all output is acknowledged.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from clawstream.config import EngineSettings, KafkaSettings, Settings, dump
from clawstream.local.kafka import EmbeddedKafka
from clawstream.stream import admin
from clawstream.stream.kafka import KafkaLog
from clawstream.stream.log import Outgoing
from tests.bench.report import report
from tests.replay.making import DEMO, LONG, Kind, Maker, demo_model, long_model

WRITE_SESSIONS = 50
WITHIN_S = 540.0
FULL = 12  # partitions, as the topics' files say


def replay(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    exchanges: Annotated[int, typer.Option(min=4, help="Of the demo's size.")] = 20_000,
    long_exchanges: Annotated[int, typer.Option(min=0, help="Of 54 KB; 0: none.")] = 2_000,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    runs: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Recorded exchanges a second, with votes from the log, and the sha256 of the samples of each run."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedKafka(Path(folder) / "kafka") as kafka:
        place = Path(folder)
        figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "workers": workers}
        models = {"demo": (demo_model(place / "demo"), DEMO, exchanges)}
        if long_exchanges:
            models["54_kb"] = (long_model(place / "long"), LONG, long_exchanges)
        for name, (model_path, kind, count) in models.items():
            runs_of = [
                _measured(place, kafka.bootstrap, name, model_path, kind, count, partitions, workers, runs)
                for partitions in (FULL, 1)
            ]
            figures[name] = {"bytes_equal": len({sha for part in runs_of for sha in part["samples_sha256"]}) == 1}
            figures[name] |= {f"partitions_{part['partitions']}": part for part in runs_of}
        report(figures, json_file)


def _measured(
    folder: Path, bootstrap: str, name: str, model_path: Path, kind: Kind, count: int, partitions: int, workers: int,
    runs: int,
) -> dict[str, Any]:  # fmt: skip
    prefix = f"{name}-{partitions}."
    asyncio.run(_write(bootstrap, prefix, partitions, Maker(model_path, kind), count // kind.num_exchanges))
    settings = Settings(
        environment=False,
        data_dir=folder / prefix,
        kafka=KafkaSettings(bootstrap=bootstrap, prefix=prefix),
        engine=EngineSettings(model_path=model_path),
    )
    file = folder / f"{prefix}json"
    file.write_text(dump(settings))
    found = [_run(file, f"run-{number}", workers if partitions > 1 else 1, partitions) for number in range(runs)]
    return {
        "partitions": partitions,
        "exchanges": found[0]["num_exchanges"],
        "samples": found[0]["num_samples"],
        "wall_s": [round(one["wall_s"], 2) for one in found],
        "exchanges_per_s": [round(one["num_exchanges"] / one["wall_s"]) for one in found],
        "samples_sha256": [one["samples_sha256"] for one in found],
    }


def _run(settings: Path, name: str, workers: int, partitions: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "clawstream", "--config", str(settings), "replay", "start", "--name", name]
    command += ["--workers", str(workers), "--json"]
    if partitions != FULL:
        command = [sys.executable, "-m", "tests.replay.program", str(settings), name, str(workers)]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, timeout=WITHIN_S, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"wall_s": time.perf_counter() - began}


async def _write(bootstrap: str, prefix: str, partitions: int, maker: Maker, num_sessions: int) -> None:
    await admin.apply(bootstrap, prefix, partitions=partitions)
    async with KafkaLog.connect(bootstrap, prefix=prefix, client_id="bench") as log:
        waiting: list[Outgoing] = []
        for number, (exchanges, votes) in enumerate(maker.sessions(num_sessions), 1):
            waiting += map(Outgoing, [*exchanges, *votes])
            if number % WRITE_SESSIONS == 0:
                await _all(log, waiting)
                waiting = []
        await _all(log, waiting)


async def _all(log: KafkaLog, outgoing: Sequence[Outgoing]) -> None:
    if outgoing:
        await log.write(outgoing)
