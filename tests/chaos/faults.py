"""Lets go wrong what a plan says, when it says so."""

import asyncio
import signal
import time

from tests.chaos.installation import Full, InstallationUnderTest, say
from tests.chaos.parts import Part
from tests.chaos.peers import Mood
from tests.chaos.plan import Plan
from tests.chaos.schedule import Fault, Kind
from tests.chaos.stale import write_stale

_MOODS = {Kind.JUDGES_SLEEP: Mood.ASLEEP, Kind.JUDGES_BUSY: Mood.BUSY, Kind.JUDGES_BABBLE: Mood.BABBLING}
_NUMBERS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGTERM}


async def harass(installation: InstallationUnderTest, plan: Plan) -> bool:
    """Return when the time is over and every fault has passed; False: what had to come about did not."""
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for fault in plan.faults:
            tasks.create_task(_at(began_s + fault.at_s, installation, fault))
        await asyncio.sleep(plan.seconds)
    return not plan.stale_writer or await write_stale(installation)


async def _at(when_s: float, installation: InstallationUnderTest, fault: Fault) -> None:
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))
    if await _apply(installation, fault):
        installation.applied[fault.kind] += 1
        say(f"{fault.kind} {fault.part or ''} {fault.lasts_s:g} s")


async def _apply(installation: InstallationUnderTest, fault: Fault) -> bool:
    """Let it go wrong, and be over; False: there was nothing to go wrong."""
    if fault.part is not None:
        return await _apply_to_part(installation.parts[fault.part], fault)
    if fault.kind in _MOODS:
        installation.judges.mood = _MOODS[fault.kind]
        await asyncio.sleep(fault.lasts_s)
        installation.judges.mood = Mood.SOUND
        return True
    if fault.kind is Kind.DATABASE_RESTART:
        await installation.database.stop()
        await asyncio.sleep(fault.lasts_s)
        await installation.database.start()
        return True
    async with installation.one_broker_fault:
        before = installation.kafka_proxy.num_acks_dropped
        await _apply_to_broker(installation, fault)
        return fault.kind is not Kind.ACKS_DROPPED or installation.kafka_proxy.num_acks_dropped > before


async def _apply_to_part(part: Part, fault: Fault) -> bool:
    if fault.kind is not Kind.FREEZE:
        return part.send(_NUMBERS[fault.kind])
    frozen = part.send(signal.SIGSTOP)
    await asyncio.sleep(fault.lasts_s)
    part.send(signal.SIGCONT)
    return frozen


async def _apply_to_broker(installation: InstallationUnderTest, fault: Fault) -> None:
    match fault.kind:
        case Kind.BROKER_STOP | Kind.BROKER_KILL:
            await (installation.broker.stop() if fault.kind is Kind.BROKER_STOP else installation.broker.kill())
            await asyncio.sleep(fault.lasts_s)
            await installation.broker.start()
        case Kind.ACKS_DROPPED:
            async with installation.kafka_proxy.dropping_acks():
                await asyncio.sleep(fault.lasts_s)
        case Kind.DISK_FULL:
            to_port = installation.kafka_proxy.to_port
            installation.kafka_proxy.lead(None)
            installation.disk.touch()
            full = Full(since_s=time.monotonic())
            installation.full.append(full)
            await asyncio.sleep(fault.lasts_s)
            installation.disk.unlink()
            full.until_s = time.monotonic()
            installation.kafka_proxy.lead(to_port)
        case _:
            raise AssertionError(f"{fault.kind} is none of the broker's")
