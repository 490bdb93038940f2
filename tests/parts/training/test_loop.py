"""The training loop over the log in memory: planned before the step, published once whole, resumed as if not killed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.config import EngineSettings, PolicySettings, Settings, TrainingSettings
from clawstream.errors import PartUnavailable, UnusableCheckpoint
from clawstream.events import (
    BatchPlanned,
    Event,
    PolicyPublished,
    SampleAssembled,
    StepTaken,
)
from clawstream.stream import topics
from clawstream.stream.stage import Record
from clawstream.training.checkpoints import alone_on, latest, read
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny

SAMPLES = [tiny.sample(f"s{i}", reward=1 if i % 2 else -1, hinted=i % 3 == 0) for i in range(9)]


def settings(base: Path, data: Path, **training: object) -> Settings:
    return Settings(
        data_dir=data,
        engine=EngineSettings(model_path=base),
        policy=PolicySettings(id="policy"),
        training=TrainingSettings(**({"batch_samples": 3, "learning_rate": 1e-3} | training)),
    )


async def said(log: MemoryLog) -> list[Event]:
    events: list[Event] = []
    async for records in log.follow([topics.POLICY], "earliest", until_end=True):
        events += [record.event for record in records if isinstance(record, Record)]
    return events


async def trained_until(log: MemoryLog, chosen: Settings, version: int) -> list[Event]:
    """Run the loop until `version` is published; return all that the policy topic says then."""
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    async with asyncio.timeout(60):
        async for records in log.follow([topics.POLICY], "earliest"):
            events = [record.event for record in records if isinstance(record, Record)]
            if running.done() or any(isinstance(e, PolicyPublished) and e.policy_version == version for e in events):
                break
    stop.set()
    await running
    return await said(log)


def names(samples: Sequence[SampleAssembled]) -> set[str]:
    return {sample.sample_id for sample in samples}


async def test_every_sample_is_in_exactly_one_planned_step_and_each_step_is_published(
    base: Path, tmp_path: Path
) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES)

    events = await trained_until(log, settings(base, tmp_path), 3)

    plans = [event for event in events if isinstance(event, BatchPlanned)]
    taken = [name for plan in plans for name in plan.sample_ids]
    assert sorted(taken) == sorted(names(SAMPLES))
    assert [event.policy_version for event in events if isinstance(event, StepTaken)] == [1, 2, 3]
    assert [event.policy_version for event in events if isinstance(event, PolicyPublished)] == [0, 1, 2, 3]


async def test_a_plan_is_on_the_log_before_its_step_and_the_checkpoint_names_it(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES[:3])

    events = await trained_until(log, settings(base, tmp_path), 1)

    kinds = [type(event) for event in events]
    assert kinds == [PolicyPublished, BatchPlanned, StepTaken, PolicyPublished]
    published = events[-1]
    assert isinstance(published, PolicyPublished)
    checkpoint = read(Path(published.path))
    assert checkpoint.plan == events[1]
    assert checkpoint.manifest_sha256 == published.manifest_sha256


async def test_an_adapter_is_published_under_a_name_of_its_own_above_the_base_and_after_a_restart(
    base: Path, tmp_path: Path
) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES[:6])
    chosen = settings(base, tmp_path, lora_rank=2)

    await trained_until(
        log, chosen.model_copy(update={"training": chosen.training.model_copy(update={"max_updates": 1})}), 1
    )
    events = await trained_until(log, chosen, 2)

    published = [event for event in events if isinstance(event, PolicyPublished)]
    assert [event.adapter for event in published] == [None, "policy-v1", "policy-v2"]
    assert all((Path(event.path) / "adapter_config.json").is_file() for event in published[1:])


async def test_a_plan_without_its_step_is_executed_as_written_after_a_restart(base: Path, tmp_path: Path) -> None:
    whole, cut = MemoryLog(MemoryBroker()), MemoryLog(MemoryBroker())
    for log in (whole, cut):
        await log.append(SAMPLES[:3])
    events = await trained_until(whole, settings(base, tmp_path / "whole"), 1)
    plan = next(event for event in events if isinstance(event, BatchPlanned))
    await cut.append([events[0], plan])

    resumed = await trained_until(cut, settings(base, tmp_path / "cut", batch_samples=2), 1)

    assert next(event for event in resumed if isinstance(event, BatchPlanned)) == plan
    weights = [
        (latest(folder / "policies" / "policy").path / "model.safetensors").read_bytes()  # type: ignore[union-attr]
        for folder in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert weights[0] == weights[1]


async def test_a_checkpoint_that_was_never_announced_is_published_after_a_restart(base: Path, tmp_path: Path) -> None:
    log, forgetful = MemoryLog(MemoryBroker()), MemoryLog(MemoryBroker())
    for each in (log, forgetful):
        await each.append(SAMPLES[:3])
    events = await trained_until(log, settings(base, tmp_path), 1)
    await forgetful.append([event for event in events if isinstance(event, BatchPlanned)])

    again = await trained_until(forgetful, settings(base, tmp_path), 1)

    assert [event for event in again if isinstance(event, StepTaken)] == [events[2]]
    assert sum(isinstance(event, BatchPlanned) for event in again) == 1


async def test_a_sample_that_stands_twice_on_the_log_is_trained_on_once(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append([*SAMPLES[:2], *SAMPLES[:2], SAMPLES[2]])

    events = await trained_until(log, settings(base, tmp_path), 1)

    plans = [event for event in events if isinstance(event, BatchPlanned)]
    assert [set(plan.sample_ids) for plan in plans] == [names(SAMPLES[:3])]


async def test_a_smaller_batch_fires_once_the_oldest_sample_has_waited_long_enough(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES[:2])

    events = await trained_until(log, settings(base, tmp_path, max_wait_s=0.2), 1)

    assert [len(event.sample_ids) for event in events if isinstance(event, BatchPlanned)] == [2]


async def test_no_update_is_planned_beyond_the_last_that_was_asked_for(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES)

    await trained_until(log, settings(base, tmp_path, max_updates=2), 2)
    events = await trained_until_idle(log, settings(base, tmp_path, max_updates=2))

    assert sum(isinstance(event, BatchPlanned) for event in events) == 2


async def trained_until_idle(log: MemoryLog, chosen: Settings) -> list[Event]:
    """Run the loop on what is there for as long as it takes to say nothing new."""
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await asyncio.shield(running)
    stop.set()
    await running
    return await said(log)


async def test_a_version_that_is_not_what_was_published_is_neither_published_nor_gone_on_from(
    base: Path, tmp_path: Path
) -> None:
    log, other = MemoryLog(MemoryBroker()), MemoryLog(MemoryBroker())
    for each in (log, other):
        await each.append(SAMPLES[:3])
    events = await trained_until(log, settings(base, tmp_path / "one"), 1)
    published = next(e for e in events if isinstance(e, PolicyPublished) and e.policy_version == 1)
    await other.append([*events[:-1], replace(published, manifest_sha256="0" * 64)])

    for _ in ("made again from its plan", "found on disk"):
        with pytest.raises(UnusableCheckpoint, match="version 1 of policy was published with 000000000000"):
            await train(settings(base, tmp_path / "two"), other, stop=asyncio.Event())
    assert len(await said(other)) == len(events)


async def test_a_policy_is_trained_by_one_process_at_a_time(base: Path, tmp_path: Path) -> None:
    with alone_on(settings(base, tmp_path).checkpoints_dir), pytest.raises(PartUnavailable, match="another process"):
        await train(settings(base, tmp_path), MemoryLog(MemoryBroker()), stop=asyncio.Event())


def test_the_topics_are_the_ones_that_samples_and_policies_are_written_to() -> None:
    from clawstream.stream.topics import topic_of

    assert (topic_of(SampleAssembled), topic_of(BatchPlanned)) == (topics.SAMPLES, topics.POLICY)
