"""The fixtures that other tests stand on: real servers, kept apart, and one clear end without them."""

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from tests import servers
from tests.servers import answers

NEEDS_KAFKA = "def test_a(kafka_bootstrap): pass\ndef test_b(kafka_bootstrap): pass\n"


def run_pytest(folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    (folder / "test_needs.py").write_text(NEEDS_KAFKA)
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CLAWSTREAM_", "DOCKER_"))}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[3],
        env=inherited | environment,
    )  # fmt: skip


def test_a_real_broker_answers(kafka_bootstrap: str) -> None:
    assert answers(kafka_bootstrap)


def test_each_test_writes_to_a_database_of_its_own(fresh_database_url: str, postgres_url: str) -> None:
    with servers.database(postgres_url, "another") as other:
        assert len({make_url(url).database for url in (fresh_database_url, postgres_url, other)}) == 3
        with psycopg.connect(make_url(other).set(drivername="postgresql").render_as_string(False)) as connection:
            assert connection.execute("SELECT count(*) FROM pg_stat_user_tables").fetchone() == (0,)


def test_a_database_is_dropped_under_an_open_connection(postgres_url: str) -> None:
    with servers.database(postgres_url, "short_lived") as url:
        left_open = psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(False))
    with pytest.raises(psycopg.OperationalError):
        left_open.execute("SELECT 1")
    left_open.close()


def test_each_test_has_a_topic_prefix_of_its_own(topic_prefix: str, request: pytest.FixtureRequest) -> None:
    assert topic_prefix.startswith("test-")
    assert request.getfixturevalue("topic_prefix") == topic_prefix


@pytest.mark.slow
def test_without_any_server_the_run_ends_at_once_and_names_the_three_remedies(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, JAVA_HOME=str(tmp_path), DOCKER_HOST="unix:///nowhere.sock")
    said = done.stdout + done.stderr
    assert done.returncode == 2
    assert all(remedy in said for remedy in ("Unset JAVA_HOME", "CLAWSTREAM_KAFKA", "Docker engine"))
    assert said.count("the tests need a real Kafka") == 1
    assert "skipped" not in said


def test_a_configured_broker_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "CONFIGURED_WITHIN_S", 0.1)
    monkeypatch.setenv("CLAWSTREAM_KAFKA", "127.0.0.1:1")
    ended = pytest.raises(pytest.exit.Exception, match=r"CLAWSTREAM_KAFKA: no Kafka broker answers at 127\.0\.0\.1:1")
    with ended, servers.kafka(tmp_path):
        pass
