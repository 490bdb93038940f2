"""A record is one row, and nothing that its event says is left out."""

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from sqlalchemy import Engine, text

from clawstream.events import (
    EVENTS,
    BatchPlanned,
    Event,
    ExchangeCompleted,
    RequestDelta,
    SampleAssembled,
    TurnOrphaned,
    VoteCast,
)
from clawstream.projections.text import escape, original_json, unescape
from clawstream.projections.write.rows import TABLE_OF, columns, indexable, row
from clawstream.stream.topics import topic_of
from tests.parts.projections.reading import write_all
from tests.unit.projections import logs


def _said(kind: type) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if hints[field.name] is RequestDelta:
            yield from _said(RequestDelta)
        else:
            yield field.name, hints[field.name]


def test_every_event_has_a_table() -> None:
    assert set(TABLE_OF) == set(EVENTS)


@pytest.mark.parametrize("kind", EVENTS)
def test_a_table_is_fed_by_the_topic_that_its_events_are_written_to(kind: type[Event]) -> None:
    assert TABLE_OF[kind][0].info["topic"] == topic_of(kind)


@pytest.mark.parametrize("kind", EVENTS)
def test_every_field_has_a_column_that_may_be_null_where_the_field_may_be_none(kind: type[Event]) -> None:
    table, _ = TABLE_OF[kind]
    for name, hint in _said(kind):
        assert name in table.c, f"{table.name} has no column for {kind.__name__}.{name}"
        assert table.c[name].nullable or NoneType not in get_args(hint), name


@pytest.mark.parametrize("kind", EVENTS)
def test_a_column_that_must_not_be_null_is_set_by_every_event_of_the_table(kind: type[Event]) -> None:
    table, label = TABLE_OF[kind]
    place = {"event_id", "source_topic", "source_partition", "source_offset", "log_time"} | (
        {"kind"} if label else set()
    )
    assert {name for name in columns(table) if not table.c[name].nullable} <= place | {name for name, _ in _said(kind)}


@given(logs.events())
def test_a_row_has_a_value_for_each_column_of_its_table(fact: Event) -> None:
    [[record]] = logs.records([fact]).values()
    made = row(record)
    assert made is not None
    named = dict(zip(columns(TABLE_OF[type(fact)][0]), made.cells, strict=True))
    assert named["event_id"] == fact.event_id
    assert (named["source_topic"], named["source_partition"]) == (record.topic, str(record.partition))


@pytest.mark.slow
def test_what_postgres_refuses_is_stored_escaped_and_comes_back(emptied: Engine) -> None:
    vote = logs.example(VoteCast, text="a\0b\ud800c\u241bd", session_id="\0")
    exchange = logs.example(ExchangeCompleted, message=rb'{"content": "a\u0000b\ud800c"}')
    write_all(emptied, logs.records([vote, exchange]))
    with emptied.connect() as connection:
        said, session = connection.execute(text("SELECT text, session_id FROM votes")).one()
        content, message = connection.execute(text("SELECT message ->> 'content', message::text FROM exchanges")).one()
    assert (unescape(said), unescape(session)) == (vote.text, vote.session_id)
    assert content == escape("a\0b\ud800c")
    assert original_json(message) == rb'{"content": "a\u0000b\ud800c"}'.decode()


@pytest.mark.parametrize("said", ["a\\b", "\\N", "\\.", "a\tb", "a\nb", "a\rb", "\x7f\u00e9", '"{,}'])
def test_what_ends_a_cell_of_copy_comes_back_from_texts_ids_arrays_and_json(emptied: Engine, said: str) -> None:
    vote = logs.example(VoteCast, text=said, turn_id=said)
    plan = logs.example(BatchPlanned, sample_ids=(said, "x"), settings=json.dumps([said]).encode())
    write_all(emptied, logs.records([vote, plan]))
    with emptied.connect() as connection:
        assert connection.execute(text("SELECT text, turn_id FROM votes")).one() == (said, said)
        found = connection.execute(text("SELECT sample_ids, settings FROM batches")).one()
    assert found == ([said, "x"], [said])


def test_numbers_in_arrays_come_back_and_a_missing_one_is_null(emptied: Engine) -> None:
    sample = logs.example(
        SampleAssembled, prompt_ids=(1, -(2**31)), response_logprobs=(-1.5, None, -math.inf), hinted_prompt_ids=None
    )
    write_all(emptied, logs.records([sample]))
    with emptied.connect() as connection:
        found = connection.execute(
            text("SELECT prompt_ids, response_logprobs, hinted_prompt_ids, sample_id FROM samples")
        ).one()
    assert found == ([1, -(2**31)], [-1.5, None, -math.inf], None, sample.sample_id)


def test_an_id_too_long_for_an_index_is_stored_by_its_hash_everywhere(emptied: Engine) -> None:
    long, other = "x" * 5000, "x" * 4999 + "y"
    assert len(indexable(long)) < 200
    assert indexable(long) != indexable(other)
    turn = logs.example(TurnOrphaned, turn_id=long, session_id=other)
    exchange = logs.example(ExchangeCompleted, exchange_id=long, session_id=other)
    write_all(emptied, logs.records([turn, exchange]))
    with emptied.connect() as connection:
        joined = connection.execute(
            text(
                "SELECT count(*) FROM turns AS t JOIN exchanges AS e "
                "ON e.exchange_id = t.turn_id AND e.session_id = t.session_id"
            )
        ).scalar()
    assert joined == 1
