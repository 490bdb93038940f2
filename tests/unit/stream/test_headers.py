"""What stands around an event's bytes."""

from hypothesis import given

from clawstream.events import Event
from clawstream.stream.avro import headers_of, traceparent_of
from tests import strategies
from tests.unit.stream import toys

NAMES = ["ce_specversion", "ce_id", "ce_type", "ce_source", "ce_time", "ce_subject", "content-type"]


@given(strategies.events())
def test_every_event_has_its_cloudevents_attributes(event: Event) -> None:
    headers = headers_of(event, source="/clawstream/test", now_ms=0, traceparent=None)
    assert [name for name, _ in headers] == NAMES
    assert dict(headers)["ce_id"].decode() == event.event_id


def test_attributes_read_as_cloudevents_says() -> None:
    headers = headers_of(toys.done("a", 0), source="/clawstream/test", now_ms=1_700_000_000_123, traceparent="00-1")
    said = {name: value.decode() for name, value in headers}
    assert said["ce_specversion"] == "1.0"
    assert said["ce_type"] == "clawstream.SessionDone"
    assert said["ce_time"] == "2023-11-14T22:13:20.123+00:00"
    assert said["ce_subject"] == "a"
    assert said["content-type"] == "application/avro"
    assert traceparent_of(tuple(headers)) == "00-1"
    assert traceparent_of(tuple(headers[:-1])) is None
