"""Readers and writers can be stopped at any time, and leave neither task nor connection."""

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition

from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.stream.avro import codec
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.appending import Appender
from clawstream.stream.kafka.client import Broker
from clawstream.stream.topics import EXCHANGES

WITHIN_S = 60.0


def broker_at(bootstrap: str) -> Broker:
    return Broker(bootstrap=bootstrap, client_id="test")


@pytest.mark.slow
async def test_a_reader_that_waits_to_fetch_again_from_a_broker_that_is_away_is_stopped_whole(tmp_path: Path) -> None:
    failed, others = asyncio.Event(), asyncio.all_tasks()

    class Failed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Failed fetch" in record.getMessage():
                failed.set()

    handler = Failed()
    fetching = logging.getLogger("aiokafka.consumer.fetcher")
    fetching.addHandler(handler)
    try:
        with EmbeddedKafka(tmp_path / "kafka", open_to_all=True) as kafka:
            await admin.apply(kafka.bootstrap)
            broker = Broker(bootstrap=kafka.bootstrap, client_id="test")
            consumer = broker.consumer(retry_backoff_ms=2000)
            await consumer.start()
            consumer.assign([TopicPartition(EXCHANGES, 0)])
            consumer.seek(TopicPartition(EXCHANGES, 0), 0)
            await consumer.getmany(timeout_ms=100)
        async with asyncio.timeout(WITHIN_S):
            await failed.wait()
            await consumer.stop()
    finally:
        fetching.removeHandler(handler)
    assert not asyncio.all_tasks() - others


async def all_ended(others: set[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while left := asyncio.all_tasks() - others:
            await asyncio.wait(left)


@pytest.mark.parametrize("num_waits", range(1, 5))
async def test_a_reader_whose_stop_is_cancelled_ends_whole_all_the_same(kafka_bootstrap: str, num_waits: int) -> None:
    others = asyncio.all_tasks()
    consumer = broker_at(kafka_bootstrap).consumer(group_id=f"test-{uuid.uuid4().hex[:12]}")
    await consumer.start()
    await cancelled_after(num_waits, consumer.stop())
    await all_ended(others)


@pytest.mark.parametrize("num_waits", range(1, 5))
async def test_a_writer_whose_end_is_cancelled_ends_whole_all_the_same(
    kafka_bootstrap: str, topic_prefix: str, num_waits: int
) -> None:
    others = asyncio.all_tasks()
    broker = Broker(bootstrap=kafka_bootstrap, client_id="test", prefix=topic_prefix)
    appender = await Appender(broker, codec()).__aenter__()
    await cancelled_after(num_waits, appender.__aexit__(None, None, None))
    await all_ended(others)


async def cancelled_after(num_waits: int, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    for _ in range(num_waits):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
