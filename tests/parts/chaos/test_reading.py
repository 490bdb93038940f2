"""What the oracle is told of the broker's committed offsets is what the broker has."""

from aiokafka import AIOKafkaConsumer, TopicPartition

from clawstream.stream.kafka import admin
from clawstream.stream.topics import TURNS
from tests.chaos.oracle import Moved
from tests.chaos.reading import moved


async def test_an_offset_that_a_group_took_back_is_told_and_one_that_went_on_is_not(
    kafka_bootstrap: str, topic_prefix: str
) -> None:
    await admin.apply(kafka_bootstrap, topic_prefix)
    back, on = (TopicPartition(f"{topic_prefix}{TURNS}", number) for number in (0, 1))
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka_bootstrap, group_id="turns", enable_auto_commit=False)
    await consumer.start()
    consumer.assign([back, on])
    for at in ({back: 7, on: 3}, {back: 5, on: 3}, {back: 6, on: 9}):
        await consumer.commit(at)
    await consumer.stop()
    told = [one for one in await moved(kafka_bootstrap) if one.topic.startswith(topic_prefix)]
    assert told == [Moved(group="turns", topic=back.topic, partition=0, was=7, found=5)]
