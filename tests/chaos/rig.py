"""One run: an installation of real processes under load and faults, then a drain, then what there is to see."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from clawstream.errors import TryLater
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import PartitionId
from clawstream.stream.topics import POLICY
from tests.chaos import reading
from tests.chaos.clients import PARTITIONS, Clients, Door, Tally
from tests.chaos.draining import Drained, collected, drained
from tests.chaos.faults import harass
from tests.chaos.installation import InstallationUnderTest, installed, say
from tests.chaos.oracle import Collected
from tests.chaos.plan import Plan

_READY_WITHIN_S = 240.0
_LOOK_EVERY_S = 0.2
_MOST_STARTS = 3  # before anything went wrong on purpose


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of it."""

    collected: Collected
    applied: Counter[str]
    tally: Tally
    drained: Drained
    crashes: dict[str, int]  # by part
    reached: bool  # False: the faults did not do what they are for


async def perform(plan: Plan, folder: Path, *, patience_s: float) -> Run:
    """Run it all; every process is gone afterwards. `patience_s`: how long nothing may move before the drain ends."""
    async with (
        installed(plan, folder) as installation,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        doors = [
            Door(url=f"http://127.0.0.1:{part.port}", part=part)
            for part in installation.parts.values()
            if part.stage == "gateway"
        ]
        async with asyncio.timeout(_READY_WITHIN_S):
            await _until_ready(http, doors, installation)
            await _until_joined(installation)
            if "train" in plan.stages:
                await _until_published(installation)
        say(f"every part is ready; {plan.clients} clients for {plan.seconds:g} s, {len(plan.faults)} faults")
        clients = Clients(doors=doors, http=http, has_room=installation.had_room, partition=plan.partition)
        async with asyncio.TaskGroup() as talking:
            for number in range(plan.clients):
                talking.create_task(clients.talk(number))
            reached = await harass(installation, plan)
            clients.stop.set()
        say(f"{len(clients.tally.seen)} answers were acknowledged; draining")
        end = await drained(installation, plan.stages, patience_s=patience_s)
        found = await collected(installation, plan.stages, clients.tally, end)
    crashes = {name: part.num_crashes for name, part in installation.parts.items() if part.num_crashes}
    return Run(
        collected=found,
        applied=installation.applied,
        tally=clients.tally,
        drained=end,
        crashes=crashes,
        reached=reached,
    )


async def _until_ready(http: aiohttp.ClientSession, doors: Sequence[Door], installation: InstallationUnderTest) -> None:
    """Return once every gateway is ready; raises RuntimeError with the words of a part that does not stay up."""
    for door in doors:
        while not await _ready(http, door):
            for part in installation.parts.values():
                if len(part.lives) > _MOST_STARTS:
                    raise RuntimeError(f"{part.name} does not stay up: {part.log.read_text()[-1500:]}")
            await asyncio.sleep(_LOOK_EVERY_S)


async def _until_joined(installation: InstallationUnderTest) -> None:
    """Return once every group has noted where it begins: a fault that comes before finds it with nothing to lose."""
    groups = {part.stage for part in installation.parts.values()}.intersection(reading.GROUPS)
    async with KafkaLog.connect(installation.bootstrap, client_id="chaos") as log:
        for group in groups:
            while {place.partition for place in await _noted(log, group)} != set(range(PARTITIONS)):
                await asyncio.sleep(_LOOK_EVERY_S)


async def _noted(log: KafkaLog, group: str) -> Collection[PartitionId]:
    try:
        return await log.committed(group)
    except TryLater:
        return ()


async def _until_published(installation: InstallationUnderTest) -> None:
    """Return once the trainer has said where it starts from: faults that come before would be none of its."""
    async with KafkaLog.connect(installation.bootstrap, client_id="chaos") as log:
        while not any((await log.end_offsets([POLICY])).values()):
            await asyncio.sleep(_LOOK_EVERY_S)


async def _ready(http: aiohttp.ClientSession, door: Door) -> bool:
    try:
        async with http.get(f"{door.url}/readyz", timeout=aiohttp.ClientTimeout(total=2)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


for name in ("aiokafka", "clawstream"):
    logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say of a broker that we stop is no news
