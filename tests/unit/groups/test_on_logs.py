"""The groups stage under the real runner: it waits by the log's clock, and is the same after a restart."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

from clawstream.config import JudgeSettings
from clawstream.events import Event, GroupSettled, GroupWaited, RewardWeights, TrajectoryEnded, TrajectoryLate
from clawstream.groups.stage import groups_stages
from clawstream.judging.stage import judging_stage
from clawstream.samples.joining import SampleRules
from clawstream.samples.stage import samples_stage
from clawstream.stream import topics
from clawstream.stream.log import Outgoing
from clawstream.stream.stage import Stage, Step
from clawstream.turns.stage import turns_stage
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import Oracle
from tests.sessions import Letters
from tests.unit.groups.attempts import attempt
from tests.unit.groups.test_settling import ended, step
from tests.unit.groups.test_trajectories import mingled
from tests.unit.samples.test_flow import GOOD
from tests.unit.stream import toys

E = TypeVar("E", bound=Event)
ONE, TWO = (ended(name, [step(f"{name}0", 0, judge)]) for name, judge in (("a", 1), ("b", -1)))


async def write(log: MemoryLog, events: Sequence[Event]) -> None:
    await log.write([Outgoing(event) for event in events])


async def of(log: MemoryLog, kind: type[E]) -> list[E]:
    return [record.event for record in await toys.read(log, topics.GROUPS) if isinstance(record.event, kind)]


async def until_said(log: MemoryLog, kind: type[Event]) -> None:
    async def said() -> bool:
        return bool(await of(log, kind))

    await toys.until(said)


async def test_a_group_that_is_not_whole_is_settled_when_the_wait_is_over_and_stays_so_after_a_restart() -> None:
    log = MemoryLog(MemoryBroker(partitions=2))
    _, by_group = groups_stages(RewardWeights(), wait_s=0.1)
    await write(log, [ONE])
    async with toys.running(by_group, log):
        await until_said(log, GroupSettled)
        await toys.settled(log, by_group.name)
    await write(log, [TWO])
    async with toys.running(by_group, log):
        await until_said(log, TrajectoryLate)
        await toys.settled(log, by_group.name)
    [settled] = await of(log, GroupSettled)
    assert (settled.complete, settled.trajectories) == (False, (ONE.event_id,))
    assert len(await of(log, GroupWaited)) == 1


async def test_a_wait_goes_on_over_a_restart() -> None:
    log = MemoryLog(MemoryBroker(partitions=2))
    _, patient = groups_stages(RewardWeights(), wait_s=3600.0)
    await write(log, [ONE])
    async with toys.running(patient, log):
        await toys.settled(log, patient.name)
    assert await of(log, GroupSettled) == []
    await write(log, [TWO])
    async with toys.running(patient, log):
        await until_said(log, GroupSettled)
    [settled] = await of(log, GroupSettled)
    assert settled.complete


async def test_a_stage_that_was_down_for_longer_than_the_wait_does_not_charge_it_to_the_attempts() -> None:
    now_ms, ticked_ms = 1_000_000, list[int]()
    log = MemoryLog(MemoryBroker(partitions=1, clock_ms=lambda: now_ms))
    _, by_group = groups_stages(RewardWeights(), wait_s=60.0)

    def tick(state: Any, at_ms: int) -> Step[Any, Any]:
        assert by_group.tick is not None
        ticked_ms.append(at_ms)
        return by_group.tick(state, at_ms)

    async def ticked() -> bool:
        return len(ticked_ms) >= 4

    watched = replace(by_group, tick=tick)
    await write(log, [ONE])
    async with toys.running(watched, log):
        await toys.settled(log, by_group.name)
    now_ms += 80_000
    async with toys.running(watched, log):
        await write(log, [replace(ONE, group_id="other", trajectory_id="z", ended_at_ms=ONE.ended_at_ms + 10)])
        await toys.settled(log, by_group.name)
        ticked_ms.clear()
        await toys.until(ticked)
        await write(log, [TWO])
        await until_said(log, GroupSettled)
    [settled] = [settled for settled in await of(log, GroupSettled) if settled.group_id == "task"]
    assert settled.complete


async def test_sessions_of_two_partitions_meet_in_their_group_through_all_stages() -> None:
    log = MemoryLog(MemoryBroker(partitions=3))
    stages: list[Stage[Any, Any]] = [
        turns_stage(),
        judging_stage(JudgeSettings(votes=3), Oracle(GOOD), now_ms=lambda: 0),
        samples_stage(SampleRules(Letters(), grouped=True)),
        *groups_stages(RewardWeights(), wait_s=3600.0),
    ]
    sessions = [
        attempt(None, None, None, session_id=name, outcome=score) for name, score in (("ann", 1.0), ("ben", -1.0))
    ]
    async with AsyncExitStack() as stack:
        for stage in stages:
            await stack.enter_async_context(toys.running(stage, log))
        await write(log, mingled(*sessions))
        await until_said(log, GroupSettled)
    [settled] = await of(log, GroupSettled)
    assert settled.complete
    assert [(kept.step_index, kept.advantage) for kept in settled.advantages if kept.advantage > 0] == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
    ]
    assert len(await of(log, TrajectoryEnded)) >= 2
