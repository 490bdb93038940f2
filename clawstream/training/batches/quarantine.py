"""Samples that can't be trained on: in their queue before anything moves past them, and trained on once asked.

The one rule: a dead letter that is replayed stays to be replayed until the step on its sample is taken, so that a
trainer that is killed in between finds in the queue what is left to do; the plans say what was done.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from clawstream.errors import TryLater, UndecodableRecord, UnusableEvent
from clawstream.events import SampleAssembled
from clawstream.stream.dead_letters.queues import DeadLetterReader
from clawstream.stream.dead_letters.records import (
    EXPIRED,
    DeadLetter,
    DeadLetterId,
    DeadLetterMark,
    Fate,
    dead_letter_of,
)
from clawstream.stream.log import Arrived, PartitionId, Raw, Undecodable
from clawstream.stream.runner.calling import wait_before
from clawstream.stream.runner.failures import FailureRate, flooded
from clawstream.training.batches.planning import Arrival, Batcher, DropReason

GROUP = "train"
RETRY_S = 0.25

log = logging.getLogger(__name__)


class TrainerDeadLetterLog(Protocol):
    """What is needed of a log."""

    async def set_aside(self, dead_letter_id: DeadLetterId, *, error: Exception, attempt: int = 1) -> None:
        """Copy the record to its topic's dead-letter queue, acknowledged."""

    async def mark(self, marks: Sequence[DeadLetterMark]) -> None:
        """Say what became of dead letters, in their queues, acknowledged."""

    def follow_raw(self, topics: Sequence[str], *, until_end: bool = False) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes on the topics from their beginning, and what comes."""

    def replay(self, ranges: Mapping[PartitionId, tuple[int, int]]) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield each partition's records from the first offset up to and without the second."""


class TrainingQuarantine:
    """The trainer's dead letters; `on_change` is called when there is something new to `rule` about."""

    def __init__(self, topic: str, to: TrainerDeadLetterLog, *, on_change: Callable[[], None]) -> None:
        self._log = to
        self._dead = DeadLetterReader(GROUP, [topic], to, retry_s=RETRY_S, on_change=on_change)
        self._failures = FailureRate(time.monotonic)
        self._asked_for: dict[DeadLetterId, str] = {}  # dead letters whose samples the batcher has, which they are
        self._lent: set[DeadLetterId] = set()  # refused again, and given to the batcher where a plan names them
        self._told: set[DeadLetterId] = set()

    async def follow(self) -> None:
        """Read the queue, and what comes, until cancelled."""
        await self._dead.follow()

    async def current(self) -> None:
        """Return when all that stood in the queue when `follow` began is known."""
        await self._dead.current.wait()

    def turn(self) -> None:
        """Another batcher is used from now on."""
        self._asked_for.clear()
        self._lent.clear()

    async def receive(self, record: Arrived, batcher: Batcher) -> None:
        """Let the batcher have the sample, if it is one; what can't be used is in the queue when this returns.

        A sample that a pending plan names is had by the batcher in any case. Raises TooManyFailures where too many
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
        """Use and close what was ruled about on the topic that the batcher's samples are of.

        A sample that was used once and is refused since is had by the batcher where a pending plan names it.
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
        """Let a plan that names a sample which is refused have it: its step is taken without."""
        sample = _sample(record)
        self._lent.add(_letter_id(record))
        if sample is not None and batcher.wants(sample.sample_id):
            batcher.receive(arrival(record, sample, again=True))

    def _tell(self, dead_letter: DeadLetter, topic: str) -> None:
        """Say once that a ruling is not done now."""
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
        self._dead.dead_letters.add(dead_letter)  # and not before: whoever is cut off here is to set it aside again

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
    """Return the sample as a batcher takes it."""
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
    """Return why the record can't be used; None: it can, or there is no use for it."""
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
