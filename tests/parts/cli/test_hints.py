"""`clawstream hints` from outside, on a real broker."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.errors import OperatorError
from clawstream.events import Event, Rehearsed, hint_id_of
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.parts.projections.one_memory import HELD, said_hint, step


@pytest.fixture
async def config(tmp_path: Path, kafka_bootstrap: str, topic_prefix: str) -> Path:
    """Settings of an installation whose policy holds two hints, of which it rehearsed one."""
    await admin.apply(kafka_bootstrap, topic_prefix)
    events: list[Event] = [*HELD, step(3, Rehearsed(hint_id=said_hint("ann", "be brief"), open_nats=0.25))]
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        await log.append(events)
    path = tmp_path / "clawstream.toml"
    path.write_text(f'data_dir = "{tmp_path}"\n[kafka]\nbootstrap = "{kafka_bootstrap}"\nprefix = "{topic_prefix}"\n')
    return path


def said(config: Path, *argv: str) -> Any:
    result = CliRunner().invoke(app, ["-c", str(config), "hints", *argv, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_a_person_sees_what_the_policy_holds_on_to_and_retires_one_of_it(config: Path) -> None:
    brief, steps = said(config, "list")
    assert (brief["hint"], brief["key_name"], brief["num_prompts"]) == ("Be brief", "ann", 2)
    assert (brief["open_nats"], steps["open_nats"], steps["hint_by_person"]) == (0.25, None, True)
    table = CliRunner().invoke(app, ["-c", str(config), "hints", "list"], catch_exceptions=False).stdout
    assert all(words in table for words in ("Be brief", "Show the steps", "ann", "a person", "0.250"))

    assert said(config, "retire", brief["hint_id"][:8])["hint"] == "Be brief"
    assert [one["hint"] for one in said(config, "list")] == ["Show the steps"]


@pytest.mark.parametrize("wrong", ["", "zz"])
def test_what_names_no_hint_or_several_retires_none(config: Path, wrong: str) -> None:
    with pytest.raises(OperatorError, match="Nothing was retired"):
        said(config, "retire", wrong)
    assert len(said(config, "list")) == 2


def test_an_id_is_of_the_words_and_who_said_them() -> None:
    assert said_hint("ann", "be brief") == hint_id_of("policy", "ann", "Be  Brief")
