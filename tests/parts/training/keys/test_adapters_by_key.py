"""An adapter for each API key: trained on that key's samples alone, in turn with the others, as if it were alone."""

import asyncio
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.config import Settings, TrainingSettings
from clawstream.config.training import CORRECTION_EPOCHS
from clawstream.events import (
    BatchPlanned,
    Event,
    HintHeld,
    PolicyPublished,
    RehearsalAsked,
    RollbackAsked,
    SampleAssembled,
    hint_id_of,
    policy_of_key,
)
from clawstream.stream import topics
from clawstream.stream.avro import codec, key_bytes
from clawstream.stream.log import Sealed
from clawstream.stream.stage import Record
from clawstream.stream.topics import replay_topic, replay_topics
from clawstream.training.batches import memory as memory_module
from clawstream.training.batches.choosing import CORRECTION_ANSWERS
from clawstream.training.batches.following import retraining
from clawstream.training.batches.memory import MERGED_STEPS, PROMPTS_A_HINT, HintMemory, common, merged_into
from clawstream.training.batches.planning import Batch
from clawstream.training.checkpoints import latest
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.batches.test_batches import plan_of
from tests.parts.training.test_loop import names, settings
from tests.parts.training.test_loop import said as policy_said
from tests.unit.stream import toys

KEYS = ("alice", "bob")


def by_key(base: Path, data: Path, adapters: str = "by_key", **training: object) -> Settings:
    chosen = settings(base, data, lora_rank=2, **training)
    return chosen.model_copy(update={"policy": chosen.policy.model_copy(update={"adapters": adapters})})


def samples_of(key: str | None, count: int, *, begin: int = 0, reward: int = 1) -> list[SampleAssembled]:
    return [
        replace(tiny.sample(f"{key} {n}", reward=reward if n % 3 else -reward, policy_id=policy_of_key("policy", key)),
                key_name=key)
        for n in range(begin, begin + count)
    ]  # fmt: skip


def published(events: Sequence[Event], key: str | None) -> list[PolicyPublished]:
    own = policy_of_key("policy", key)
    return [event for event in events if isinstance(event, PolicyPublished) and event.policy_id == own]


async def trained_until(log: MemoryLog, chosen: Settings, **versions: int) -> list[Event]:
    """Run the loop until each of these keys has its version; return all that the policy topic says then."""
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    events: list[Event] = []
    async with asyncio.timeout(60):
        async for records in log.follow([topics.POLICY], "earliest"):
            events += [record.event for record in records if isinstance(record, Record)]
            newest = {key: max((e.policy_version for e in published(events, key)), default=-1) for key in versions}
            if running.done() or all(newest[key] >= version for key, version in versions.items()):
                break
    stop.set()
    await running
    return await policy_said(log)


def weights(chosen: Settings, key: str) -> bytes:
    checkpoint = latest(chosen.checkpoints_dir.parent / policy_of_key("policy", key))
    assert checkpoint is not None
    return (checkpoint.path / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("adapters", "keys"), [("by_key", KEYS), ("metadata.agent", ("alice", "acme+alice"))], ids=["API keys", "agents"]
)
async def test_each_key_has_versions_of_its_own_made_of_its_own_samples_alone(
    base: Path, tmp_path: Path, adapters: str, keys: Sequence[str]
) -> None:
    log, own = MemoryLog(MemoryBroker()), {key: samples_of(key, 6) for key in keys}
    await log.append([one for pair in zip(*own.values(), strict=True) for one in pair])
    events = await trained_until(log, by_key(base, tmp_path, adapters), **dict.fromkeys(keys, 2))
    for key in keys:
        versions = published(events, key)
        assert [event.policy_version for event in versions] == [0, 1, 2]
        assert [event.adapter for event in versions] == [None, f"policy+{key}-v1", f"policy+{key}-v2"]
        plans = [e for e in events if isinstance(e, BatchPlanned) and e.policy_id == policy_of_key("policy", key)]
        assert {name for plan in plans for name in plan.sample_ids} == names(own[key])
    assert [event.policy_version for event in published(events, None)] == [0]


async def test_a_key_is_trained_as_if_it_were_alone(base: Path, tmp_path: Path) -> None:
    found = {}
    for name, keys in (("both", KEYS), *((key, (key,)) for key in KEYS)):
        log, own = (
            MemoryLog(MemoryBroker()),
            {key: samples_of(key, 9, reward=1 if key == "bob" else -1) for key in keys},
        )
        await log.append([one for some in zip(*own.values(), strict=True) for one in some])
        chosen = by_key(base, tmp_path / name)
        await trained_until(log, chosen, **dict.fromkeys(keys, 3))
        found[name] = [weights(chosen, key) for key in keys]
    assert found["both"] == [*found["alice"], *found["bob"]]
    assert found["alice"] != found["bob"]


async def test_keys_that_come_later_and_a_restart_take_nothing_from_those_that_are_there(
    base: Path, tmp_path: Path
) -> None:
    log, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path)
    await log.append(samples_of("alice", 3))
    await trained_until(log, chosen, alice=1)
    await log.append([*samples_of("bob", 3), *samples_of("alice", 3, begin=3)])
    events = await trained_until(log, chosen, alice=2, bob=1)
    await log.append(samples_of("bob", 3, begin=3))
    events = await trained_until(log, chosen, bob=2)
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    taken = [(plan.policy_id, name) for plan in plans for name in plan.sample_ids]
    assert len(taken) == len(set(taken)) == 12
    assert [event.policy_version for event in published(events, "alice")] == [0, 1, 2]
    assert [event.policy_version for event in published(events, "bob")] == [0, 1, 2]


@pytest.mark.slow
async def test_wherever_a_trainer_was_cut_off_each_key_comes_to_the_same_versions(base: Path, tmp_path: Path) -> None:
    own = {key: samples_of(key, 6) for key in KEYS}
    recorded = [one for pair in zip(*own.values(), strict=True) for one in pair]
    whole, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path / "whole")
    await whole.append(recorded)
    events = await trained_until(whole, chosen, alice=2, bob=2)
    for cut in range(1, len(events)):
        log, again = MemoryLog(MemoryBroker()), by_key(base, tmp_path / f"cut{cut}")
        await log.append([*recorded, *events[:cut]])
        for plan in events[:cut]:
            if isinstance(plan, BatchPlanned) and cut % 2:  # its checkpoint was whole, or was not yet
                there = chosen.of_policy(plan.policy_id).checkpoints_dir / f"v{plan.policy_version:06d}"
                shutil.copytree(there, again.of_policy(plan.policy_id).checkpoints_dir / there.name)
            elif isinstance(plan, PolicyPublished) and plan.adapter is not None and not cut % 2:
                shutil.copytree(plan.path, again.of_policy(plan.policy_id).checkpoints_dir / Path(plan.path).name)
        resumed = await trained_until(log, again, alice=2, bob=2)
        assert [weights(again, key) for key in KEYS] == [weights(chosen, key) for key in KEYS], events[cut - 1]
        plans = [event for event in resumed if isinstance(event, BatchPlanned)]
        assert sorted(name for plan in plans for name in plan.sample_ids) == sorted(names(recorded))


async def test_a_new_key_begins_with_what_the_shared_policy_has_learned_and_keeps_that_version(
    base: Path, tmp_path: Path
) -> None:
    log, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path, keep_checkpoints=1)
    await log.append(samples_of(None, 6))
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    async with asyncio.timeout(60):
        while len(published(await policy_said(log), None)) < 3:
            await asyncio.sleep(0.02)
    stop.set()
    await running
    await log.append(samples_of("alice", 3))
    await trained_until(log, chosen, alice=3)
    await log.append([*samples_of(None, 6, begin=6), *samples_of("alice", 3, begin=3)])
    events = await trained_until(log, chosen, alice=4)

    first, *_ = published(events, "alice")
    begun_with = chosen.checkpoints_dir / "v000002"
    assert (first.policy_version, first.parent_version, first.path) == (2, None, str(begun_with.absolute()))
    assert first.adapter == "policy+alice-v2"
    assert [event.policy_version for event in published(events, "alice")] == [2, 3, 4]
    assert begun_with.is_dir(), "what a key began with stays, however many versions came since"

    await log.append([RollbackAsked(policy_id="policy+alice", number=1, to_version=2, asked_at_ms=0)])
    await trained_until(log, chosen, alice=5)
    assert weights(chosen, "alice") == (begun_with / "adapter_model.safetensors").read_bytes()


async def test_where_all_share_one_policy_a_keys_samples_are_not_of_it(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append([*samples_of("alice", 3), *samples_of(None, 3)])
    chosen = settings(base, tmp_path, lora_rank=2, max_updates=1)
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    async with asyncio.timeout(60):
        while len(published(await policy_said(log), None)) < 2:
            await asyncio.sleep(0.02)
    stop.set()
    await running
    assert published(await policy_said(log), "alice") == []


async def test_a_replay_trains_one_policy_on_the_samples_of_all_keys(base: Path, tmp_path: Path) -> None:
    log, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path)
    log.broker.create(replay_topics("again", partitions=3, retention_ms=1000))
    topic, replayed = replay_topic(topics.SAMPLES, "again"), [s for key in (*KEYS, None) for s in samples_of(key, 3)]
    await log.put([Sealed(topic, key_bytes(one.key), codec().encode(one), ()) for one in replayed], 0)
    own, what = retraining(chosen, replay="again", from_version=0)
    async with asyncio.timeout(60):
        await train(own, log, stop=asyncio.Event(), retraining=what)
    plans = [event for event in await policy_said(log) if isinstance(event, BatchPlanned)]
    assert {plan.policy_id for plan in plans} == {"policy-again"}
    assert sum(len(plan.sample_ids) for plan in plans) == 9


@pytest.mark.parametrize("adapters", ["by_key", "metadata.agent"])
def test_adapters_beside_the_shared_one_have_a_rank_where_none_is_set(adapters: str) -> None:
    assert Settings(environment=False, policy={"adapters": adapters}).training.lora_rank == 16
    own = Settings(environment=False, policy={"adapters": adapters}, training={"lora_rank": 4})
    assert own.training.lora_rank == 4
    assert Settings(environment=False).training.lora_rank is None
    assert Settings(environment=False, policy={"adapters": "shared"}).training.lora_rank is None


@pytest.mark.parametrize("adapters", ["by key", "metadata", "metadata.", "metadata.two words", "metadata." + "a" * 65])
def test_nothing_else_has_adapters(adapters: str) -> None:
    with pytest.raises(
        ValueError, match=r"policy\.adapters\n +String should match pattern '\^\(shared\|by_key\|metadata"
    ):
        Settings(environment=False, policy={"adapters": adapters})


def hinted(key: str, name: str, hint: str) -> SampleAssembled:
    own = tiny.sample(f"{key} {name}", reward=-1, hinted=True, policy_id=policy_of_key("policy", key))
    return replace(own, key_name=key, hint=hint)


def answered(ask: RehearsalAsked, version: int) -> SampleAssembled:
    """What the refresh stage writes: today's policy has answered the prompt."""
    name = f"{ask.session_id} {ask.number}"
    own = tiny.sample(name, reward=None, hinted=True, policy_id=ask.policy_id, version=version)
    return replace(
        own, hint=ask.hint, hint_id=ask.hint_id, prompt_ids=ask.prompt_ids, hinted_prompt_ids=ask.hinted_prompt_ids,
        refreshed_id=name, judge="nobody", turn_id=ask.turn_id,
    )  # fmt: skip


def memory(key: str, *samples: SampleAssembled) -> HintMemory:
    found = HintMemory()
    for number, sample in enumerate(samples, 1):
        plan = replace(plan_of(Batch(samples=(), offsets=()), number), policy_id=policy_of_key("policy", key))
        for event in found.to_hold(plan, [sample], now_ms=number):
            found.learn(event)
    return found


def test_common_is_what_so_many_keys_were_taught_in_whatever_case_on_prompts_of_each_of_them() -> None:
    memories = [
        memory("a", *(hinted("a", str(n), "Be brief") for n in range(9)), hinted("a", "x", "in bold")),
        memory("b", hinted("b", "0", "be  brief"), hinted("b", "x", "in full")),
        memory("c", hinted("c", "x", "in bold")),
    ]
    assert common(memories, "policy", at_least=3) == []
    brief, bold = common(memories, "policy", at_least=2)
    assert {one.hint_id for one in brief} == {hint_id_of("policy", None, "be brief")}
    assert [one.turn_id.split()[0] for one in brief[:3]] == ["a", "b", "a"]
    assert len(brief) == PROMPTS_A_HINT
    assert {(one.policy_id, one.key_name) for one in (*brief, *bold)} == {("policy", None)}
    assert len(common(memories, "policy", at_least=1)) == 3


async def test_the_shared_policy_learns_what_is_merged_by_steps_of_its_own_until_it_follows_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, chosen = MemoryLog(MemoryBroker()), by_key(base, tmp_path, gate=False, batch_samples=1, hint_choice="fall")
    await log.append([hinted(key, "0", "be brief") for key in KEYS])
    await trained_until(log, chosen, alice=1, bob=1)
    said = [one.event for one in await toys.read(log, topics.MEMORY) if isinstance(one.event, HintHeld)]
    memories = [HintMemory() for _ in KEYS]
    for found, key in zip(memories, KEYS, strict=True):
        for event in said:
            if event.policy_id == policy_of_key("policy", key):
                found.learn(event)
    [prompts] = common(memories, "policy", at_least=2)
    await log.append([merged_into(one, 0, 5) for one in prompts])
    monkeypatch.setattr(memory_module, "OPEN_NATS", -math.inf)  # it is never followed: all steps are taken

    stop, versions = asyncio.Event(), list[PolicyPublished]()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    answering = asyncio.create_task(answer_rehearsals(log))
    async with asyncio.timeout(60):
        while len(versions) <= MERGED_STEPS:
            await asyncio.sleep(0.05)
            versions = published(await policy_said(log), None)
    for task in (running, answering):
        assert not task.done()
    stop.set()
    answering.cancel()
    await running
    plans = [e for e in await policy_said(log) if isinstance(e, BatchPlanned) and e.policy_id == "policy"]
    assert len(plans) == MERGED_STEPS, "and no further one"
    asks = [one.event for one in await toys.read(log, topics.ANSWERS) if isinstance(one.event, RehearsalAsked)]
    ours = [ask for ask in asks if ask.policy_id == "policy" and ask.number < -MERGED_STEPS]  # others are rehearsals
    assert len(ours) == MERGED_STEPS * CORRECTION_ANSWERS
    assert {ask.hint_id for ask in ours} == {hint_id_of("policy", None, "be brief")}
    settings_of_step = TrainingSettings.model_validate_json(plans[0].settings)
    assert (settings_of_step.corrects, settings_of_step.epochs) == (True, CORRECTION_EPOCHS)


async def answer_rehearsals(log: MemoryLog) -> None:
    """Answer what the shared policy is asked, by its newest version."""
    async for records in log.follow([topics.ANSWERS]):
        asks = [r.event for r in records if isinstance(r, Record) and isinstance(r.event, RehearsalAsked)]
        newest = max((e.policy_version for e in published(await policy_said(log), None)), default=0)
        await log.append([answered(ask, newest) for ask in asks if ask.policy_id == "policy"])
