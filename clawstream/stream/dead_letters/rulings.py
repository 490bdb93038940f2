"""Where a person rules about letters: looks them up, shows one, says what is to become of it.

The one rule: a person says what is to happen, and the stage does it; nothing is moved here. A parked record is not
ruled about: it shares the lot of the one that it waits behind.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from clawstream.errors import OperatorError, UndecodableRecord
from clawstream.stream.codec.avro import codec
from clawstream.stream.dead_letters.records import Fate, Letter, LetterId, Letters, Mark, Reason
from clawstream.stream.log import Raw
from clawstream.stream.topics import DLQ_SUFFIX, all_topics, dead_letter_topic


class Queues(Protocol):
    """What is needed of a log."""

    def follow_raw(self, topics: Sequence[str], *, until_end: bool = False) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes on the topics from their beginning."""

    async def mark(self, marks: Sequence[Mark]) -> None:
        """Say what became of letters, in their queues, acknowledged."""


async def letters(log: Queues) -> list[Letter]:
    """Return all letters of all queues, in the order in which they were set aside."""
    found, _ = await _read(log, None)
    return sorted(found, key=lambda letter: (letter.set_aside_at_ms, letter.id))


async def shown(log: Queues, name: str) -> dict[str, Any]:
    """Return all that is known of a letter, its record included; raises OperatorError where there is none."""
    letter_id = letter_id_of(name)
    found, raw = await _read(log, letter_id)
    letter = _known(found, letter_id)
    assert raw is not None, "a letter is known from its copy"
    try:
        event: str | None = repr(codec().decode(raw.value))
    except UndecodableRecord:
        event = None
    headers = {header: None if value is None else value.decode("utf-8", "replace") for header, value in raw.headers}
    return plain(letter) | {"headers": headers, "value_hex": (raw.value or b"").hex(), "event": event}


async def rule(log: Queues, fate: Fate, *, letter: str | None, stage: str | None, because: str | None) -> list[Letter]:
    """Ask for a fate of one letter, or of all of a stage that wait to be ruled about; return them.

    Raises OperatorError for a letter that is not there, or is parked or done with.
    """
    if (letter is None) == (stage is None):
        raise OperatorError("name one letter, or all of a stage with --stage; see `clawstream dlq list`")
    if because is not None and not because.strip():
        raise OperatorError("a reason is needed: whoever looks at the log later has nothing else to go by")
    found, _ = await _read(log, None)
    chosen = (
        [_ruleable(found, letter_id_of(letter))]
        if letter is not None
        else [one for one in found if one.id.group == stage and _open(one)]
    )
    marks = [Mark(id=one.id, key=one.key, attempt=one.attempt, fate=fate, because=because) for one in chosen]
    if marks:
        await log.mark(marks)
    return [replace(one, fate=fate, because=because) for one in chosen]


def letter_id_of(name: str) -> LetterId:
    """Return the letter that `stage/topic/partition/offset` names; raises OperatorError for other words."""
    match name.split("/"):
        case [group, topic, partition, offset] if partition.isdecimal() and offset.isdecimal():
            return LetterId(group, topic, int(partition), int(offset))
    raise OperatorError(
        f"{name!r} names no letter: expected stage/topic/partition/offset, as `clawstream dlq list` has"
    )


def plain(letter: Letter) -> dict[str, Any]:
    """Return a letter as JSON has it."""
    return {
        "letter": "/".join(map(str, letter.id)),
        "stage": letter.id.group,
        "topic": letter.id.topic,
        "partition": letter.id.partition,
        "offset": letter.id.offset,
        "key": None if letter.key is None else letter.key.decode("utf-8", "replace"),
        "reason": letter.reason.value,
        "error": letter.error,
        "attempt": letter.attempt,
        "fate": letter.fate.value,
        "because": letter.because,
        "timestamp": _time(letter.timestamp_ms),
        "set_aside_at": _time(letter.set_aside_at_ms),
        "ruled_at": None if letter.ruled_at_ms is None else _time(letter.ruled_at_ms),
    }


def _ruleable(found: Letters, letter_id: LetterId) -> Letter:
    letter = _known(found, letter_id)
    if letter.reason is Reason.PARKED and letter.waits:
        first = found.blocks(letter.id.place, letter.key, letter.id.offset)
        behind = "/".join(map(str, first)) if first is not None else "one that is being replayed"
        raise OperatorError(f"{'/'.join(map(str, letter_id))} waits behind {behind}: rule about that one")
    if not _open(letter):
        raise OperatorError(f"{'/'.join(map(str, letter_id))} is ruled about already: {letter.fate.value}")
    return letter


def _known(found: Letters, letter_id: LetterId) -> Letter:
    letter = found.get(letter_id)
    if letter is None:
        raise OperatorError(f"no queue holds {'/'.join(map(str, letter_id))}; see `clawstream dlq list --all`")
    return letter


def _open(letter: Letter) -> bool:
    return letter.fate is Fate.OPEN and letter.reason is not Reason.PARKED


async def _read(log: Queues, wanted: LetterId | None) -> tuple[Letters, Raw | None]:
    """Return all letters, and the newest copy of the one that is wanted."""
    found, copy = Letters(), None
    queues = [topic.name for topic in all_topics() if topic.name.endswith(DLQ_SUFFIX)]
    async for raws in log.follow_raw(queues, until_end=True):
        for raw in raws:
            found.read(raw)
            letter = None if wanted is None else found.get(wanted)
            if (
                letter is not None
                and raw.topic == dead_letter_topic(letter.id.topic)
                and raw.offset == letter.copy_offset
            ):
                copy = raw
    return found, copy


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
