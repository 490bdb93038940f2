"""Samples that are past their topic's retention, on a real broker."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from clawstream.errors import SamplesGone
from clawstream.events import BatchPlanned, PolicyPublished
from clawstream.stream import topics
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import PartitionId
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import outside, tiny
from tests.parts.training.test_loop import settings, trained_until

SAMPLES = [tiny.sample(f"s{i}", reward=1 if i % 2 else -1) for i in range(6)]


class Rig:
    """A log whose oldest records can be let go, as the broker does it when their time is over."""

    def __init__(self, log: KafkaLog, bootstrap: str, prefix: str) -> None:
        self.log = log
        self._bootstrap = bootstrap
        self._prefix = prefix

    async def let_go(self, ends: Mapping[PartitionId, int]) -> None:
        """Have no record of these partitions before these offsets any more."""
        client = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await client.start()
        try:
            gone = {TopicPartition(self._prefix + place.topic, place.partition): end for place, end in ends.items()}
            await client.delete_records({at: RecordsToDelete(before_offset=end) for at, end in gone.items()})
        finally:
            await client.close()

    async def published(self, version: int) -> list[BatchPlanned]:
        """Return all plans once the version is there."""
        async with asyncio.timeout(60):
            while True:
                events = await outside.said(self.log)
                if any(isinstance(e, PolicyPublished) and e.policy_version == version for e in events):
                    return [event for event in events if isinstance(event, BatchPlanned)]


@pytest.fixture
async def rig(kafka_bootstrap: str, topic_prefix: str) -> AsyncIterator[Rig]:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=1)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        yield Rig(log, kafka_bootstrap, topic_prefix)


async def test_a_plan_whose_samples_are_gone_says_which_and_where_and_what_to_do(
    rig: Rig, base: Path, tmp_path: Path
) -> None:
    twin = MemoryLog(MemoryBroker(partitions=1))
    await twin.append(SAMPLES)
    events = await trained_until(twin, settings(base, tmp_path / "twin", max_updates=1), 1)
    [plan] = [event for event in events if isinstance(event, BatchPlanned)]
    await rig.log.append([*SAMPLES, plan])
    await rig.let_go({PartitionId(topics.SAMPLES, 0): 2})

    async with asyncio.timeout(60):
        with pytest.raises(SamplesGone) as gone:
            await train(settings(base, tmp_path), rig.log, stop=asyncio.Event())

    words = str(gone.value)
    assert words.startswith("the plan of version 1 of policy names 2 samples of 3 that are not on the log any more")
    assert SAMPLES[0].sample_id in words
    assert f"{topics.SAMPLES}-0 before 3" in words
    assert "clawstream train --samples again --from-policy 0" in words
    assert gone.value.exit_status == 2


@pytest.mark.slow
async def test_samples_that_went_before_they_were_read_are_said_and_training_goes_on_with_the_rest(
    rig: Rig, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.log.append(SAMPLES[:3])
    stop = asyncio.Event()
    running = asyncio.create_task(train(settings(base, tmp_path), rig.log, stop=stop))
    await rig.published(1)
    stop.set()
    await running
    late = [tiny.sample(f"late-{i}") for i in range(4)]
    await rig.log.append(late)
    await rig.let_go({PartitionId(topics.SAMPLES, 0): 4})

    stop = asyncio.Event()
    with caplog.at_level(logging.WARNING):
        running = asyncio.create_task(train(settings(base, tmp_path), rig.log, stop=stop))
        plans = await rig.published(2)
        stop.set()
        await running

    assert plans[1].sample_ids == tuple(sample.sample_id for sample in late[1:])
    assert f"samples_unread partition={topics.SAMPLES}-0 from=3 to=4" in caplog.text
