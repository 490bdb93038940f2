"""What stands in the dead-letter queues: records set aside, and what was ruled about them. Pure.

The one rule: a letter is named by stage and place on the log, so setting a record aside again is the same letter; only
an attempt of a higher number makes it new. Marks are records of the queue too, so the queue tells all there is to know.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from clawstream.errors import ParkedRecord, TopicMismatch, UndecodableRecord, UnusableEvent
from clawstream.stream.codec.headers import Headers, key_bytes
from clawstream.stream.log import Arrived, Place, Raw, key_of
from clawstream.stream.topics import dead_letter_topic

MESSAGE_CHARACTERS = 500
EXPIRED = "its record is past its topic's retention"  # why a letter that is to be used is discarded


class Reason(StrEnum):
    """Why a record is set aside."""

    UNDECODABLE = "undecodable"  # no schema explains its bytes
    UNUSABLE = "unusable"  # the stage refuses it, or what it would write
    FAILED = "failed"  # the stage broke on it
    PARKED = "parked"  # it follows one of its session that is set aside


class Fate(StrEnum):
    """What became of a letter."""

    OPEN = "open"
    REPLAY = "replay"  # asked for, and not done yet
    DISCARD = "discard"  # likewise
    REPLAYED = "replayed"
    DISCARDED = "discarded"


class LetterId(NamedTuple):
    """A record, and the stage that set it aside."""

    group: str
    topic: str
    partition: int
    offset: int

    @property
    def place(self) -> Place:
        """Where the record stands."""
        return Place(self.topic, self.partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One record that was set aside by one stage, and where matters stand."""

    id: LetterId
    key: bytes | None
    timestamp_ms: int  # of the record itself
    reason: Reason
    error: str  # its type and words
    attempt: int  # 1: it was never replayed
    story: Mapping[str, int]  # by topic: the first record that the state of its key follows from
    set_aside_at_ms: int
    copy_offset: int | None = None  # in the queue; None: it is not known to stand there
    fate: Fate = Fate.OPEN
    because: str | None = None  # what was said when it was discarded
    ruled_at_ms: int | None = None

    @property
    def waits(self) -> bool:
        """Whether it is still to be applied, or to be ruled about."""
        return self.fate in (Fate.OPEN, Fate.REPLAY, Fate.DISCARD)

    @property
    def applied(self) -> bool:
        """Whether the stage has used the record after all."""
        return self.fate is Fate.REPLAYED


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is said of a letter in its queue."""

    id: LetterId
    key: bytes | None
    attempt: int
    fate: Fate
    because: str | None = None


class Letters:
    """The queues as read so far; `group` keeps one stage's letters alone."""

    def __init__(self, group: str | None = None) -> None:
        self._group = group
        self._letters: dict[LetterId, Letter] = {}
        self._by_key: dict[tuple[int, bytes | None], list[LetterId]] = {}
        self.changes = 0
        self.positions: dict[Place, int] = {}

    def __iter__(self) -> Iterator[Letter]:
        """Yield the letters in the order in which they were first set aside."""
        return iter(list(self._letters.values()))

    def get(self, letter_id: LetterId) -> Letter | None:
        """Return the letter; None: that record was not set aside."""
        return self._letters.get(letter_id)

    def read(self, raw: Raw) -> None:
        """Take in a record of a queue; one that was read before changes nothing."""
        queue = Place(raw.topic, raw.partition)
        if raw.offset < self.positions.get(queue, 0):
            return
        self.positions[queue] = raw.offset + 1
        found = _written(raw)
        if found is None or self._group not in (None, found.id.group):
            return
        if isinstance(found, Mark):
            self.mark(found.id, found.attempt, found.fate, found.because, raw.timestamp_ms)
        else:
            self.add(found)

    def add(self, letter: Letter) -> None:
        """A record is set aside."""
        known = self._letters.get(letter.id)
        if known is None:
            self._by_key.setdefault((letter.id.partition, letter.key), []).append(letter.id)
        elif known.attempt >= letter.attempt:
            return
        self._letters[letter.id] = letter
        self.changes += 1

    def mark(self, letter_id: LetterId, attempt: int, fate: Fate, because: str | None, at_ms: int | None) -> None:
        """Something is said of a letter; of an attempt that is over, or of no letter that we know, it is nothing."""
        known = self._letters.get(letter_id)
        if known is not None and known.attempt == attempt and known.waits:
            self._letters[letter_id] = replace(known, fate=fate, because=because or known.because, ruled_at_ms=at_ms)
            self.changes += 1

    def of_key(self, partition: int, key: bytes | None) -> list[Letter]:
        """Return the letters of a key in the log's order."""
        found = [self._letters[letter_id] for letter_id in self._by_key.get((partition, key), ())]
        return sorted(found, key=lambda letter: (letter.timestamp_ms, letter.id))

    def blocks(self, place: Place, key: bytes | None, offset: int) -> LetterId | None:
        """Return the first record of the key that waits before `offset`; None: nothing is in the way."""
        for letter in self.of_key(place.partition, key):
            if letter.waits and letter.id.topic == place.topic and letter.id.offset < offset:
                return letter.id
        return None

    def waiting(self, partition: int) -> list[bytes | None]:
        """Return the keys with letters that wait."""
        return [
            key
            for (number, key), ids in self._by_key.items()
            if number == partition and any(self._letters[letter_id].waits for letter_id in ids)
        ]

    def due(self, partition: int) -> list[bytes | None]:
        """Return the keys of which something is to be applied or closed now."""
        return [key for (number, key) in self._by_key if number == partition and self.ready(partition, key)]

    def ready(self, partition: int, key: bytes | None) -> list[Letter]:
        """Return what is to be applied or closed of a key, in order: what was ruled about and what waited behind.

        As in `blocks` a record waits behind those of its own topic alone.
        """
        waiting = [letter for letter in self.of_key(partition, key) if letter.waits]
        held = {
            letter.id.topic for letter in waiting if letter.fate is Fate.OPEN and letter.reason is not Reason.PARKED
        }
        return [
            letter
            for letter in waiting
            if letter.fate is not Fate.OPEN or (letter.reason is Reason.PARKED and letter.id.topic not in held)
        ]


def parked(letters: Letters, place: Place, key: bytes | None, offset: int) -> ParkedRecord | None:
    """Return why the record there has to wait; None: it need not."""
    first = letters.blocks(place, key, offset)
    return None if first is None else ParkedRecord(f"it waits behind {first.topic}-{first.partition}-{first.offset}")


def reason_of(error: Exception) -> Reason:
    """Return what kind of trouble an error is."""
    if isinstance(error, ParkedRecord):
        return Reason.PARKED
    if isinstance(error, UndecodableRecord):
        return Reason.UNDECODABLE
    return Reason.UNUSABLE if isinstance(error, UnusableEvent) else Reason.FAILED


def letter_of(
    letter_id: LetterId, record: Arrived, error: Exception, *, attempt: int, story: Mapping[str, int] | None = None
) -> Letter:
    """Return the letter of a record that is being set aside, before its copy is known to stand in the queue."""
    return Letter(
        id=letter_id,
        key=key_of(record),
        timestamp_ms=record.timestamp_ms,
        reason=reason_of(error),
        error=f"{type(error).__name__}: {error}",
        attempt=attempt,
        story=story or {},
        set_aside_at_ms=record.timestamp_ms,
    )


def letter_headers(
    letter_id: LetterId, timestamp_ms: int, *, error: Exception, attempt: int, story: Mapping[str, int]
) -> Headers:
    """Return what a queue adds to a record's own headers."""
    return _headers(
        _named(letter_id, attempt)
        | {
            "dlq.timestamp": str(timestamp_ms),
            "dlq.reason": reason_of(error).value,
            "dlq.error.class": type(error).__name__,
            "dlq.error.message": str(error)[:MESSAGE_CHARACTERS],
            "dlq.story": json.dumps(dict(story)),
        }
    )


def _written(raw: Raw) -> "Letter | Mark | None":
    """Return what a record of a queue says; None: it is not one of ours, whoever wrote it."""
    try:
        said = {
            name: value.decode("utf-8", "surrogatepass")
            for name, value in raw.headers
            if name.startswith("dlq.") and value is not None
        }
        letter_id = LetterId(said["dlq.group"], said["dlq.topic"], int(said["dlq.partition"]), int(said["dlq.offset"]))
        attempt = int(said.get("dlq.attempt", "1"))
        if "dlq.fate" in said:
            fate = Fate(said["dlq.fate"])
            return Mark(id=letter_id, key=raw.key, attempt=attempt, fate=fate, because=said.get("dlq.because"))
        return Letter(
            id=letter_id,
            key=raw.key,
            timestamp_ms=int(said["dlq.timestamp"]),
            reason=Reason(said.get("dlq.reason", Reason.UNUSABLE)),
            error=f"{said['dlq.error.class']}: {said['dlq.error.message']}",
            attempt=attempt,
            story=json.loads(said.get("dlq.story", "{}")),
            set_aside_at_ms=raw.timestamp_ms,
            copy_offset=raw.offset,
        )
    except (KeyError, ValueError):
        return None


def mark_headers(mark: Mark) -> Headers:
    """Return the headers of a mark, which is all that it has."""
    because = {} if mark.because is None else {"dlq.because": mark.because}
    return _headers(_named(mark.id, mark.attempt) | {"dlq.fate": mark.fate.value} | because)


def needed_queue(letter_id: LetterId) -> str:
    """Return the queue of a letter; raises TopicMismatch where its topic has none."""
    queue = dead_letter_topic(letter_id.topic)
    if queue is None:
        raise TopicMismatch(
            f"{letter_id.topic} has no dead-letter queue in its file in topics/, and {letter_id.group} needs one"
        )
    return queue


def _named(letter_id: LetterId, attempt: int) -> dict[str, str]:
    return {
        "dlq.group": letter_id.group,
        "dlq.topic": letter_id.topic,
        "dlq.partition": str(letter_id.partition),
        "dlq.offset": str(letter_id.offset),
        "dlq.attempt": str(attempt),
    }


def _headers(said: Mapping[str, str]) -> Headers:
    return [(name, key_bytes(value)) for name, value in said.items()]
