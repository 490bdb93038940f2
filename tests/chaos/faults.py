"""Lets go wrong what a plan says, when it says so."""

import asyncio
import signal
import time

from tests.chaos.house import Full, House, say
from tests.chaos.parts import Part
from tests.chaos.peers import Mood
from tests.chaos.plan import Plan
from tests.chaos.schedule import Fault, Kind
from tests.chaos.stale import write_stale

_MOODS = {Kind.JUDGES_SLEEP: Mood.ASLEEP, Kind.JUDGES_BUSY: Mood.BUSY, Kind.JUDGES_BABBLE: Mood.BABBLING}
_NUMBERS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGTERM}


async def harass(house: House, plan: Plan) -> bool:
    """Return when the time is over and every fault has passed; False: what had to come about did not."""
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for fault in plan.faults:
            tasks.create_task(_at(began_s + fault.at_s, house, fault))
        await asyncio.sleep(plan.seconds)
    return not plan.stale_writer or await write_stale(house)


async def _at(when_s: float, house: House, fault: Fault) -> None:
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))
    if await _apply(house, fault):
        house.applied[fault.kind] += 1
        say(f"{fault.kind} {fault.part or ''} {fault.lasts_s:g} s")


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
        await asyncio.sleep(fault.lasts_s)
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
            to_port = house.kafka_proxy.to_port
            house.kafka_proxy.lead(None)
            house.disk.touch()
            full = Full(since_s=time.monotonic())
            house.full.append(full)
            await asyncio.sleep(fault.lasts_s)
            house.disk.unlink()
            full.until_s = time.monotonic()
            house.kafka_proxy.lead(to_port)
        case _:
            raise AssertionError(f"{fault.kind} is none of the broker's")
