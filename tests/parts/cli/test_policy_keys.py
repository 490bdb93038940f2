"""`clawstream policy keys` and `policy merge`, and what is refused where there are adapters beside the shared one."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.errors import ConfigError, OperatorError
from clawstream.events import HintHeld, hint_id_of, policy_of_key
from clawstream.stream import topics
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import policy_events
from tests.parts.projections.one_memory import held, step
from tests.unit.monitoring.said import activated, plan, published, sample

S = [sample(str(number)) for number in range(3)]
BOB = "acme+bob"  # the agent bob under the API key acme


def said_to(key: str, turn: str, hint: str) -> HintHeld:
    policy_id, key_name = policy_of_key("policy", key), key.rpartition("+")[0] or None
    return replace(held(turn, hint, key_name), policy_id=policy_id, hint_id=hint_id_of(policy_id, key_name, hint))


@pytest.fixture
async def config(tmp_path: Path, kafka_bootstrap: str, topic_prefix: str) -> Path:
    """Settings of an installation with two agents: both were told to be brief, one of them something else too."""
    await admin.apply(kafka_bootstrap, topic_prefix)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        await log.append([published(0, "/base"), activated(0)])
        for key in ("ann", BOB):
            own = policy_of_key("policy", key)
            told = [published(0, "/base"), plan(1, (S[0],), {}), step(1), published(1, "/v1"), activated(1)]
            await log.append([replace(one, policy_id=own) for one in told])
            await log.append([said_to(key, f"{key[-3:]} 0", "Be brief" if key == "ann" else "be  brief")])
        await log.append([said_to(BOB, "bob 1", "my boss is called Karl")])
    path = tmp_path / "clawstream.toml"
    path.write_text(
        f'data_dir = "{tmp_path}"\n[policy]\nadapters = "metadata.agent"\n[kafka]\nbootstrap = "{kafka_bootstrap}"\n'
        f'prefix = "{topic_prefix}"\n'
    )
    return path


def said(config: Path, *argv: str) -> Any:
    result = CliRunner().invoke(app, ["-c", str(config), *argv, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_each_key_has_a_row_and_versions_and_hints_of_its_own(config: Path) -> None:
    rows = said(config, "policy", "keys")
    assert [(row["key"], row["began_with"], row["newest"], row["served"], row["updates"]) for row in rows] == [
        (BOB, 0, 1, 1, 1),
        ("ann", 0, 1, 1, 1),
    ]
    assert [row["version"] for row in said(config, "policy", "list", "--key", "ann")] == [0, 1]
    assert [row["version"] for row in said(config, "policy", "list")] == [0]
    assert {row["hint"] for row in said(config, "hints", "list", "--key", BOB)} == {
        "be  brief",
        "my boss is called Karl",
    }
    assert said(config, "hints", "list") == []
    table = CliRunner().invoke(app, ["-c", str(config), "policy", "keys"], catch_exceptions=False).stdout
    assert all(word in table for word in ("ann", BOB, "newest version"))


async def test_what_most_keys_were_taught_is_held_by_the_shared_policy_and_what_one_was_is_not(
    config: Path, kafka_bootstrap: str, topic_prefix: str
) -> None:
    [one] = await asyncio.to_thread(said, config, "policy", "merge")
    assert one["hint_id"] == hint_id_of("policy", None, "be brief")
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        events = [event for event in await policy_events(log, topics.MEMORY, "policy") if isinstance(event, HintHeld)]
    assert {(event.merged, event.key_name, event.policy_version) for event in events} == {(True, None, 0)}
    assert {event.turn_id for event in events} == {"ann 0", "bob 0"}


def test_nothing_is_merged_that_too_few_keys_hold_nor_where_hints_are_not_held(config: Path) -> None:
    with pytest.raises(OperatorError, match=r"no hint is held in 3 of 2 adapters"):
        said(config, "policy", "merge", "--at-least", "3")
    one = CliRunner().invoke(app, ["-c", str(config), "policy", "merge", "--at-least", "1"])
    assert one.exit_code == 2, "what one person said is not for all"
    config.write_text(config.read_text() + '[training]\nmethod = "binary"\n')
    with pytest.raises(ConfigError, match="hints are not held"):
        said(config, "policy", "merge")


def test_where_no_key_has_an_adapter_a_merge_says_so(config: Path) -> None:
    config.write_text(config.read_text().replace("[policy]", '[policy]\nid = "another"'))
    with pytest.raises(OperatorError, match="no key has an adapter"):
        said(config, "policy", "merge")


@pytest.mark.parametrize("adapters", ["by_key", "metadata.agent"])
def test_a_replay_is_not_promoted_where_there_are_adapters_beside_the_shared_one(config: Path, adapters: str) -> None:
    config.write_text(config.read_text().replace("metadata.agent", adapters))
    with pytest.raises(ConfigError, match=f"policy.adapters is '{adapters}'.*Nothing was promoted"):
        CliRunner().invoke(app, ["-c", str(config), "replay", "promote", "again"], catch_exceptions=False)
