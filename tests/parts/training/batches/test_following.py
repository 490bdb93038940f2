"""Which samples a policy is trained on: the live ones, or a promoted replay's, changed between two steps."""

import asyncio
import json
from pathlib import Path

import pytest

from clawstream.events import BatchPlanned, PolicyPublished, SampleAssembled, SamplesPromoted, StepTaken
from clawstream.stream import topics
from clawstream.stream.avro import codec, key_bytes
from clawstream.stream.log import Sealed
from clawstream.stream.topics import replay_topic, replay_topics
from clawstream.training.batches.following import retraining
from clawstream.training.checkpoints import latest
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.test_loop import said, settings, trained_until

LIVE = [tiny.sample(f"live-{i}", reward=1 if i % 2 else -1) for i in range(6)]
AGAIN = [tiny.sample(f"again-{i}", reward=1 if i % 2 else -1) for i in range(4)]


async def recorded(*, replayed: int = 3) -> MemoryLog:
    """A log with three live samples, and some of the replay `again`."""
    log = MemoryLog(MemoryBroker())
    log.broker.create(replay_topics("again", partitions=3, retention_ms=1000))
    await log.append(LIVE[:3])
    topic = replay_topic(topics.SAMPLES, "again")
    await log.put([Sealed(topic, key_bytes(one.key), codec().encode(one), ()) for one in AGAIN[:replayed]], 0)
    return log


def pointer(number: int, replay: str | None, undoes: int | None = None) -> SamplesPromoted:
    return SamplesPromoted(policy_id="policy", number=number, replay=replay, undoes=undoes, promoted_at_ms=0)


def ids(samples: list[SampleAssembled]) -> list[str]:
    return sorted(sample.sample_id for sample in samples)


def manifest(data: Path, version: int) -> dict[str, object]:
    text = (data / "policies" / "policy" / f"v{version:06d}" / "manifest.json").read_text()
    plan: dict[str, object] = json.loads(text)["plan"]
    return plan


async def test_the_pointer_is_followed_between_two_steps_and_stands_in_the_manifest(base: Path, tmp_path: Path) -> None:
    log = await recorded()
    chosen = settings(base, tmp_path)
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))

    async def published(version: int) -> None:
        async with asyncio.timeout(60):
            async for _ in log.follow(["clawstream.policy.v1"], "earliest"):
                done = {event.policy_version for event in await said(log) if isinstance(event, PolicyPublished)}
                if version in done or running.done():
                    return

    await published(1)
    await log.append([pointer(1, "again")])
    await published(2)
    await log.append(LIVE[3:])
    await log.append([pointer(2, None, undoes=1)])
    await published(3)
    stop.set()
    await running

    plans = [event for event in await said(log) if isinstance(event, BatchPlanned)]
    assert [plan.replay for plan in plans] == [None, "again", None]
    assert [sorted(plan.sample_ids) for plan in plans] == [ids(LIVE[:3]), ids(AGAIN[:3]), ids(LIVE[3:])]
    assert [manifest(tmp_path, version)["replay"] for version in (1, 2, 3)] == [None, "again", None]


@pytest.mark.slow
async def test_live_samples_that_waited_when_a_replay_was_promoted_are_trained_on_after_the_rollback(
    base: Path, tmp_path: Path
) -> None:
    log = await recorded()
    await log.append([LIVE[3]])
    await trained_until(log, settings(base, tmp_path), 1)
    await log.append([pointer(1, "again")])
    await trained_until(log, settings(base, tmp_path), 2)
    await log.append([pointer(2, None, undoes=1), *LIVE[4:]])
    events = await trained_until(log, settings(base, tmp_path), 3)
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    assert sorted(name for plan in plans for name in plan.sample_ids) == ids(LIVE + AGAIN[:3])


async def test_a_plan_is_executed_with_the_samples_it_names_wherever_the_pointer_is_by_then(
    base: Path, tmp_path: Path
) -> None:
    first = await recorded()
    await first.append([pointer(1, "again")])
    events = await trained_until(first, settings(base, tmp_path / "one"), 1)
    [plan] = [event for event in events if isinstance(event, BatchPlanned)]

    killed = await recorded()
    await killed.append([pointer(1, "again"), plan, pointer(2, None, undoes=1)])
    await trained_until(killed, settings(base, tmp_path / "two"), 1)

    checkpoints = [latest(settings(base, tmp_path / name).checkpoints_dir) for name in ("one", "two")]
    assert checkpoints[0] is not None
    assert checkpoints[1] is not None
    assert checkpoints[1].plan == plan
    assert checkpoints[0].files == checkpoints[1].files


async def test_a_policy_of_its_own_is_trained_on_a_replay_from_a_version_and_ends_with_its_samples(
    base: Path, tmp_path: Path
) -> None:
    log = await recorded(replayed=4)
    chosen = settings(base, tmp_path)
    await trained_until(log, chosen, 1)
    own, what = retraining(chosen, replay="again", from_version=1)
    async with asyncio.timeout(60):
        await train(own, log, stop=asyncio.Event(), retraining=what)

    mine = [event for event in await said(log) if getattr(event, "policy_id", None) == "policy-again"]
    plans = [event for event in mine if isinstance(event, BatchPlanned)]
    assert [(plan.policy_version, len(plan.sample_ids), plan.replay) for plan in plans] == [
        (2, 3, "again"),
        (3, 1, "again"),
    ]
    published = [event for event in mine if isinstance(event, PolicyPublished)]
    assert [event.policy_version for event in published] == [1, 2, 3]
    live = latest(chosen.checkpoints_dir)
    assert live is not None
    assert (published[0].path, published[0].manifest_sha256) == (str(live.path.absolute()), live.manifest_sha256)
    steps = [event for event in mine if isinstance(event, StepTaken)]
    assert len(steps) == 2

    async with asyncio.timeout(60):
        await train(own, log, stop=asyncio.Event(), retraining=what)
    assert len([event for event in await said(log) if isinstance(event, StepTaken)]) == 3
