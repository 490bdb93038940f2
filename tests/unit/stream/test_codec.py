"""Events to bytes and back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import UndecodableRecord, UnusableEvent
from clawstream.events import EVENTS, Event, ExchangeCompleted, SessionDone, TurnPaired
from clawstream.stream.avro import codec
from clawstream.stream.schemas import all_schemas
from tests import strategies

DONE = SessionDone(session_id="ann", after_exchange_id=None)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_every_event_comes_back_as_it_was(kind: type[Event]) -> None:
    @given(strategies.of(kind))
    def round_trip(event: Event) -> None:
        assert codec().decode(codec().encode(event)) == event

    round_trip()


@given(strategies.events(), st.binary(max_size=3))
def test_a_longer_record_is_not_an_event(event: Event, more: bytes) -> None:
    value = codec().encode(event)
    assert codec().decode(value) == event
    if more:
        with pytest.raises(UndecodableRecord, match=f"of the record's {len(value) + len(more)} bytes"):
            codec().decode(value + more)


@given(strategies.events(), st.data())
def test_a_record_cut_short_is_not_an_event(event: Event, data: st.DataObject) -> None:
    value = codec().encode(event)
    with pytest.raises(UndecodableRecord):
        codec().decode(value[: data.draw(st.integers(0, len(value) - 1))])


@given(strategies.events(), st.integers(0), st.integers(0, 255))
def test_a_changed_byte_gives_an_event_or_a_clear_refusal_and_nothing_else(event: Event, where: int, byte: int) -> None:
    value = bytearray(codec().encode(event))
    value[where % len(value)] = byte
    with contextlib.suppress(UndecodableRecord):
        assert isinstance(codec().decode(bytes(value)), Event)


@given(st.binary())
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(UndecodableRecord):
        codec().decode(noise)


def test_a_record_names_its_schema() -> None:
    [schema] = [schema for schema in all_schemas() if schema.event is SessionDone]
    assert codec().encode(DONE)[:10] == b"\xc3\x01" + schema.fingerprint


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "has no value"),
        (b"", "0 bytes beginning with nothing"),
        (b'{"a": 1}', "beginning with 7b22"),
        (b"\xc3\x01" + b"\1" * 8, "fingerprint 0101010101010101"),
        (b"\0\0\0\0\7", "5 bytes beginning with 0000000007: an event begins with c301"),
    ],
)
def test_the_refusal_says_what_was_found(value: bytes | None, says: str) -> None:
    with pytest.raises(UndecodableRecord, match=says):
        codec().decode(value)


@pytest.mark.parametrize("next_state", [(2**63,), ("one",)])
def test_a_value_that_does_not_fit_is_not_written(next_state: tuple[int, ...]) -> None:
    turn = TurnPaired(session_id="ann", turn_id="t", next_exchange_id="n", next_state=next_state)
    with pytest.raises(UnusableEvent, match=turn.event_id):
        codec().encode(turn)


@given(strategies.of(ExchangeCompleted, output_ids=st.just((1, 2**31))))
def test_a_token_id_beyond_32_bits_is_not_written(exchange: ExchangeCompleted) -> None:
    with pytest.raises(UnusableEvent):
        codec().encode(exchange)
