"""What a worker does about records that were set aside: skips them, holds up what follows, uses them once asked.

The one rule: a replayed dead letter is used in its original place. The state of its key is folded again from the log
without it; then the dead letter is applied, then the records parked behind it, in order, before any later record.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Generic, TypeVar

from clawstream.errors import ParkedRecord, TryLater, UndecodableRecord, UnusableEvent
from clawstream.stream.dead_letters.records import (
    EXPIRED,
    DeadLetter,
    DeadLetterId,
    DeadLetterMark,
    Fate,
    Reason,
    dead_letter_of,
    parked,
)
from clawstream.stream.dead_letters.rulings import DeadLetterReader
from clawstream.stream.log import Arrived, Log, PartitionId, Undecodable, key_of
from clawstream.stream.runner.calling import wait_before
from clawstream.stream.runner.partition_state import PartitionState, PendingRecord
from clawstream.stream.runner.pending_records import PendingRecords
from clawstream.stream.stage import Stage, Step

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")


class StageQuarantine(Generic[S, C]):
    """The dead letters of a stage, as its queues say; made again whenever partitions are given to the worker."""

    def __init__(self, stage: Stage[S, C], to: Log, pending_records: PendingRecords[S, C], *, retry_s: float) -> None:
        self._stage = stage
        self._log = to
        self._pending = pending_records
        self._retry_s = retry_s
        self._dead = DeadLetterReader(stage.name, stage.reads, to, retry_s=retry_s)
        self.dead_letters = self._dead.dead_letters
        self._released_at: dict[int, int] = {}  # by partition: the value of `dead_letters.changes` that is dealt with

    async def follow(self) -> None:
        """Read the queues, then what arrives, until cancelled."""
        await self._dead.follow()

    async def current(self) -> None:
        """Return once everything that stood in the queues when `follow` began is read."""
        await self._dead.current.wait()

    def held(self, number: int) -> frozenset[str]:
        """Return the keys with waiting dead letters, which get no tick for now."""
        return frozenset(map(_text, self.dead_letters.waiting(number))) if self._stage.ordered else frozenset()

    def unused(self, record: Arrived) -> bool:
        """Return whether the record is set aside and was not used since."""
        dead_letter = self.dead_letters.get(
            DeadLetterId(self._stage.name, record.topic, record.partition, record.offset)
        )
        return dead_letter is not None and not dead_letter.applied

    def blocked(self, place: PartitionId, record: Arrived) -> ParkedRecord | None:
        """Return why the record has to wait; None: it need not."""
        if not self._stage.ordered:
            return None
        return parked(self.dead_letters, place, key_of(record), record.offset)

    def set_aside(
        self, partition: PartitionState[S, C], pending: PendingRecord, record: Arrived, error: Exception
    ) -> None:
        """Copy the record to its queue; in an ordered stage the later records of its key wait from now on."""
        place = PartitionId(record.topic, record.partition)
        pending.key = _key_text(record)
        dead_letter_id = DeadLetterId(self._stage.name, *place, record.offset)
        rebuild_offsets = partition.fold.rebuild_offsets(pending.key)
        self.dead_letters.add(
            dead_letter_of(dead_letter_id, record, error, attempt=pending.attempt, rebuild_offsets=rebuild_offsets)
        )
        self._pending.set_aside(partition, pending, error)

    async def release(self, partition: PartitionState[S, C]) -> None:
        """Use and close this partition's dead letters that were ruled about, as far as the queues were read."""
        changes = self.dead_letters.changes
        if not partition.live or partition.gone or self._released_at.get(partition.number) == changes:
            return
        for key in self.dead_letters.due(partition.number):
            if not partition.gone and not await self._release(partition, key):
                return
        self._released_at[partition.number] = changes

    async def _release(self, partition: PartitionState[S, C], key: bytes | None) -> bool:
        """Return whether the key's dead letters were released; False: the log is away, to be tried again."""
        ready: Sequence[DeadLetter] = self.dead_letters.ready(partition.number, key)
        try:
            records = await self._read(partition, key, ready)
            ready = await self._usable(ready, {DeadLetterId(self._stage.name, *_at(record)) for record in records})
        except TryLater as error:
            log.warning("stage=%s partition=%d release=failed reason=%s", self._stage.name, partition.number, error)
            return False
        if partition.gone:
            return False
        self._forget(partition, records)
        if not self._stage.ordered:
            self._remember(partition, records, above=-1)
        by_id = {DeadLetterId(self._stage.name, *_at(one)): at for at, one in enumerate(records)}
        closing: list[DeadLetterMark] = []
        pending_records: list[PendingRecord] = []
        above = -1
        for dead_letter in ready:
            fate = Fate.DISCARDED if dead_letter.fate is Fate.DISCARD else Fate.REPLAYED
            at = by_id.get(dead_letter.id)
            if self._stage.ordered and at is not None:
                self._remember(partition, records[:at], above=above)
                above = at
            if fate is Fate.REPLAYED:
                pending = PendingRecord(
                    place=dead_letter.id.place, offset=dead_letter.id.offset, attempt=dead_letter.attempt + 1,
                    rebuild_offsets=dead_letter.rebuild_offsets,
                    released=asyncio.Event(),
                )  # fmt: skip
                if (
                    not self._use(partition, pending, dead_letter, None if at is None else records[at])
                    and self._stage.ordered
                ):
                    break
                pending_records.append(pending)
            closing.append(
                DeadLetterMark(
                    id=dead_letter.id, key=key, attempt=dead_letter.attempt, fate=fate, because=dead_letter.because
                )
            )
        else:
            if self._stage.ordered:
                self._remember(partition, records, above=above)
        for mark in closing:
            self.dead_letters.mark(mark.id, mark.attempt, mark.fate, mark.because, None)
        log.info("stage=%s partition=%d released=%d", self._stage.name, partition.number, len(closing))
        self._pending.start(partition, self._close(partition, closing, pending_records))
        return True

    async def _read(
        self, partition: PartitionState[S, C], key: bytes | None, ready: Sequence[DeadLetter]
    ) -> list[Arrived]:
        """Return the records that the key's state follows from, and the dead letters', in the log clock's order."""
        rebuild_offsets = [dead_letter.rebuild_offsets for dead_letter in ready] + [
            partition.fold.rebuild_offsets(_text(key))
        ]
        rebuild_offsets += [{dead_letter.id.topic: dead_letter.id.offset} for dead_letter in ready]
        found: list[Arrived] = []
        for place in partition.places:
            firsts = [
                rebuild_offsets[place.topic] for rebuild_offsets in rebuild_offsets if place.topic in rebuild_offsets
            ]
            if firsts:
                ranges = {place: (min(firsts), partition.read_up_to(place))}
                async with aclosing(self._log.replay(ranges, key=key)) as there:
                    async for records in there:
                        found += records
        return sorted(found, key=lambda record: record.timestamp_ms)

    async def _usable(self, ready: Sequence[DeadLetter], found: Collection[DeadLetterId]) -> Sequence[DeadLetter]:
        """Return the dead letters, to be discarded where the log has lost the record: nothing can be made of it any
        more.
        """
        if all(dead_letter.id in found for dead_letter in ready):
            return ready
        begins = await self._log.begin_offsets(self._stage.reads)
        return [
            replace(dead_letter, fate=Fate.DISCARD, because=EXPIRED)
            if dead_letter.fate is not Fate.DISCARD and dead_letter.id.offset < begins.get(dead_letter.id.place, 0)
            else dead_letter
            for dead_letter in ready
        ]

    def _forget(self, partition: PartitionState[S, C], records: Sequence[Arrived]) -> None:
        for key in {_key_text(record) for record in records}:
            partition.fold.forget(key)

    def _remember(self, partition: PartitionState[S, C], records: Sequence[Arrived], *, above: int) -> None:
        """Fold the records after index `above` that were done, without writing or calling anything."""
        for record in records[above + 1 :]:
            if not isinstance(record, Undecodable) and not self.unused(record):
                with suppress(Exception):  # as in PartitionState.remember
                    partition.fold.apply(record)

    def _use(
        self, partition: PartitionState[S, C], pending: PendingRecord, dead_letter: DeadLetter, record: Arrived | None
    ) -> bool:
        """Apply the dead letter's record; False where it is set aside again."""
        step: Step[S, C] | None = None
        try:
            if record is None:
                raise UnusableEvent("the record was not found on its topic")  # noqa: TRY301
            if isinstance(record, Undecodable):
                raise UndecodableRecord(record.reason)  # noqa: TRY301
            pending.traceparent = record.traceparent
            step = partition.fold.apply(record)
        except Exception as error:  # noqa: BLE001  # as in the runner
            self.dead_letters.add(replace(dead_letter, attempt=pending.attempt, fate=Fate.OPEN, reason=Reason.UNUSABLE))
            self._pending.set_aside(partition, pending, error)
            return False
        self._pending.follow_up(partition, pending, step)
        return True

    async def _close(
        self, partition: PartitionState[S, C], marks: Sequence[DeadLetterMark], pending_records: Sequence[PendingRecord]
    ) -> None:
        """Mark the dead letters as done in their queues, once all that they led to has ended."""
        for pending in pending_records:
            assert pending.released is not None, "the pending record of a dead letter says when it has ended"
            await pending.released.wait()
        attempt = 0
        async with partition.copying:  # the copies of parked records come first, so that each mark has its dead letter
            while True:
                try:
                    await self._log.mark(marks)
                except TryLater as error:
                    log.warning("stage=%s marks=failed reason=%s", self._stage.name, error)
                    await asyncio.sleep(wait_before(attempt, self._retry_s))
                    attempt += 1
                else:
                    return


def _at(record: Arrived) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


def _key_text(record: Arrived) -> str:
    return _text(record.raw.key) if isinstance(record, Undecodable) else record.key


def _text(key: bytes | None) -> str:
    """Return a key as the text that records have; "" for bytes that are no text, as no key of ours is."""
    try:
        return (key or b"").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return ""
