"""A database with the tables in it, shared by the tests of this folder, and emptied for each that writes."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import Engine

from clawstream.projections import database
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests import servers
from tests.parts.projections import reading
from tests.unit.projections import logs


@pytest.fixture(scope="session")
def migrated_url(postgres_url: str) -> Iterator[str]:
    """SQLAlchemy URL of a database with the tables."""
    with servers.database(postgres_url, f"test_{uuid.uuid4().hex[:12]}") as url:
        database.upgrade(url)
        yield url


@pytest.fixture(scope="session")
def migrated(migrated_url: str) -> Iterator[Engine]:
    """The database with the tables; whoever writes empties it first."""
    engine = database.connect(migrated_url)
    yield engine
    engine.dispose()


@pytest.fixture
def emptied(migrated: Engine) -> Engine:
    """The database with the tables, empty."""
    reading.empty(migrated)
    return migrated


@pytest.fixture
def live(fresh_database_url: str) -> Iterator[Engine]:
    """A database of the test's own, with the tables."""
    database.upgrade(fresh_database_url)
    engine = database.connect(fresh_database_url)
    yield engine
    engine.dispose()


@pytest.fixture
async def log(kafka_bootstrap: str, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    """A log of its own, with three partitions where there are many."""
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=logs.NUM_PARTITIONS)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as connected:
        yield connected
