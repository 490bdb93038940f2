"""A broker or a database of our own that was killed comes back where it was, with what it held."""

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import psycopg
import pytest

from clawstream.config import KafkaSettings
from clawstream.errors import PartUnavailable
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.local.servers.postgres import EmbeddedPostgres
from clawstream.local.servers.server_process import ServerProcess
from clawstream.local.supervisor import Patience, keep
from clawstream.stream.kafka import admin

SOON = Patience(first_wait_s=0.01, longest_wait_s=0.05)


def kill(server: EmbeddedKafka | EmbeddedPostgres) -> None:
    server_process = server._server_process
    assert isinstance(server_process, ServerProcess)
    (process,) = psutil.Process(server_process.watcher_pid).children()
    process.send_signal(signal.SIGKILL)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not holds():
            await asyncio.sleep(0.05)


def rows(url: str) -> object:
    with psycopg.connect(url.replace("+psycopg", ""), connect_timeout=5) as connection:
        return connection.execute("SELECT count(*) FROM kept").fetchone()


def is_said(said: list[str], words: str, times: int) -> bool:
    return said.count(words) == times


async def test_a_database_that_was_killed_is_back_at_its_address_with_its_rows(tmp_path: Path) -> None:
    said: list[str] = []
    with EmbeddedPostgres(tmp_path / "postgres", fresh=True) as server:
        url = server.url
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("CREATE TABLE kept ()")
        keeping = asyncio.create_task(keep(server, say=said.append, patience=SOON))
        for times in (1, 2):
            kill(server)
            await until(partial(is_said, said, "Postgres runs again", times))
            assert (server.url, rows(url)) == (url, (0,))
        keeping.cancel()
    assert f"Postgres ended with 137: starting it again on its data (its log: {server.log})" in said


@pytest.mark.slow
async def test_a_broker_that_was_killed_is_back_at_its_address(tmp_path: Path) -> None:
    said: list[str] = []
    with EmbeddedKafka(tmp_path / "kafka", fresh=True) as server:
        bootstrap = server.bootstrap
        keeping = asyncio.create_task(keep(server, say=said.append, patience=SOON))
        kill(server)
        await until(lambda: "Kafka runs again" in said)
        settings = KafkaSettings(**server.access)
        assert settings.bootstrap == bootstrap
        await admin.apply(bootstrap, security=settings)
        keeping.cancel()


class Hindered:
    """A server that ended, and can't be started as often as it is said."""

    def __init__(self, hindrances: list[Exception]) -> None:
        self.log, self._hindrances, self.runs = Path("its.log"), hindrances, False

    def exit_status(self) -> int | None:
        return None if self.runs else 1

    def restart(self) -> None:
        if self._hindrances:
            raise self._hindrances.pop(0)
        self.runs = True


async def test_one_that_cannot_be_started_yet_is_tried_until_it_can_and_says_each_reason_once() -> None:
    said: list[str] = []
    full, away = OSError(28, "No space left on device"), PartUnavailable("the port can't be had")
    server = Hindered([full, full, full, away])
    keeping = asyncio.create_task(keep(server, say=said.append, patience=SOON))
    await until(lambda: "Hindered runs again" in said)
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    assert [line for line in said if "can't be started yet" in line] == [
        f"Hindered can't be started yet, and is tried again: {why}" for why in (full, away)
    ]


class Slow(Hindered):
    """A server whose start takes until it is let go on."""

    def __init__(self) -> None:
        super().__init__([])
        self.starts, self.goes_on = threading.Event(), threading.Event()

    def restart(self) -> None:
        self.starts.set()
        assert self.goes_on.wait(30)
        super().restart()


async def test_a_start_that_is_under_way_ends_before_the_keeping_does() -> None:
    server = Slow()
    keeping = asyncio.create_task(keep(server, say=lambda _: None, patience=SOON))
    await until(server.starts.is_set)
    keeping.cancel()
    done, _ = await asyncio.wait([keeping], timeout=0.1)
    assert not done
    server.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert server.runs
