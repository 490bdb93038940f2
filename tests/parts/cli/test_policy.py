"""`clawstream policy` from outside, on a real broker."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.errors import OperatorError
from clawstream.events import RollbackAsked
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record
from clawstream.stream.topics import CONTROL
from tests.unit.monitoring.said import activated, plan, published, rejected, sample

S = [sample(str(number)) for number in range(3)]


@pytest.fixture
async def config(tmp_path: Path, kafka_bootstrap: str, topic_prefix: str) -> Path:
    """Settings of an installation whose policy is at version 3; its second step was rejected."""
    await admin.apply(kafka_bootstrap, topic_prefix)
    for folder in ("v0", "v3"):
        (tmp_path / folder).mkdir()
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        await log.append([published(0, str(tmp_path / "v0")), activated(0)])
        await log.append([plan(1, (S[0],), {}), published(1, str(tmp_path / "pruned")), activated(1)])
        await log.append([plan(2, (S[1],), {}), rejected(2, "it looped")])
        await log.append([plan(3, (S[2],), {}), published(3, str(tmp_path / "v3"))])
    path = tmp_path / "clawstream.toml"
    path.write_text(f'data_dir = "{tmp_path}"\n[kafka]\nbootstrap = "{kafka_bootstrap}"\nprefix = "{topic_prefix}"\n')
    return path


async def asked(bootstrap: str, prefix: str) -> list[RollbackAsked]:
    async with KafkaLog.connect(bootstrap, prefix=prefix) as log:
        return [
            record.event
            async for records in log.follow([CONTROL], "earliest", until_end=True)
            for record in records
            if isinstance(record, Record) and isinstance(record.event, RollbackAsked)
        ]


def said(config: Path, *argv: str) -> Any:
    result = CliRunner().invoke(app, ["-c", str(config), "policy", *argv, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_a_person_sees_what_became_of_every_version_and_why(config: Path) -> None:
    rows = {row["version"]: row for row in said(config, "list")}
    assert {number: row["standing"] for number, row in rows.items()} == {
        0: "published", 1: "active", 2: "rejected", 3: "published",
    }  # fmt: skip
    assert rows[2]["why"] == "it looped"
    shown = said(config, "show", "1")
    assert (shown["engines"], shown["made_of"], shown["sample_ids"]) == (["http://engine"], [0], [S[0].sample_id])
    text = CliRunner().invoke(app, ["-c", str(config), "policy", "list"], catch_exceptions=False).stdout
    assert "it looped" in text


async def test_a_rollback_is_on_the_log_with_a_number_of_its_own(
    config: Path, kafka_bootstrap: str, topic_prefix: str
) -> None:
    for number in (1, 2):
        assert (await asyncio.to_thread(said, config, "rollback", "0"))["number"] == number
    found = await asked(kafka_bootstrap, topic_prefix)
    assert [(event.number, event.to_version) for event in found] == [(1, 0), (2, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("9", "there is no version 9"),
        ("2", "rejected: it looped"),
        ("1", "not on disk any more"),
        ("3", "is the newest"),
    ],
)
def test_what_can_not_be_gone_back_to_is_refused_in_words(config: Path, version: str, words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        said(config, "rollback", version)


def test_of_a_version_that_lies_on_the_trainer_s_machine_the_trainer_is_asked(config: Path) -> None:
    config.write_text(config.read_text() + '[weights]\nurl = "http://trainer:9000"\n')
    assert said(config, "rollback", "1")["to_version"] == 1
    with pytest.raises(OperatorError, match="rejected: it looped"):
        said(config, "rollback", "2")


def test_how_far_a_rollback_reaches_is_said_in_the_list_and_where_one_is_refused(config: Path) -> None:
    reached = {row["version"]: row["reached"] for row in said(config, "list")}
    assert reached == {0: True, 1: False, 2: False, 3: True}
    text = CliRunner().invoke(app, ["-c", str(config), "policy", "list"], catch_exceptions=False).stdout
    assert "A rollback reaches the newest 5 versions (training.keep_checkpoints), the base and what is pinned" in text
    with pytest.raises(OperatorError, match=r"pinned in time .* which are: 0, 3\."):
        said(config, "rollback", "1")


@pytest.mark.slow
def test_a_version_is_pinned_until_it_is_unpinned_and_one_that_is_gone_can_not_be(config: Path) -> None:
    for number, (command, kept) in enumerate((("pin", True), ("unpin", False), ("pin", True)), 1):
        event = said(config, command, "3")
        assert (event["number"], event["policy_version"], event["pinned"]) == (number, 3, kept)
        assert [row["version"] for row in said(config, "list") if row["pinned"]] == ([3] if kept else [])
    with pytest.raises(OperatorError, match="not on disk any more"):
        said(config, "pin", "1")
    with pytest.raises(OperatorError, match="there is no version 9"):
        said(config, "unpin", "9")
