"""The broker and the database for a command that only looks: the configured one, the running one, or one's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawstream.config import KafkaSettings, Settings
from clawstream.errors import PartUnavailable


@contextmanager
def database(settings: Settings) -> Iterator[str]:
    """Yield the database's URL; an installation that is stopped has its own Postgres started for so long."""
    if settings.postgres.url is not None:
        yield settings.postgres.url.get_secret_value()
        return
    from clawstream.local.servers.folders import address_in
    from clawstream.local.servers.postgres import EmbeddedPostgres

    folder = settings.data_dir / "postgres"
    _existing(folder, "database", "CLAWSTREAM_POSTGRES")
    running = address_in(folder)
    if running is not None:
        yield running
        return
    with EmbeddedPostgres(folder) as postgres:
        yield postgres.url


def database_address(settings: Settings) -> str:
    """Return the URL of the database, configured or running; raises PartUnavailable where neither is."""
    if settings.postgres.url is not None:
        return settings.postgres.url.get_secret_value()
    from clawstream.local.servers.folders import address_in

    folder = settings.data_dir / "postgres"
    _existing(folder, "database", "CLAWSTREAM_POSTGRES")
    running = address_in(folder)
    if running is None:
        raise PartUnavailable(
            f"the database in {folder} does not run, so it has no address. Start `clawstream up`: its address "
            "is the one that it had last, as long as nobody else took the port"
        )
    return running


@contextmanager
def broker(settings: Settings) -> Iterator[KafkaSettings]:
    """Yield where the broker is; an installation that is stopped has its own Kafka started for so long."""
    if settings.kafka.bootstrap is not None:
        yield settings.kafka
        return
    from clawstream.local.servers.access import access_to
    from clawstream.local.servers.folders import address_in
    from clawstream.local.servers.kafka import EmbeddedKafka

    folder = settings.data_dir / "kafka"
    _existing(folder, "log", "CLAWSTREAM_KAFKA")
    running = address_in(folder)
    if running is not None:
        yield settings.kafka.model_copy(update=access_to(folder, running))
        return
    with EmbeddedKafka(folder, cache_dir=settings.cache_dir) as kafka:
        yield settings.kafka.model_copy(update=kafka.access)


def _existing(folder: Path, what: str, variable: str) -> None:
    if not folder.exists():
        raise PartUnavailable(
            f"there is no {what} in {folder}: nothing was ever run there. Start `clawstream up`, name the "
            f"settings file of the run you mean with --config, or set {variable} to a server's address"
        )
