"""The samples that a policy is trained on: the live ones, those of the replay that is promoted, or those of one replay.

They are read from where the newest executed plan ends, so what a plan still to be executed names is among them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from clawstream.config import Settings
from clawstream.events import Event, SampleAssembled, SamplesPromoted
from clawstream.events.control import promotions
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import Record
from clawstream.stream.topics import replay_topic
from clawstream.training.batches import Arrival, Batcher, Rules, resume_offsets
from clawstream.training.lived import Lived, of_policy
from clawstream.training.retraining import Retraining

log = logging.getLogger(__name__)

SAMPLES_TOPIC = "clawstream.samples.v1"
CONTROL_TOPIC = "clawstream.control.v1"


class TrainingLog(Protocol):
    """The part of a log that training needs."""

    async def append(self, events: Sequence[Event]) -> None: ...
    def follow(
        self, topics: Sequence[str], start: Start, *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]: ...


class Following:
    """Reads samples into a batcher, which is a new one each time that others are to be trained on."""

    batcher: Batcher

    def __init__(
        self, settings: Settings, training_log: TrainingLog, lived: Lived, retraining: Retraining | None
    ) -> None:
        self._settings = settings
        self._log = training_log
        self._lived = lived
        self._retraining = retraining
        self._promoted: list[SamplesPromoted] = []
        self.replay: str | None = None  # whose samples are read; None: the live ones
        self.all_read = False  # of a replay that is read to its end
        self.arrived = asyncio.Event()
        self.reading: list[asyncio.Task[None]] = []

    @property
    def wanted(self) -> str | None:
        """Whose samples are to be trained on from the next plan on; None: the live ones."""
        if self._retraining is not None:
            return self._retraining.replay
        standing = promotions(self._promoted)
        return standing[-1].replay if standing else None

    async def read_promotions(self, *, until_end: bool) -> None:
        """Know which samples are promoted."""
        async for records in self._log.follow([CONTROL_TOPIC], "earliest", until_end=until_end):
            events = of_policy(records, self._settings.policy.id)
            self._promoted += [event for event in events if isinstance(event, SamplesPromoted)]
            self.arrived.set()

    def turn_to(self, replay: str | None, *, executed_version: int) -> None:
        """Train on these samples from now on; what waits of others is read again when they are trained on again."""
        for task in self.reading:
            task.cancel()
        of = self._settings.policy.id if self._retraining is None else self._retraining.of
        self.replay = replay
        self.batcher = Batcher(rules(self._settings, of=of), self._lived.plans, executed_version=executed_version)
        self.all_read = False
        self.reading.append(asyncio.create_task(self._read(replay, self.batcher, executed_version)))
        log.info("samples_from replay=%s version=%d", replay, executed_version)

    async def _read(self, replay: str | None, batcher: Batcher, executed_version: int) -> None:
        topic = SAMPLES_TOPIC if replay is None else replay_topic(SAMPLES_TOPIC, replay)
        start = resume_offsets(self._lived.plans, executed_version)
        start = {place: offset for place, offset in start.items() if place[0] == topic}
        async for records in self._log.follow([topic], start, until_end=self._retraining is not None):
            for record in records:
                if isinstance(record, Record) and isinstance(record.event, SampleAssembled):
                    batcher.receive(_arrival(record, record.event))
            self.arrived.set()
        self.all_read = True
        self.arrived.set()


def rules(settings: Settings, *, of: str) -> Rules:
    """Return when a batch is made and of what, as the settings say; `of` names the policy that answered."""
    training = settings.training
    w_binary, w_opd = training.weights
    return Rules(
        policy_id=of,
        batch_samples=training.batch_samples,
        max_wait_ms=round(training.max_wait_s * 1000),
        max_versions_behind=training.max_versions_behind,
        rewards_count=w_binary > 0,
        hints_count=w_opd > 0,
    )


def _arrival(record: Record, sample: SampleAssembled) -> Arrival:
    return Arrival(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        sample=sample,
    )
