"""A stage that sets too many records aside ends in a way that a supervisor tells from all others."""

import asyncio
import sys
from pathlib import Path

import pytest

from clawstream.config import KafkaSettings, Settings, dump
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.topics import EXCHANGES
from tests.parts.stream.raw import append_bytes

pytestmark = pytest.mark.slow


async def test_a_flood_of_bad_records_ends_the_command_with_a_status_of_its_own_and_says_what_to_do(
    kafka_bootstrap: str, topic_prefix: str, tmp_path: Path
) -> None:
    config = tmp_path / "settings.json"
    kafka = KafkaSettings(bootstrap=kafka_bootstrap, prefix=topic_prefix)
    config.write_text(dump(Settings(environment=False, data_dir=tmp_path, kafka=kafka)))
    await admin.apply(kafka_bootstrap, topic_prefix)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix, client_id="feed") as log:
        for number in range(12):
            await append_bytes(log, EXCHANGES, f"s{number}".encode(), b"nonsense", [])

    argv = [sys.executable, "-m", "clawstream", "--config", str(config), "turns"]
    stage = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        _, words = await stage.communicate()

    assert stage.returncode == 3
    assert "turns set 1" in words.decode()
    assert "clawstream dlq list --stage turns" in words.decode()
