"""Broker and database of an installation end, by a kill or a full disk, and every stage goes on where it was.

One installation, on a disk of its own, goes through both.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import openai
import psutil
import psycopg
import pytest

from clawstream.config import load
from clawstream.local.installation import Installation, installation
from tests.parts.engine.tiny_model import make_model

pytestmark = pytest.mark.timeout(400)
ROOT = os.geteuid() == 0
SETTINGS = """
environment = false
data_dir = "{folder}"
[engine]
port = 0
[gateway]
port = 0
default_max_tokens = 8
[policy]
renderer = "qwen3"
enable_thinking = false
[training]
[monitor]
port = 0
"""


async def _say(running: Installation, session: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.addresses.gateway}/v1", api_key="none", max_retries=0) as client:
        await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "What is 1 + 2?"}],
            extra_headers={"X-Session-Id": session},
        )


def _sessions(running: Installation) -> set[str]:
    url = running.addresses.postgres.replace("+psycopg", "")
    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            return {str(session) for (session,) in connection.execute("SELECT session_id FROM exchanges")}
    except psycopg.OperationalError:
        return set()


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(150):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.2)


def _servers(folder: Path) -> list[psutil.Process]:
    """Return the broker and the database whose data is in `folder`, which this process started through watchers."""
    below = psutil.Process().children(recursive=True)
    parents = [process for process in below if any("watcher.py" in word for word in process.cmdline())]
    servers = [server for watcher in parents for server in watcher.children()]
    return [server for server in servers if any(str(folder) in word for word in (server.cwd(), *server.cmdline()))]


class Victim(NamedTuple):
    """An installation, the disk that it is on, and what it says."""

    running: Installation
    disk: Path
    said: list[str]


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of its own that a file can fill; for who may mount none, a folder."""
    folder = tmp_path_factory.mktemp("disk")
    if not ROOT:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "none", str(folder)], check=True, timeout=10)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


@pytest.fixture(scope="module")
async def victim(tmp_path_factory: pytest.TempPathFactory, small_disk: Path) -> AsyncIterator[Victim]:
    folder = tmp_path_factory.mktemp("victim")
    config, said = folder / "clawstream.toml", list[str]()
    config.write_text(SETTINGS.format(folder=small_disk / "data"))
    model = await asyncio.to_thread(make_model, folder / "model")
    async with installation(load(config), model_path=model, say=said.append) as running:
        yield Victim(running, small_disk, said)


@pytest.fixture(autouse=True)
def _nothing_was_said_yet(victim: Victim) -> None:
    victim.said.clear()


@pytest.mark.slow
async def test_what_is_said_before_and_after_both_servers_were_killed_becomes_rows(victim: Victim) -> None:
    running, disk, said = victim
    earlier = _sessions(running)
    await _say(running, "before-a-kill")
    await _until(lambda: _sessions(running) == earlier | {"before-a-kill"})
    killed = _servers(disk)
    assert len(killed) == 2
    for server in killed:
        server.send_signal(signal.SIGKILL)
    await _until(lambda: {"Kafka runs again", "Postgres runs again"} <= set(said))
    await _say(running, "after-a-kill")
    await _until(lambda: _sessions(running) == earlier | {"before-a-kill", "after-a-kill"})
    assert not running.supervisor.failed.is_set()
    assert {child.failure for child in running.supervisor.children.values()} == {None}


def _fill(folder: Path) -> Path:
    """Let the disk have no byte left but what a file holds; return it.

    The file has no buffer: one would hold what did not fit, and fail a second time when it is closed.
    """
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))
    return filler


@pytest.mark.slow
@pytest.mark.skipif(not ROOT, reason="only root mounts a disk")
async def test_a_full_disk_ends_nothing_for_good_and_all_goes_on_when_there_is_room(victim: Victim) -> None:
    running, disk, said = victim
    earlier = _sessions(running)
    await _say(running, "before")
    await _until(lambda: _sessions(running) == earlier | {"before"})
    filler = await asyncio.to_thread(_fill, disk)
    async with asyncio.timeout(100):
        while not any(" ended with " in words for words in said):
            with suppress(openai.OpenAIError):
                await _say(running, "meanwhile")
    assert not running.supervisor.failed.is_set()
    filler.unlink()
    ended = {words.partition(" ")[0] for words in said if " ended with " in words}
    await _until(lambda: {f"{name} runs again" for name in ended} <= set(said))
    await _until_said(running, "after")
    await _until(lambda: {"before", "after"} <= _sessions(running))
    assert not running.supervisor.failed.is_set()


async def _until_said(running: Installation, session: str) -> None:
    async with asyncio.timeout(100):
        while True:
            with suppress(openai.OpenAIError):
                await _say(running, session)
                return
            await asyncio.sleep(0.5)
