"""What stands around an event's bytes: CloudEvents attributes (Kafka binding, binary mode) and the trace. Pure.

The one rule: nothing that a person said stands here.
"""

from datetime import UTC, datetime

from clawstream.events import Event

Headers = list[tuple[str, bytes]]
TRACEPARENT = "traceparent"


def headers_of(event: Event, *, source: str, now_ms: int, traceparent: str | None) -> Headers:
    """Return the record's headers; `source` names the process that writes."""
    attributes = {
        "ce_specversion": "1.0",
        "ce_id": event.event_id,
        "ce_type": f"clawstream.{type(event).__name__}",
        "ce_source": source,
        "ce_time": datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        "ce_subject": event.key,
        "content-type": "application/avro",
    }
    if traceparent is not None:
        attributes[TRACEPARENT] = traceparent
    return [(name, key_bytes(value)) for name, value in attributes.items()]


def traceparent_of(headers: tuple[tuple[str, bytes], ...]) -> str | None:
    """Return the trace that a record belongs to."""
    for name, value in headers:
        if name == TRACEPARENT:
            return value.decode("ascii", "replace")
    return None


def key_bytes(text: str) -> bytes:
    """Return text as keys and headers have it; lone surrogates survive."""
    return text.encode("utf-8", "surrogatepass")
