"""A terminal of 80 columns shows the tables of commands with no word split: an id is pasted as it stands."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.cli.learning.progress import show, tables
from clawstream.events import Event
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.unit.monitoring.said import activated, plan, published, rejected, sample, verdict
from tests.unit.simulation.learn.outcomes import REFERENCE, failed, row

SESSION, TURN = "agent:main:subagent:0d7d5c2e-8e05-4a57-b1d0-5f0f14a1c2aa", "7c9d2b4a-61f3-4d0e-9a55-1d2f3b4c5e6f"
WHY = "the KL to the reference is 0.42 nats a token, and training.max_kl_nats allows 0.1"

pytestmark = pytest.mark.usefixtures("narrow_terminal")


def words(text: str) -> list[str]:
    return re.sub(r"[┃│]", " ", text).split()


async def said(tmp_path: Path, bootstrap: str, prefix: str, events: Sequence[Event], *command: str) -> list[str]:
    await admin.apply(bootstrap, prefix)
    async with KafkaLog.connect(bootstrap, prefix=prefix) as log:
        await log.append(events)
    path = tmp_path / "clawstream.toml"
    path.write_text(f'data_dir = "{tmp_path}"\n[kafka]\nbootstrap = "{bootstrap}"\nprefix = "{prefix}"\n')
    result = await asyncio.to_thread(CliRunner().invoke, app, ["-c", str(path), *command], catch_exceptions=False)
    return words(result.stdout)


async def test_status_shows_the_ids_of_sessions_and_turns_whole(
    tmp_path: Path, kafka_bootstrap: str, topic_prefix: str
) -> None:
    shown = await said(tmp_path, kafka_bootstrap, topic_prefix, [verdict(TURN, 1, session_id=SESSION)], "status")
    assert {SESSION, TURN, "decided", "session", "turn", "status"} <= set(shown)


async def test_policy_list_splits_no_header_and_no_reason(
    tmp_path: Path, kafka_bootstrap: str, topic_prefix: str
) -> None:
    events = [published(0), activated(0), plan(1, (sample(TURN),), {}), rejected(1, WHY)]
    shown = await said(tmp_path, kafka_bootstrap, topic_prefix, events, "policy", "list")
    assert {"version", "from", "standing", "samples", "mean", "reward", "when", "why"} <= set(shown)
    assert {"active", "rejected", "training.max_kl_nats"} <= set(shown)


def test_learn_splits_no_header_and_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0.32, 0.5, method="binary"), failed("binary", seed=2), row(0.5, 0.6), row(0.5, 0.8, seed=1)]
    show(tables(rows, REFERENCE))
    shown = words(capsys.readouterr().out)
    assert {"seeds", "after", "policy", "combined", "failed)", "0.70", "(0.16-0.24)", "difference"} <= set(shown)
