"""A query prints what it finds and can change nothing."""

import csv
import io
import json

import pytest
from sqlalchemy import Engine

from clawstream.errors import DatabaseMismatch, OperatorError
from clawstream.projections.look.sql import RowFormat, print_query
from tests.parts.projections import one_session
from tests.parts.projections.reading import contents, write_all
from tests.unit.projections import logs


def _printed(url: str, query: str, form: RowFormat) -> str:
    out = io.StringIO()
    print_query(url, query, form=form, out=out)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM votes",
        "COMMIT; DELETE FROM votes",
        "SELECT 1; DELETE FROM votes",
        "WITH gone AS (DELETE FROM votes RETURNING 1) SELECT * FROM gone",
        "SET TRANSACTION READ WRITE",
        "SELECT set_config('transaction_read_only', 'off', false)",
        "DROP VIEW lineage",
        "CREATE TABLE mine ()",
        "SELECT pg_sleep(99999) FROM nowhere",
        "SELEC",
        "",
    ],
)
def test_a_query_that_does_not_read_is_refused_in_postgres_words_and_changes_nothing(
    emptied: Engine, migrated_url: str, query: str
) -> None:
    write_all(emptied, logs.records(one_session.ONE_SESSION))
    before = contents(emptied)
    with pytest.raises(OperatorError, match=r"^Postgres refused the query: .+\. Nothing was changed$"):
        _printed(migrated_url, query, RowFormat.TABLE)
    assert contents(emptied) == before


def test_a_query_that_takes_too_long_is_ended(migrated_url: str) -> None:
    with pytest.raises(OperatorError, match="statement timeout"):
        print_query(migrated_url, "SELECT pg_sleep(60)", form=RowFormat.CSV, out=io.StringIO(), timeout_s=0.05)


def test_the_three_forms_print_the_same_rows(emptied: Engine, migrated_url: str) -> None:
    write_all(emptied, logs.records(one_session.ONE_SESSION))
    query = "SELECT turn_id, score, 1.5 AS half, message_text(NULL), 1 AS score FROM verdicts"
    table = _printed(migrated_url, query, RowFormat.TABLE)
    assert "turn_id" in table
    assert one_session.FIRST in table
    assert list(csv.reader(io.StringIO(_printed(migrated_url, query, RowFormat.CSV)))) == [
        ["turn_id", "score", "half", "message_text", "score_2"],
        [one_session.FIRST, "-1", "1.5", "", "1"],
    ]
    assert json.loads(_printed(migrated_url, query, RowFormat.JSON)) == [
        {"turn_id": one_session.FIRST, "score": -1, "half": 1.5, "message_text": None, "score_2": 1}
    ]


def test_json_columns_are_json_and_percent_signs_are_characters(emptied: Engine, migrated_url: str) -> None:
    write_all(emptied, logs.records(one_session.ONE_SESSION))
    query = "SELECT request, judge LIKE 'j%' AS like_j FROM lineage WHERE ballot = 1"
    [row] = json.loads(_printed(migrated_url, query, RowFormat.JSON))
    assert row["request"][1] == json.loads(one_session.QUESTION)
    assert row["like_j"] is True


@pytest.mark.parametrize(("form", "nothing"), [(RowFormat.CSV, "turn_id\n"), (RowFormat.JSON, "[]\n")])
def test_no_rows_are_no_rows(emptied: Engine, migrated_url: str, form: RowFormat, nothing: str) -> None:
    assert emptied is not None
    assert _printed(migrated_url, "SELECT turn_id FROM votes", form) == nothing


def test_markup_in_a_cell_is_text(migrated_url: str) -> None:
    assert "[bold]x[/bold]" in _printed(migrated_url, "SELECT '[bold]x[/bold]' AS said", RowFormat.TABLE)


@pytest.mark.usefixtures("narrow_terminal")
def test_a_terminal_of_80_columns_shows_ids_and_the_names_of_columns_whole(migrated_url: str) -> None:
    session, turn = "agent:main:0d7d5c2e-8e05-4a57-b1d0-5f0f14a1c2aa", "7c9d2b4a-61f3-4d0e-9a55-1d2f3b4c5e6f"
    asked = "a question of many words " * 9
    query = f"SELECT '{session}' AS session_id, '{asked}' AS request, '{turn}' AS turn_id, -1 AS score"
    shown = " ".join(_printed(migrated_url, query, RowFormat.TABLE).replace("│", " ").split())
    assert {session, turn, "session_id", "request", "turn_id", "score"} <= set(shown.replace("┃", " ").split())
    assert shown.count("question of many words") == 9


HOSTILE = "a\rb\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202eb\nnext line"


@pytest.mark.parametrize("form", RowFormat)
def test_nothing_that_is_printed_makes_a_terminal_do_anything(migrated_url: str, form: RowFormat) -> None:
    found = _printed(migrated_url, f'SELECT $c${HOSTILE}$c$ AS "{HOSTILE[:40]}", to_jsonb($c${HOSTILE}$c$::text)', form)
    assert [char for char in found if not char.isprintable() and char != "\n"] == []
    assert "next line" in found
    if form is RowFormat.JSON:
        [row] = json.loads(found)
        assert row["to_jsonb"] == HOSTILE


def test_words_of_postgres_that_repeat_a_cell_make_a_terminal_do_nothing_either(migrated_url: str) -> None:
    with pytest.raises(OperatorError) as refused:
        _printed(migrated_url, f"SELECT lower($c${HOSTILE}$c$)::integer", RowFormat.TABLE)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", "\n=", "\uff1d"])
def test_no_cell_of_the_csv_is_a_formula_and_json_has_it_as_it_is(migrated_url: str, start: str) -> None:
    said = f"{start}cmd|' /C calc'!A0"
    query = f"SELECT $c${said}$c$ AS said"
    assert list(csv.reader(io.StringIO(_printed(migrated_url, query, RowFormat.CSV), newline=""))) == [
        ["said"],
        [f"'{said}"],
    ]
    assert json.loads(_printed(migrated_url, query, RowFormat.JSON)) == [{"said": said}]


def test_numbers_are_no_formulas(migrated_url: str) -> None:
    found = _printed(
        migrated_url, "SELECT -1 AS a, -0.5::float8 AS b, '-12.5e3' AS c, '+3' AS d, '-1+1' AS e", RowFormat.CSV
    )
    assert found.splitlines()[1] == "-1,-0.5,-12.5e3,+3,'-1+1"


def test_a_database_without_the_tables_is_refused(fresh_database_url: str) -> None:
    with pytest.raises(DatabaseMismatch, match="clawstream db upgrade"):
        _printed(fresh_database_url, "SELECT 1", RowFormat.CSV)


class _Closed(io.StringIO):
    """A reader that has gone away, as `head` does."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


@pytest.mark.timeout(20)
def test_a_reader_that_goes_away_ends_the_query_and_waits_for_nothing(migrated_url: str) -> None:
    with pytest.raises(BrokenPipeError):
        print_query(migrated_url, "SELECT generate_series(1, 100000)", form=RowFormat.CSV, out=_Closed())
