"""Samples on a log that lost its end, or on another log: no trainer passes over what was written there since."""

import asyncio
import json
from pathlib import Path

import pytest

from clawstream.errors import LogContradicted, SamplesGone
from clawstream.events import BatchPlanned, Event
from clawstream.stream import topics
from clawstream.stream.log import PartitionId
from clawstream.training.batches.bookmark import put_trainers_back
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.batches.test_retention import Rig, rig
from tests.parts.training.test_loop import names, settings, trained_until

__all__ = ["rig"]

OLD = [tiny.sample(f"old-{i}", reward=1 if i % 2 else -1) for i in range(3)]
NEW = [tiny.sample(f"new-{i}", reward=1 if i % 2 else -1) for i in range(3)]
PLACE = PartitionId(topics.SAMPLES, 0)


def one_partition() -> MemoryLog:
    return MemoryLog(MemoryBroker(partitions=1))


def cut(log: MemoryLog, number: int) -> None:
    """Lose the newest records of the samples."""
    del log.broker._partitions[PLACE][-number:]


def planned(events: list[Event]) -> list[set[str]]:
    return [set(event.sample_ids) for event in events if isinstance(event, BatchPlanned)]


async def refused(log: MemoryLog, base: Path, data: Path, match: str) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(LogContradicted, match=match):
            await train(settings(base, data), log, stop=asyncio.Event())


async def test_samples_below_the_old_end_of_a_cut_log_are_trained_on_once_the_log_is_trusted(
    base: Path, tmp_path: Path
) -> None:
    log = one_partition()
    await log.append(OLD)
    await trained_until(log, settings(base, tmp_path), 1)
    cut(log, 2)
    await log.append(NEW)

    wrong = (
        r"train-policy: clawstream.samples.v1 partition 0 was read up to offset 3 and has another record at 2.*rebuild"
    )
    await refused(log, base, tmp_path, wrong)
    assert {group: len(back) for group, back in (await put_trainers_back(log)).items()} == {"train-policy": 1}

    events = await trained_until(log, settings(base, tmp_path), 2)
    assert planned(events) == [names(OLD), names(NEW)]
    newest = [event for event in events if isinstance(event, BatchPlanned)][-1]
    assert [o.next_offset for o in newest.offsets] == [4]
    assert await put_trainers_back(log) == {"train-policy": []}


async def test_a_log_that_is_shorter_than_what_was_trained_on_is_refused(base: Path, tmp_path: Path) -> None:
    log = one_partition()
    await log.append(OLD)
    await trained_until(log, settings(base, tmp_path), 1)
    cut(log, 1)
    await refused(log, base, tmp_path, "was read up to offset 3 and ends at 2")
    await put_trainers_back(log)
    await log.append(NEW)
    assert planned(await trained_until(log, settings(base, tmp_path), 2)) == [names(OLD), names(NEW)]


async def test_a_trainer_that_noted_nothing_yet_is_refused_by_its_plans_and_put_back_as_well(
    base: Path, tmp_path: Path
) -> None:
    log = one_partition()
    await log.append(OLD)
    await trained_until(log, settings(base, tmp_path), 1)
    log.broker.group("train-policy").committed.clear()
    cut(log, 2)
    await refused(log, base, tmp_path, "was read up to offset 3 and ends at 1")
    await put_trainers_back(log)
    await log.append(NEW)
    assert planned(await trained_until(log, settings(base, tmp_path), 2)) == [names(OLD), names(NEW)]


async def test_a_step_that_was_planned_on_samples_which_the_log_lost_is_not_waited_for(
    base: Path, tmp_path: Path
) -> None:
    twin, log = one_partition(), one_partition()
    await twin.append(OLD)
    events = await trained_until(twin, settings(base, tmp_path / "twin", max_updates=1), 1)
    await log.append([*OLD, *(event for event in events if isinstance(event, BatchPlanned))])
    cut(log, 1)
    async with asyncio.timeout(20):
        with pytest.raises(SamplesGone, match="names 1 samples of 3 that are not on the log any more"):
            await train(settings(base, tmp_path), log, stop=asyncio.Event())


async def test_the_broker_keeps_where_a_trainer_stopped_and_a_shorter_log_is_not_blamed_on_retention(
    rig: Rig, base: Path, tmp_path: Path
) -> None:
    await rig.log.append(OLD)
    stop = asyncio.Event()
    running = asyncio.create_task(train(settings(base, tmp_path), rig.log, stop=stop))
    await rig.published(1)
    stop.set()
    await running
    [(place, commit)] = (await rig.log.committed("train-policy")).items()
    assert (place, commit.offset) == (PLACE, 3)
    note = json.loads(commit.note)
    assert len(note["last"]) > 0

    await rig.log.put_back("train-policy", {place: commit._replace(offset=5)})
    async with asyncio.timeout(30):
        with pytest.raises(LogContradicted, match="was read up to offset 5 and ends at 3"):
            await train(settings(base, tmp_path), rig.log, stop=asyncio.Event())
    assert [len(back) for back in (await put_trainers_back(rig.log)).values()] == [1]
    assert (await rig.log.committed("train-policy"))[place].offset <= 3
