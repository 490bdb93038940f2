"""A replay's events as records for its own topics, and the digest of its samples. Pure, but for the count.

The one rule: equal samples give equal digests, in whatever order and on however many partitions they were assembled.
"""

import hashlib
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping

from clawstream.events import Event, SampleAssembled
from clawstream.stream.codec.avro import codec
from clawstream.stream.codec.headers import headers_of, key_bytes
from clawstream.stream.log import PartitionId, PlacedRecord
from clawstream.stream.topics import replay_topic, topic_of

Digests = Mapping[bytes, bytes]  # a sample's id -> the sha256 of its bytes


class Output:
    """Makes records of events; counts them by type, and keeps each sample's digest, the first one of an id."""

    def __init__(self, replay: str) -> None:
        self._replay = replay
        self._source = f"/clawstream/replay/{replay}"
        self._topics: dict[type[Event], str] = {}
        self.counts: Counter[str] = Counter()
        self.digests: dict[bytes, bytes] = {}

    def record(self, event: Event, *, partition: int, at_ms: int, traceparent: str | None) -> PlacedRecord:
        """Return the event's record for this replay's topic in place of the event's own.

        `at_ms` is the time of the record that the event follows from. Raises UnusableEvent for an event that can't be
        encoded.
        """
        kind = type(event)
        value = codec().encode(event)
        headers = headers_of(event, source=self._source, now_ms=at_ms, traceparent=traceparent)
        self.counts[kind.__name__] += 1
        if kind is SampleAssembled:
            event_id = uuid.UUID(dict(headers)["ce_id"].decode("ascii"))
            self.digests.setdefault(event_id.bytes, hashlib.sha256(value).digest())
        if kind not in self._topics:
            self._topics[kind] = replay_topic(topic_of(kind), self._replay)
        return PlacedRecord(PartitionId(self._topics[kind], partition), key_bytes(event.key), value, headers)


def merged(parts: Iterable[Digests]) -> Digests:
    """Return the digests of all parts."""
    return {name: digest for part in parts for name, digest in part.items()}


def samples_sha256(digests: Digests) -> str:
    """Return the sha256 over the samples' digests, in the order of their ids."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()
