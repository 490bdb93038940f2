"""From a step to the engine that serves its version: the trainer and the weights stage on one log, a CPU engine."""

import asyncio
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import aiohttp
import torch
import typer

from clawstream.config import EngineSettings, PolicySettings, Settings, TrainingSettings
from clawstream.events import Event, PolicyActivated, PolicyPublished, StepTaken
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.stream import topics
from clawstream.stream.stage import Record
from clawstream.training.loop import train
from clawstream.weights.stage import keep_current
from tests.bench.report import report
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.engine.process import cpu_engine
from tests.parts.training import tiny

WITHIN_S = 900.0


def serving(
    model: Annotated[Path, typer.Option(help="The base, a Hugging Face folder.")],
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    updates: Annotated[int, typer.Option(min=2)] = 5,
    lora_rank: Annotated[int | None, typer.Option(help="Train an adapter.  [default: all weights]")] = None,
) -> None:
    """Milliseconds from each step to its version on the log, and to the engine that serves it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = shutil.copytree(model, Path(folder) / "base")  # the engine's log goes beside it
        training = TrainingSettings(batch_samples=2, max_updates=updates, gate=False, lora_rank=lora_rank)
        settings = Settings(
            data_dir=Path(folder), engine=EngineSettings(model_path=base), policy=PolicySettings(id="policy"),
            training=training,
        )  # fmt: skip
        options = () if lora_rank is None else ("--enable-lora", "--max-lora-rank", str(lora_rank))
        with reserved() as port, cpu_engine(base, port, "--weight-version", "0", *options) as url:
            events = asyncio.run(_events(settings, url, updates))
    report(_figures(events, updates), json_file)


async def _events(settings: Settings, url: str, updates: int) -> list[Event]:
    """Train and serve until the last version is served; return what the log says of the policy then."""
    log, stop = MemoryLog(MemoryBroker()), asyncio.Event()
    await log.append([tiny.sample(f"s{i}", reward=1 if i % 2 else -1, hinted=True) for i in range(2 * updates)])
    found: list[Event] = []
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as parts, asyncio.timeout(WITHIN_S):
        parts.create_task(train(settings, log, stop=stop))
        parts.create_task(keep_current([SglangEngine(http, url)], log, policy_id="policy", stop=stop))
        async for records in log.follow([topics.POLICY], "earliest"):
            found += [record.event for record in records if isinstance(record, Record)]
            if any(isinstance(event, PolicyActivated) and event.policy_version == updates for event in found):
                break
        stop.set()
    return found


def _figures(events: list[Event], updates: int) -> dict[str, float | int | list[int]]:
    taken = {e.policy_version: e.taken_at_ms for e in events if isinstance(e, StepTaken)}
    published = {e.policy_version: e.published_at_ms for e in events if isinstance(e, PolicyPublished)}
    served = {e.policy_version: e.activated_at_ms for e in events if isinstance(e, PolicyActivated)}
    num_bytes = [e.num_bytes for e in events if isinstance(e, PolicyActivated)]
    ms = {
        "step_to_log_ms": [published[v] - taken[v] for v in range(1, updates + 1)],
        "step_to_serving_ms": [served[v] - taken[v] for v in range(1, updates + 1) if v in served],
    }
    return {
        **ms,
        **{f"median_{name}": statistics.median(each) for name, each in ms.items()},
        "num_bytes": num_bytes[-1],
    }
