"""What befalls one key's policy reaches no other: dead letters, lost samples, a folder that was moved."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.config import Settings
from clawstream.errors import ConfigError, UnusableEvent
from clawstream.events import BatchPlanned, HintHeld, PolicyPublished, SamplesPromoted, policy_of_key
from clawstream.stream import quarantine, topics
from clawstream.stream.log import DeadLetterId, DeadLetterMark, Fate
from clawstream.training.batches import memory as memory_module
from clawstream.training.batches.memory import MERGED_STEPS, HintMemory, common, merged_into
from clawstream.training.batches.planning import turn_of
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training.keys.test_adapters_by_key import (
    KEYS,
    answer_rehearsals,
    by_key,
    hinted,
    published,
    samples_of,
    trained_until,
)
from tests.parts.training.test_loop import said as policy_said
from tests.unit.stream import toys


@asynccontextmanager
async def training(log: MemoryLog, chosen: Settings) -> AsyncIterator[None]:
    """Train during the block; an error of the trainer is raised at its end."""
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    try:
        async with asyncio.timeout(60):
            yield
    finally:
        stop.set()
        await running


async def until_published(log: MemoryLog, key: str | None, version: int) -> None:
    while max((e.policy_version for e in published(await policy_said(log), key)), default=-1) < version:
        await asyncio.sleep(0.02)


async def plans_of(log: MemoryLog, key: str | None) -> list[BatchPlanned]:
    own = policy_of_key("policy", key)
    return [e for e in await policy_said(log) if isinstance(e, BatchPlanned) and e.policy_id == own]


async def test_a_replayed_dead_letter_of_a_key_is_closed_once_its_own_policy_was_trained_on_it(
    base: Path, tmp_path: Path
) -> None:
    log, chosen = MemoryLog(MemoryBroker(partitions=1)), by_key(base, tmp_path)
    await log.append([*samples_of("alice", 4), *samples_of("bob", 1)])
    letter = DeadLetterId("train", topics.SAMPLES, 0, 3)
    await log.set_aside(letter, error=UnusableEvent("too long"))
    await trained_until(log, chosen, alice=1)
    [told] = await quarantine.dead_letters(log)
    await log.mark([DeadLetterMark(id=letter, key=told.key, attempt=1, fate=Fate.REPLAY)])
    async with training(log, chosen):
        await log.append(samples_of("bob", 2, begin=5))
        await until_published(log, "bob", 1)  # by then all policies had turns
        assert (await quarantine.dead_letters(log))[0].fate is Fate.REPLAY
    await log.append(samples_of("alice", 2, begin=10))
    async with training(log, chosen):
        await until_published(log, "alice", 2)
        while (await quarantine.dead_letters(log))[0].fate is Fate.REPLAY:
            await asyncio.sleep(0.02)
    last = (await plans_of(log, "alice"))[-1]
    assert samples_of("alice", 4)[3].sample_id in last.sample_ids


async def test_a_keys_pending_plan_gets_the_refused_sample_that_it_names(base: Path, tmp_path: Path) -> None:
    log, chosen = MemoryLog(MemoryBroker(partitions=1)), by_key(base, tmp_path)
    own = samples_of("alice", 6)
    bad = replace(own[0], response_ids=(10**6,) * len(own[0].response_ids))
    await log.append([bad, *own[1:4]])
    letter = DeadLetterId("train", topics.SAMPLES, 0, 0)
    await log.set_aside(letter, error=UnusableEvent("x"))
    await trained_until(log, chosen, alice=1)
    await log.append(own[4:6])
    await log.set_aside(letter, error=UnusableEvent("x"), attempt=2)
    [plan] = await plans_of(log, "alice")
    named = [bad, *own[4:6]]
    pending = replace(
        plan, policy_version=2, parent_version=1, sample_ids=tuple(s.sample_id for s in named),
        turns=tuple(map(turn_of, named)), offsets=tuple(replace(o, next_offset=6) for o in plan.offsets),
    )  # fmt: skip
    await log.append([pending])
    async with training(log, chosen):
        await until_published(log, "alice", 2)


async def test_a_key_whose_samples_are_gone_is_left_out_and_the_others_are_trained(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, chosen = MemoryLog(MemoryBroker(partitions=1)), by_key(base, tmp_path / "first")
    await first.append(samples_of("alice", 3))
    told = await trained_until(first, chosen, alice=1)
    log, chosen = MemoryLog(MemoryBroker(partitions=1)), by_key(base, tmp_path / "second")
    begun = [e for e in told if isinstance(e, PolicyPublished) and e.policy_version == 0]
    await log.append([*begun, *(e for e in told if isinstance(e, BatchPlanned)), *samples_of("bob", 6)])
    async with training(log, chosen):
        await until_published(log, "bob", 2)
        while "policy=policy+alice state=not_trained" not in caplog.text:
            await asyncio.sleep(0.02)
        await log.append(samples_of("bob", 3, begin=6))
        await until_published(log, "bob", 3)
    assert "are not on the log any more" in caplog.text


async def test_what_a_key_began_with_is_found_where_the_data_folder_lies_now(base: Path, tmp_path: Path) -> None:
    log, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path / "a")
    await log.append(samples_of(None, 3))
    async with training(log, chosen):
        await until_published(log, None, 1)
    await log.append(samples_of("alice", 3))
    await trained_until(log, chosen, alice=2)
    (tmp_path / "a").rename(tmp_path / "b")
    await log.append([*samples_of("alice", 3, begin=3), *samples_of("bob", 3)])
    events = await trained_until(log, by_key(base, tmp_path / "b"), alice=3, bob=2)
    assert [event.policy_version for event in published(events, "alice")] == [1, 2, 3]


async def test_a_key_begins_with_its_first_step_as_the_shared_policy_is_then(base: Path, tmp_path: Path) -> None:
    log, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path)
    await log.append(samples_of("alice", 2))
    async with training(log, chosen):
        await log.append(samples_of(None, 3))
        await until_published(log, None, 1)
        assert published(await policy_said(log), "alice") == []
        await log.append(samples_of("alice", 1, begin=2))
        await until_published(log, "alice", 2)
    first, second = published(await policy_said(log), "alice")
    assert (first.policy_version, first.path) == (1, str((chosen.checkpoints_dir / "v000001").absolute()))
    assert second.parent_version == 1


async def test_a_key_with_less_than_a_batch_is_known_after_a_restart(base: Path, tmp_path: Path) -> None:
    log, chosen = MemoryLog(MemoryBroker(partitions=1)), by_key(base, tmp_path, max_wait_s=1.0)
    await log.append([*samples_of("alice", 1), *samples_of(None, 3)])
    async with training(log, chosen):
        await until_published(log, None, 1)
    async with training(log, chosen):
        await until_published(log, "alice", 2)


async def test_a_promoted_replay_is_refused_and_nothing_is_trained(base: Path, tmp_path: Path) -> None:
    log, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path)
    await log.append([SamplesPromoted(policy_id="policy", number=1, replay="again", undoes=None, promoted_at_ms=0)])
    with pytest.raises(ConfigError, match="replay again is promoted"):
        await train(chosen, log, stop=asyncio.Event())


async def test_the_steps_on_a_merged_hint_are_counted_over_restarts(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path, gate=False, batch_samples=1)
    await log.append([hinted(key, "0", "be brief") for key in KEYS])
    await trained_until(log, chosen, alice=1, bob=1)
    memories = {policy_of_key("policy", key): HintMemory() for key in KEYS}
    for one in await toys.read(log, topics.MEMORY):
        assert isinstance(one.event, HintHeld)
        memories[one.event.policy_id].learn(one.event)
    [prompts] = common(memories.values(), "policy", at_least=2)
    await log.append([merged_into(one, 0, 5) for one in prompts])
    monkeypatch.setattr(memory_module, "OPEN_NATS", -math.inf)  # it is never followed: all steps are taken
    for steps in (2, MERGED_STEPS, MERGED_STEPS):
        async with training(log, chosen):
            answering = asyncio.create_task(answer_rehearsals(log))
            await until_published(log, None, steps)
            await asyncio.sleep(0.5)
            answering.cancel()
    assert len(await plans_of(log, None)) == MERGED_STEPS
