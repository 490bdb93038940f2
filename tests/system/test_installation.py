"""The whole installation with every real part: processes, Kafka, Postgres, CPU engine, judge over HTTP, one update.

The policy has random weights: what it says is noise, what happens to it is not.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import count

import aiohttp
import openai
import pytest

from clawstream.config import Settings, load
from clawstream.events import PolicyActivated
from clawstream.local.installation import Installation, installation
from clawstream.local.servers.server_process import reserved
from clawstream.local.supervisor import Part
from clawstream.projections.look.sql import rows_of
from clawstream.stream.kafka.connect import connected
from clawstream.stream.stage import Record
from clawstream.stream.topics import POLICY
from tests.parts.engine.tiny_model import make_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, kafka_bootstrap: str, postgres_url: str
) -> AsyncIterator[Installation]:
    folder = tmp_path_factory.mktemp("installation")
    model = make_model(folder / "model")
    with reserved() as judge_port:
        config = folder / "clawstream.toml"
        config.write_text(
            f"""
            data_dir = "{folder}"
            [kafka]
            bootstrap = "{kafka_bootstrap}"
            prefix = "{folder.name}."
            [postgres]
            url = "{_database(postgres_url, folder.name)}"
            [engine]
            port = 0
            [gateway]
            port = 0
            default_max_tokens = 24
            [policy]
            renderer = "qwen3"
            enable_thinking = false
            [judge]
            url = "http://127.0.0.1:{judge_port}/v1"
            model = "judge"
            [training]
            batch_samples = 1
            learning_rate = 1e-3
            [monitor]
            port = 0
            """
        )
        judge = Part(
            name="judge",
            command=(
                sys.executable,
                "-m",
                "clawstream.simulation.judge",
                "--port",
                str(judge_port),
                "--wrong-share",
                "0",
            ),
        )
        async with installation(load(config), model_path=model, say=lambda _: None, extra_parts=[judge]) as found:
            yield found


def _database(url: str, name: str) -> str:
    """Make a database of this module's own."""
    import psycopg

    plain = url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{url.rpartition('/')[0]}/{name}"


async def _say(running: Installation, session: str, messages: list[dict[str, str]], *, done: bool = False) -> str:
    headers = {"X-Session-Id": session} | ({"X-Session-Done": "1"} if done else {})
    async with openai.AsyncOpenAI(base_url=f"{running.addresses.gateway}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="policy",
            messages=messages,  # type: ignore[arg-type]
            extra_headers=headers,
            max_tokens=24,
            temperature=1.0,
        )
    return answer.choices[0].message.content or ""


async def _until_activated(settings: Settings, version: int) -> None:
    async with asyncio.timeout(120), connected(settings.kafka, client_id="test") as log:
        async for records in log.follow([POLICY], "earliest"):
            for record in records:
                event = record.event if isinstance(record, Record) else None
                if isinstance(event, PolicyActivated) and event.policy_version >= version:
                    return


async def _complain(running: Installation) -> None:
    """Never stop: a random policy seldom ends its answer, and one that is cut is no sample."""
    for attempt in count():
        question = {"role": "user", "content": f"What is {attempt} + 2?"}
        answer = await _say(running, f"s{attempt}", [question])
        complaint = {"role": "user", "content": "no headings or bold please, just say it plainly"}
        history = [question, {"role": "assistant", "content": answer}, complaint]
        await _say(running, f"s{attempt}", history, done=True)


async def test_a_complaint_becomes_a_new_policy_version_whose_lineage_leads_back_to_the_request(
    running: Installation,
) -> None:
    complaining = asyncio.create_task(_complain(running))
    await _until_activated(running.settings, 1)
    complaining.cancel()

    rows = await _rows(
        running,
        "SELECT DISTINCT policy_version, session_id, exchange_id, request::text AS request FROM lineage "
        "WHERE policy_version = 1 AND exchange_id IS NOT NULL AND vote_id IS NOT NULL",
    )

    assert all("What is" in str(row["request"]) for row in rows)


async def test_the_metrics_and_readiness_of_a_running_gateway_can_be_read(running: Installation) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{running.addresses.gateway}/readyz") as ready:
            assert ready.status == 200
        async with session.get(f"{running.addresses.gateway}/metrics") as metrics:
            assert "clawstream" in await metrics.text()


async def _rows(running: Installation, query: str) -> list[dict[str, object]]:
    """Ask until the projection has caught up."""
    async with asyncio.timeout(60):
        while not (rows := await asyncio.to_thread(rows_of, running.addresses.postgres, query)):
            await asyncio.sleep(0.05)
    return rows
