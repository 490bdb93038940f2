"""The headers around an event's bytes: CloudEvents attributes (Kafka binding, binary mode) and the trace. Pure.

The one rule: no header holds anything that a person said.
"""

from datetime import UTC, datetime
from functools import lru_cache

from clawstream.events import Event

Headers = list[tuple[str, bytes]]
ReadHeaders = tuple[tuple[str, bytes | None], ...]  # anybody may have written them
TRACEPARENT = "traceparent"


def headers_of(event: Event, *, source: str, now_ms: int, traceparent: str | None) -> Headers:
    """Return the record's headers; `source` names the process that writes."""
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", event.event_id.encode("ascii")),
        ("ce_type", f"clawstream.{type(event).__name__}".encode()),
        ("ce_source", key_bytes(source)),
        ("ce_time", _time(now_ms)),
        ("ce_subject", key_bytes(event.key)),
        ("content-type", b"application/avro"),
    ]
    if traceparent is not None:
        headers.append((TRACEPARENT, key_bytes(traceparent)))
    return headers


def traceparent_of(headers: ReadHeaders) -> str | None:
    """Return the trace that a record belongs to."""
    for name, value in headers:
        if name == TRACEPARENT and value is not None:
            return value.decode("ascii", "replace")
    return None


def key_bytes(text: str) -> bytes:
    """Return text as the bytes of a key or header; lone surrogates survive."""
    return text.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=1024)  # all events that follow from one record carry one time
def _time(now_ms: int) -> bytes:
    return datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds").encode("ascii")
