"""How every process opens the log that the settings name, after a check of its topics."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from clawstream.config import KafkaSettings
from clawstream.errors import PartUnavailable, TryLater
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.runner.calling import wait_at_most

LOG = logging.getLogger(__name__)
LOOK_AGAIN_S = 5.0


@asynccontextmanager
async def connected(
    settings: KafkaSettings, *, client_id: str, partitions: int | None = None
) -> AsyncIterator[KafkaLog]:
    """Yield the log; raises PartUnavailable without a broker, TopicMismatch for topics that differ from their files.

    `partitions` replaces the files' count in small installations; it has to be the number that `admin.apply` had.
    """
    await admin.verify(settings.address, settings.prefix, security=settings, partitions=partitions)
    async with KafkaLog.connect(
        settings.address, prefix=settings.prefix, client_id=client_id, security=settings
    ) as log:
        await log.publish_schemas()
        yield log


@asynccontextmanager
async def connected_once_there(
    settings: KafkaSettings, *, client_id: str, stop: asyncio.Event
) -> AsyncIterator[KafkaLog | None]:
    """Do as `connected` does, but wait while the broker is away, and log that. Yields None if `stop` is set first."""
    async with AsyncExitStack() as stack:
        log: KafkaLog | None = None
        while log is None and not stop.is_set():
            try:
                log = await stack.enter_async_context(connected(settings, client_id=client_id))
            except (PartUnavailable, TryLater) as error:
                LOG.warning("kafka=away state=waiting again_in_s=%g reason=%s", LOOK_AGAIN_S, error)
                await wait_at_most(stop, LOOK_AGAIN_S)
        yield log
