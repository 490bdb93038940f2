"""What the projector does about records that are set aside: holds up the later ones, and uses them once asked.

The one rule: the queue has a dead letter, acknowledged, before the tables move past its record; and the tables have the
result of a ruling before the queue says that it is done. So a projector that is cut off in between finds in the queue
what is left to do, and doing it again changes nothing.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Protocol

from clawstream.errors import ParkedRecord, TryLater, UndecodableRecord, UnusableEvent
from clawstream.projections.tables import TOPICS
from clawstream.projections.write.projector import Projector
from clawstream.projections.write.sorting import GROUP, Release, SetAside, UnusableRecords, released, sort_out
from clawstream.stream.dead_letters.records import (
    DeadLetter,
    DeadLetterId,
    DeadLetterMark,
    Fate,
    KnownDeadLetters,
    Reason,
)
from clawstream.stream.dead_letters.rulings import DeadLetterReader
from clawstream.stream.log import Arrived, PartitionId, Raw, RecordBatch
from clawstream.stream.runner.breaker import FailureRate

RETRY_S = 0.5
RELEASED_AT_ONCE = 1000  # dead letters in one transaction

_log = logging.getLogger(__name__)


class DeadLetterLog(Protocol):
    """The part of a log that is needed."""

    async def set_aside(self, dead_letter_id: DeadLetterId, *, error: Exception, attempt: int = 1) -> None:
        """Copy the record to its topic's dead-letter queue, acknowledged."""

    async def mark(self, marks: Sequence[DeadLetterMark]) -> None:
        """Write marks into the dead letters' queues, acknowledged."""

    def follow_raw(self, topics: Sequence[str], *, until_end: bool = False) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes on the topics from their beginning, then what arrives."""

    def replay(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records of the key from the first offset up to but not including the second."""


class ProjectionQuarantine:
    """The dead letters of the partitions that are ours, from each `begin` to the next `end`; one task uses it.

    Each wait for a database or broker ends with TryLater once `stop` is set.
    """

    def __init__(self, projector: Projector, log: DeadLetterLog, stop: asyncio.Event, failures: FailureRate) -> None:
        self._projector = projector
        self._log = log
        self._stop = stop
        self._failures = failures
        self._assignment: _AssignedDeadLetters | None = None

    async def begin(self) -> None:
        """Follow the queues; a dead letter that waits by the tables waits, even if the queues have lost it."""
        self._assignment = _AssignedDeadLetters(await self._projector.waiting(), self._log)

    def end(self) -> None:
        """Decide nothing more, as partitions are being reassigned."""
        if self._assignment is not None:
            self._assignment.following.cancel()
        self._assignment = None

    async def take(self, batches: Sequence[RecordBatch]) -> None:
        """Put the batches into the tables, except records set aside, which are in their queue when this returns."""
        unusable: dict[DeadLetterId, Exception] = {}
        while (dead_letters := await self._dead_letters()) is not None:
            missing = self._projector.missing(batches)
            found = {batch.place: sort_out(batch, dead_letters, unusable) for batch in missing}
            await self._set_aside([one for some in found.values() for one in some])
            if self._is_over(dead_letters):
                return  # the partitions' new owner reads these records again
            try:
                await self._projector.take(
                    missing, {place: [one.dead_letter for one in some] for place, some in found.items()}
                )
            except UnusableRecords as refused:
                unusable |= refused.errors
            else:
                return

    async def release(self) -> None:
        """Use and close the dead letters that were ruled about, as far as the queues are read and the tables reach."""
        assignment, dead_letters = self._assignment, await self._dead_letters()
        if assignment is None or dead_letters is None:
            return
        state = (dead_letters.changes, self._projector.positions())
        if assignment.settled == state:
            return
        for place, ready in self._ready(dead_letters):
            if not await self._release(dead_letters, place, ready):
                return
        assignment.settled = state

    def _ready(self, dead_letters: KnownDeadLetters) -> list[tuple[PartitionId, list[DeadLetter]]]:
        """Return the dead letters to use or close, by partition and key, in the log's order."""
        positions = self._projector.positions()
        found: list[tuple[PartitionId, list[DeadLetter]]] = []
        for number in {place.partition for place in positions}:
            for key in dead_letters.due(number):
                by_place: defaultdict[PartitionId, list[DeadLetter]] = defaultdict(list)
                for dead_letter in dead_letters.ready(number, key):
                    if dead_letter.id.offset < positions.get(dead_letter.id.place, 0):
                        by_place[dead_letter.id.place].append(dead_letter)
                found += [(place, sorted(some, key=_offset)) for place, some in sorted(by_place.items())]
        return found

    async def _release(self, dead_letters: KnownDeadLetters, place: PartitionId, ready: Sequence[DeadLetter]) -> bool:
        """Return whether the dead letters were released; False: try again, or the partition is not ours any more."""
        ready = ready[:RELEASED_AT_ONCE]
        try:
            records = await self._read(place, ready)
        except TryLater as error:
            _log.warning("partition=%s-%s release=failed reason=%r", *place, str(error))
            return False
        release = await self._used(dead_letters, place, ready, records)
        if release is None:
            return False
        if release.again is not None:
            dead_letters.add(release.again.dead_letter)
        await self._until_done(lambda: self._log.mark(release.closed))
        for mark in release.closed:
            dead_letters.mark(mark.id, mark.attempt, mark.fate, mark.because, None)
        _log.info("partition=%s-%s released=%d", *place, len(release.closed))
        return True

    async def _used(
        self,
        dead_letters: KnownDeadLetters,
        place: PartitionId,
        ready: Sequence[DeadLetter],
        records: Mapping[int, Arrived],
    ) -> Release | None:
        """Return the release that the tables hold now; None: the partition is not ours any more."""
        unusable: dict[DeadLetterId, Exception] = {}
        while True:
            release = await asyncio.to_thread(released, ready, records, unusable)
            if release.again is not None:
                await self._set_aside([release.again])
            if self._is_over(dead_letters):
                return None
            try:
                return release if await self._projector.use(place, release) else None
            except UnusableRecords as refused:
                unusable |= refused.errors

    async def _read(self, place: PartitionId, ready: Sequence[DeadLetter]) -> dict[int, Arrived]:
        ranges = {place: (ready[0].id.offset, ready[-1].id.offset + 1)}
        async with aclosing(self._log.replay(ranges, key=ready[0].key)) as there:
            return {record.offset: record async for records in there for record in records}

    async def _dead_letters(self) -> KnownDeadLetters | None:
        """Return the dead letters, once the queues are read to where they ended; None: we have no partitions."""
        assignment = self._assignment
        if assignment is None:
            return None
        await assignment.current(self._stop)
        for dead_letter in assignment.take_unknown():
            await self._copy(dead_letter, _error(dead_letter))
        return None if self._is_over(assignment.dead_letters) else assignment.dead_letters

    def _is_over(self, dead_letters: KnownDeadLetters) -> bool:
        return self._assignment is None or self._assignment.dead_letters is not dead_letters

    async def _set_aside(self, found: Sequence[SetAside]) -> None:
        """Copy the new ones to their queues."""
        for dead_letter, error in found:
            if error is not None:
                if dead_letter.reason is not Reason.PARKED:
                    self._failures.set_aside()
                await self._copy(dead_letter, error)

    async def _copy(self, dead_letter: DeadLetter, error: Exception) -> None:
        _log.warning("record=%s-%s-%s dead_letter=%r", *dead_letter.id[1:], dead_letter.error)
        await self._until_done(lambda: self._log.set_aside(dead_letter.id, error=error, attempt=dead_letter.attempt))

    async def _until_done(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except TryLater as error:
                if self._stop.is_set():
                    raise
                _log.warning("state=waiting_for_kafka reason=%r", str(error))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), RETRY_S)
            else:
                return


class _AssignedDeadLetters:
    """The dead letters during one assignment of partitions to us."""

    def __init__(self, waiting: Sequence[DeadLetter], log: DeadLetterLog) -> None:
        self._dead = DeadLetterReader(GROUP, TOPICS, log, retry_s=RETRY_S)
        self._waiting = waiting  # waiting by the tables; not added to `dead_letters` yet
        self.following = asyncio.create_task(self._dead.follow())
        self.settled: tuple[int, dict[PartitionId, int]] | None = None

    @property
    def dead_letters(self) -> KnownDeadLetters:
        """All dead letters known so far."""
        return self._dead.dead_letters

    async def current(self, stop: asyncio.Event) -> None:
        """Return once the queues are read to their first end; raises TryLater once `stop` is set, or a read error."""
        if not self._dead.current.is_set():
            waits = [asyncio.create_task(self._dead.current.wait()), asyncio.create_task(stop.wait())]
            await asyncio.wait([*waits, self.following], return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if not self._dead.current.is_set() and stop.is_set():
                raise TryLater("stopped before the dead-letter queues were read")
        if self.following.done() and not self.following.cancelled():
            self.following.result()

    def take_unknown(self) -> list[DeadLetter]:
        """Add the dead letters that wait by the tables; return those of which no queue has a copy any more.

        A ruling that is done by the queue but not by the tables (say, restored from a backup) is carried out again.
        """
        unknown = []
        for dead_letter in self._waiting:
            known = self.dead_letters.get(dead_letter.id)
            if known is None:
                unknown.append(dead_letter)
            elif not known.waits:
                fate = Fate.REPLAY if known.applied else Fate.DISCARD
                dead_letter = replace(known, attempt=known.attempt + 1, fate=fate)  # noqa: PLW2901
            self.dead_letters.add(dead_letter)
        self._waiting = ()
        return unknown


def _offset(dead_letter: DeadLetter) -> int:
    return dead_letter.id.offset


def _error(dead_letter: DeadLetter) -> Exception:
    """Return an error like the one with which the record was set aside."""
    kinds = {Reason.PARKED: ParkedRecord, Reason.UNDECODABLE: UndecodableRecord, Reason.UNUSABLE: UnusableEvent}
    return kinds.get(dead_letter.reason, RuntimeError)(dead_letter.error.partition(": ")[2])
