"""The records of the dead-letter queues: records that were set aside, and marks that say what becomes of them. Pure.

A dead letter is named by its stage and its record's place on the log. So a record that is set aside again is the same
dead letter, which changes only with a higher attempt number. Marks stand in the queue too, so the queue holds all
that is known.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from clawstream.errors import ParkedRecord, TopicMismatch, UndecodableRecord, UnusableEvent
from clawstream.stream.avro import Headers, key_bytes
from clawstream.stream.log import DeadLetterId, DeadLetterMark, Fate, PartitionId, Raw
from clawstream.stream.topics import dead_letter_topic

MESSAGE_CHARACTERS = 500
EXPIRED = "its record is past its topic's retention"  # the reason where a dead letter is discarded instead of replayed


class Reason(StrEnum):
    """Why a record is set aside."""

    UNDECODABLE = "undecodable"  # its bytes can't be decoded
    UNUSABLE = "unusable"  # the stage refuses it, or can't write the events that follow from it
    FAILED = "failed"  # the stage failed with an unexpected error
    PARKED = "parked"  # an earlier record of its key is set aside


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One record that was set aside by one stage, and what has become of it."""

    id: DeadLetterId
    key: bytes | None
    timestamp_ms: int  # when the broker appended the record, not the copy
    reason: Reason
    error: str  # the error's type and message
    attempt: int  # 1: it was never replayed
    rebuild_offsets: Mapping[str, int]  # by topic: the offset of the first record that its key's state follows from
    set_aside_at_ms: int
    copy_offset: int | None = None  # of the record's copy in the queue; None: the copy was not read there yet
    fate: Fate = Fate.OPEN
    because: str | None = None  # the reason that was given for discarding it
    ruled_at_ms: int | None = None

    @property
    def waits(self) -> bool:
        """Whether it is neither used nor discarded yet."""
        return self.fate in (Fate.OPEN, Fate.REPLAY, Fate.DISCARD)

    @property
    def unruled(self) -> bool:
        """Whether a person has to decide about it; a parked record shares the fate of the one that it waits behind."""
        return self.fate is Fate.OPEN and self.reason is not Reason.PARKED

    @property
    def applied(self) -> bool:
        """Whether the stage has used the record after all."""
        return self.fate is Fate.REPLAYED

    @property
    def closed(self) -> "DeadLetterMark":
        """The mark that closes the dead letter: as discarded if a discard was asked for, else as replayed."""
        fate = Fate.DISCARDED if self.fate is Fate.DISCARD else Fate.REPLAYED
        return DeadLetterMark(id=self.id, key=self.key, attempt=self.attempt, fate=fate, because=self.because)

    def again(self, error: Exception) -> "DeadLetter":
        """Return the dead letter as it is after its replay failed with `error`."""
        text = f"{type(error).__name__}: {error}"
        return replace(self, attempt=self.attempt + 1, reason=reason_of(error), error=text, fate=Fate.OPEN)


class KnownDeadLetters:
    """The dead letters in the queues, as far as these were read; with a `group`, those of this stage alone."""

    def __init__(self, group: str | None = None) -> None:
        self._group = group
        self._dead_letters: dict[DeadLetterId, DeadLetter] = {}
        self._by_key: dict[tuple[int, bytes | None], list[DeadLetterId]] = {}
        self.changes = 0
        self.positions: dict[PartitionId, int] = {}

    def __iter__(self) -> Iterator[DeadLetter]:
        """Yield the dead letters in the order in which they were first read."""
        return iter(list(self._dead_letters.values()))

    def get(self, dead_letter_id: DeadLetterId) -> DeadLetter | None:
        """Return the dead letter; None: that record was not set aside."""
        return self._dead_letters.get(dead_letter_id)

    def read(self, raw: Raw) -> None:
        """Take in a record of a queue; a record that was read before changes nothing."""
        queue = PartitionId(raw.topic, raw.partition)
        if raw.offset < self.positions.get(queue, 0):
            return
        self.positions[queue] = raw.offset + 1
        found = _parsed(raw)
        if found is None or self._group not in (None, found.id.group):
            return
        if isinstance(found, DeadLetterMark):
            self.mark(found, raw.timestamp_ms)
        else:
            self.add(found)

    def add(self, dead_letter: DeadLetter) -> None:
        """Add a record that was set aside. A dead letter that is known already changes only with a higher attempt."""
        known = self._dead_letters.get(dead_letter.id)
        if known is None:
            self._by_key.setdefault((dead_letter.id.partition, dead_letter.key), []).append(dead_letter.id)
        elif known.attempt >= dead_letter.attempt:
            return
        self._dead_letters[dead_letter.id] = dead_letter
        self.changes += 1

    def mark(self, mark: DeadLetterMark, at_ms: int | None = None) -> None:
        """Take in a mark. A mark of an earlier attempt, or of an unknown dead letter, changes nothing."""
        known = self._dead_letters.get(mark.id)
        if known is not None and known.attempt == mark.attempt and known.waits:
            self._dead_letters[mark.id] = replace(
                known, fate=mark.fate, because=mark.because or known.because, ruled_at_ms=at_ms
            )
            self.changes += 1

    def of_key(self, partition: int, key: bytes | None) -> list[DeadLetter]:
        """Return the dead letters of a key in the log's order."""
        found = [self._dead_letters[dead_letter_id] for dead_letter_id in self._by_key.get((partition, key), ())]
        return sorted(found, key=lambda dead_letter: (dead_letter.timestamp_ms, dead_letter.id))

    def blocks(self, place: PartitionId, key: bytes | None, offset: int) -> DeadLetterId | None:
        """Return the key's first waiting dead letter on the topic before `offset`; None: nothing is in the way."""
        earlier = (one.id for one in self.of_key(place.partition, key) if one.waits and one.id.offset < offset)
        return next((one for one in earlier if one.topic == place.topic), None)

    def waiting(self, partition: int) -> list[bytes | None]:
        """Return the partition's keys that have waiting dead letters."""
        return [
            key
            for (number, key), ids in self._by_key.items()
            if number == partition and any(self._dead_letters[dead_letter_id].waits for dead_letter_id in ids)
        ]

    def due(self, partition: int) -> list[bytes | None]:
        """Return the partition's keys that have dead letters to use or discard now."""
        return [key for (number, key) in self._by_key if number == partition and self.ready(partition, key)]

    def ready(self, partition: int, key: bytes | None) -> list[DeadLetter]:
        """Return the key's dead letters to use or discard now, in order: ruled ones, and parked ones not held up.

        A parked record is held up while a dead letter of its own topic has no ruling.
        """
        waiting = [dead_letter for dead_letter in self.of_key(partition, key) if dead_letter.waits]
        held = {one.id.topic for one in waiting if one.unruled}
        return [one for one in waiting if one.fate is not Fate.OPEN or one.id.topic not in held]


def reason_of(error: Exception) -> Reason:
    """Return the reason that an error stands for."""
    if isinstance(error, ParkedRecord):
        return Reason.PARKED
    if isinstance(error, UndecodableRecord):
        return Reason.UNDECODABLE
    return Reason.UNUSABLE if isinstance(error, UnusableEvent) else Reason.FAILED


def expired(dead_letter: DeadLetter) -> DeadLetter:
    """Return the dead letter as one to be discarded: its record is not on the log any more, so it can't be used."""
    return dead_letter if dead_letter.fate is Fate.DISCARD else replace(dead_letter, fate=Fate.DISCARD, because=EXPIRED)


def dead_letter_headers(
    dead_letter_id: DeadLetterId,
    timestamp_ms: int,
    *,
    error: Exception,
    attempt: int,
    rebuild_offsets: Mapping[str, int],
) -> Headers:
    """Return the headers that a record's copy in the queue has besides the record's own."""
    about = {
        "dlq.timestamp": str(timestamp_ms),
        "dlq.reason": reason_of(error).value,
        "dlq.error.class": type(error).__name__,
        "dlq.error.message": str(error)[:MESSAGE_CHARACTERS],
        "dlq.story": json.dumps(dict(rebuild_offsets)),
    }
    return _headers(dead_letter_id, attempt, about)


def _parsed(raw: Raw) -> "DeadLetter | DeadLetterMark | None":
    """Return the dead letter or mark that a queue's record holds; None: it holds neither."""
    try:
        headers = {
            name: value.decode("utf-8", "surrogatepass")
            for name, value in raw.headers
            if name.startswith("dlq.") and value is not None
        }
        dead_letter_id = DeadLetterId(
            headers["dlq.group"], headers["dlq.topic"], int(headers["dlq.partition"]), int(headers["dlq.offset"])
        )
        attempt = int(headers.get("dlq.attempt", "1"))
        if "dlq.fate" in headers:
            fate, because = Fate(headers["dlq.fate"]), headers.get("dlq.because")
            return DeadLetterMark(id=dead_letter_id, key=raw.key, attempt=attempt, fate=fate, because=because)
        return DeadLetter(
            id=dead_letter_id,
            key=raw.key,
            timestamp_ms=int(headers["dlq.timestamp"]),
            reason=Reason(headers.get("dlq.reason", Reason.UNUSABLE)),
            error=f"{headers['dlq.error.class']}: {headers['dlq.error.message']}",
            attempt=attempt,
            rebuild_offsets=json.loads(headers.get("dlq.story", "{}")),
            set_aside_at_ms=raw.timestamp_ms,
            copy_offset=raw.offset,
        )
    except (KeyError, ValueError):
        return None


def mark_headers(mark: DeadLetterMark) -> Headers:
    """Return the headers of a mark's record, which has no value."""
    because = {} if mark.because is None else {"dlq.because": mark.because}
    return _headers(mark.id, mark.attempt, {"dlq.fate": mark.fate.value} | because)


def needed_queue(dead_letter_id: DeadLetterId) -> str:
    """Return the queue of a dead letter; raises TopicMismatch where its topic has none."""
    queue = dead_letter_topic(dead_letter_id.topic)
    if queue is None:
        raise TopicMismatch(
            f"{dead_letter_id.topic} has no dead-letter queue in its file in topics/, and "
            f"{dead_letter_id.group} needs one"
        )
    return queue


def _headers(dead_letter_id: DeadLetterId, attempt: int, about: Mapping[str, str]) -> Headers:
    group, topic, partition, offset = map(str, dead_letter_id)
    named = {"dlq.group": group, "dlq.topic": topic, "dlq.partition": partition, "dlq.offset": offset}
    return [(name, key_bytes(value)) for name, value in {**named, "dlq.attempt": str(attempt), **about}.items()]
