"""How fast a recorded log is replayed with the votes that were cast, and that the samples are the same bytes.

The log stands on a real broker, on 12 partitions and on 1; broker and workers share the machine. `exchanges_per_s` is
of the time in which workers worked, from their first read until all output is acknowledged; `wall_s` is of the whole
command, in which processes start and tokenizers load. CPU seconds are those of the command, without the broker.
"""

import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar
from zlib import crc32

import typer

from clawstream.config import EngineSettings, KafkaSettings, Settings, dump
from clawstream.events import ExchangeCompleted
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.stream.avro import codec, headers_of, key_bytes
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Sealed
from clawstream.stream.topics import topic_of
from tests.bench.report import report
from tests.parts.replay.making import DEMO, LONG, Maker, demo_model, long_model

WRITE_RECORDS = 2000
_PREPARED = re.compile(r"workers=prepared cpu_s=([0-9.]+)")
_WORKER = re.compile(r"worker=done .*seconds=([0-9.]+) cpu_s=([0-9.]+) starting_cpu_s=([0-9.]+)")
T = TypeVar("T")
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
    with tempfile.TemporaryDirectory() as folder, EmbeddedKafka(Path(folder) / "kafka", open_to_all=True) as kafka:
        place = Path(folder)
        figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "workers": workers}
        models = {"demo": (demo_model(place / "demo"), DEMO, exchanges)}
        if long_exchanges:
            models["54_kb"] = (long_model(place / "long"), LONG, long_exchanges)
        for name, (model_path, kind, count) in models.items():
            recorded = _recorded(Maker(model_path, kind), count // kind.num_exchanges)
            runs_of = [
                _measured(place, kafka.bootstrap, name, model_path, recorded, partitions, workers, runs)
                for partitions in (FULL, 1)
            ]
            figures[name] = {
                "bytes_an_exchange": recorded.num_bytes // count,
                "records": len(recorded.records),
                "bytes_equal": len({sha for part in runs_of for sha in part["samples_sha256"]}) == 1,
            }
            figures[name] |= {f"partitions_{part['partitions']}": part for part in runs_of}
        report(figures, json_file)


class Recorded(NamedTuple):
    """A log, not written yet."""

    records: list[Sealed]
    num_bytes: int  # of the exchanges


def _recorded(maker: Maker, num_sessions: int) -> Recorded:
    records: list[Sealed] = []
    num_bytes = 0
    for exchanges, votes in maker.sessions(num_sessions):
        for event in (*exchanges, *votes):
            headers = headers_of(event, source="/clawstream/bench", now_ms=0, traceparent=None)
            records.append(Sealed(topic_of(type(event)), key_bytes(event.key), codec().encode(event), tuple(headers)))
            num_bytes += len(records[-1].value) if isinstance(event, ExchangeCompleted) else 0
    return Recorded(records, num_bytes)


def _measured(
    folder: Path, bootstrap: str, name: str, model_path: Path, recorded: Recorded, partitions: int, workers: int,
    runs: int,
) -> dict[str, Any]:  # fmt: skip
    prefix = f"{name}-{partitions}."
    asyncio.run(_write(bootstrap, prefix, partitions, recorded))
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
        "workers": found[0]["workers"],
        "exchanges": found[0]["num_exchanges"],
        "samples": found[0]["num_samples"],
        "wall_s": [round(one["wall_s"], 2) for one in found],
        "working_s": [one["working_s"] for one in found],
        "cpu_s": [one["cpu_s"] for one in found],
        "cpu_s_working": [one["cpu_s_working"] for one in found],
        "exchanges_per_s": [round(one["num_exchanges"] / one["working_s"]) for one in found],
        "exchanges_per_s_with_start": [round(one["num_exchanges"] / one["wall_s"]) for one in found],
        "samples_sha256": [one["samples_sha256"] for one in found],
    }


def _run(settings: Path, name: str, workers: int, partitions: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "clawstream", "--config", str(settings), "replay", "start", "--name", name]
    command += ["--workers", str(workers), "--json"]
    if partitions != FULL:
        command = [sys.executable, "-m", "tests.parts.replay.program", str(settings), name, str(workers)]
    began, cpu_s = time.perf_counter(), _cpu_s_of_children()
    done = subprocess.run(command, check=True, timeout=WITHIN_S, capture_output=True)
    found: dict[str, Any] = json.loads(done.stdout)
    told = done.stderr.decode()
    said = [tuple(map(float, match)) for match in _WORKER.findall(told)]
    # Workers are forks of a process that ends unasked for behind the command, so neither is among its children.
    theirs = [float(said) for said in _PREPARED.findall(told)] + [part for _, *both in said for part in both]
    return found | {
        "workers": len(said),
        "wall_s": time.perf_counter() - began,
        "working_s": max(working_s for working_s, _, _ in said),
        "cpu_s": round(_cpu_s_of_children() - cpu_s + sum(theirs), 2),
        "cpu_s_working": round(sum(cpu_s for _, cpu_s, _ in said), 2),
    }


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _write(bootstrap: str, prefix: str, partitions: int, recorded: Recorded) -> None:
    await admin.apply(bootstrap, prefix, partitions=partitions)
    async with KafkaLog.connect(bootstrap, prefix=prefix, client_id="bench") as log:
        for some in batched(recorded.records, WRITE_RECORDS):
            for number in range(partitions):
                await log.put([record for record in some if crc32(record.key) % partitions == number], number)


def batched(records: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the records in groups of `size`."""
    for start in range(0, len(records), size):
        yield records[start : start + size]
