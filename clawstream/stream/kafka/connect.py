"""The log that the settings name, with topics as they should be: how every process opens it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from clawstream.config import KafkaSettings
from clawstream.errors import ConfigError, PartUnavailable, TryLater
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.client import KafkaSecurity
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.runner.calling import wait_at_most

LOG = logging.getLogger(__name__)
LOOK_AGAIN_S = 5.0


@asynccontextmanager
async def connected(
    settings: KafkaSettings, *, client_id: str, partitions: int | None = None
) -> AsyncIterator[KafkaLog]:
    """Yield the log; raises PartUnavailable without a broker, TopicMismatch for topics that differ from their files.

    `partitions` replaces the files' count in small installations; it is the number that `admin.apply` was given.
    """
    if settings.bootstrap is None:
        raise ConfigError("kafka.bootstrap is not set: name a broker, or run `clawstream up`, which starts one")
    security = security_of(settings)
    await admin.verify(settings.bootstrap, settings.prefix, security=security, partitions=partitions)
    async with KafkaLog.connect(
        settings.bootstrap, prefix=settings.prefix, client_id=client_id, security=security
    ) as log:
        await log.publish_schemas()
        yield log


@asynccontextmanager
async def connected_once_there(
    settings: KafkaSettings, *, client_id: str, stop: asyncio.Event
) -> AsyncIterator[KafkaLog | None]:
    """Do as `connected` does, but wait for a broker that is away and log that; None: `stop` was set first."""
    async with AsyncExitStack() as stack:
        log: KafkaLog | None = None
        while log is None and not stop.is_set():
            try:
                log = await stack.enter_async_context(connected(settings, client_id=client_id))
            except (PartUnavailable, TryLater) as error:
                LOG.warning("kafka=away state=waiting again_in_s=%g reason=%s", LOOK_AGAIN_S, error)
                await wait_at_most(stop, LOOK_AGAIN_S)
        yield log


def security_of(settings: KafkaSettings) -> KafkaSecurity:
    """Return how to log in, as the settings say."""
    password = settings.sasl_password
    return KafkaSecurity(
        protocol=settings.security_protocol,
        sasl_mechanism=settings.sasl_mechanism,
        sasl_username=settings.sasl_username,
        sasl_password=None if password is None else password.get_secret_value(),
        ca_file=settings.ca_file,
    )
