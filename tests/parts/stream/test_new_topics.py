"""A topic that is made while a producer runs costs no record of another topic."""

import asyncio

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from clawstream.stream.avro import codec
from clawstream.stream.kafka.appending import Appender, EncodedRecord
from clawstream.stream.kafka.client import Broker
from tests.unit.stream import toys

WITHIN_S = 20.0  # a producer gives records up after 40
LINGERS_MS = 500  # so long that the first record still waits when the new topic is met


async def make(bootstrap: str, name: str) -> None:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    await client.create_topics([NewTopic(name, 1, 1)])

    async def is_made() -> bool:
        return name in await client.list_topics()

    await toys.until(is_made)
    await client.close()


async def test_records_that_wait_are_written_although_a_topic_is_met_that_is_new(
    kafka_bootstrap: str, topic_prefix: str
) -> None:
    await make(kafka_bootstrap, f"{topic_prefix}old")
    broker = Broker(bootstrap=kafka_bootstrap, client_id="test", prefix=topic_prefix, linger_ms=LINGERS_MS)
    async with Appender(broker, codec()) as appender:
        await make(kafka_bootstrap, f"{topic_prefix}new")
        async with asyncio.timeout(WITHIN_S):
            await appender.append([EncodedRecord(name, None, b"x", (), name) for name in ("old", "new")])
