"""The installation under test: real processes, broker and database, and an engine and judges that obey the rig."""

import asyncio
import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawstream.config import Settings, dump
from clawstream.local.servers.server_process import reserved
from clawstream.projections import database
from clawstream.stream.kafka import admin
from tests.chaos.parts import Part, preload
from tests.chaos.peers import Judges, engine
from tests.chaos.plan import Plan
from tests.chaos.servers import Broker, Database, Proxy
from tests.fakes.scripted_engine import serving
from tests.renderers import load_renderer

_CONTEXT_TOKENS = 4096
_NO_ROOM_FOR_S = 3.0  # after a disk was full: what was refused then is told now


@dataclass(slots=True, kw_only=True)
class Full:
    """A time in which the spools' disk was full, by the monotonic clock."""

    since_s: float
    until_s: float = math.inf


@dataclass(slots=True, kw_only=True)
class InstallationUnderTest:
    """What there is, and what was done to it."""

    settings: Settings
    broker: Broker
    kafka_proxy: Proxy
    database: Database
    judges: Judges
    parts: dict[str, Part]
    disk: Path  # while it is there, the spools' disk is full
    full: list[Full] = field(default_factory=list)
    applied: Counter[str] = field(default_factory=Counter)
    one_broker_fault: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def bootstrap(self) -> str:
        """host:port of the broker, as every client knows it."""
        return self.broker.bootstrap

    def had_room(self, since_s: float, until_s: float) -> bool:
        """Whether the spools had room all the time."""
        return not any(full.since_s <= until_s and since_s <= full.until_s + _NO_ROOM_FOR_S for full in self.full)


@contextlib.asynccontextmanager
async def installed(plan: Plan, folder: Path) -> AsyncIterator[InstallationUnderTest]:
    """Yield the installation; its processes are gone afterwards."""
    training = "train" in plan.stages
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(preload(training=training))
        made = tasks.create_task(asyncio.to_thread(_model, folder / "model", training=training))
    model = made.result()
    renderer = load_renderer(model, "qwen3", enable_thinking=False)
    async with contextlib.AsyncExitStack() as stack:
        kafka_proxy = await stack.enter_async_context(Proxy().running())
        database_proxy = await stack.enter_async_context(Proxy().running())
        broker, postgres = Broker(folder / "kafka", kafka_proxy), Database(folder / "postgres", database_proxy)
        stack.push_async_callback(broker.stop)
        stack.push_async_callback(postgres.stop)
        await asyncio.gather(broker.start(), postgres.start())
        await admin.apply(broker.bootstrap)
        await asyncio.to_thread(database.upgrade, postgres.url)
        backend = engine(renderer, context_length_tokens=_CONTEXT_TOKENS)
        engine_url = await stack.enter_async_context(serving(backend))
        judges = await stack.enter_async_context(Judges().serving())
        settings = _settings(folder, model, broker, postgres, engine_url, judges)
        (folder / "logs").mkdir(exist_ok=True)
        disk = folder / "disk-is-full"
        parts = {}
        for name in plan.parts:
            port = stack.enter_context(reserved()) if name.startswith("gateway") else 0
            parts[name] = _part(name, settings, disk, plan, port, kafka_proxy.leads)
        await stack.enter_async_context(_kept(parts.values()))
        yield InstallationUnderTest(
            settings=settings, broker=broker, kafka_proxy=kafka_proxy, database=postgres, judges=judges, parts=parts,
            disk=disk,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def _kept(parts: Iterable[Part]) -> AsyncIterator[None]:
    keepers = [asyncio.create_task(part.keep()) for part in parts]
    try:
        yield
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


def _model(folder: Path, *, training: bool) -> Path:
    """Make the policy's folder; its weights are for the trainer alone, and torch takes seconds to import."""
    from tests.parts.engine.tiny_model import make_config, make_model

    make = make_model if training else make_config
    make(folder, context_length_tokens=_CONTEXT_TOKENS)
    return folder


def _settings(
    folder: Path, model: Path, broker: Broker, postgres: Database, engine_url: str, judges: Judges
) -> Settings:
    values: dict[str, Any] = {
        "environment": False,
        "data_dir": folder,
        "cache_dir": folder / "cache",
        "kafka": {"bootstrap": broker.bootstrap},
        "postgres": {"url": postgres.url},
        "engine": {"urls": (engine_url,), "model_path": model},
        "policy": {"renderer": "qwen3", "enable_thinking": False},
        "judge": {"url": judges.url, "votes": 1},
        "training": {"batch_samples": 64, "max_wait_s": 3.0, "keep_checkpoints": 100_000,
                     "micro_batch_tokens": 4096},
    }  # fmt: skip
    return Settings(**values)


def _part(name: str, settings: Settings, disk: Path, plan: Plan, port: int, broker_is_there: asyncio.Event) -> Part:
    kafka = settings.kafka.model_copy(update={"instance": f"slot-{name}"})
    gateway = settings.gateway.model_copy(update={"port": port})
    config = settings.data_dir / f"{name}.json"
    config.write_text(dump(settings.model_copy(update={"kafka": kafka, "gateway": gateway})))
    log = settings.data_dir / "logs" / f"{name}.log"
    arguments = {"config": config, "disk": disk, "log": log, "without": plan.without}
    return Part(name=name, stage=name.partition("-")[0], arguments=arguments, port=port, may_start=broker_is_there)


def say(words: str) -> None:
    """Tell whoever watches the run."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)
