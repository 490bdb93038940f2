"""The real servers that tests run against: configured ones, else containers, else our own.

No test is skipped for want of a server: where there is none of the three, the whole run ends with one message.
"""

import gc
import os
import socket
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from sqlalchemy.engine import make_url

from clawstream.errors import PartUnavailable
from clawstream.local.servers.kafka import EmbeddedKafka, listeners, server_properties
from clawstream.local.servers.postgres import EmbeddedPostgres
from clawstream.local.servers.server_process import reserved

KAFKA_IMAGE = "apache/kafka:4.1.0"
POSTGRES_IMAGE = "postgres:17"
READY_WITHIN_S = 90.0
CONFIGURED_WITHIN_S = 15.0
ENGINE_WITHIN_S = 20  # podman looks its own packages up before it tells its version


@contextmanager
def kafka(folder: Path) -> Iterator[str]:
    """Yield host:port of a broker."""
    configured = os.environ.get("CLAWSTREAM_KAFKA")
    if configured:
        _wait_for_broker(configured, within_s=CONFIGURED_WITHIN_S, of="CLAWSTREAM_KAFKA")
        yield configured
    elif docker_answers():
        with _kafka_container() as bootstrap:
            yield bootstrap
    else:
        with ended_without("Kafka"), EmbeddedKafka(folder, open_to_all=True) as broker:
            yield broker.bootstrap


async def delete_topics(bootstrap: str, prefix: str) -> None:
    """Have no topic left whose name begins with the prefix."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        names = [name for name in await admin.list_topics() if name.startswith(prefix)]
        if names:
            await admin.delete_topics(names)
    finally:
        await admin.close()


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Yield the SQLAlchemy URL of a database whose user may create others."""
    configured = os.environ.get("CLAWSTREAM_POSTGRES")
    if configured:
        yield configured
    elif docker_answers():
        from testcontainers.community.postgres import PostgresContainer

        with PostgresContainer(POSTGRES_IMAGE, driver="psycopg") as container:
            yield container.get_connection_url()
    else:
        with ended_without("Postgres"), EmbeddedPostgres(folder) as server:
            yield server.url


@contextmanager
def database(url: str, name: str) -> Iterator[str]:
    """Yield the URL of a database `name` that is there for the length of the block."""
    address = make_url(url)
    dsn = address.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    try:
        yield address.set(database=name).render_as_string(hide_password=False)
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            # Not with FORCE: where this account is no superuser, that is refused while autovacuum is at work there.
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = %s AND pg_has_role(usesysid, 'USAGE')",
                (name,),
            )
            connection.execute(f'DROP DATABASE "{name}"')


@contextmanager
def ended_without(what: str) -> Iterator[None]:
    """End the whole run, with the remedies, where `what` can't be had."""
    try:
        yield
    except PartUnavailable as error:
        pytest.exit(f"the tests need a real {what}, and there is none. {error}", returncode=2)


def docker_answers() -> bool:
    """Whether a Docker engine tells its version; a matter of milliseconds where there is none."""
    import docker  # type: ignore[import-untyped]  # has no types, and is asked for two calls

    with warnings.catch_warnings():
        # Where no engine is, docker leaves its sockets to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            client = docker.from_env(timeout=ENGINE_WITHIN_S)
        except docker.errors.DockerException:
            client = None
        gc.collect()
    if client is None:
        return False
    client.close()
    return True


@contextmanager
def _kafka_container() -> Iterator[str]:
    """A broker with the embedded one's settings, which the image reads from KAFKA_* variables."""
    from testcontainers.core.container import DockerContainer

    with reserved() as port:
        pass
    container = DockerContainer(KAFKA_IMAGE).with_bind_ports(9092, port)
    host = container.get_docker_client().host()
    settings = dict(
        line.split("=", 1)
        for line in server_properties("/tmp/kafka-logs", listeners(9092, 9093, None)).splitlines()
        if line and not line.startswith("#")
    )
    settings |= {
        "listeners": "PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093",
        "advertised.listeners": f"PLAINTEXT://{host}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }
    for name, value in settings.items():
        container = container.with_env(f"KAFKA_{name.upper().replace('.', '_')}", value)
    with container:
        _wait_for_broker(f"{host}:{port}", within_s=READY_WITHIN_S, of=f"container {KAFKA_IMAGE}")
        yield f"{host}:{port}"


def _wait_for_broker(bootstrap: str, *, within_s: float, of: str) -> None:
    deadline = time.monotonic() + within_s
    while not any(map(answers, bootstrap.split(","))):
        if time.monotonic() > deadline:
            pytest.exit(
                f"{of}: no Kafka broker answers at {bootstrap} (plaintext) within {within_s:g} s. "
                "Start it, or unset the variable",
                returncode=2,
            )
        time.sleep(0.1)


_CORRELATION = 0x636C6177  # comes back in the reply; a server other than a broker does not send it


def answers(bootstrap: str, *, timeout_s: float = 2.0) -> bool:
    """Whether the broker at host:port answers a metadata request with at least one broker that takes requests."""
    host, _, port = bootstrap.rpartition(":")
    request = struct.pack(">hhihi", 3, 0, _CORRELATION, -1, 0)  # Metadata, version 0, no client id, all topics
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            reply = connection.makefile("rb").read(12)
    except OSError:
        return False
    if len(reply) < 12:
        return False
    _size, correlation, num_brokers = struct.unpack(">iii", reply)
    return bool(correlation == _CORRELATION and num_brokers >= 1)
