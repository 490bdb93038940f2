"""Every text and every JSON can be stored, and comes back."""

import json

import pytest
from hypothesis import given
from sqlalchemy import Engine

from clawstream.projections.text import ESCAPE, escape, original_json, storable_json, unescape
from tests.unit.projections.logs import JSON_TEXTS, TEXTS


@given(TEXTS)
def test_escaping_is_undone_exactly_and_leaves_nothing_that_postgres_refuses(text: str) -> None:
    stored = escape(text)
    assert unescape(stored) == text
    assert "\0" not in stored
    stored.encode()


@given(TEXTS, TEXTS)
def test_two_texts_never_become_one(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(JSON_TEXTS)
def test_stored_json_says_what_the_original_said(raw: bytes) -> None:
    stored = storable_json(raw)
    assert "\\u0000" not in stored.replace("\\\\", "")
    assert json.loads(original_json(stored)) == json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "stored"),
    [
        (b'{"a": 1.50}', '{"a": 1.50}'),
        (rb'"\u0000 \\u0000 \ud83d\ude00 \ud83d"', rf'"{ESCAPE}u0000 \\u0000 \ud83d\ude00 {ESCAPE}ud83d"'),
        (b"no json", '"no json"'),
        (b"\xff", f'"{ESCAPE}udcff"'),
        (b"1e200000", '"1e200000"'),
        (b"NaN", '"NaN"'),
    ],
)
def test_json_is_stored_as_it_was_sent_but_for_what_jsonb_refuses(raw: bytes, stored: str) -> None:
    assert storable_json(raw) == stored


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 1000 + b"]" * 1000,
        b"[" * 100_000 + b"]" * 100_000,
        b"1e-99999",
        b"0e999999999",
        b"0." + b"1" * 20_000,
        b"9" * 200_000,
        b'{"\\u0000": 1, "\\ud800": 2}',
        b'"' + b"x" * 2**20 + b'"',
    ],
    ids=lambda raw: f"{raw[:12]!r}",
)
def test_postgres_takes_whatever_was_made_storable(migrated: Engine, raw: bytes) -> None:
    with migrated.connect() as connection:
        taken = connection.exec_driver_sql("SELECT %s::jsonb IS NOT NULL", (storable_json(raw),)).scalar()
    assert taken is True
