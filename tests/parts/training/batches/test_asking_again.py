"""What a trainer says on the log of samples that came too late: each once, and of live samples alone."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from clawstream.events import BatchPlanned, Event, SampleAssembled
from clawstream.stream.avro import codec, key_bytes
from clawstream.stream.log import Arrived, Sealed, Start
from clawstream.stream.topics import SAMPLES, replay_topic, replay_topics
from clawstream.training.batches.following import retraining
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training.batches.test_following import pointer
from tests.parts.training.batches.test_refreshed import asked, sample
from tests.parts.training.test_loop import said, settings, trained_until

pytestmark = pytest.mark.slow

AGAIN = replay_topic(SAMPLES, "again")


class Meanwhile(MemoryLog):
    """A log on which a sample lands, and is read to the end, while the first plan is on its way."""

    def __init__(self, broker: MemoryBroker, late: SampleAssembled) -> None:
        super().__init__(broker)
        self.late: SampleAssembled | None = late
        self.read = asyncio.Event()

    async def append(
        self, events: Sequence[Event], traceparent: str | None = None, *, timeout_s: float | None = None
    ) -> None:
        if self.late is not None and any(isinstance(event, BatchPlanned) for event in events):
            late, self.late = self.late, None
            self.read.clear()
            await super().append([late])
            await self.read.wait()
        await super().append(events, traceparent, timeout_s=timeout_s)

    async def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        async for records in super().follow(topics, start, until_end=until_end):
            yield records
            if SAMPLES in topics:
                self.read.set()


async def replayed(log: MemoryLog, *samples: SampleAssembled) -> None:
    await log.put([Sealed(AGAIN, key_bytes(one.key), codec().encode(one), ()) for one in samples], 0)


async def test_a_revision_that_lands_while_the_plan_is_on_its_way_is_asked_for_though_nothing_follows(
    base: Path, tmp_path: Path
) -> None:
    revised = sample("a", reward=-1, num_feedback=1)
    log = Meanwhile(MemoryBroker(), revised)
    await log.append([sample("a")])
    [plan] = [
        event
        for event in await trained_until(log, settings(base, tmp_path, late="refresh", batch_samples=1), 1)
        if isinstance(event, BatchPlanned)
    ]
    assert plan.sample_ids == (sample("a").sample_id,)
    assert [one.sample_id for one in await asked(log)] == [revised.sample_id]


@pytest.mark.parametrize("of_its_own", [True, False])  # a policy of its own; the promoted replay's samples
async def test_nothing_is_asked_for_where_the_samples_are_a_replays(
    base: Path, tmp_path: Path, *, of_its_own: bool
) -> None:
    log = MemoryLog(MemoryBroker())
    log.broker.create(replay_topics("again", partitions=3, retention_ms=1000))
    chosen = settings(base, tmp_path, late="refresh", batch_samples=1)
    if not of_its_own:
        await log.append([pointer(1, "again")])
    own, what = retraining(chosen, replay="again", from_version=0)

    async def trained(version: int) -> None:
        if not of_its_own:
            await trained_until(log, chosen, version)
            return
        async with asyncio.timeout(60):
            await train(own, log, stop=asyncio.Event(), retraining=what)

    await replayed(log, sample("a"))
    await trained(1)
    await replayed(log, sample("a", reward=-1, num_feedback=1), sample("b"))
    await trained(2)

    plans = [event for event in await said(log) if isinstance(event, BatchPlanned)]
    assert [plan.sample_ids for plan in plans] == [(sample(name).sample_id,) for name in "ab"]
    assert await asked(log) == []
