"""One run: an installation of real processes under load and faults, then a drain, then what there is to see."""

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiokafka.errors import KafkaError

from clawstream.config import Settings, dump
from clawstream.errors import TryLater
from clawstream.events import BatchPlanned, SampleAssembled, StepTaken
from clawstream.inference.rendering import PromptRenderer
from clawstream.inference.scripted import serving
from clawstream.local.ports import reserved
from clawstream.projections import database
from clawstream.stream import admin
from clawstream.stream.kafka import KafkaLog
from clawstream.stream.stage import Record
from tests.chaos import reading
from tests.chaos.clients import Clients, Door, Tally
from tests.chaos.guards import Guard
from tests.chaos.oracle import STAGES, Collected
from tests.chaos.parts import Part, command
from tests.chaos.peers import Judges, Mood, engine
from tests.chaos.schedule import Fault, Kind
from tests.chaos.servers import Broker, Database, Proxy

PARTS = {"gateway": 2, "turns": 2, "judging": 2, "samples": 2, "project": 2, "train": 1, "weights": 1}
NAMES = tuple(f"{stage}-{number}" if slots > 1 else stage for stage, slots in PARTS.items() for number in range(slots))
_CONTEXT_TOKENS = 4096
_POLICY_TOPIC = "clawstream.policy.v1"
_READY_WITHIN_S = 240.0
_MOST_STARTS = 3  # before anything went wrong on purpose
_NO_ROOM_FOR_S = 3.0  # after a disk was full: what was refused then is told now
_MOODS = {Kind.JUDGES_SLEEP: Mood.ASLEEP, Kind.JUDGES_BUSY: Mood.BUSY, Kind.JUDGES_BABBLE: Mood.BABBLING}
_NUMBERS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGTERM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run is to be."""

    folder: Path
    seconds: float
    faults: Sequence[Fault]
    clients: int
    drain_s: float
    without: Guard | None = None
    stages: frozenset[str] = STAGES


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of it."""

    collected: Collected
    applied: Counter[str]
    tally: Tally
    drained: str | None  # None: everything came to its end; else what did not
    drain_s: float
    crashes: dict[str, int]  # by part


@dataclass(slots=True, kw_only=True)
class House:
    """The installation under test."""

    settings: Settings
    broker: Broker
    kafka_proxy: Proxy
    database: Database
    judges: Judges
    parts: dict[str, Part]
    full: Path  # while it is there, the spools' disk is full
    no_room: list[tuple[float, float]] = field(default_factory=list)
    applied: Counter[str] = field(default_factory=Counter)
    one_broker_fault: asyncio.Lock = field(default_factory=asyncio.Lock)

    def had_room(self, since_s: float, until_s: float) -> bool:
        """Whether the spools had room all the time."""
        return not any(begin <= until_s and since_s <= end + _NO_ROOM_FOR_S for begin, end in self.no_room)


async def perform(plan: Plan) -> Run:
    """Run it all; every process is gone afterwards."""
    async with _house(plan) as house, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        doors = [
            Door(url=f"http://127.0.0.1:{_port(part)}", part=part)
            for name, part in house.parts.items()
            if name.startswith("gateway")
        ]
        await _until_ready(http, doors, house)
        if "train" in plan.stages:
            await _until_published(house)
        _say(f"every gateway is ready; {plan.clients} clients for {plan.seconds:g} s, {len(plan.faults)} faults")
        clients = Clients(doors=doors, http=http, has_room=house.had_room)
        async with asyncio.TaskGroup() as talking:
            for number in range(plan.clients):
                talking.create_task(clients.talk(number))
            await _harass(house, plan)
            clients.stop.set()
        _say(f"{len(clients.tally.seen)} answers were acknowledged; draining for at most {plan.drain_s:g} s")
        drained, records, bad, took_s = await _drain(house, plan)
        collected = await _collect(house, plan, clients.tally, records, bad)
    crashes = {name: part.num_crashes for name, part in house.parts.items() if part.num_crashes}
    return Run(
        collected=collected, applied=house.applied, tally=clients.tally, drained=drained, drain_s=took_s,
        crashes=crashes,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _house(plan: Plan) -> AsyncIterator[House]:
    folder = plan.folder
    model = await asyncio.to_thread(_model, folder / "model", plan.stages)
    renderer = PromptRenderer.load(model, "qwen3", enable_thinking=False)
    backend = engine(renderer, context_length_tokens=_CONTEXT_TOKENS)
    async with contextlib.AsyncExitStack() as stack:
        kafka_proxy = await stack.enter_async_context(Proxy().running())
        database_proxy = await stack.enter_async_context(Proxy().running())
        broker, postgres = Broker(folder / "kafka", kafka_proxy), Database(folder / "postgres", database_proxy)
        stack.push_async_callback(broker.stop)
        stack.push_async_callback(postgres.stop)
        await asyncio.gather(broker.start(), postgres.start())
        await admin.apply(broker.bootstrap)
        await asyncio.to_thread(database.upgrade, postgres.url)
        engine_url = await stack.enter_async_context(serving(backend))
        judges = await stack.enter_async_context(Judges().serving())
        settings = _settings(folder, model, broker, postgres, engine_url, judges)
        full = folder / "disk-is-full"
        parts = {}
        (folder / "logs").mkdir(exist_ok=True)
        for name in (name for name in NAMES if name.partition("-")[0] in plan.stages):
            port = stack.enter_context(reserved()) if name.startswith("gateway") else 0
            parts[name] = _part(name, settings, folder, full, plan.without, port)
        house = House(
            settings=settings, broker=broker, kafka_proxy=kafka_proxy, database=postgres, judges=judges, parts=parts,
            full=full,
        )  # fmt: skip
        keepers = [asyncio.create_task(part.keep()) for part in parts.values()]
        try:
            yield house
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


def _model(folder: Path, stages: frozenset[str]) -> Path:
    """Make the policy's folder; its weights are for the trainer alone, and torch takes seconds to import."""
    from tests.engine.tiny_model import make_config, make_model

    make = make_model if "train" in stages else make_config
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
        "judge": {"url": judges.url, "votes": 1, "call_timeout_s": 20.0, "deadline_s": 120.0},
        "training": {"batch_samples": 16, "max_wait_s": 3.0, "keep_checkpoints": 100_000, "threads": 1,
                     "device": "cpu", "micro_batch_tokens": 4096},
    }  # fmt: skip
    return Settings(**values)


def _part(name: str, settings: Settings, folder: Path, full: Path, without: Guard | None, port: int) -> Part:
    kafka = settings.kafka.model_copy(update={"instance": f"slot-{name}"})
    gateway = settings.gateway.model_copy(update={"port": port})
    config = folder / f"{name}.json"
    config.write_text(dump(settings.model_copy(update={"kafka": kafka, "gateway": gateway})))
    argv = command(config, name.partition("-")[0], without=without, disk=full)
    return Part(name=name, argv=argv, log=folder / "logs" / f"{name}.log")


def _port(part: Part) -> int:
    config = Path(part.argv[part.argv.index("--config") + 1])
    found = json.loads(config.read_text())["gateway"]["port"]
    assert isinstance(found, int)
    return found


async def _until_ready(http: aiohttp.ClientSession, doors: Sequence[Door], house: House) -> None:
    """Return once every gateway is ready; raises RuntimeError with the words of a part that does not stay up."""
    async with asyncio.timeout(_READY_WITHIN_S):
        for door in doors:
            while not await _ready(http, door):
                for part in house.parts.values():
                    if len(part.lives) > _MOST_STARTS:
                        raise RuntimeError(f"{part.name} does not stay up: {part.log.read_text()[-1500:]}")
                await asyncio.sleep(0.2)


async def _until_published(house: House) -> None:
    """Return once the trainer has said where it starts from: faults that come before would be none of its."""
    async with asyncio.timeout(_READY_WITHIN_S), KafkaLog.connect(house.broker.bootstrap, client_id="chaos") as log:
        while not any((await log.end_offsets([_POLICY_TOPIC])).values()):
            await asyncio.sleep(0.2)


async def _ready(http: aiohttp.ClientSession, door: Door) -> bool:
    try:
        async with http.get(f"{door.url}/readyz", timeout=aiohttp.ClientTimeout(total=2)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _harass(house: House, plan: Plan) -> None:
    """Return when the time is over and every fault has passed."""
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for fault in plan.faults:
            tasks.create_task(_at(began_s + fault.at_s, house, fault))
        await asyncio.sleep(plan.seconds)


async def _at(when_s: float, house: House, fault: Fault) -> None:
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))
    if await _apply(house, fault):
        house.applied[fault.kind] += 1
        _say(f"{fault.kind} {fault.part or ''} {fault.lasts_s:g} s")


async def _apply(house: House, fault: Fault) -> bool:
    """Let it go wrong, and be over; False: there was nothing to go wrong."""
    if fault.part is not None:
        return await _apply_to_part(house.parts[fault.part], fault)
    if fault.kind in _MOODS:
        house.judges.mood = _MOODS[fault.kind]
        await asyncio.sleep(fault.lasts_s)
        house.judges.mood = Mood.SOUND
        return True
    if fault.kind is Kind.DATABASE_RESTART:
        await house.database.stop()
        await house.database.start()
        return True
    async with house.one_broker_fault:
        before = house.kafka_proxy.num_acks_dropped
        await _apply_to_broker(house, fault)
        return fault.kind is not Kind.ACKS_DROPPED or house.kafka_proxy.num_acks_dropped > before


async def _apply_to_part(part: Part, fault: Fault) -> bool:
    if fault.kind is not Kind.FREEZE:
        return part.send(_NUMBERS[fault.kind])
    frozen = part.send(signal.SIGSTOP)
    await asyncio.sleep(fault.lasts_s)
    part.send(signal.SIGCONT)
    return frozen


async def _apply_to_broker(house: House, fault: Fault) -> None:
    match fault.kind:
        case Kind.BROKER_STOP | Kind.BROKER_KILL:
            await (house.broker.stop() if fault.kind is Kind.BROKER_STOP else house.broker.kill())
            await asyncio.sleep(fault.lasts_s)
            await house.broker.start()
        case Kind.ACKS_DROPPED:
            async with house.kafka_proxy.dropping_acks():
                await asyncio.sleep(fault.lasts_s)
        case Kind.DISK_FULL:
            to_port, house.kafka_proxy.to_port = house.kafka_proxy.to_port, None
            house.kafka_proxy.cut()
            house.full.touch()
            began_s = time.monotonic()
            await asyncio.sleep(fault.lasts_s)
            house.full.unlink()
            house.no_room.append((began_s, time.monotonic()))
            house.kafka_proxy.to_port = to_port
        case _:
            raise AssertionError(f"{fault.kind} is none of the broker's")


async def _drain(house: House, plan: Plan) -> tuple[str | None, list[Record], list[str], float]:
    """Return when nothing is left to do, or the time is over: what is left then, and the log as it stands."""
    began_s = time.monotonic()
    deadline_s = began_s + plan.drain_s
    while True:
        left, records, bad = "the log can't be read", list[Record](), list[str]()
        with contextlib.suppress(TryLater, KafkaError):
            left, records, bad = await _left(house, plan.stages)
        if not left or time.monotonic() > deadline_s:
            return left or None, records, bad, time.monotonic() - began_s
        await asyncio.sleep(1.0)


async def _left(house: House, stages: frozenset[str]) -> tuple[str, list[Record], list[str]]:
    spooled = [path.name for path in (house.settings.data_dir / "spool").glob("*.spool") if path.stat().st_size]
    bootstrap = house.settings.kafka.bootstrap
    assert bootstrap is not None
    async with KafkaLog.connect(bootstrap, client_id="chaos-drain") as log:
        lags = {group: await log.lag(group) for group in reading.GROUPS if group in stages}
        behind = [f"{group} is {lag} behind" for group, lag in lags.items() if lag != 0]
        records, bad = await reading.everything(log)
    untrained = _untrained(records) if "train" in stages else []
    return "; ".join([*spooled, *behind, *untrained]), records, bad


def _untrained(records: Sequence[Record]) -> list[str]:
    events = [record.event for record in records]
    samples = {event.event_id for event in events if isinstance(event, SampleAssembled)}
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    waiting = samples - {name for plan in plans for name in plan.sample_ids}
    steps = {event.policy_version for event in events if isinstance(event, StepTaken)}
    pending = {plan.policy_version for plan in plans} - steps
    return [f"{len(some)} {what}" for some, what in ((waiting, "samples wait"), (pending, "steps are due")) if some]


async def _collect(house: House, plan: Plan, tally: Tally, records: Sequence[Record], bad: Sequence[str]) -> Collected:
    found = Collected(
        seen=tuple(tally.seen),
        records=records,
        undecodable=bad,
        manifests=await asyncio.to_thread(reading.manifests, house.settings.checkpoints_dir),
        moved=tuple(await reading.moved(house.broker.bootstrap)),
        failed=tuple(tally.failed),
        stages=plan.stages,
    )
    if "project" not in plan.stages:
        return found
    audit = await reading.audited(house.settings.data_dir / f"{NAMES[0]}.json")
    rows = await asyncio.to_thread(reading.rows, house.database.url)
    return replace(found, rows=rows, rows_differ=audit.rows_differ, chain_breaks=audit.chain_breaks)


def _say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what it says of a broker that we stop is no news
