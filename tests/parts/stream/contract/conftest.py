"""Each test here runs on the log in memory and on the log on Kafka."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.fakes.memory_log import MemoryBroker, MemoryLog

AnyLog = KafkaLog | MemoryLog
Connect = Callable[[], AbstractAsyncContextManager[AnyLog]]


@pytest.fixture(params=["memory", "kafka"])
async def connect(request: pytest.FixtureRequest) -> Connect:
    """Opens a connection to one broker with three partitions for topics that have more than one."""
    if request.param == "memory":
        broker = MemoryBroker(partitions=3)

        @asynccontextmanager
        async def in_memory() -> AsyncIterator[AnyLog]:
            yield MemoryLog(broker)

        return in_memory

    bootstrap: str = request.getfixturevalue("kafka_bootstrap")
    prefix: str = request.getfixturevalue("topic_prefix")
    await admin.apply(bootstrap, prefix, partitions=3)
    return lambda: KafkaLog.connect(bootstrap, prefix=prefix, client_id="test")


@pytest.fixture
async def log(connect: Connect) -> AsyncIterator[AnyLog]:
    """One connection."""
    async with connect() as opened:
        yield opened
