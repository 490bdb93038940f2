"""A group on a real broker whose members come, go, freeze and wake: who owns a partition, and what others can do."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from clawstream.events import Event, SessionDone
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.runner.hosting import RunnerIntervals, run
from clawstream.stream.runner.pending_records import WorkerProgress
from clawstream.stream.stage import Stage
from tests.chaos.reading import moved
from tests.parts.stream.worker import CALL_S, CALLS_AT_ONCE, SHORT
from tests.unit.stream import toys

SESSIONS = [f"s{number}" for number in range(40)]
PARTITIONS = 12
MOST_UNDER_WAY = CALLS_AT_ONCE * (2 + round(toys.HASTE.drain_s / CALL_S))  # it may finish what it can in that time


@pytest.fixture
async def feed(kafka_bootstrap: str, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=PARTITIONS)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix, client_id="feed") as log:
        yield log


class Slot:
    """One place in a group, under its own instance id or under none."""

    def __init__(
        self,
        bootstrap: str,
        prefix: str,
        stage: Stage[Any, Any],
        instance_id: str | None,
        pace: RunnerIntervals = toys.HASTE,
    ) -> None:
        self._connecting = KafkaLog.connect(bootstrap, prefix=prefix, client_id="member", patience=SHORT)
        self._stage = stage
        self._instance_id = instance_id
        self._pace = pace
        self.progress: WorkerProgress | None = None

    @property
    def num_partitions(self) -> int:
        return 0 if self.progress is None else self.progress.partitions

    async def has_half(self) -> bool:
        return self.num_partitions == PARTITIONS // 2

    def _note(self, progress: WorkerProgress) -> None:
        self.progress = progress

    @asynccontextmanager
    async def filled(self) -> AsyncIterator["Slot"]:
        """A worker runs in it for the length of the block, and stops in good order."""
        stop = asyncio.Event()
        async with self._connecting as log, asyncio.TaskGroup() as tasks:
            tasks.create_task(
                run(self._stage, log, stop=stop, instance_id=self._instance_id, pace=self._pace, on_progress=self._note)
            )
            yield self
            stop.set()


async def covered(slots: Sequence[Slot]) -> None:
    """Return when every partition has one of these for its owner, and each of them some."""

    async def all_shared_out() -> bool:
        shares = [slot.num_partitions for slot in slots]
        return sum(shares) == PARTITIONS and max(shares) - min(shares) <= 1

    await toys.until(all_shared_out)


def some(numbers: range) -> list[SessionDone]:
    return [toys.done(session, number) for number in numbers for session in SESSIONS]


def pairs_up_to(end: int) -> list[str]:
    return sorted(toys.paired(session, number).event_id for session in SESSIONS for number in range(end - 1))


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, 4, 5])
async def test_all_partitions_have_one_owner_each_whoever_leaves_and_joins_and_each_pair_is_written_once(
    feed: KafkaLog, kafka_bootstrap: str, topic_prefix: str, members: int
) -> None:
    slots = [Slot(kafka_bootstrap, topic_prefix, toys.pairs(), f"slot-{number}") for number in range(members + 1)]
    await feed.append(some(range(3)))
    async with AsyncExitStack() as staying:
        async with slots[0].filled():
            for slot in slots[1:members]:
                await staying.enter_async_context(slot.filled())
            await covered(slots[:members])
            await feed.append(some(range(3, 6)))
            await toys.settled(feed, "pairs")
        await feed.append(some(range(6, 9)))
        await covered(slots[1:members])
        await staying.enter_async_context(slots[members].filled())
        await covered(slots[1:])
        await feed.append(some(range(9, 12)))
        await toys.settled(feed, "pairs")
    found = [record.event.event_id for record in await toys.read(feed, toys.TURNS)]
    assert sorted(found) == pairs_up_to(12)
    assert await moved(kafka_bootstrap, [f"{topic_prefix}pairs"]) == []


@pytest.mark.slow
async def test_members_that_come_and_go_while_calls_are_under_way_make_none_twice(
    feed: KafkaLog, kafka_bootstrap: str, topic_prefix: str
) -> None:
    asked: list[str] = []

    async def perform(call: SessionDone) -> list[Event]:
        asked.append(call.event_id)
        await asyncio.sleep(0.3)
        return await toys.answered(call)

    stage = toys.asks(perform, calls_at_once=8, in_flight=16)
    patient = replace(toys.HASTE, drain_s=20.0)  # what is cut off is called again
    slots = [Slot(kafka_bootstrap, topic_prefix, stage, None, patient) for _ in range(3)]
    calls = some(range(2))

    async def until_it_asks(slot: Slot) -> None:
        """There is work for all, so that nobody comes to an empty table."""

        async def has_asked() -> bool:
            if len(calls) - len(asked) < len(SESSIONS):
                more = some(range(len(calls) // len(SESSIONS), len(calls) // len(SESSIONS) + 1))
                calls.extend(more)
                await feed.append(more)
            return slot.progress is not None and slot.progress.calls > 0

        await toys.until(has_asked)

    await feed.append(calls)
    async with slots[0].filled():
        await until_it_asks(slots[0])
        async with slots[1].filled():
            await until_it_asks(slots[1])
            async with slots[2].filled():
                await until_it_asks(slots[2])
        await toys.settled(feed, "asks")
    assert len(asked) == len(set(asked)) == len(calls)


@asynccontextmanager
async def process(bootstrap: str, prefix: str, slot: str, stage: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker that can be frozen."""
    argv = [sys.executable, "-m", "tests.parts.stream.worker", bootstrap, prefix, slot, stage]
    worker = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


async def asked_before(worker: asyncio.subprocess.Process, wanted: Collection[str]) -> list[str]:
    """Return which calls the worker still begins before it comes to one of these."""
    assert worker.stdout is not None
    found: list[str] = []
    async with asyncio.timeout(60):
        while line := (await worker.stdout.readline()).decode().split():
            if line[-1] in wanted:
                return found
            found += line[1:]
    raise AssertionError("the worker ended")


async def says(worker: asyncio.subprocess.Process, word: str, *, times: int = 1) -> None:
    """Return once the worker has said it so often."""
    assert worker.stdout is not None
    async with asyncio.timeout(60):
        while times:
            line = await worker.stdout.readline()
            assert line, "the worker ended"
            times -= line.startswith(word.encode())


@pytest.mark.slow
@pytest.mark.parametrize("slot", ["-", "the-slot"])
async def test_a_frozen_worker_that_wakes_can_not_commit_drops_what_it_read_and_none_of_its_votes_counts_twice(
    feed: KafkaLog, kafka_bootstrap: str, topic_prefix: str, slot: str
) -> None:
    calls = some(range(3))
    await feed.append(calls)
    successor = Slot(kafka_bootstrap, topic_prefix, toys.asks(toys.answered), None if slot == "-" else slot)
    async with process(kafka_bootstrap, topic_prefix, slot, "asks") as frozen:
        await says(frozen, "asked", times=4 * CALLS_AT_ONCE)
        frozen.send_signal(signal.SIGSTOP)
        async with successor.filled():
            await toys.settled(feed, "asks")
            frozen.send_signal(signal.SIGCONT)
            await says(frozen, "refused")
            if slot != "-":
                frozen.kill()  # two workers of one slot take it from each other as long as both live
                await feed.append(some(range(3, 4)))
                older: list[str] = []
            else:
                await toys.until(successor.has_half)
                newer = some(range(3, 4))
                await feed.append(newer)
                older = await asked_before(frozen, toys.ids(newer))
            await toys.settled(feed, "asks")

    assert len(older) <= MOST_UNDER_WAY  # of some 100 that it had read
    votes = [record.event for record in await toys.read(feed, toys.VOTES)]
    by_id = {vote.event_id: vote for vote in votes}
    assert set(by_id) == toys.ids(toys.vote(session, number) for session in SESSIONS for number in range(4))
    assert all(vote == by_id[vote.event_id] for vote in votes)
    assert await moved(kafka_bootstrap, [f"{topic_prefix}asks"]) == []


@pytest.mark.slow
async def test_a_frozen_worker_that_wakes_after_its_successor_left_can_not_take_the_offsets_back(
    feed: KafkaLog, kafka_bootstrap: str, topic_prefix: str
) -> None:
    await feed.append(some(range(3)))
    successor = Slot(kafka_bootstrap, topic_prefix, toys.asks(toys.answered), None)
    async with process(kafka_bootstrap, topic_prefix, "-", "asks") as frozen:
        await says(frozen, "asked", times=4 * CALLS_AT_ONCE)
        frozen.send_signal(signal.SIGSTOP)
        async with successor.filled():
            await toys.settled(feed, "asks")
        frozen.send_signal(signal.SIGCONT)
        await says(frozen, "refused")
        await feed.append(some(range(3, 4)))
        await toys.settled(feed, "asks")
    assert await moved(kafka_bootstrap, [f"{topic_prefix}asks"]) == []
