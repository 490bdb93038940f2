"""Bytes onto a log, as somebody else's producer would put them there."""

from collections.abc import Sequence

from clawstream.stream.kafka.appending import EncodedRecord
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.fakes.memory_log import MemoryLog


async def append_bytes(
    log: KafkaLog | MemoryLog,
    topic: str,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
) -> None:
    if isinstance(log, MemoryLog):
        log.broker.write(topic, key, value, headers)
    else:
        await log._appender.append([EncodedRecord(topic, key, value, headers, "noise")])
