"""A reader of a broker that has gone away can be stopped at any time."""

import asyncio
import logging
from pathlib import Path

from aiokafka import TopicPartition

from clawstream.local.kafka import EmbeddedKafka
from clawstream.stream import admin
from clawstream.stream.client import Broker, KafkaSecurity

WITHIN_S = 60.0
EXCHANGES = "clawstream.exchanges.v1"


async def test_a_reader_that_waits_to_fetch_again_from_a_broker_that_is_away_is_stopped_whole(tmp_path: Path) -> None:
    failed = asyncio.Event()

    class Failed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Failed fetch" in record.getMessage():
                failed.set()

    handler = Failed()
    fetching = logging.getLogger("aiokafka.consumer.fetcher")
    fetching.addHandler(handler)
    try:
        with EmbeddedKafka(tmp_path / "kafka") as kafka:
            await admin.apply(kafka.bootstrap)
            broker = Broker(bootstrap=kafka.bootstrap, client_id="test", security=KafkaSecurity())
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
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left
