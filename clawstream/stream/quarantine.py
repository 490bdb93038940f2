"""How readers of the log set records aside, and how a person's rulings (replay or discard) are noted and carried out.

A record is in its queue, acknowledged, before its reader moves past it. A ruling is carried out before the queue says
that this is done. So a reader that is cut off in between finds in the queue what is left to do. A person only asks; the
stage carries the ruling out. A parked record gets no ruling: it shares the fate of the record that it waits behind.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from clawstream.errors import OperatorError, ParkedRecord, TryLater, UndecodableRecord
from clawstream.stream.avro import codec
from clawstream.stream.dead_letters import DeadLetter, KnownDeadLetters, Reason, reason_of
from clawstream.stream.log import (
    Arrived,
    DeadLetterId,
    DeadLetterMark,
    Fate,
    Log,
    PartitionId,
    Raw,
    Undecodable,
    key_of,
)
from clawstream.stream.runner.breaker import LONGEST_WAIT_S
from clawstream.stream.runner.calling import until_done
from clawstream.stream.stage import Record
from clawstream.stream.topics import DLQ_SUFFIX, all_topics, dead_letter_topic

log = logging.getLogger(__name__)


class Quarantine:
    """The dead letters of `name`, a reader of `topics`. With `ordered`, later records of a key wait behind them.

    `known` holds the queues' dead letters; those that the reader itself sets aside are added at once. `on_change` is
    called when the queues have something new. A wait for the queues ends with TryLater once `stop` is set.
    """

    def __init__(
        self,
        name: str,
        topics: Iterable[str],
        to: Log,
        *,
        ordered: bool,
        retry_s: float,
        longest_s: float = LONGEST_WAIT_S,
        stop: asyncio.Event | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.ordered = ordered
        self.known = KnownDeadLetters(name)
        self.current = asyncio.Event()  # set once everything that stood in the queues when `follow` began is read
        self._log = to
        self._retry_s, self._longest_s = retry_s, longest_s
        self._stop = stop or asyncio.Event()
        self._on_change = on_change
        self._queues = [queue for queue in map(dead_letter_topic, topics) if queue is not None]
        # By partition: `known.changes` when rulings were last carried out, and the reader's positions if some waited.
        self._carried_out: dict[int, tuple[int, Mapping[PartitionId, int] | None]] = {}

    async def follow(self) -> None:
        """Read the queues, then what arrives, until cancelled."""
        if self._queues:
            await until_done(
                self._follow, f"stage={self.name} dead_letters=unread", retry_s=self._retry_s, longest_s=self._longest_s
            )
        self.current.set()

    async def _follow(self) -> None:
        await self._read_queues(until_end=True)
        self.current.set()
        self._on_change()
        await self._read_queues(until_end=False)

    async def _read_queues(self, *, until_end: bool) -> None:
        async with aclosing(self._log.follow_raw(self._queues, until_end=until_end)) as there:
            async for raws in there:
                for raw in raws:
                    self.known.read(raw)
                self._on_change()

    def id_of(self, record: Arrived) -> DeadLetterId:
        """Return the name of the record's dead letter."""
        return DeadLetterId(self.name, record.topic, record.partition, record.offset)

    def is_unused(self, record: Arrived) -> bool:
        """Return whether the record was set aside and has not been used since."""
        dead_letter = self.known.get(self.id_of(record))
        return dead_letter is not None and not dead_letter.applied

    def usable(self, record: Arrived) -> Record:
        """Return the record; raises ParkedRecord where it has to wait, UndecodableRecord where it has no event."""
        if self.ordered:
            first = self.known.blocks(PartitionId(record.topic, record.partition), key_of(record), record.offset)
            if first is not None:
                raise ParkedRecord(f"it waits behind {first.topic}-{first.partition}-{first.offset}")
        return readable(record)

    def dead_letter(
        self, record: Arrived, error: Exception, rebuild_offsets: Mapping[str, int] | None = None
    ) -> DeadLetter:
        """Return the dead letter of a record that is to be set aside; `set_aside` then adds it to `known`."""
        known = self.known.get(self.id_of(record))
        return DeadLetter(
            id=self.id_of(record),
            key=key_of(record),
            timestamp_ms=record.timestamp_ms,
            reason=reason_of(error),
            error=f"{type(error).__name__}: {error}",
            attempt=1 if known is None else known.attempt + 1,
            rebuild_offsets=rebuild_offsets or {},
            set_aside_at_ms=record.timestamp_ms,
        )

    async def set_aside(self, dead_letter: DeadLetter, error: Exception) -> None:
        """Copy the record to its queue, then add it to `known`. A reader that is cut off in between copies it again."""
        level = logging.WARNING if isinstance(error, ParkedRecord) else logging.ERROR
        log.log(level, "record=%s-%s-%s dead_letter=%r", *dead_letter.id[1:], dead_letter.error)
        await self._until_done(lambda: self._log.set_aside(dead_letter.id, error=error, attempt=dead_letter.attempt))
        self.known.add(dead_letter)

    async def close(self, marks: Sequence[DeadLetterMark]) -> None:
        """Write to the queues what became of dead letters."""
        await self._until_done(lambda: self._log.mark(marks))
        for mark in marks:
            self.known.mark(mark)

    async def carry_out(
        self,
        number: int,
        positions: Mapping[PartitionId, int],
        use: Callable[[Sequence[DeadLetter]], Awaitable[bool]],
    ) -> None:
        """For each key of the partition, call `use` with its dead letters that are `ready`, in the log's order.

        Only those before the reader's `positions` are given. If `use` returns False or raises TryLater, the next call
        of this method tries again.
        """
        changes, left_at = self.known.changes, None
        if self._carried_out.get(number) in ((changes, None), (changes, positions)):
            return
        for key in self.known.due(number):
            ready = self.known.ready(number, key)
            reached = [one for one in ready if one.id.offset < positions.get(one.id.place, 0)]
            try:
                if reached and not await use(reached):
                    return
            except TryLater as error:
                log.warning("stage=%s partition=%d release=failed reason=%s", self.name, number, error)
                return
            if reached != ready:
                left_at = dict(positions)  # the rest is carried out once the reader has come to it
        self._carried_out[number] = changes, left_at

    async def read(self, dead_letters: Sequence[DeadLetter]) -> dict[DeadLetterId, Arrived]:
        """Return the key's records from the first to the last of the dead letters, which are of one key and partition.

        Records that the log has lost are missing.
        """
        offsets = [dead_letter.id.offset for dead_letter in dead_letters]
        ranges = {dead_letters[0].id.place: (min(offsets), max(offsets) + 1)}
        async with aclosing(self._log.replay(ranges, key=dead_letters[0].key)) as there:
            return {self.id_of(record): record async for records in there for record in records}

    async def _until_done(self, work: Callable[[], Awaitable[None]]) -> None:
        await until_done(
            work, f"stage={self.name} dead_letter=failed", retry_s=self._retry_s, longest_s=self._longest_s,
            stop=self._stop,
        )  # fmt: skip


def readable(record: Arrived) -> Record:
    """Return the record; raises UndecodableRecord where it has no event."""
    if isinstance(record, Undecodable):
        raise UndecodableRecord(record.reason)
    return record


async def dead_letters(log: Log) -> list[DeadLetter]:
    """Return all dead letters of all queues, in the order in which they were set aside."""
    found, _ = await _read(log, None)
    return sorted(found, key=lambda dead_letter: (dead_letter.set_aside_at_ms, dead_letter.id))


async def shown(log: Log, name: str) -> dict[str, Any]:
    """Return all that is known of a dead letter, its record included; raises OperatorError for an unknown one."""
    dead_letter_id = dead_letter_id_of(name)
    found, raw = await _read(log, dead_letter_id)
    dead_letter = _known(found, dead_letter_id)
    assert raw is not None, "a dead letter is known from its copy"
    try:
        event: str | None = repr(codec().decode(raw.value))
    except UndecodableRecord:
        event = None
    headers = {header: None if value is None else value.decode("utf-8", "replace") for header, value in raw.headers}
    return plain(dead_letter) | {"headers": headers, "value_hex": (raw.value or b"").hex(), "event": event}


async def rule(
    log: Log, fate: Fate, *, dead_letter: str | None, stage: str | None, because: str | None
) -> list[DeadLetter]:
    """Ask for a fate of one dead letter, or of all of a stage that have no ruling yet; return these dead letters.

    Raises OperatorError for a dead letter that is unknown, parked or ruled about already.
    """
    if (dead_letter is None) == (stage is None):
        raise OperatorError("name one dead letter, or all of a stage with --stage; see `clawstream dlq list`")
    if because is not None and not because.strip():
        raise OperatorError("a reason is needed: people who look at the log later have nothing else to go by")
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
        f"{name!r} names no dead letter: expected stage/topic/partition/offset, as `clawstream dlq list` shows"
    )


def plain(dead_letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as plain values for JSON."""
    return {
        "dead_letter": str(dead_letter.id),
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
    """Return all dead letters, and the newest copy of the wanted one's record."""
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
