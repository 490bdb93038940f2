"""What only a real broker can show: it goes away, workers are killed, members are taken for dead."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from clawstream.errors import TryLater, UnusableEvent
from clawstream.events import Event, SessionDone
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.kafka.member import GroupPatience
from clawstream.stream.runner.hosting import run
from tests.unit.stream import toys


@pytest.fixture
async def feed(kafka_bootstrap: str, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=3)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix, client_id="feed") as log:
        yield log


@asynccontextmanager
async def victim(bootstrap: str, prefix: str) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = [sys.executable, "-m", "tests.parts.stream.worker", bootstrap, prefix, "the-worker", "pairs"]
    process = await asyncio.create_subprocess_exec(*argv)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_worker_killed_in_mid_session_comes_back_under_its_name_and_loses_no_pair(
    feed: KafkaLog, kafka_bootstrap: str, topic_prefix: str
) -> None:
    await feed.append([toys.done(session, number) for number in range(20) for session in "abcd"])

    async def some_written() -> bool:
        return len(await toys.written(feed, toys.TURNS)) >= 20

    async with victim(kafka_bootstrap, topic_prefix) as process:
        await toys.until(some_written)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    await feed.append([toys.done(session, number) for number in range(20, 25) for session in "abcd"])
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(toys.pairs(), feed, stop=stop, instance_id="the-worker", pace=toys.HASTE))
        await toys.settled(feed, "pairs")
        stop.set()
    expected = toys.ids(toys.paired(session, number) for session in "abcd" for number in range(24))
    assert await toys.written(feed, toys.TURNS) == expected


@pytest.mark.slow
async def test_a_member_whose_calls_take_longer_than_the_poll_interval_keeps_its_partitions(
    feed: KafkaLog, kafka_bootstrap: str, topic_prefix: str
) -> None:
    asked: list[str] = []

    async def perform(call: SessionDone) -> list[Event]:
        asked.append(call.event_id)
        await asyncio.sleep(2.5)
        return await toys.answered(call)

    hasty = GroupPatience(session_timeout_s=6.0, heartbeat_s=0.2, max_poll_interval_s=1.0)
    await feed.append([toys.done("a", number) for number in range(4)])
    async with (
        KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix, client_id="slow", patience=hasty) as log,
        toys.running(replace(toys.asks(perform), in_flight=2), log),
    ):
        await toys.settled(feed, "asks")
    assert len(asked) == len(set(asked)) == 4


@pytest.mark.slow
async def test_a_broker_that_goes_away_is_noticed_and_what_waits_is_written_in_order(tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path, open_to_all=True) as broker:
        await admin.apply(broker.bootstrap, partitions=1)
        async with KafkaLog.connect(broker.bootstrap, client_id="gateway") as log:

            async def away() -> bool:
                return not log.healthy()

            async def back() -> bool:
                return log.healthy()

            await log.append([toys.done("a", 0)])
            with silenced(tmp_path):
                await toys.until(away)
                with pytest.raises(TryLater, match=r"did not acknowledge 1 events within 0\.5 s"):
                    await log.append([toys.done("a", 1)], timeout_s=0.5)
                waiting = [asyncio.create_task(log.append([toys.done("a", number)])) for number in range(2, 6)]
                await asyncio.sleep(0.1)
                assert not any(one.done() for one in waiting)
            async with asyncio.timeout(60):
                await asyncio.gather(*waiting)
            await toys.until(back)
            numbers = [toys.number_of(one.event) for one in await toys.read(log, toys.EXCHANGES)]
    assert numbers == [0, 1, 2, 3, 4, 5]


@contextmanager
def silenced(data_dir: Path) -> Iterator[None]:
    """The broker on `data_dir` answers nobody for the length of the block."""
    [broker] = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() == "java" and process.cwd() == str(data_dir)
    ]
    broker.suspend()
    try:
        yield
    finally:
        broker.resume()


async def test_a_record_of_eight_mebibytes_is_taken_and_a_larger_one_refused(feed: KafkaLog) -> None:
    large = replace(toys.vote("a", 0), text="x" * (8 * 2**20))
    await feed.append([large])
    assert await toys.written(feed, toys.VOTES) == toys.ids([large])
    with pytest.raises(UnusableEvent, match="9371648 is the limit"):
        await feed.append([replace(large, text="x" * (9 * 2**20))])
    await feed.append([toys.vote("a", 1)])
    assert len(await toys.written(feed, toys.VOTES)) == 2
