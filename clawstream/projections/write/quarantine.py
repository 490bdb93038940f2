"""How the projector sets records aside, parks later records of their keys, and carries out rulings about them.

A record gets no row while an earlier one of its key and partition waits, so that the key's rows have no gap that nobody
decided on. A ruling is carried out in one transaction, and carrying it out again changes nothing.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from clawstream.errors import ParkedRecord, TryLater, UndecodableRecord, UnusableEvent
from clawstream.projections.tables import TOPICS
from clawstream.projections.write.projector import Projector
from clawstream.projections.write.rows import GROUP, Release, UnusableRecords, released
from clawstream.stream.dead_letters import DeadLetter, Reason
from clawstream.stream.log import Arrived, DeadLetterId, Fate, Log, PartitionId, RecordBatch
from clawstream.stream.quarantine import Quarantine
from clawstream.stream.runner.breaker import FailureRate
from clawstream.stream.topics import dead_letter_topic

RETRY_S = 0.5
RELEASED_AT_ONCE = 1000  # dead letters in one transaction

_log = logging.getLogger(__name__)


class ProjectionQuarantine(Quarantine):
    """The dead letters of the partitions that are ours, until `end`. Each assignment has its own, used by one task.

    The dead letters in `waiting`, which the tables name, wait even if the queues have lost them. Each wait for a
    database or broker ends with TryLater once `stop` is set.
    """

    def __init__(
        self,
        projector: Projector,
        to: Log,
        stop: asyncio.Event,
        failures: FailureRate,
        waiting: Sequence[DeadLetter] = (),
    ) -> None:
        super().__init__(GROUP, TOPICS, to, ordered=True, retry_s=RETRY_S, longest_s=RETRY_S, stop=stop)
        self._projector = projector
        self._failures = failures
        self._waiting = waiting  # those that are not in `known` yet
        self._over = False
        self._following = asyncio.create_task(self.follow())

    def end(self) -> None:
        """Decide nothing more, as partitions are being reassigned."""
        self._over = True
        self._following.cancel()

    async def take(self, batches: Sequence[RecordBatch]) -> None:
        """Put the batches into the tables, except records that are set aside: those are in their queue by then."""
        unusable: dict[DeadLetterId, Exception] = {}
        while await self._is_ours():
            missing = self._projector.missing(batches)
            found = {batch.place: await self._sort_out(batch, unusable) for batch in missing}
            if self._over:
                return  # the partitions' new owner reads these records again
            try:
                await self._projector.take(missing, found)
            except UnusableRecords as refused:
                unusable |= refused.errors
            else:
                return

    async def release(self) -> None:
        """Use or discard the dead letters that were ruled about, of records before the tables' offsets."""
        if await self._is_ours():
            positions = self._projector.positions()
            for number in {place.partition for place in positions}:
                await self.carry_out(number, positions, self._release)

    async def _sort_out(self, batch: RecordBatch, unusable: Mapping[DeadLetterId, Exception]) -> list[DeadLetter]:
        """Set aside the batch's unusable records, and those that wait behind them; return the dead letters of both.

        A record that can't be decoded, on a topic without a queue, holds up nothing: nobody could rule about it.
        """
        found = []
        for record in batch.records:
            dead_letter = self.known.get(self.id_of(record))
            if dead_letter is None or dead_letter.applied:
                error = self._refusal(record, unusable)
                if error is None:
                    continue
                dead_letter = self.dead_letter(record, error)
                await self._set_aside(dead_letter, error)
            found.append(dead_letter)
        return found

    def _refusal(self, record: Arrived, unusable: Mapping[DeadLetterId, Exception]) -> Exception | None:
        try:
            self.usable(record)
        except UndecodableRecord as error:
            return None if dead_letter_topic(record.topic) is None else error
        except ParkedRecord as error:
            return error
        return unusable.get(self.id_of(record))

    async def _release(self, ready: Sequence[DeadLetter]) -> bool:
        """Carry out the rulings; return False where the partition is not ours any more."""
        for place, some in groupby(sorted(ready, key=lambda one: one.id), key=lambda one: one.id.place):
            release = await self._used(place, list(some)[:RELEASED_AT_ONCE])
            if release is None:
                return False
            await self.close(release.closed)
            _log.info("partition=%s-%s released=%d", *place, len(release.closed))
        return True

    async def _used(self, place: PartitionId, ready: Sequence[DeadLetter]) -> Release | None:
        """Write the outcome for these dead letters and return it; None: the partition is not ours any more."""
        records = await self.read(ready)
        unusable: dict[DeadLetterId, Exception] = {}
        while True:
            release = await asyncio.to_thread(released, ready, records, unusable)
            if release.again is not None:
                await self._set_aside(*release.again)
            if self._over:
                return None
            try:
                return release if await self._projector.use(place, release) else None
            except UnusableRecords as refused:
                unusable |= refused.errors

    async def _is_ours(self) -> bool:
        """Wait until the queues are read to where they ended; then return whether we still have our partitions.

        Raises TryLater once `stop` is set, and what reading the queues raised.
        """
        if not self.current.is_set():
            waits = [asyncio.create_task(event.wait()) for event in (self.current, self._stop)]
            await asyncio.wait([*waits, self._following], return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if self._following.done() and not self._following.cancelled():
            self._following.result()
        if not (self._over or self.current.is_set()):
            raise TryLater("stopped before the dead-letter queues were read")
        if not self._over:
            await self._learn()
        return not self._over

    async def _learn(self) -> None:
        """Add to `known` the dead letters that wait according to the tables; copy those again that the queue has lost.

        A ruling that is done according to the queue but not to the tables, which may be a backup, is carried out again.
        """
        waiting, self._waiting = self._waiting, ()
        for dead_letter in waiting:
            known = self.known.get(dead_letter.id)
            if known is None:
                await self.set_aside(dead_letter, _error(dead_letter))
            elif known.waits:
                self.known.add(dead_letter)
            else:
                fate = Fate.REPLAY if known.applied else Fate.DISCARD
                self.known.add(replace(known, attempt=known.attempt + 1, fate=fate))

    async def _set_aside(self, dead_letter: DeadLetter, error: Exception) -> None:
        if not isinstance(error, ParkedRecord):
            self._failures.set_aside()
        await self.set_aside(dead_letter, error)


def _error(dead_letter: DeadLetter) -> Exception:
    """Return an error like the one with which the record was set aside."""
    kinds = {Reason.PARKED: ParkedRecord, Reason.UNDECODABLE: UndecodableRecord, Reason.UNUSABLE: UnusableEvent}
    return kinds.get(dead_letter.reason, RuntimeError)(dead_letter.error.partition(": ")[2])
