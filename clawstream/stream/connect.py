"""The log that the settings name, with topics as they should be: how every process opens it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from clawstream.config import KafkaSettings
from clawstream.errors import ConfigError
from clawstream.stream import admin
from clawstream.stream.client import KafkaSecurity
from clawstream.stream.kafka import KafkaLog


@asynccontextmanager
async def connected(
    settings: KafkaSettings, *, client_id: str, partitions: int | None = None
) -> AsyncIterator[KafkaLog]:
    """Yield the log; raises PartUnavailable without a broker, TopicMismatch for topics that are not as they should be.

    `partitions` stands in for the files' count in small installations, as `admin.apply` was given it.
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


def security_of(settings: KafkaSettings) -> KafkaSecurity:
    """Return how to be let in, as the settings say."""
    password = settings.sasl_password
    return KafkaSecurity(
        protocol=settings.security_protocol,
        sasl_mechanism=settings.sasl_mechanism,
        sasl_username=settings.sasl_username,
        sasl_password=None if password is None else password.get_secret_value(),
        ca_file=settings.ca_file,
    )
