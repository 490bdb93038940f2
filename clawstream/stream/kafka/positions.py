"""Sets from outside where a group begins to read: the monitor's group (its consumer is faust's), or a stage put back.

The one rule: a group's positions are set while nobody reads in it; the broker refuses anything else.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupIdNotFound, KafkaError, for_code
from aiokafka.structs import OffsetAndMetadata

from clawstream.errors import PartUnavailable
from clawstream.stream.kafka.client import Broker, describe, kafka_errors
from clawstream.stream.log import Commit, PartitionId

ASK_AGAIN_S = 0.5


async def offsets_at(
    broker: Broker, prefix: str, places: Iterable[PartitionId], time_ms: int
) -> dict[PartitionId, int]:
    """Return the offset of each partition's first record appended at `time_ms` or later; its end where none is."""
    at = {TopicPartition(prefix + place.topic, place.partition): place for place in places}
    async with _started(broker.consumer()) as consumer:
        with kafka_errors("look for a time"):
            found = await consumer.offsets_for_times(dict.fromkeys(at, time_ms))
            ends = await consumer.end_offsets(list(at))
    return {place: ends[one] if found[one] is None else found[one].offset for one, place in at.items()}


async def set_group(
    broker: Broker, prefix: str, group: str, starts: Mapping[PartitionId, int | Commit], *, within_s: float = 15.0
) -> None:
    """Let `group` begin at `starts`, keeping their notes; waits until the broker forgets a killed member.

    Raises PartUnavailable where somebody still reads in the group after `within_s`.
    """
    name = prefix + group
    await _emptied(broker, name, within_s)
    offsets = {
        TopicPartition(prefix + place.topic, place.partition): OffsetAndMetadata(
            *(start if isinstance(start, Commit) else Commit(start))
        )
        for place, start in starts.items()
    }
    async with _started(broker.consumer(group_id=name)) as consumer:
        consumer.assign(list(offsets))
        with kafka_errors(f"set where {name} begins"):
            await consumer.commit(offsets)


async def _emptied(broker: Broker, name: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    admin = broker.admin()
    try:
        with broker.connecting():
            await admin.start()
        while (reason := await _taken(admin, name)) is not None:
            if time.monotonic() > deadline:
                raise PartUnavailable(f"the consumer group {name} can't be had within {within_s:g} s: {reason}")
            await asyncio.sleep(ASK_AGAIN_S)
    finally:
        await admin.close()


async def _taken(admin: AIOKafkaAdminClient, name: str) -> str | None:
    """Return why the group's positions can't be set now; None: they can."""
    try:
        [response] = await admin.describe_consumer_groups([name])
    except KafkaError as error:
        # A new broker has no coordinator at first.
        return describe(error)
    [(code, _name, _state, _type, _protocol, members, *_)] = response.groups
    if code and for_code(code) is not GroupIdNotFound:
        return str(for_code(code).__name__)
    return f"it has {len(members)} members already; stop the other process" if members else None


@asynccontextmanager
async def _started(consumer: AIOKafkaConsumer) -> AsyncIterator[AIOKafkaConsumer]:
    try:
        with kafka_errors("ask for positions"):
            await consumer.start()
        yield consumer
    finally:
        await consumer.stop()
