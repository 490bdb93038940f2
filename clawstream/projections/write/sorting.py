"""Which of the records read become rows, and which are set aside. Pure, but for the dead letters, which grow.

The one rule: a key's record gets no row while an earlier one of the key on that partition waits, so that its rows have
no hole that nobody ruled about. dead_letters/records.py decides which records wait, as for every stage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from clawstream.errors import UndecodableRecord
from clawstream.projections.write.rows import TableRow, row
from clawstream.stream.dead_letters.records import (
    EXPIRED,
    DeadLetter,
    DeadLetterId,
    DeadLetterMark,
    Fate,
    KnownDeadLetters,
    dead_letter_of,
    parked,
    reason_of,
)
from clawstream.stream.log import Arrived, RecordBatch, Undecodable, key_of
from clawstream.stream.topics import dead_letter_topic

GROUP = "project"


class UnusableRecords(Exception):
    """Records of a batch that can't become rows; nothing of the batch was written."""

    def __init__(self, errors: Mapping[DeadLetterId, Exception]) -> None:
        super().__init__("; ".join(f"{'/'.join(map(str, at))}: {error}" for at, error in errors.items()))
        self.errors = errors


class SetAside(NamedTuple):
    """A record without a row."""

    dead_letter: DeadLetter
    error: Exception | None  # None: its queue has the dead letter already


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The outcome for one key's and partition's dead letters: those ruled about, and those that waited behind."""

    rows: Sequence[TableRow]
    used: Sequence[int]  # offsets
    discarded: Sequence[int]
    again: SetAside | None  # the record that can't be used after all; later ones wait on
    closed: Sequence[DeadLetterMark]


def sort_out(
    batch: RecordBatch, dead_letters: KnownDeadLetters, unusable: Mapping[DeadLetterId, Exception]
) -> list[SetAside]:
    """Return what of the batch is set aside, by what is known of it, and what waits behind that; `dead_letters` has it
    then.

    A record that can't be read, on a topic without a queue, holds up nothing: nobody could rule about it.
    """
    found = []
    for record in batch.records:
        dead_letter_id = DeadLetterId(GROUP, *batch.place, record.offset)
        known = dead_letters.get(dead_letter_id)
        if known is not None and not known.applied:
            found.append(SetAside(known, None))
            continue
        error = parked(dead_letters, batch.place, key_of(record), record.offset) or unusable.get(dead_letter_id)
        if error is None and isinstance(record, Undecodable) and dead_letter_topic(record.topic) is not None:
            error = UndecodableRecord(record.reason)
        if error is not None:
            dead_letter = dead_letter_of(
                dead_letter_id, record, error, attempt=1 if known is None else known.attempt + 1
            )
            dead_letters.add(dead_letter)
            found.append(SetAside(dead_letter, error))
    return found


def rows_of(records: Iterable[Arrived]) -> list[TableRow]:
    """Return the rows of the records; a record that can't be read has none.

    Raises UnusableRecords where some records can't become rows.
    """
    found: list[TableRow] = []
    errors: dict[DeadLetterId, Exception] = {}
    for record in records:
        if not isinstance(record, Undecodable):
            try:
                made = row(record)
            except Exception as error:  # noqa: BLE001  # as in the runner: it would break each projector in turn
                errors[DeadLetterId(GROUP, record.topic, record.partition, record.offset)] = error
            else:
                found += [] if made is None else [made]
    if errors:
        raise UnusableRecords(errors)
    return found


def released(
    ready: Sequence[DeadLetter], records: Mapping[int, Arrived], unusable: Mapping[DeadLetterId, Exception]
) -> Release:
    """Return the outcome for one key's and partition's dead letters, in order; `records` are by offset.

    A dead letter whose record the log has lost is discarded, since it can never be used.
    """
    rows: list[TableRow] = []
    used, discarded, closed = [], [], []
    again = None
    for dead_letter in (_expired(known) if known.id.offset not in records else known for known in ready):
        if dead_letter.fate is Fate.DISCARD:
            discarded.append(dead_letter.id.offset)
            closed.append(_closed(dead_letter, Fate.DISCARDED))
            continue
        try:
            rows += _usable(dead_letter, records[dead_letter.id.offset], unusable)
        except Exception as error:  # noqa: BLE001  # as in `rows_of`
            again = SetAside(_again(dead_letter, error), error)
            break
        used.append(dead_letter.id.offset)
        closed.append(_closed(dead_letter, Fate.REPLAYED))
    return Release(rows=rows, used=used, discarded=discarded, again=again, closed=closed)


def _usable(dead_letter: DeadLetter, record: Arrived, unusable: Mapping[DeadLetterId, Exception]) -> list[TableRow]:
    if isinstance(record, Undecodable):
        raise UndecodableRecord(record.reason)
    if dead_letter.id in unusable:
        raise unusable[dead_letter.id]
    made = row(record)
    return [] if made is None else [made]


def _expired(dead_letter: DeadLetter) -> DeadLetter:
    return dead_letter if dead_letter.fate is Fate.DISCARD else replace(dead_letter, fate=Fate.DISCARD, because=EXPIRED)


def _again(dead_letter: DeadLetter, error: Exception) -> DeadLetter:
    said = f"{type(error).__name__}: {error}"
    return replace(dead_letter, attempt=dead_letter.attempt + 1, reason=reason_of(error), error=said, fate=Fate.OPEN)


def _closed(dead_letter: DeadLetter, fate: Fate) -> DeadLetterMark:
    return DeadLetterMark(
        id=dead_letter.id, key=dead_letter.key, attempt=dead_letter.attempt, fate=fate, because=dead_letter.because
    )
