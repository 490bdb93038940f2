"""Which records become rows, and which dead letters do once they are ruled about. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clawstream.projections.write.rows import TableRow, row
from clawstream.stream.dead_letters import DeadLetter, DeadLetterId, DeadLetterMark, Fate, expired
from clawstream.stream.log import Arrived, Undecodable
from clawstream.stream.quarantine import readable

GROUP = "project"


class UnusableRecords(Exception):
    """Records of a batch that can't become rows; nothing of the batch was written."""

    def __init__(self, errors: Mapping[DeadLetterId, Exception]) -> None:
        super().__init__("; ".join(f"{'/'.join(map(str, at))}: {error}" for at, error in errors.items()))
        self.errors = errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The outcome for one key's and partition's dead letters: those ruled about, and those that waited behind."""

    rows: Sequence[TableRow]
    closed: Sequence[DeadLetterMark] = ()
    again: tuple[DeadLetter, Exception] | None = None  # can't be used after all; later ones wait on


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
    ready: Sequence[DeadLetter],
    records: Mapping[DeadLetterId, Arrived],
    unusable: Mapping[DeadLetterId, Exception],
) -> Release:
    """Return the outcome for one key's and partition's dead letters, in order."""
    rows: list[TableRow] = []
    closed: list[DeadLetterMark] = []
    for dead_letter in expired(ready, records):
        if dead_letter.fate is not Fate.DISCARD:
            try:
                if dead_letter.id in unusable:
                    raise unusable[dead_letter.id]  # noqa: TRY301
                made = row(readable(records[dead_letter.id]))
            except Exception as error:  # noqa: BLE001  # as in `rows_of`
                return Release(rows=rows, closed=closed, again=(dead_letter.again(error), error))
            rows += [] if made is None else [made]
        closed.append(dead_letter.closed)
    return Release(rows=rows, closed=closed)
