"""Samples that can't be trained on: each becomes a dead letter before reading goes on. A person may have it used later.

The one rule: a dead letter that is to be replayed stays open until the step on its sample is taken. A trainer that is
killed before that finds in the queue what is left to do; the plans say what was done.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from clawstream.errors import UndecodableRecord, UnusableEvent
from clawstream.events import SampleAssembled, SampleRefused
from clawstream.stream.dead_letters import DeadLetter, expired
from clawstream.stream.log import Arrived, DeadLetterId, Fate, Log, Undecodable
from clawstream.stream.quarantine import Quarantine
from clawstream.stream.runner.breaker import FailureRate, flooded
from clawstream.training.batches.choosing import Arrival
from clawstream.training.batches.planning import Batcher, DropReason

GROUP = "train"
RETRY_S = 0.25

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Given:
    """Which dead letters were given to a batcher, and which concern other policies."""

    sample_ids: dict[DeadLetterId, str] = field(default_factory=dict)  # by the replayed dead letter that held it
    lent: set[DeadLetterId] = field(default_factory=set)  # refused again, but offered for a pending plan
    of_others: set[DeadLetterId] = field(default_factory=set)  # of other policies


class TrainingQuarantine(Quarantine):
    """The trainer's dead letters; `on_change` is called when there is something new to `rule` about."""

    def __init__(self, topic: str, to: Log, *, on_change: Callable[[], None]) -> None:
        super().__init__(GROUP, [topic], to, ordered=False, retry_s=RETRY_S, on_change=on_change)
        self._failures = FailureRate(time.monotonic)
        self._given: WeakKeyDictionary[Batcher, _Given] = WeakKeyDictionary()
        self._told: set[DeadLetterId] = set()

    async def receive(self, record: Arrived, batcher: Batcher) -> None:
        """Give the record's sample to the batcher; an unusable record is a dead letter when this returns.

        A sample that a pending plan names goes to the batcher in any case. Raises TooManyFailures where too many
        records can't be used.
        """
        sample = _sample(record)
        if sample is None or batcher.concerns(sample):
            self._failures.read()
        error = _error(record, batcher)
        if error is not None and self.known.get(self.id_of(record)) is None:
            await self._refuse(self.dead_letter(record, error), error)
            flood = self._failures.too_many()
            if flood is not None:
                raise flooded(GROUP, *flood)
        if sample is None:
            if (refused := _refused(record)) is not None:
                batcher.refused(refused.session_id)
            return
        if error is not None or not self.is_unused(record) or batcher.wants(sample.sample_id):
            reason = batcher.receive(arrival(record, sample))
            if reason is DropReason.LATE:
                log.info("sample=%s turn=%s trained=never reason=late", sample.sample_id, sample.turn_id)

    async def rule(self, topic: str, batcher: Batcher) -> None:
        """Use or close the dead letters of `topic`, the batcher's topic, that people decided about.

        A replayed sample that was refused again still goes to the batcher where a pending plan names it.
        """
        if not self.current.is_set():
            return
        given = self._given.setdefault(batcher, _Given())
        for dead_letter in self.known:
            if dead_letter.id.topic != topic:
                self._tell(dead_letter, topic)
            elif dead_letter.fate is Fate.DISCARD:
                await self._close(dead_letter)
            elif dead_letter.fate is Fate.REPLAY:
                await self._use(dead_letter, batcher, given)
            elif dead_letter.waits and dead_letter.attempt > 1 and dead_letter.id not in given.lent:
                for record in (await self.read([dead_letter])).values():
                    self._lend(record, batcher, given)

    async def _use(self, dead_letter: DeadLetter, batcher: Batcher, given: "_Given") -> None:
        if dead_letter.id in given.of_others:
            return
        if dead_letter.id not in given.sample_ids:
            records = await self.read([dead_letter])
            record = records.get(dead_letter.id)
            if record is None:
                await self._close(expired(dead_letter))
                return
            sample, error = _sample(record), _error(record, batcher)
            if error is not None:
                self._lend(record, batcher, given)
                await self._refuse(dead_letter.again(error), error)
                return
            if sample is not None:
                if batcher.receive(arrival(record, sample, again=True)) is DropReason.OTHER_POLICY:
                    given.of_others.add(dead_letter.id)  # its own trainer closes it
                    return
                given.sample_ids[dead_letter.id] = sample.sample_id
        if not batcher.holds(given.sample_ids.get(dead_letter.id, "")):
            await self._close(dead_letter)

    def _lend(self, record: Arrived, batcher: Batcher, given: "_Given") -> None:
        """Give the batcher a refused sample that a pending plan names: then the step can be taken (without it)."""
        sample = _sample(record)
        given.lent.add(self.id_of(record))
        if sample is not None and batcher.wants(sample.sample_id):
            batcher.receive(arrival(record, sample, again=True))

    def _tell(self, dead_letter: DeadLetter, topic: str) -> None:
        if dead_letter.fate in (Fate.REPLAY, Fate.DISCARD) and dead_letter.id not in self._told:
            self._told.add(dead_letter.id)
            why = f"only a trainer that reads its topic can do this; this one reads {topic}"
            log.warning(
                "record=%s-%s-%s fate=%s state=waiting reason=%r", *dead_letter.id[1:], dead_letter.fate.value, why
            )

    async def _refuse(self, dead_letter: DeadLetter, error: UnusableEvent) -> None:
        self._failures.set_aside()
        await self.set_aside(dead_letter, error)

    async def _close(self, dead_letter: DeadLetter) -> None:
        mark = dead_letter.closed
        await self.close([mark])
        log.info("record=%s-%s-%s fate=%s", *mark.id[1:], mark.fate.value)


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


def _refused(record: Arrived) -> SampleRefused | None:
    """Return the refusal of an answer that was asked for."""
    if isinstance(record, Undecodable) or not isinstance(record.event, SampleRefused):
        return None
    return None if record.event.refreshed_id is None else record.event


def _error(record: Arrived, batcher: Batcher) -> UnusableEvent | None:
    """Return why the record can't be used; None: it can, or it is not needed."""
    if isinstance(record, Undecodable):
        return UndecodableRecord(record.reason)
    sample = _sample(record)
    found = None if sample is None else batcher.flaw(sample)
    return None if found is None else UnusableEvent(f"no step can be taken on it: {found}")
