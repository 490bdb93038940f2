"""Where a person rules about dead letters: lists them, shows one, says what is to become of it.

The one rule: a person only asks, and the stage does it; nothing is moved here. A parked record is not ruled about: it
shares the fate of the record that it waits behind.
"""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from clawstream.errors import OperatorError, UndecodableRecord
from clawstream.stream.avro import codec
from clawstream.stream.dead_letters import (
    DeadLetter,
    DeadLetterId,
    DeadLetterMark,
    Fate,
    KnownDeadLetters,
    Reason,
)
from clawstream.stream.log import Log, Raw
from clawstream.stream.topics import DLQ_SUFFIX, all_topics, dead_letter_topic


async def dead_letters(log: Log) -> list[DeadLetter]:
    """Return all dead letters of all queues, in the order in which they were set aside."""
    found, _ = await _read(log, None)
    return sorted(found, key=lambda dead_letter: (dead_letter.set_aside_at_ms, dead_letter.id))


async def shown(log: Log, name: str) -> dict[str, Any]:
    """Return all that is known of a dead letter, its record included; raises OperatorError if there is none."""
    dead_letter_id = dead_letter_id_of(name)
    found, raw = await _read(log, dead_letter_id)
    dead_letter = _known(found, dead_letter_id)
    assert raw is not None, "a letter is known from its copy"
    try:
        event: str | None = repr(codec().decode(raw.value))
    except UndecodableRecord:
        event = None
    headers = {header: None if value is None else value.decode("utf-8", "replace") for header, value in raw.headers}
    return plain(dead_letter) | {"headers": headers, "value_hex": (raw.value or b"").hex(), "event": event}


async def rule(
    log: Log, fate: Fate, *, dead_letter: str | None, stage: str | None, because: str | None
) -> list[DeadLetter]:
    """Ask for a fate of one dead letter, or of all of a stage's that wait to be ruled about; return them.

    Raises OperatorError for a dead letter that is missing, parked or done with.
    """
    if (dead_letter is None) == (stage is None):
        raise OperatorError("name one letter, or all of a stage with --stage; see `clawstream dlq list`")
    if because is not None and not because.strip():
        raise OperatorError("a reason is needed: whoever looks at the log later has nothing else to go by")
    found, _ = await _read(log, None)
    chosen = (
        [_ruleable(found, dead_letter_id_of(dead_letter))]
        if dead_letter is not None
        else [one for one in found if one.id.group == stage and one.unruled]
    )
    marks = [DeadLetterMark(id=one.id, key=one.key, attempt=one.attempt, fate=fate, because=because) for one in chosen]
    if marks:
        await log.mark(marks)
    return [replace(one, fate=fate, because=because) for one in chosen]


def dead_letter_id_of(name: str) -> DeadLetterId:
    """Return the id that `stage/topic/partition/offset` names; raises OperatorError for text of another form."""
    match name.split("/"):
        case [group, topic, partition, offset] if partition.isdecimal() and offset.isdecimal():
            return DeadLetterId(group, topic, int(partition), int(offset))
    raise OperatorError(
        f"{name!r} names no letter: expected stage/topic/partition/offset, as `clawstream dlq list` has"
    )


def plain(dead_letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as JSON has it."""
    return {
        "letter": str(dead_letter.id),
        "stage": dead_letter.id.group,
        "topic": dead_letter.id.topic,
        "partition": dead_letter.id.partition,
        "offset": dead_letter.id.offset,
        "key": None if dead_letter.key is None else dead_letter.key.decode("utf-8", "replace"),
        "reason": dead_letter.reason.value,
        "error": dead_letter.error,
        "attempt": dead_letter.attempt,
        "fate": dead_letter.fate.value,
        "because": dead_letter.because,
        "timestamp": _time(dead_letter.timestamp_ms),
        "set_aside_at": _time(dead_letter.set_aside_at_ms),
        "ruled_at": None if dead_letter.ruled_at_ms is None else _time(dead_letter.ruled_at_ms),
    }


def _ruleable(found: KnownDeadLetters, dead_letter_id: DeadLetterId) -> DeadLetter:
    dead_letter = _known(found, dead_letter_id)
    if dead_letter.reason is Reason.PARKED and dead_letter.waits:
        first = found.blocks(dead_letter.id.place, dead_letter.key, dead_letter.id.offset)
        behind = "one that is being replayed" if first is None else first
        raise OperatorError(f"{dead_letter_id} waits behind {behind}: rule about that one")
    if not dead_letter.unruled:
        raise OperatorError(f"{dead_letter_id} is ruled about already: {dead_letter.fate.value}")
    return dead_letter


def _known(found: KnownDeadLetters, dead_letter_id: DeadLetterId) -> DeadLetter:
    dead_letter = found.get(dead_letter_id)
    if dead_letter is None:
        raise OperatorError(f"no queue holds {dead_letter_id}; see `clawstream dlq list --all`")
    return dead_letter


async def _read(log: Log, wanted: DeadLetterId | None) -> tuple[KnownDeadLetters, Raw | None]:
    """Return all dead letters, and the newest copy of the wanted one."""
    found, copy = KnownDeadLetters(), None
    queues = [topic.name for topic in all_topics() if topic.name.endswith(DLQ_SUFFIX)]
    async for raws in log.follow_raw(queues, until_end=True):
        for raw in raws:
            found.read(raw)
            known = None if wanted is None else found.get(wanted)
            if known is not None and (dead_letter_topic(known.id.topic), known.copy_offset) == (raw.topic, raw.offset):
                copy = raw
    return found, copy


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
