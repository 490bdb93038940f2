"""The faust application that reads the log and gives the monitor each record.

faust loses a record whose handler raises, and may commit past a record that is still being handled. So the handler here
is fast, takes one record at a time and in order, and raises for no record, whatever its bytes are; and the log can be
read again at any time. The application has no tables, no replies and no leader topic, so it creates and writes none.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import faust

from clawstream.config import KafkaSettings
from clawstream.stream.avro import codec
from clawstream.stream.kafka.client import Broker
from clawstream.stream.log import Arrived, Raw, arrived

SESSION_TIMEOUT_S = 10.0  # after this time the group drops a killed monitor, and the next one may begin
BUFFERED_RECORDS = 256


class Message(Protocol):
    """The fields of a faust message that are used here."""

    topic: str
    partition: int
    offset: int
    timestamp: float
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]


@asynccontextmanager
async def hosted(
    broker: Broker,
    topics: Sequence[str],
    receive: Callable[[Arrived], None],
    *,
    group: str,
    prefix: str,
    folder: Path,
) -> AsyncIterator[asyncio.Task[None]]:
    """Until the block ends, give `receive` each record of `topics`, from where the group begins.

    `folder` has to exist; faust needs one, though without tables it keeps nothing in it.
    Yields a task that ends only if the application does, and then raises the reason.
    """
    app = faust.App(
        prefix + group,
        broker=[f"kafka://{address}" for address in broker.bootstrap.split(",")],
        broker_credentials=_credentials(broker.security),
        broker_session_timeout=SESSION_TIMEOUT_S,
        broker_heartbeat_interval=SESSION_TIMEOUT_S / 4,
        consumer_auto_offset_reset="latest",
        datadir=folder,
        stream_buffer_maxsize=BUFFERED_RECORDS,
        stream_wait_empty=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        producer_threaded=False,
        web_enabled=False,
    )
    # Bytes are not decoded by faust: it drops what it can't decode, but such records are to be counted.
    source = app.topic(
        *(prefix + topic for topic in topics),
        key_type=bytes,
        key_serializer="raw",
        value_type=bytes,
        value_serializer="raw",
    )

    async def fold(stream: Any) -> None:
        async for event in stream.events():
            receive(arrived(raw(event.message, prefix), codec()))

    app.agent(source, name="windows", concurrency=1)(fold)
    await app.start()
    ended = asyncio.create_task(_ended(app))
    try:
        yield ended
    finally:
        ended.cancel()
        await app.stop()


def raw(message: Message, prefix: str) -> Raw:
    """Return faust's message as a record of the log."""
    return Raw(
        topic=message.topic.removeprefix(prefix),
        partition=message.partition,
        offset=message.offset,
        timestamp_ms=round(message.timestamp * 1000),
        key=message.key,
        value=message.value,
        headers=tuple(message.headers or ()),
    )


async def _ended(app: Any) -> None:
    await app.wait_until_stopped()
    raise RuntimeError(f"faust's application ended by itself: {app.crash_reason!r}") from app.crash_reason


def _credentials(security: KafkaSettings | None) -> Any:
    if security is None or security.security_protocol == "PLAINTEXT":
        return None
    encrypted = security.security_protocol.endswith("SSL")
    cafile = None if security.ca_file is None else str(security.ca_file)
    context = ssl.create_default_context(cafile=cafile) if encrypted else None
    if security.sasl_mechanism is None:
        return faust.SSLCredentials(context)
    return faust.SASLCredentials(
        username=security.sasl_username,
        password=security.password,
        ssl_context=context,
        mechanism=security.sasl_mechanism,
    )
