"""The topics of a real broker."""

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from clawstream.config import KafkaSettings
from clawstream.errors import ConfigError, PartUnavailable, TopicMismatch
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.connect import connected
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Raw
from clawstream.stream.schemas import all_schemas
from clawstream.stream.topics import EXCHANGES, SAMPLES, SCHEMAS, TURNS, Altered, Created, RefusedChange, all_topics
from tests.unit.stream import toys

NOBODY = "127.0.0.1:1"


async def alter(bootstrap: str, topic: str, **config: str) -> None:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    names = {name.replace("_", "."): value for name, value in config.items()}
    await client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=names)])

    async def altered() -> bool:
        return names.items() <= (await settings_of(client, topic)).items()

    await toys.until(altered)
    await client.close()


async def settings_of(client: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    [response] = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {entry[0]: entry[1] for entry in response.resources[0][4]}


async def test_apply_makes_what_plan_says_and_then_there_is_nothing_to_do(
    kafka_bootstrap: str, topic_prefix: str
) -> None:
    planned = await admin.plan(kafka_bootstrap, topic_prefix)
    assert [change.topic for change in planned if isinstance(change, Created)] == list(all_topics())
    with pytest.raises(TopicMismatch, match=r"clawstream\.votes\.v1: not there; run `clawstream topics apply`"):
        await admin.verify(kafka_bootstrap, topic_prefix)
    assert await admin.apply(kafka_bootstrap, topic_prefix) == planned
    assert await admin.plan(kafka_bootstrap, topic_prefix) == []
    assert await admin.apply(kafka_bootstrap, topic_prefix) == []
    await admin.verify(kafka_bootstrap, topic_prefix)


async def test_apply_alters_settings_and_keeps_those_that_others_set(kafka_bootstrap: str, topic_prefix: str) -> None:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=1)
    name = SAMPLES
    await alter(kafka_bootstrap, topic_prefix + name, retention_ms="1000", segment_bytes="1048576")
    changes = await admin.apply(kafka_bootstrap, topic_prefix, partitions=1)
    assert {change.topic.name for change in changes} == {name}
    assert {change.setting: change.found for change in changes if isinstance(change, Altered)}["retention.ms"] == "1000"
    assert await admin.plan(kafka_bootstrap, topic_prefix, partitions=1) == []
    client = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await client.start()
    settings = await settings_of(client, topic_prefix + name)
    await client.close()
    assert settings["segment.bytes"] == "1048576"


async def test_apply_lowers_no_retention_and_does_nothing_else_then(kafka_bootstrap: str, topic_prefix: str) -> None:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=1)
    await alter(kafka_bootstrap, topic_prefix + SAMPLES, retention_ms="-1")
    await alter(kafka_bootstrap, topic_prefix + TURNS, retention_ms="5")
    with pytest.raises(TopicMismatch, match=r"clawstream\.samples\.v1: retention\.ms is -1, expected 7776000000"):
        await admin.apply(kafka_bootstrap, topic_prefix, partitions=1)
    changes = await admin.plan(kafka_bootstrap, topic_prefix, partitions=1)
    assert [change.found for change in changes if isinstance(change, RefusedChange)] == ["-1"]
    assert "5" in [change.found for change in changes if isinstance(change, Altered)]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"retention_ms": "5"}, r"retention\.ms is 5, expected -1"),
        ({"cleanup_policy": "compact"}, r"cleanup\.policy is compact, expected delete"),
        ({"message_timestamp_type": "CreateTime"}, r"message\.timestamp\.type is CreateTime, expected LogAppendTime"),
    ],
)
async def test_start_up_refuses_what_readers_rely_on(
    kafka_bootstrap: str, topic_prefix: str, config: dict[str, str], says: str
) -> None:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=1)
    await alter(kafka_bootstrap, topic_prefix + TURNS, **config)
    with pytest.raises(TopicMismatch, match=says):
        await admin.verify(kafka_bootstrap, topic_prefix, partitions=1)


async def test_start_up_refuses_a_wrong_partition_count(kafka_bootstrap: str, topic_prefix: str) -> None:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await client.start()
    name = topic_prefix + EXCHANGES
    await client.create_topics([NewTopic(name, 5, 1)])

    async def created() -> bool:
        return name in await client.list_topics()

    await toys.until(created)
    await client.close()
    with pytest.raises(TopicMismatch, match=r"exchanges\.v1: number of partitions is 5, expected 12"):
        await admin.apply(kafka_bootstrap, topic_prefix)
    settings = KafkaSettings(bootstrap=kafka_bootstrap, prefix=topic_prefix)
    with pytest.raises(TopicMismatch, match="number of partitions is 5, expected 12"):
        async with connected(settings, client_id="test"):
            pass


async def test_a_process_that_connects_publishes_the_schemas(kafka_bootstrap: str, topic_prefix: str) -> None:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=1)
    settings = KafkaSettings(bootstrap=kafka_bootstrap, prefix=topic_prefix)
    for _ in range(2):
        async with connected(settings, client_id="test", partitions=1) as log:
            found = [one async for one in log.follow([SCHEMAS], until_end=True)]
    published = {one.key: one.value for records in found for one in records if isinstance(one, Raw)}
    assert published == {schema.fingerprint.hex().encode(): schema.text.encode() for schema in all_schemas()}


async def test_a_broker_that_is_not_there_is_named_with_what_to_do() -> None:
    for attempt in (admin.plan, admin.verify):
        with pytest.raises(PartUnavailable, match=r"no Kafka broker answers at 127\.0\.0\.1:1 .*CLAWSTREAM_KAFKA"):
            await attempt(NOBODY)
    with pytest.raises(PartUnavailable, match=r"127\.0\.0\.1:1"):
        async with KafkaLog.connect(NOBODY):
            pass


async def test_settings_without_a_broker_say_so() -> None:
    with pytest.raises(ConfigError, match=r"kafka\.bootstrap"):
        async with connected(KafkaSettings(), client_id="test"):
            pass
