"""What a worker does about records that were set aside: leaves them out, holds up what follows, uses them once asked.

The one rule: a letter that is replayed is used where it stood. The state of its key is folded anew from the log without
it, then it is applied, and after it what was parked behind it, in order and before anything that comes later.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Generic, TypeVar

from clawstream.errors import ParkedRecord, TryLater, UndecodableRecord, UnusableEvent
from clawstream.stream.dead_letters.queues import DeadLetters
from clawstream.stream.dead_letters.records import EXPIRED, Fate, Letter, LetterId, Mark, Reason, letter_of, parked
from clawstream.stream.log import Arrived, Log, Place, Undecodable, key_of
from clawstream.stream.runner.calling import wait_before
from clawstream.stream.runner.pending import Errands
from clawstream.stream.runner.work import Errand, Share
from clawstream.stream.stage import Stage, Step

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")


class Quarantine(Generic[S, C]):
    """The letters of a stage, as its queues say; begun anew whenever partitions are given to the worker."""

    def __init__(self, stage: Stage[S, C], to: Log, errands: Errands[S, C], *, retry_s: float) -> None:
        self._stage = stage
        self._log = to
        self._errands = errands
        self._retry_s = retry_s
        self._dead = DeadLetters(stage.name, stage.reads, to, retry_s=retry_s)
        self.letters = self._dead.letters
        self._released_at: dict[int, int] = {}  # by partition: how many changes of the letters are dealt with

    async def follow(self) -> None:
        """Read the queues, and what comes, until cancelled."""
        await self._dead.follow()

    async def current(self) -> None:
        """Return when all that stood in the queues when `follow` began is known."""
        await self._dead.current.wait()

    def held(self, number: int) -> frozenset[str]:
        """Return the keys that nothing may be said of for now."""
        return frozenset(map(_text, self.letters.waiting(number))) if self._stage.ordered else frozenset()

    def unused(self, record: Arrived) -> bool:
        """Return whether the record is set aside, and not used since."""
        letter = self.letters.get(LetterId(self._stage.name, record.topic, record.partition, record.offset))
        return letter is not None and not letter.applied

    def blocked(self, place: Place, record: Arrived) -> ParkedRecord | None:
        """Return why the record has to wait; None: it need not."""
        if not self._stage.ordered:
            return None
        return parked(self.letters, place, key_of(record), record.offset)

    def set_aside(self, share: Share[S, C], errand: Errand, record: Arrived, error: Exception) -> None:
        """Copy the record to its queue; in an ordered stage what follows of its key waits from now on."""
        place = Place(record.topic, record.partition)
        errand.key = _key_text(record)
        letter_id = LetterId(self._stage.name, *place, record.offset)
        story = share.fold.story(errand.key)
        self.letters.add(letter_of(letter_id, record, error, attempt=errand.attempt, story=story))
        self._errands.set_aside(share, errand, error)

    async def release(self, share: Share[S, C]) -> None:
        """Use and close what was ruled about in this partition, as far as it is known."""
        changes = self.letters.changes
        if not share.live or share.gone or self._released_at.get(share.number) == changes:
            return
        for key in self.letters.due(share.number):
            if not share.gone and not await self._release(share, key):
                return
        self._released_at[share.number] = changes

    async def _release(self, share: Share[S, C], key: bytes | None) -> bool:
        """Return whether it was done; False: the log is away, and it is to be tried again."""
        ready: Sequence[Letter] = self.letters.ready(share.number, key)
        try:
            records = await self._read(share, key, ready)
            ready = await self._usable(ready, {LetterId(self._stage.name, *_at(record)) for record in records})
        except TryLater as error:
            log.warning("stage=%s partition=%d release=failed reason=%s", self._stage.name, share.number, error)
            return False
        if share.gone:
            return False
        self._forget(share, records)
        if not self._stage.ordered:
            self._remember(share, records, above=-1)
        by_id = {LetterId(self._stage.name, *_at(one)): at for at, one in enumerate(records)}
        closing: list[Mark] = []
        errands: list[Errand] = []
        above = -1
        for letter in ready:
            fate = Fate.DISCARDED if letter.fate is Fate.DISCARD else Fate.REPLAYED
            at = by_id.get(letter.id)
            if self._stage.ordered and at is not None:
                self._remember(share, records[:at], above=above)
                above = at
            if fate is Fate.REPLAYED:
                errand = Errand(
                    place=letter.id.place, offset=letter.id.offset, attempt=letter.attempt + 1, story=letter.story,
                    released=asyncio.Event(),
                )  # fmt: skip
                if not self._use(share, errand, letter, None if at is None else records[at]) and self._stage.ordered:
                    break
                errands.append(errand)
            closing.append(Mark(id=letter.id, key=key, attempt=letter.attempt, fate=fate, because=letter.because))
        else:
            if self._stage.ordered:
                self._remember(share, records, above=above)
        for mark in closing:
            self.letters.mark(mark.id, mark.attempt, mark.fate, mark.because, None)
        log.info("stage=%s partition=%d released=%d", self._stage.name, share.number, len(closing))
        self._errands.start(share, self._close(share, closing, errands))
        return True

    async def _read(self, share: Share[S, C], key: bytes | None, ready: Sequence[Letter]) -> list[Arrived]:
        """Return what the key's state follows from, and the letters' records, in the order of the log's clock."""
        stories = [letter.story for letter in ready] + [share.fold.story(_text(key))]
        stories += [{letter.id.topic: letter.id.offset} for letter in ready]
        found: list[Arrived] = []
        for place in share.places:
            firsts = [story[place.topic] for story in stories if place.topic in story]
            if firsts:
                ranges = {place: (min(firsts), share.read_up_to(place))}
                async with aclosing(self._log.replay(ranges, key=key)) as there:
                    async for records in there:
                        found += records
        return sorted(found, key=lambda record: record.timestamp_ms)

    async def _usable(self, ready: Sequence[Letter], found: Collection[LetterId]) -> Sequence[Letter]:
        """Return the letters, to be discarded where the log has lost the record: nothing can be made of it any more."""
        if all(letter.id in found for letter in ready):
            return ready
        begins = await self._log.begin_offsets(self._stage.reads)
        return [
            replace(letter, fate=Fate.DISCARD, because=EXPIRED)
            if letter.fate is not Fate.DISCARD and letter.id.offset < begins.get(letter.id.place, 0)
            else letter
            for letter in ready
        ]

    def _forget(self, share: Share[S, C], records: Sequence[Arrived]) -> None:
        for key in {_key_text(record) for record in records}:
            share.fold.forget(key)

    def _remember(self, share: Share[S, C], records: Sequence[Arrived], *, above: int) -> None:
        """Fold what was done, from after number `above` on, without writing or calling anything."""
        for record in records[above + 1 :]:
            if not isinstance(record, Undecodable) and not self.unused(record):
                with suppress(Exception):  # as in Share.remember
                    share.fold.apply(record)

    def _use(self, share: Share[S, C], errand: Errand, letter: Letter, record: Arrived | None) -> bool:
        """Apply the letter's record; False where it is set aside again."""
        step: Step[S, C] | None = None
        try:
            if record is None:
                raise UnusableEvent("the record was not found on its topic")  # noqa: TRY301
            if isinstance(record, Undecodable):
                raise UndecodableRecord(record.reason)  # noqa: TRY301
            errand.traceparent = record.traceparent
            step = share.fold.apply(record)
        except Exception as error:  # noqa: BLE001  # as in the runner
            self.letters.add(replace(letter, attempt=errand.attempt, fate=Fate.OPEN, reason=Reason.UNUSABLE))
            self._errands.set_aside(share, errand, error)
            return False
        self._errands.follow_up(share, errand, step)
        return True

    async def _close(self, share: Share[S, C], marks: Sequence[Mark], errands: Sequence[Errand]) -> None:
        """Say in the queues that the letters are done with, once all that they led to is."""
        for errand in errands:
            assert errand.released is not None, "an errand of a letter says when it has ended"
            await errand.released.wait()
        attempt = 0
        async with share.copying:  # the copies of parked records come first, or the marks would be of nothing
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
    """Return a key as records have it; no record of ours has one that is not text."""
    try:
        return (key or b"").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return ""
