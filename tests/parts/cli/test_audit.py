"""`clawstream audit` and `projection` from outside, on the real broker and database."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from clawstream.events import Event, SampleAssembled, SampleRefused, TurnOrphaned, VoteCast
from clawstream.projections import database
from clawstream.stream import topics
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Commit, PartitionId
from tests.flow import Flow
from tests.forks import forked_command
from tests.parts.projections import one_session
from tests.parts.projections.rebuild.test_audit import session
from tests.parts.projections.write.test_stage import caught_up, projecting
from tests.parts.stream.raw import append_bytes
from tests.unit.samples.test_flow import conversation

pytestmark = pytest.mark.slow


def _pipeline() -> list[Event]:
    """What turns, judging and samples make of sessions of every kind, in the order in which they write it."""
    moves = ["ask", "ask", "side", "again", "failed", "ask", "reset", "idle", "ask", "done", "forget"]
    sessions = [event for n in range(8) for event in conversation(moves[n % 3 :], f"s{n}")]
    written = [record for topic in Flow().run(sessions).topics.values() for record in topic]
    return [record.event for record in sorted(written, key=lambda record: record.timestamp_ms)]


PIPELINE = _pipeline()
RECORDS = len(one_session.ONE_SESSION) + len(PIPELINE) + 1
SET_ASIDE = 1 + sum(isinstance(event, VoteCast) and event.session_id == "s1" for event in PIPELINE)


def run(config: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CLAWSTREAM_")}
    command = [sys.executable, "-m", "clawstream", "-c", str(config), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)


def forked(config: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    """As `run` does, without the two seconds of its imports."""
    return forked_command(config.parent, "-c", str(config), *argv)


@pytest.fixture
async def config(tmp_path: Path, kafka_bootstrap: str, topic_prefix: str, fresh_database_url: str) -> Path:
    """Settings of an installation whose projector has read what the stages made of some sessions, and nonsense."""
    await admin.apply(kafka_bootstrap, topic_prefix)
    database.upgrade(fresh_database_url)
    engine = database.connect(fresh_database_url)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log, projecting(fresh_database_url, log):
        await append_bytes(log, topics.VOTES, b"s1", b"nonsense", [])
        await log.append([*one_session.ONE_SESSION, *PIPELINE])
        await caught_up(engine, log)
    engine.dispose()
    path = tmp_path / "clawstream.toml"
    settings(path, kafka_bootstrap, topic_prefix, fresh_database_url)
    return path


def settings(path: Path, kafka_bootstrap: str, topic_prefix: str, database_url: str) -> None:
    path.write_text(
        f'data_dir = "{path.parent}"\n[kafka]\nbootstrap = "{kafka_bootstrap}"\nprefix = "{topic_prefix}"\n'
        f'[postgres]\nurl = "{database_url}"\n'
    )


def test_an_edit_by_hand_is_named_with_exit_code_two_and_a_rebuild_undoes_it(
    config: Path, fresh_database_url: str
) -> None:
    assert {SampleAssembled, SampleRefused, TurnOrphaned} <= set(map(type, PIPELINE))
    clean = run(config, "audit", "verify", "--json")
    assert clean.returncode == 0, clean.stderr
    told = json.loads(clean.stdout)
    assert (told["records"], told["records_chained"], told["records_set_aside"]) == (RECORDS, RECORDS, SET_ASIDE)
    assert told["records_unread"] == 0
    assert (told["chain_ok"], told["rows_differ"], told["unchained"]) == (True, 0, {})

    with psycopg.connect(fresh_database_url.replace("+psycopg", "")) as connection:
        edit = "UPDATE verdicts SET score = 1 WHERE session_id = %s RETURNING event_id"
        [row] = connection.execute(edit, (one_session.SESSION,)).fetchall()
    edited = run(config, "audit", "verify", "--json")
    assert edited.returncode == 2
    assert "1 rows differ" in edited.stderr
    [difference] = json.loads(edited.stdout)["differences"]
    assert difference == {
        "table": "verdicts", "key": str(row[0]), "what": "different", "column": "score", "expected": "-1", "found": "1"
    }  # fmt: skip
    assert str(row[0]) in run(config, "audit", "verify").stdout

    rebuilt = run(config, "projection", "rebuild", "--json")
    assert rebuilt.returncode == 0, rebuilt.stderr
    made = json.loads(rebuilt.stdout)
    assert (made["records"], made["records_set_aside"], made["records_unread"]) == (RECORDS, SET_ASIDE, 0)
    assert set(made["seconds"]) == {"preparing", "reading", "catching_up", "swapping"}
    sampled = run(config, "audit", "verify", "--sample", "3", "--seed", "5")
    assert sampled.returncode == 0, sampled.stderr
    assert "--seed 5" in sampled.stderr


def trusted(config: Path, database_url: str) -> dict[str, Any]:
    """Rebuild as the message says that is there first, and return what an audit says then, which must be content."""
    for command in (("audit", "verify"), ("projection", "rebuild")):
        refused = forked(config, *command)
        assert refused.returncode == 2, refused.stderr
        assert "`clawstream projection rebuild --trust-log`" in " ".join(refused.stderr.split())
    rebuilt = forked(config, "projection", "rebuild", "--trust-log", "--json")
    assert rebuilt.returncode == 0, rebuilt.stderr
    kept = json.loads(rebuilt.stdout)["kept_schema"]
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        assert connection.execute(f"SELECT count(*) FROM {kept}.offsets").fetchone() != (0,)
        ahead = (
            "SELECT count(*) FROM commits c JOIN offsets o USING (topic, partition) WHERE c.next_offset > o.next_offset"
        )
        assert connection.execute(ahead).fetchone() == (0,), "these were of records that are not there"
    verified = forked(config, "audit", "verify", "--json")
    assert verified.returncode == 0, verified.stderr
    told: dict[str, Any] = json.loads(verified.stdout)
    assert {one["kept_schema"] for one in told["overruled"]} == {kept}
    return told


async def test_a_chain_that_was_edited_by_hand_is_made_again_on_a_persons_word_and_that_is_noted(
    config: Path, kafka_bootstrap: str, topic_prefix: str, fresh_database_url: str
) -> None:
    edit = "UPDATE offsets SET chain = %s WHERE topic = %s AND next_offset > 0 RETURNING partition, next_offset"
    with psycopg.connect(fresh_database_url.replace("+psycopg", "")) as connection:
        edited = connection.execute(edit, (b"\0" * 32, topics.VOTES)).fetchall()
    engine = database.connect(fresh_database_url)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log, projecting(fresh_database_url, log):
        await caught_up(engine, log)
        told = await asyncio.to_thread(trusted, config, fresh_database_url)
        await log.append(more := session(1))
        await caught_up(engine, log)
    engine.dispose()
    assert [(one["place"], one["next_offset"], one["made_next_offset"]) for one in told["overruled"]] == [
        (f"{topics.VOTES}-{partition}", next_offset, next_offset) for partition, next_offset in sorted(edited)
    ]
    assert all(one["chain_differed"] for one in told["overruled"])
    later = forked(config, "audit", "verify", "--json")
    assert later.returncode == 0, later.stderr
    assert json.loads(later.stdout)["records"] == told["records"] + len(more)
    assert json.loads(later.stdout)["overruled"] == told["overruled"]
    assert "offset and hash chain overruled on" in forked(config, "audit", "verify").stdout


async def test_tables_that_have_read_past_the_end_of_the_log_are_made_of_the_log_that_is_there(
    config: Path, kafka_bootstrap: str, topic_prefix: str, fresh_database_url: str
) -> None:
    """As where a log was restored from an older copy; what comes then stands where others stood."""
    shorter = f"{topic_prefix}restored."
    await admin.apply(kafka_bootstrap, shorter)
    await asyncio.to_thread(settings, config, kafka_bootstrap, shorter, fresh_database_url)
    engine = database.connect(fresh_database_url)
    async with KafkaLog.connect(kafka_bootstrap, prefix=shorter) as log:
        await log.append(one_session.ONE_SESSION)
        trained = PartitionId(topics.SAMPLES, 0)
        await log.put_back("train-policy", {trained: Commit(1000)})
        told = await asyncio.to_thread(trusted, config, fresh_database_url)
        assert (await log.committed("train-policy"))[trained].offset < 1000
        assert told["records"] <= len(one_session.ONE_SESSION)
        assert any(one["next_offset"] > one["made_next_offset"] == 0 for one in told["overruled"])
        async with projecting(fresh_database_url, log):
            await log.append(PIPELINE)
            await caught_up(engine, log)
    engine.dispose()
    later = forked(config, "audit", "verify", "--json")
    assert later.returncode == 0, later.stderr
    found = json.loads(later.stdout)
    assert (found["records"], found["records_set_aside"]) == (len(one_session.ONE_SESSION) + len(PIPELINE), 0)
