"""Groups that a replay settled: trained on where it is promoted, and by a policy of its own."""

import asyncio
from pathlib import Path

import pytest

from clawstream.errors import ConfigError
from clawstream.events import (
    BatchPlanned,
    ReplayStarted,
    RewardWeights,
    SamplesPromoted,
    VotesFrom,
)
from clawstream.stream import topics
from clawstream.stream.avro import codec, key_bytes
from clawstream.stream.log import Sealed
from clawstream.stream.topics import replay_topic, replay_topics
from clawstream.training.batches.following import retraining
from clawstream.training.checkpoints import latest
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training.batches.test_groups import GROUP, settled
from tests.parts.training.test_loop import settings, trained_until


def started(*, grouped: bool) -> ReplayStarted:
    return ReplayStarted(
        replay="again", votes_from=VotesFrom.LOG, judge=None, prompt_version=None, session_id=None, num_votes=3,
        quorum=2, ranges=(), started_at_ms=0, reward_weights=RewardWeights(),
        hint_quorum=2, grouped=grouped,
    )  # fmt: skip


async def replayed() -> MemoryLog:
    """A log with a replay that settled a group on its own topics, unlike what is live."""
    log = MemoryLog(MemoryBroker())
    log.broker.create(replay_topics("again", partitions=1, retention_ms=1000))
    await log.append([started(grouped=True), settled(0, 2), *GROUP[:2]])
    for topic, said in ((topics.SAMPLES, GROUP), (topics.GROUPS, [settled(0, 3)])):
        again = replay_topic(topic, "again")
        await log.put([Sealed(again, key_bytes(one.key), codec().encode(one), ()) for one in said], 0)
    return log


async def test_a_replay_s_groups_are_trained_on_where_it_is_promoted(base: Path, tmp_path: Path) -> None:
    log = await replayed()
    await log.append([SamplesPromoted(policy_id="policy", number=1, replay="again", undoes=None, promoted_at_ms=0)])
    events = await trained_until(log, settings(base, tmp_path, method="stepwise"), 1)
    [plan] = [event for event in events if isinstance(event, BatchPlanned)]
    assert (plan.replay, len(plan.sample_ids), plan.advantages) == ("again", 3, (-1.5, -0.5, 0.5))


async def test_a_policy_of_its_own_is_trained_on_all_groups_of_a_replay_and_then_ends(
    base: Path, tmp_path: Path
) -> None:
    log = await replayed()
    own, what = retraining(settings(base, tmp_path, method="stepwise", batch_samples=9), replay="again", from_version=0)
    async with asyncio.timeout(60):
        await train(own, log, stop=asyncio.Event(), retraining=what)
    newest = latest(own.checkpoints_dir)
    assert newest is not None
    assert (newest.version, len(newest.plan.sample_ids), newest.plan.replay) == (1, 3, "again")


@pytest.mark.parametrize("begun", [None, False])
async def test_a_replay_that_settled_no_groups_is_refused(base: Path, tmp_path: Path, begun: bool | None) -> None:
    log = MemoryLog(MemoryBroker())
    if begun is not None:
        await log.append([started(grouped=begun)])
    await log.append([SamplesPromoted(policy_id="policy", number=1, replay="again", undoes=None, promoted_at_ms=0)])
    with pytest.raises(ConfigError, match="replay again was begun under another method, so it settled none"):
        async with asyncio.timeout(30):
            await train(settings(base, tmp_path, method="stepwise"), log, stop=asyncio.Event())
