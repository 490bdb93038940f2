"""Samples that can't be trained on: written to their queue before anything moves past them, trained on once asked.

The one rule: a dead letter's replay stays asked for until the step on its sample is taken. A trainer that is killed in
between finds in the queue what is left to do; the plans say what was done.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from clawstream.errors import TryLater, UndecodableRecord, UnusableEvent
from clawstream.events import SampleAssembled
from clawstream.stream.dead_letters.records import (
    EXPIRED,
    DeadLetter,
    DeadLetterId,
    DeadLetterMark,
    Fate,
    dead_letter_of,
)
from clawstream.stream.dead_letters.rulings import DeadLetterReader
from clawstream.stream.log import Arrived, PartitionId, Raw, Undecodable
from clawstream.stream.runner.breaker import FailureRate, flooded
from clawstream.stream.runner.calling import wait_before
from clawstream.training.batches.planning import Arrival, Batcher, DropReason

GROUP = "train"
RETRY_S = 0.25

log = logging.getLogger(__name__)


class TrainerDeadLetterLog(Protocol):
    """The part of a log that is needed."""

    async def set_aside(self, dead_letter_id: DeadLetterId, *, error: Exception, attempt: int = 1) -> None:
        """Copy the record to its topic's dead-letter queue, acknowledged."""

    async def mark(self, marks: Sequence[DeadLetterMark]) -> None:
        """Write marks into the dead letters' queues, acknowledged."""

    def follow_raw(self, topics: Sequence[str], *, until_end: bool = False) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes on the topics from their beginning, then what arrives."""

    def replay(self, ranges: Mapping[PartitionId, tuple[int, int]]) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records from the first offset up to but not including the second."""


class TrainingQuarantine:
    """The trainer's dead letters; `on_change` is called when there is something new to `rule` about."""

    def __init__(self, topic: str, to: TrainerDeadLetterLog, *, on_change: Callable[[], None]) -> None:
        self._log = to
        self._dead = DeadLetterReader(GROUP, [topic], to, retry_s=RETRY_S, on_change=on_change)
        self._failures = FailureRate(time.monotonic)
        self._asked_for: dict[DeadLetterId, str] = {}  # by dead letter that the batcher got to replay: its sample's id
        self._lent: set[DeadLetterId] = set()  # refused again, but offered to the batcher for a pending plan
        self._told: set[DeadLetterId] = set()

    async def follow(self) -> None:
        """Read the queue, then what arrives, until cancelled."""
        await self._dead.follow()

    async def current(self) -> None:
        """Return once everything that stood in the queue when `follow` began is read."""
        await self._dead.current.wait()

    def turn(self) -> None:
        """Begin again, for another batcher."""
        self._asked_for.clear()
        self._lent.clear()

    async def receive(self, record: Arrived, batcher: Batcher) -> None:
        """Give the record's sample to the batcher; an unusable record is in the queue when this returns.

        The batcher gets a sample that a pending plan names in any case. Raises TooManyFailures where too many records
        can't be used.
        """
        self._failures.read()
        error = _error(record, batcher)
        dead_letter = self._dead.dead_letters.get(_letter_id(record))
        if error is not None and dead_letter is None:
            await self._set_aside(record, error, attempt=1)
            self._refuse_a_flood()
        sample = _sample(record)
        if sample is None:
            return
        waits = dead_letter is not None and not dead_letter.applied and error is None
        if not waits or batcher.wants(sample.sample_id):
            reason = batcher.receive(arrival(record, sample))
            if reason is DropReason.LATE:
                log.info("sample=%s turn=%s trained=never reason=late", sample.sample_id, sample.turn_id)

    async def rule(self, topic: str, batcher: Batcher) -> None:
        """Use and close the dead letters that were ruled about, of the topic that the batcher's samples come from.

        A replayed sample that was refused again still goes to the batcher where a pending plan names it.
        """
        if not self._dead.current.is_set():
            return
        for dead_letter in self._dead.dead_letters:
            if dead_letter.id.topic != topic:
                self._tell(dead_letter, topic)
            elif dead_letter.fate is Fate.DISCARD:
                await self._close(dead_letter, Fate.DISCARDED, dead_letter.because)
            elif dead_letter.fate is Fate.REPLAY:
                await self._use(dead_letter, batcher)
            elif dead_letter.waits and dead_letter.attempt > 1 and dead_letter.id not in self._lent:
                record = await self._read(dead_letter.id)
                if record is not None:
                    self._lend(record, batcher)

    async def _use(self, dead_letter: DeadLetter, batcher: Batcher) -> None:
        if dead_letter.id not in self._asked_for:
            record = await self._read(dead_letter.id)
            if record is None:
                await self._close(dead_letter, Fate.DISCARDED, EXPIRED)
                return
            sample, error = _sample(record), _error(record, batcher)
            if error is not None:
                self._lend(record, batcher)
                await self._set_aside(record, error, attempt=dead_letter.attempt + 1)
                return
            if sample is not None:
                if batcher.receive(arrival(record, sample, again=True)) is DropReason.OTHER_POLICY:
                    return  # its own trainer closes it
                self._asked_for[dead_letter.id] = sample.sample_id
        if not batcher.holds(self._asked_for.get(dead_letter.id, "")):
            await self._close(dead_letter, Fate.REPLAYED, dead_letter.because)

    def _lend(self, record: Arrived, batcher: Batcher) -> None:
        """Give the batcher a refused sample that a pending plan names, so that the step can be taken (without it)."""
        sample = _sample(record)
        self._lent.add(_letter_id(record))
        if sample is not None and batcher.wants(sample.sample_id):
            batcher.receive(arrival(record, sample, again=True))

    def _tell(self, dead_letter: DeadLetter, topic: str) -> None:
        """Log once that a ruling can't be carried out by this trainer."""
        if dead_letter.fate in (Fate.REPLAY, Fate.DISCARD) and dead_letter.id not in self._told:
            self._told.add(dead_letter.id)
            why = f"only a trainer of these samples does it, and this one reads {topic}"
            log.warning(
                "record=%s-%s-%s fate=%s state=waiting reason=%r", *dead_letter.id[1:], dead_letter.fate.value, why
            )

    async def _read(self, dead_letter_id: DeadLetterId) -> Arrived | None:
        ranges = {dead_letter_id.place: (dead_letter_id.offset, dead_letter_id.offset + 1)}
        async with aclosing(self._log.replay(ranges)) as there:
            async for records in there:
                return records[0]
        return None

    async def _set_aside(self, record: Arrived, error: UnusableEvent, *, attempt: int) -> None:
        dead_letter = dead_letter_of(_letter_id(record), record, error, attempt=attempt)
        log.error("record=%s-%s-%s dead_letter=%r", *dead_letter.id[1:], dead_letter.error)
        self._failures.set_aside()
        await _until_done(lambda: self._log.set_aside(dead_letter.id, error=error, attempt=attempt))
        self._dead.dead_letters.add(dead_letter)  # only now: a trainer that is cut off before has to set it aside again

    async def _close(self, dead_letter: DeadLetter, fate: Fate, because: str | None) -> None:
        mark = DeadLetterMark(
            id=dead_letter.id, key=dead_letter.key, attempt=dead_letter.attempt, fate=fate, because=because
        )
        await _until_done(lambda: self._log.mark([mark]))
        self._dead.dead_letters.mark(dead_letter.id, dead_letter.attempt, fate, because, None)
        log.info("record=%s-%s-%s fate=%s", *dead_letter.id[1:], fate.value)

    def _refuse_a_flood(self) -> None:
        flood = self._failures.too_many()
        if flood is not None:
            raise flooded(GROUP, *flood)


def arrival(record: Arrived, sample: SampleAssembled, *, again: bool = False) -> Arrival:
    """Return the sample in the form that a batcher takes."""
    return Arrival(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        sample=sample,
        again=again,
    )


def _sample(record: Arrived) -> SampleAssembled | None:
    if isinstance(record, Undecodable) or not isinstance(record.event, SampleAssembled):
        return None
    return record.event


def _error(record: Arrived, batcher: Batcher) -> UnusableEvent | None:
    """Return why the record can't be used; None: it can, or it is not needed."""
    if isinstance(record, Undecodable):
        return UndecodableRecord(record.reason)
    sample = _sample(record)
    found = None if sample is None else batcher.flaw(sample)
    return None if found is None else UnusableEvent(f"no step can be taken on it: {found}")


def _letter_id(record: Arrived) -> DeadLetterId:
    return DeadLetterId(GROUP, record.topic, record.partition, record.offset)


async def _until_done(work: Callable[[], Awaitable[None]]) -> None:
    tries = 0
    while True:
        try:
            await work()
        except TryLater as away:
            log.warning("dead_letter=failed reason=%s", away)
            await asyncio.sleep(wait_before(tries, RETRY_S))
            tries += 1
        else:
            return
