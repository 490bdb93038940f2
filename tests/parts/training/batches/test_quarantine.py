"""Samples that can't be trained on: in their queue, ruled about there, and in nobody's way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clawstream.config import Settings
from clawstream.errors import TooManyFailures, UnusableEvent
from clawstream.events import BatchPlanned, SampleAssembled, SamplesPromoted, StepTaken
from clawstream.stream import quarantine, topics
from clawstream.stream.avro import codec, key_bytes
from clawstream.stream.dead_letters import DeadLetter, Reason
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import DeadLetterId, Fate, PartitionId, Sealed
from clawstream.stream.topics import replay_topic, replay_topics
from clawstream.training.checkpoints import latest
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.stream.raw import append_bytes
from tests.parts.training import outside, tiny
from tests.parts.training.test_loop import names, said, settings, trained_until

SAMPLES = [tiny.sample(f"s{i}", reward=1 if i % 2 else -1, hinted=i % 3 == 0) for i in range(9)]
BAD: list[dict[str, Any]] = [
    {"response_logprobs": SAMPLES[0].response_logprobs * 2},
    {"trained": SAMPLES[0].trained * 2},
    {"response_ids": (10**6,) * len(SAMPLES[0].response_ids)},
]
JUNK = b"no schema of ours"
QUEUE = PartitionId(f"{topics.SAMPLES}.dlq", 0)


def log_of(samples: Sequence[SampleAssembled | bytes]) -> MemoryLog:
    """A log with the samples, or somebody's bytes, in one partition."""
    log = MemoryLog(MemoryBroker(partitions=1))
    for one in samples:
        key, value = (b"key", one) if isinstance(one, bytes) else (key_bytes(one.key), codec().encode(one))
        log.broker.put(PartitionId(topics.SAMPLES, 0), key, value, [("x", b"y")])
    return log


def letter_at(offset: int, topic: str = topics.SAMPLES) -> str:
    return f"train/{topic}/0/{offset}"


async def dead_letters(log: MemoryLog) -> list[DeadLetter]:
    return await quarantine.dead_letters(log)


async def planned(log: MemoryLog) -> list[str]:
    """The samples of all plans, in order."""
    return [name for event in await said(log) if isinstance(event, BatchPlanned) for name in event.sample_ids]


async def trained_while(log: MemoryLog, chosen: Settings, happens: Callable[[], Awaitable[bool]]) -> None:
    """Run the loop until what is on the topics is as wanted."""
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    async with asyncio.timeout(60):
        while not await happens() and not running.done():
            await log.broker.changed(0.05)
    stop.set()
    await running


@pytest.mark.parametrize("changes", BAD)
async def test_a_sample_that_cannot_be_trained_on_goes_to_its_queue_as_it_is_and_training_goes_on(
    base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    bad = replace(SAMPLES[0], **changes)
    log = log_of([SAMPLES[1], bad, *SAMPLES[2:6]])

    for _ in ("once", "and again after a restart"):
        await trained_until(log, settings(base, tmp_path, max_wait_s=0.1), 2)

    assert await planned(log) == [sample.sample_id for sample in SAMPLES[1:6]]
    [copy] = log.broker.records(QUEUE)
    there = log.broker.records(PartitionId(topics.SAMPLES, 0))[1]
    assert (copy.key, copy.value, copy.headers[:1]) == (there.key, there.value, there.headers)
    [dead_letter] = await dead_letters(log)
    assert (dead_letter.id, dead_letter.reason) == (DeadLetterId("train", topics.SAMPLES, 0, 1), Reason.UNUSABLE)
    assert dead_letter.error.startswith("UnusableEvent: no step can be taken on it: ")


async def test_a_sample_that_cannot_be_read_goes_to_its_queue_and_training_goes_on(base: Path, tmp_path: Path) -> None:
    log = log_of([JUNK, *SAMPLES[:3]])

    await trained_until(log, settings(base, tmp_path), 1)

    assert [(dead_letter.id.offset, dead_letter.reason) for dead_letter in await dead_letters(log)] == [
        (0, Reason.UNDECODABLE)
    ]


async def test_what_is_of_another_policy_is_not_ours_to_set_aside(base: Path, tmp_path: Path) -> None:
    log = log_of([replace(SAMPLES[0], policy_id="another", **BAD[2]), *SAMPLES[1:4]])

    await trained_until(log, settings(base, tmp_path), 1)

    assert await dead_letters(log) == []


async def test_nothing_is_planned_past_a_sample_before_its_letter_is_acknowledged(base: Path, tmp_path: Path) -> None:
    copying = asyncio.Event()

    class Slow(MemoryLog):
        async def set_aside(self, *_: Any, **__: Any) -> None:
            copying.set()
            await asyncio.Event().wait()

    log = Slow(log_of([replace(SAMPLES[0], **BAD[0]), *SAMPLES[1:4]]).broker)
    stop = asyncio.Event()
    running = asyncio.create_task(train(settings(base, tmp_path), log, stop=stop))
    await copying.wait()
    for _ in range(200):
        await asyncio.sleep(0)
    stop.set()
    await running

    assert await planned(log) == []


async def test_more_than_one_in_a_hundred_stops_the_trainer_with_a_status_of_its_own(
    base: Path, tmp_path: Path
) -> None:
    log = log_of([*[JUNK] * 12, *SAMPLES])

    with pytest.raises(TooManyFailures, match=r"train set 10 of the last 10 records aside.*--stage train") as flood:
        await train(settings(base, tmp_path), log, stop=asyncio.Event())

    assert flood.value.exit_status == 3
    assert len(await dead_letters(log)) == 10
    assert await planned(log) == []


async def test_a_plan_of_an_older_version_is_executed_without_the_sample_that_breaks_it(
    base: Path, tmp_path: Path
) -> None:
    bad = replace(SAMPLES[0], **BAD[2])
    good = log_of(SAMPLES[:3])
    events = await trained_until(good, settings(base, tmp_path / "good"), 1)
    plan = next(event for event in events if isinstance(event, BatchPlanned))
    log = log_of([bad, *SAMPLES[1:6]])
    await log.append([plan])

    after = await trained_until(log, settings(base, tmp_path / "one"), 2)

    steps = [event for event in after if isinstance(event, StepTaken)]
    assert [step.num_samples for step in steps] == [2, 3]
    assert sorted(await planned(log)) == sorted(names(SAMPLES[:6]))
    assert [dead_letter.id.offset for dead_letter in await dead_letters(log)] == [0]

    cut = log_of([bad, *SAMPLES[1:6]])
    await cut.append([plan])
    await cut.set_aside(DeadLetterId("train", topics.SAMPLES, 0, 0), error=UnusableEvent("by a life before"))
    await trained_until(cut, settings(base, tmp_path / "two", max_updates=1), 1)
    await trained_until(cut, settings(base, tmp_path / "two"), 2)
    checkpoints = [latest(settings(base, tmp_path / name).checkpoints_dir) for name in ("one", "two")]
    assert checkpoints[0] is not None
    assert checkpoints[1] is not None
    assert checkpoints[0].files == checkpoints[1].files
    assert len(cut.broker.records(QUEUE)) == 1


async def test_a_plan_of_nothing_but_such_samples_leaves_the_weights_and_training_goes_on(
    base: Path, tmp_path: Path
) -> None:
    good = log_of(SAMPLES[:1])
    events = await trained_until(good, settings(base, tmp_path / "good", batch_samples=1), 1)
    log = log_of([replace(SAMPLES[0], **BAD[1]), *SAMPLES[1:4]])
    await log.append([event for event in events if isinstance(event, BatchPlanned)])

    after = await trained_until(log, settings(base, tmp_path / "bad"), 2)

    steps = [event for event in after if isinstance(event, StepTaken)]
    assert [(step.num_samples, step.loss_nats is None) for step in steps] == [(0, True), (3, False)]


def promoted(number: int, replay: str) -> SamplesPromoted:
    return SamplesPromoted(policy_id="policy", number=number, replay=replay, undoes=None, promoted_at_ms=0)


async def test_what_a_replay_has_that_cannot_be_trained_on_goes_to_the_live_topics_queue(
    base: Path, tmp_path: Path
) -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    log.broker.create(replay_topics("again", partitions=1, retention_ms=1000))
    topic = replay_topic(topics.SAMPLES, "again")
    samples = [replace(SAMPLES[0], **BAD[0]), *SAMPLES[1:4]]
    await log.put([Sealed(topic, key_bytes(one.key), codec().encode(one), ()) for one in samples], 0)
    await log.append([promoted(1, "again")])

    await trained_until(log, settings(base, tmp_path), 1)

    assert len(log.broker.records(QUEUE)) == 1
    shown = await quarantine.shown(log, letter_at(0, topic))
    assert "response_logprobs has 14 values" in shown["error"]
    assert bytes.fromhex(shown["value_hex"]) == codec().encode(samples[0])


async def set_aside_by_hand(samples: Sequence[SampleAssembled]) -> MemoryLog:
    """A log whose first sample an older version could not use, and which is asked for now."""
    log = log_of(samples)
    await log.set_aside(DeadLetterId("train", topics.SAMPLES, 0, 0), error=UnusableEvent("an older version could not"))
    return log


async def fate(log: MemoryLog) -> Fate:
    return (await dead_letters(log))[0].fate


async def test_a_letter_is_not_trained_on_until_it_is_asked_for_and_then_once(base: Path, tmp_path: Path) -> None:
    log = await set_aside_by_hand(SAMPLES[:6])
    chosen = settings(base, tmp_path, max_wait_s=0.1)
    await trained_until(log, chosen, 2)
    assert await planned(log) == [sample.sample_id for sample in SAMPLES[1:6]]

    async def replayed() -> bool:
        return await fate(log) is Fate.REPLAYED

    await quarantine.rule(log, Fate.REPLAY, dead_letter=letter_at(0), stage=None, because=None)
    await trained_while(log, chosen, replayed)
    await log.append(SAMPLES[6:])
    await trained_until(log, chosen, 4)

    assert await planned(log) == [sample.sample_id for sample in [*SAMPLES[1:6], SAMPLES[0], *SAMPLES[6:]]]


async def test_a_ruling_wakes_a_trainer_that_has_nothing_else_to_do(base: Path, tmp_path: Path) -> None:
    log = await set_aside_by_hand(SAMPLES[:3])
    asked = False

    async def replayed() -> bool:
        nonlocal asked
        if not asked and any(isinstance(event, StepTaken) for event in await said(log)):
            asked = True
            await quarantine.rule(log, Fate.REPLAY, dead_letter=letter_at(0), stage=None, because=None)
        return await fate(log) is Fate.REPLAYED

    await trained_while(log, settings(base, tmp_path, batch_samples=1), replayed)

    assert len(await planned(log)) == 3


async def test_a_replayed_sample_is_in_its_plan_after_the_trainer_was_killed_before_the_step(
    base: Path, tmp_path: Path
) -> None:
    first = await set_aside_by_hand(SAMPLES[:4])
    await trained_until(first, settings(base, tmp_path / "one"), 1)
    await quarantine.rule(first, Fate.REPLAY, dead_letter=letter_at(0), stage=None, because=None)
    events = await trained_until(first, settings(base, tmp_path / "one", max_wait_s=0.1), 2)
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    assert plans[1].sample_ids == (SAMPLES[0].sample_id,)
    assert plans[1].offsets == plans[0].offsets

    killed = await set_aside_by_hand(SAMPLES[:4])
    await quarantine.rule(killed, Fate.REPLAY, dead_letter=letter_at(0), stage=None, because=None)
    await killed.append(plans[:1])
    await trained_until(killed, settings(base, tmp_path / "two", max_updates=1), 1)
    await killed.append(plans[1:])
    await trained_until(killed, settings(base, tmp_path / "two"), 2)

    checkpoints = [latest(settings(base, tmp_path / name).checkpoints_dir) for name in ("one", "two")]
    assert checkpoints[0] is not None
    assert checkpoints[1] is not None
    assert checkpoints[0].files == checkpoints[1].files
    assert await planned(killed) == [name for plan in plans for name in plan.sample_ids]


@pytest.mark.parametrize("refused_before", [False, True])
async def test_a_plan_that_names_a_replayed_sample_which_is_refused_since_is_executed_without_it(
    base: Path, tmp_path: Path, refused_before: bool
) -> None:
    older = await set_aside_by_hand(SAMPLES[:4])
    await trained_until(older, settings(base, tmp_path / "older"), 1)
    await quarantine.rule(older, Fate.REPLAY, dead_letter=letter_at(0), stage=None, because=None)
    events = await trained_until(older, settings(base, tmp_path / "older", max_wait_s=0.1), 2)
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    assert plans[1].sample_ids == (SAMPLES[0].sample_id,)

    log = await set_aside_by_hand([replace(SAMPLES[0], **BAD[2]), *SAMPLES[1:4]])
    newer = settings(base, tmp_path / "newer")

    async def refused() -> bool:
        return (await dead_letters(log))[0].attempt == 2

    await log.append(plans[:1])
    await trained_until(log, newer, 1)
    await quarantine.rule(log, Fate.REPLAY, dead_letter=letter_at(0), stage=None, because=None)
    if refused_before:
        await trained_while(log, newer, refused)
    await log.append(plans[1:])
    after = await trained_until(log, newer, 2)

    assert [event.num_samples for event in after if isinstance(event, StepTaken)] == [3, 0]
    [dead_letter] = await dead_letters(log)
    assert (dead_letter.fate, dead_letter.attempt) == (Fate.OPEN, 2)


async def test_a_ruling_about_samples_that_are_not_trained_on_is_said_to_wait_once(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_of(SAMPLES[:6])
    log.broker.create(replay_topics("again", partitions=1, retention_ms=1000))
    topic = replay_topic(topics.SAMPLES, "again")
    await log.put([Sealed(topic, b"key", codec().encode(SAMPLES[6]), ())], 0)
    await log.set_aside(DeadLetterId("train", topic, 0, 0), error=UnusableEvent("an older version could not"))
    await quarantine.rule(log, Fate.REPLAY, dead_letter=letter_at(0, topic), stage=None, because=None)

    await trained_until(log, settings(base, tmp_path), 2)

    assert caplog.text.count(f"record={topic}-0-0 fate=replay state=waiting") == 1
    assert await fate(log) is Fate.REPLAY


async def test_a_letter_that_still_cannot_be_used_is_set_aside_again_and_one_that_is_left_out_is_closed(
    base: Path, tmp_path: Path
) -> None:
    log = log_of([JUNK, replace(SAMPLES[0], **BAD[1]), *SAMPLES[1:4]])
    chosen = settings(base, tmp_path)
    await trained_until(log, chosen, 1)
    await quarantine.rule(log, Fate.DISCARD, dead_letter=letter_at(0), stage=None, because="not ours")
    await quarantine.rule(log, Fate.REPLAY, dead_letter=letter_at(1), stage=None, because=None)

    async def done() -> bool:
        junk, bad = await dead_letters(log)
        return junk.fate is Fate.DISCARDED and bad.attempt == 2

    await trained_while(log, chosen, done)

    junk, bad = await dead_letters(log)
    assert (junk.because, bad.fate) == ("not ours", Fate.OPEN)
    assert len(await planned(log)) == 3


@pytest.mark.slow
async def test_on_a_real_broker_too_what_cannot_be_used_is_copied_as_it_is_and_closed_as_asked(
    kafka_bootstrap: str, topic_prefix: str, base: Path, tmp_path: Path
) -> None:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=1)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        bad = replace(SAMPLES[0], **BAD[2])
        await append_bytes(log, topics.SAMPLES, b"key", JUNK, [("x", b"y")])
        await log.append([bad, *SAMPLES[1:4]])
        stop = asyncio.Event()
        running = asyncio.create_task(train(settings(base, tmp_path), log, stop=stop))
        async with asyncio.timeout(60):
            while not any(isinstance(event, StepTaken) for event in await outside.said(log)):
                assert not running.done()
            shown = [await quarantine.shown(log, letter_at(offset)) for offset in (0, 1)]
            await quarantine.rule(log, Fate.DISCARD, dead_letter=letter_at(1), stage=None, because="no such token")
            while [one.fate for one in await quarantine.dead_letters(log)] != [
                Fate.OPEN,
                Fate.DISCARDED,
            ]:
                assert not running.done()
        stop.set()
        await running

    assert [bytes.fromhex(one["value_hex"]) for one in shown] == [JUNK, codec().encode(bad)]
    assert [one["reason"] for one in shown] == ["undecodable", "unusable"]
