"""What the projector does about records that are set aside: holds up what follows them, and uses them once asked.

The one rule: the queue has a letter, acknowledged, before the tables move past its record; the tables have what came of
a ruling before the queue says that it is done. So whoever is cut off in between finds in the queue what is left to do,
and to do it again changes nothing.
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
from clawstream.stream.dead_letters.queues import DeadLetters
from clawstream.stream.dead_letters.records import Fate, Letter, LetterId, Letters, Mark, Reason
from clawstream.stream.log import Arrived, Batch, Place, Raw
from clawstream.stream.runner.failures import FailureRate

RETRY_S = 0.5
RELEASED_AT_ONCE = 1000  # letters in one transaction

_log = logging.getLogger(__name__)


class LetterLog(Protocol):
    """What is needed of a log."""

    async def set_aside(self, letter_id: LetterId, *, error: Exception, attempt: int = 1) -> None:
        """Copy the record to its topic's dead-letter queue, acknowledged."""

    async def mark(self, marks: Sequence[Mark]) -> None:
        """Say what became of letters, in their queues, acknowledged."""

    def follow_raw(self, topics: Sequence[str], *, until_end: bool = False) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes on the topics from their beginning, and what comes."""

    def replay(
        self, ranges: Mapping[Place, tuple[int, int]], *, key: bytes | None = None
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records of the key from the first offset up to and without the second."""


class Quarantine:
    """The letters of the partitions that are ours, from each `begin` to the next `end`; one task uses it.

    Each wait for a database or broker ends with TryLater once `stop` is set.
    """

    def __init__(self, projector: Projector, log: LetterLog, stop: asyncio.Event, failures: FailureRate) -> None:
        self._projector = projector
        self._log = log
        self._stop = stop
        self._failures = failures
        self._tenure: _Tenure | None = None

    async def begin(self) -> None:
        """Follow the queues; what the tables say waits does so, whatever the queues still have of it."""
        self._tenure = _Tenure(await self._projector.waiting(), self._log)

    def end(self) -> None:
        """Decide nothing more: partitions are being given anew."""
        if self._tenure is not None:
            self._tenure.following.cancel()
        self._tenure = None

    async def take(self, batches: Sequence[Batch]) -> None:
        """Put the batches into the tables, but for what is set aside, which is in its queue then."""
        unusable: dict[LetterId, Exception] = {}
        while (letters := await self._letters()) is not None:
            missing = self._projector.missing(batches)
            found = {batch.place: sort_out(batch, letters, unusable) for batch in missing}
            await self._set_aside([one for some in found.values() for one in some])
            if self._is_over(letters):
                return  # whoever has the partitions now reads these again
            try:
                await self._projector.take(
                    missing, {place: [one.letter for one in some] for place, some in found.items()}
                )
            except UnusableRecords as refused:
                unusable |= refused.errors
            else:
                return

    async def release(self) -> None:
        """Use and close what was ruled about, as far as it is known and the tables have come to it."""
        tenure, letters = self._tenure, await self._letters()
        if tenure is None or letters is None:
            return
        state = (letters.changes, self._projector.positions())
        if tenure.settled == state:
            return
        for place, ready in self._ready(letters):
            if not await self._release(letters, place, ready):
                return
        tenure.settled = state

    def _ready(self, letters: Letters) -> list[tuple[Place, list[Letter]]]:
        """Return what is to be done by partition and key, in the log's order."""
        positions = self._projector.positions()
        found: list[tuple[Place, list[Letter]]] = []
        for number in {place.partition for place in positions}:
            for key in letters.due(number):
                by_place: defaultdict[Place, list[Letter]] = defaultdict(list)
                for letter in letters.ready(number, key):
                    if letter.id.offset < positions.get(letter.id.place, 0):
                        by_place[letter.id.place].append(letter)
                found += [(place, sorted(some, key=_offset)) for place, some in sorted(by_place.items())]
        return found

    async def _release(self, letters: Letters, place: Place, ready: Sequence[Letter]) -> bool:
        """Return whether it was done; False: it is to be tried again, or is somebody else's to do."""
        ready = ready[:RELEASED_AT_ONCE]
        try:
            records = await self._read(place, ready)
        except TryLater as error:
            _log.warning("partition=%s-%s release=failed reason=%r", *place, str(error))
            return False
        release = await self._used(letters, place, ready, records)
        if release is None:
            return False
        if release.again is not None:
            letters.add(release.again.letter)
        await self._until_done(lambda: self._log.mark(release.closed))
        for mark in release.closed:
            letters.mark(mark.id, mark.attempt, mark.fate, mark.because, None)
        _log.info("partition=%s-%s released=%d", *place, len(release.closed))
        return True

    async def _used(
        self, letters: Letters, place: Place, ready: Sequence[Letter], records: Mapping[int, Arrived]
    ) -> Release | None:
        """Return what the tables have now; None where the partition is not ours any more."""
        unusable: dict[LetterId, Exception] = {}
        while True:
            release = await asyncio.to_thread(released, ready, records, unusable)
            if release.again is not None:
                await self._set_aside([release.again])
            if self._is_over(letters):
                return None
            try:
                return release if await self._projector.use(place, release) else None
            except UnusableRecords as refused:
                unusable |= refused.errors

    async def _read(self, place: Place, ready: Sequence[Letter]) -> dict[int, Arrived]:
        ranges = {place: (ready[0].id.offset, ready[-1].id.offset + 1)}
        async with aclosing(self._log.replay(ranges, key=ready[0].key)) as there:
            return {record.offset: record async for records in there for record in records}

    async def _letters(self) -> Letters | None:
        """Return the letters, once all that stood in the queues is known; None: we have no partitions."""
        tenure = self._tenure
        if tenure is None:
            return None
        await tenure.current(self._stop)
        for letter in tenure.take_unknown():
            await self._copy(letter, _error(letter))
        return None if self._is_over(tenure.letters) else tenure.letters

    def _is_over(self, letters: Letters) -> bool:
        return self._tenure is None or self._tenure.letters is not letters

    async def _set_aside(self, found: Sequence[SetAside]) -> None:
        """Have the new ones of these in their queues."""
        for letter, error in found:
            if error is not None:
                if letter.reason is not Reason.PARKED:
                    self._failures.set_aside()
                await self._copy(letter, error)

    async def _copy(self, letter: Letter, error: Exception) -> None:
        _log.warning("record=%s-%s-%s dead_letter=%r", *letter.id[1:], letter.error)
        await self._until_done(lambda: self._log.set_aside(letter.id, error=error, attempt=letter.attempt))

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


class _Tenure:
    """The letters from when partitions are given to us until they are taken away."""

    def __init__(self, waiting: Sequence[Letter], log: LetterLog) -> None:
        self._dead = DeadLetters(GROUP, TOPICS, log, retry_s=RETRY_S)
        self._waiting = waiting  # by the tables; not told to the letters yet
        self.following = asyncio.create_task(self._dead.follow())
        self.settled: tuple[int, dict[Place, int]] | None = None

    @property
    def letters(self) -> Letters:
        """All that is known of them."""
        return self._dead.letters

    async def current(self, stop: asyncio.Event) -> None:
        """Return when all that stood in the queues is known; raises TryLater once `stop` is set, and what broke."""
        if not self._dead.current.is_set():
            waits = [asyncio.create_task(self._dead.current.wait()), asyncio.create_task(stop.wait())]
            await asyncio.wait([*waits, self.following], return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if not self._dead.current.is_set() and stop.is_set():
                raise TryLater("stopped before the dead-letter queues were read")
        if self.following.done() and not self.following.cancelled():
            self.following.result()

    def take_unknown(self) -> list[Letter]:
        """Let the letters have what the tables say waits; return those of which no queue has a copy any more.

        What a queue says is done with, and the tables not, as when they are of a backup, is to be done again.
        """
        unknown = []
        for letter in self._waiting:
            known = self.letters.get(letter.id)
            if known is None:
                unknown.append(letter)
            elif not known.waits:
                fate = Fate.REPLAY if known.applied else Fate.DISCARD
                letter = replace(known, attempt=known.attempt + 1, fate=fate)  # noqa: PLW2901
            self.letters.add(letter)
        self._waiting = ()
        return unknown


def _offset(letter: Letter) -> int:
    return letter.id.offset


def _error(letter: Letter) -> Exception:
    """Return the error as it was said when the record was set aside."""
    kinds = {Reason.PARKED: ParkedRecord, Reason.UNDECODABLE: UndecodableRecord, Reason.UNUSABLE: UnusableEvent}
    return kinds.get(letter.reason, RuntimeError)(letter.error.partition(": ")[2])
