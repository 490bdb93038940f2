"""Every table, view and column has words, in the database and on the page that they are read from."""

import json
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import make_url
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.projections import database, tables
from clawstream.projections.look.sql import rows_of

PAGE = Path(__file__).parents[3] / "docs" / "dictionary.md"
SAID = """
    SELECT relname, attname, obj_description(c.oid, 'pg_class') AS relation, col_description(c.oid, attnum) AS said
    FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v') AND attnum > 0 AND NOT attisdropped
"""


def test_every_table_view_and_column_has_a_comment(migrated_url: str) -> None:
    found = rows_of(migrated_url, SAID)
    assert {row["relname"] for row in found} == set(tables.RELATION_MEANINGS)
    assert [(row["relname"], row["attname"]) for row in found if not row["said"] or not row["relation"]] == []


def test_an_upgrade_mends_a_comment_that_says_something_else(live: Engine) -> None:
    url = live.url.render_as_string(hide_password=False)
    with live.begin() as connection:
        connection.exec_driver_sql("COMMENT ON COLUMN votes.score IS 'nothing'")
    database.upgrade(url)
    [row] = rows_of(url, f"{SAID} AND relname = 'votes' AND attname = 'score'")
    assert row["said"] == tables.meaning("votes", "score")


def test_the_page_that_the_words_are_read_from_is_what_the_command_prints(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWSTREAM_POSTGRES", migrated_url)
    printed = CliRunner().invoke(app, ["db", "dictionary"])
    assert printed.stdout == PAGE.read_text(), (
        "docs/dictionary.md says what the database is not: see `clawstream db dictionary`"
    )


def test_db_url_prints_what_other_tools_log_in_with(migrated_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWSTREAM_POSTGRES", migrated_url)
    account = make_url(migrated_url).username
    for options, who in (((), account), (("--read-only",), f"{account}_reader")):
        printed = CliRunner().invoke(app, ["db", "url", *options])
        with psycopg.connect(printed.stdout.strip()) as connection:
            assert connection.execute("SELECT session_user").fetchone() == (who,)


def test_a_database_that_does_not_run_has_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLAWSTREAM_POSTGRES", raising=False)
    (tmp_path / "postgres").mkdir()
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"data_dir": str(tmp_path)}))
    found = CliRunner().invoke(app, ["--config", str(settings), "db", "url"])
    assert "does not run" in str(found.exception)
    assert "Start `clawstream up`" in str(found.exception)
