"""How a worker treats records that were set aside: it skips them, and uses them when a person asks for it.

To use a dead letter, its key's state is folded again from the log. In an `ordered` stage later records of the key are
parked behind the dead letter, and all of these are used in their original places. Elsewhere the dead letter comes last.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Generic, TypeVar

from clawstream.errors import UnusableEvent
from clawstream.stream.dead_letters import DeadLetter, expired
from clawstream.stream.log import Arrived, DeadLetterMark, Fate, Log, Undecodable, key_of
from clawstream.stream.quarantine import Quarantine, readable
from clawstream.stream.runner.partition_state import PartitionState, PendingRecord
from clawstream.stream.runner.pending_records import PendingRecords
from clawstream.stream.stage import Stage

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")


class StageQuarantine(Quarantine, Generic[S, C]):
    """The dead letters of a stage; made again whenever the worker is given partitions."""

    def __init__(self, stage: Stage[S, C], to: Log, pending_records: PendingRecords[S, C], *, retry_s: float) -> None:
        super().__init__(stage.name, stage.reads, to, ordered=stage.ordered, retry_s=retry_s)
        self._pending = pending_records

    def held(self, number: int) -> frozenset[str]:
        """Return the keys that get no tick, since they have waiting dead letters and the stage is `ordered`."""
        return frozenset(map(_text, self.known.waiting(number))) if self.ordered else frozenset()

    def refuse(
        self, partition: PartitionState[S, C], pending: PendingRecord, record: Arrived, error: Exception
    ) -> None:
        """Set the record aside; when this returns, its copy is on the way to the queue, not yet acknowledged."""
        dead_letter = self.dead_letter(record, error, partition.fold.rebuild_offsets(pending.key))
        pending.attempt = dead_letter.attempt
        self.known.add(dead_letter)
        self._pending.set_aside(partition, pending, error)

    async def release(self, partition: PartitionState[S, C]) -> None:
        """Use or discard this partition's dead letters that were ruled about, as far as the queues were read."""
        if partition.live and not partition.gone:
            positions = {place: partition.read_up_to(place) for place in partition.places}
            await self.carry_out(partition.number, positions, partial(self._release, partition))

    async def _release(self, partition: PartitionState[S, C], ready: Sequence[DeadLetter]) -> bool:
        """Fold the key's records again, those of its dead letters too; return False if the partition was taken away."""
        records = await self._history(partition, ready)
        if partition.gone:
            return False
        missing = {one.id for one in ready} - set(map(self.id_of, records))
        begins = await self._log.begin_offsets([place.topic for place in partition.places]) if missing else {}
        past = {at for at in missing if at.offset < begins.get(at.place, 0)}
        asked = {one.id: expired(one) if one.id in past else one for one in ready}
        if not self.ordered:  # the key's other records were used without these, so the dead letters come last
            records.sort(key=lambda record: self.id_of(record) in asked)
        for key in {key_text(record) for record in records}:
            partition.fold.forget(key)
        closing = [one.closed for one in asked.values() if one.fate is Fate.DISCARD]
        used: list[PendingRecord] = []
        held: dict[str, int] = {}  # by topic: the key's records from this offset on still have to wait
        for one in asked.values():
            if one.id in missing and one.fate is not Fate.DISCARD:
                self._use(partition, one, None)
                held.setdefault(one.id.topic, one.id.offset)
        for record in records:
            dead_letter = asked.get(self.id_of(record))
            if dead_letter is None:
                if not self.is_unused(record):
                    with suppress(Exception):  # as in PartitionState.remember
                        partition.fold.apply(readable(record))
            elif dead_letter.fate is not Fate.DISCARD and (
                not self.ordered or record.offset < held.get(record.topic, record.offset + 1)
            ):
                pending = self._use(partition, dead_letter, record)
                if pending is not None:
                    used.append(pending)
                    closing.append(dead_letter.closed)
                else:
                    held[record.topic] = record.offset
        for mark in closing:
            self.known.mark(mark)
        log.info("stage=%s partition=%d released=%d", self.name, partition.number, len(closing))
        self._pending.start(partition, self._close(partition, closing, used))
        return True

    async def _history(self, partition: PartitionState[S, C], ready: Sequence[DeadLetter]) -> list[Arrived]:
        """Return the records that the key's state follows from, and the dead letters', in order of append time."""
        key = ready[0].key
        needed = [partition.fold.rebuild_offsets(_text(key)), *(one.rebuild_offsets for one in ready)]
        needed += [{one.id.topic: one.id.offset} for one in ready]
        found: list[Arrived] = []
        for place in partition.places:
            firsts = [offsets[place.topic] for offsets in needed if place.topic in offsets]
            if firsts:
                ranges = {place: (min(firsts), partition.read_up_to(place))}
                async with aclosing(self._log.replay(ranges, key=key)) as there:
                    async for records in there:
                        found += [record for record in records if key_of(record) == key]
        return sorted(found, key=lambda record: record.timestamp_ms)

    def _use(
        self, partition: PartitionState[S, C], dead_letter: DeadLetter, record: Arrived | None
    ) -> PendingRecord | None:
        """Apply the dead letter's record and return its pending record; None: it is set aside again."""
        pending = PendingRecord(
            place=dead_letter.id.place,
            offset=dead_letter.id.offset,
            attempt=dead_letter.attempt + 1,
            rebuild_offsets=dead_letter.rebuild_offsets,
            released=asyncio.Event(),
        )
        try:
            if record is None:
                raise UnusableEvent("the record was not found on its topic")  # noqa: TRY301
            usable = readable(record)
            step = partition.fold.apply(usable)
        except Exception as error:  # noqa: BLE001  # as in the runner
            self.known.add(dead_letter.again(error))
            self._pending.set_aside(partition, pending, error)
            return None
        pending.traceparent = usable.traceparent
        self._pending.follow_up(partition, pending, step)
        return pending

    async def _close(
        self, partition: PartitionState[S, C], marks: Sequence[DeadLetterMark], used: Sequence[PendingRecord]
    ) -> None:
        """Write the marks into the queues, once all that followed from the used records has ended."""
        for pending in used:
            assert pending.released is not None, "the pending record of a dead letter says when it has ended"
            await pending.released.wait()
        async with partition.copying:  # copies under way come into the queue first, so that no mark precedes its copy
            await self.close(marks)


def key_text(record: Arrived) -> str:
    """Return the record's key as the text that the stage's states have."""
    return _text(record.key) if isinstance(record, Undecodable) else record.key


def _text(key: bytes | None) -> str:
    """Return a key as text; "" for bytes that are not UTF-8, since no event has such a key."""
    try:
        return (key or b"").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return ""
