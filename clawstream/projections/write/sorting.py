"""Which of the records that were read become rows, and which are set aside. Pure, but for the letters, which grow.

The one rule: a key has no row of a record while one before it on that partition waits, so that its rows have no hole
that nobody ruled about. Who waits, and for what, is decided by dead_letters/records.py, as it is for every stage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from clawstream.errors import UndecodableRecord
from clawstream.projections.write.rows import Row, row
from clawstream.stream.dead_letters.records import (
    EXPIRED,
    Fate,
    Letter,
    LetterId,
    Letters,
    Mark,
    letter_of,
    parked,
    reason_of,
)
from clawstream.stream.log import Arrived, Batch, Undecodable, key_of
from clawstream.stream.topics import dead_letter_topic

GROUP = "project"


class UnusableRecords(Exception):
    """Records of a batch of which no rows can be; nothing of the batch was written."""

    def __init__(self, errors: Mapping[LetterId, Exception]) -> None:
        super().__init__("; ".join(f"{'/'.join(map(str, at))}: {error}" for at, error in errors.items()))
        self.errors = errors


class SetAside(NamedTuple):
    """A record without a row."""

    letter: Letter
    error: Exception | None  # None: its queue has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What becomes of letters of one key and partition that were ruled about, and of what waited behind them."""

    rows: Sequence[Row]
    used: Sequence[int]  # offsets
    discarded: Sequence[int]
    again: SetAside | None  # can't be used after all; what comes after it waits on
    closed: Sequence[Mark]


def sort_out(batch: Batch, letters: Letters, unusable: Mapping[LetterId, Exception]) -> list[SetAside]:
    """Return what of the batch is set aside, by what is known of it, and what waits behind that; `letters` has it then.

    What can't be read on a topic without a queue is in nobody's way: nobody could rule about it.
    """
    found = []
    for record in batch.records:
        letter_id = LetterId(GROUP, *batch.place, record.offset)
        known = letters.get(letter_id)
        if known is not None and not known.applied:
            found.append(SetAside(known, None))
            continue
        error = parked(letters, batch.place, key_of(record), record.offset) or unusable.get(letter_id)
        if error is None and isinstance(record, Undecodable) and dead_letter_topic(record.topic) is not None:
            error = UndecodableRecord(record.reason)
        if error is not None:
            letter = letter_of(letter_id, record, error, attempt=1 if known is None else known.attempt + 1)
            letters.add(letter)
            found.append(SetAside(letter, error))
    return found


def rows_of(records: Iterable[Arrived]) -> list[Row]:
    """Return the rows of the records; what can't be read has none.

    Raises UnusableRecords where none can be made of some.
    """
    found: list[Row] = []
    errors: dict[LetterId, Exception] = {}
    for record in records:
        if not isinstance(record, Undecodable):
            try:
                made = row(record)
            except Exception as error:  # noqa: BLE001  # as in the runner: it would break each projector in turn
                errors[LetterId(GROUP, record.topic, record.partition, record.offset)] = error
            else:
                found += [] if made is None else [made]
    if errors:
        raise UnusableRecords(errors)
    return found


def released(
    ready: Sequence[Letter], records: Mapping[int, Arrived], unusable: Mapping[LetterId, Exception]
) -> Release:
    """Return what becomes of letters of one key and partition, in order; `records` has what stands at an offset.

    Of a record that the log has no more nothing can be made, now or later: its letter is discarded.
    """
    rows: list[Row] = []
    used, discarded, closed = [], [], []
    again = None
    for letter in (_expired(known) if known.id.offset not in records else known for known in ready):
        if letter.fate is Fate.DISCARD:
            discarded.append(letter.id.offset)
            closed.append(_closed(letter, Fate.DISCARDED))
            continue
        try:
            rows += _usable(letter, records[letter.id.offset], unusable)
        except Exception as error:  # noqa: BLE001  # as in `rows_of`
            again = SetAside(_again(letter, error), error)
            break
        used.append(letter.id.offset)
        closed.append(_closed(letter, Fate.REPLAYED))
    return Release(rows=rows, used=used, discarded=discarded, again=again, closed=closed)


def _usable(letter: Letter, record: Arrived, unusable: Mapping[LetterId, Exception]) -> list[Row]:
    if isinstance(record, Undecodable):
        raise UndecodableRecord(record.reason)
    if letter.id in unusable:
        raise unusable[letter.id]
    made = row(record)
    return [] if made is None else [made]


def _expired(letter: Letter) -> Letter:
    return letter if letter.fate is Fate.DISCARD else replace(letter, fate=Fate.DISCARD, because=EXPIRED)


def _again(letter: Letter, error: Exception) -> Letter:
    said = f"{type(error).__name__}: {error}"
    return replace(letter, attempt=letter.attempt + 1, reason=reason_of(error), error=said, fate=Fate.OPEN)


def _closed(letter: Letter, fate: Fate) -> Mark:
    return Mark(id=letter.id, key=letter.key, attempt=letter.attempt, fate=fate, because=letter.because)
