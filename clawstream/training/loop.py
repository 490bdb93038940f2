"""The training loop: samples in, published versions out; written to be killed at any line and started again.

A batch is planned on the log before its step, the checkpoint's manifest holds the plan and what the step did, and only
a checkpoint that is whole on disk is published. So after a restart the log and the checkpoints say together what is
still to be done: publish again, execute a plan that was written, or read on from the newest plan's offsets.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from clawstream.config import Settings, TrainingSettings
from clawstream.errors import ConfigError
from clawstream.events import (
    BatchPlanned,
    Event,
    PolicyActivated,
    PolicyEvent,
    PolicyPublished,
    SampleAssembled,
    SamplesPromoted,
    StepTaken,
)
from clawstream.events.control import promotions
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import Record
from clawstream.stream.topics import replay_topic
from clawstream.training.batches import Arrival, Batch, Batcher, Rules, resume_offsets, versions_behind
from clawstream.training.checkpoints import Checkpoint, latest, prune, read, write
from clawstream.training.trainer import Trainer, Update

log = logging.getLogger(__name__)

SAMPLES_TOPIC = "clawstream.samples.v1"
POLICY_TOPIC = "clawstream.policy.v1"
CONTROL_TOPIC = "clawstream.control.v1"
_FOR_EVER_MS = 2**62


class TrainingLog(Protocol):
    """The part of a log that training needs."""

    async def append(self, events: Sequence[Event]) -> None: ...
    def follow(
        self, topics: Sequence[str], start: Start, *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]: ...


@dataclass(slots=True)
class Lived:
    """What the policy topic says of this policy so far."""

    plans: list[BatchPlanned] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    published: set[int] = field(default_factory=set)
    active: int | None = None  # None: no engine has taken any version over

    def learn(self, event: PolicyEvent) -> None:
        """Take in one event of this policy."""
        match event:
            case BatchPlanned():
                self.plans.append(event)
            case StepTaken():
                self.steps.add(event.policy_version)
            case PolicyPublished():
                self.published.add(event.policy_version)
            case PolicyActivated():
                self.active = event.policy_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    """A policy of its own, trained on a replay's samples from a version of another policy on."""

    replay: str
    of: str  # the policy whose answers the samples are, and whose version it starts from
    from_version: int  # 0: the base
    start: Path | None  # that version's checkpoint; None: the base


async def train(
    settings: Settings, training_log: TrainingLog, *, stop: asyncio.Event, retraining: Retraining | None = None
) -> None:
    """Train until `stop`, or up to `max_updates` and then wait for it; or, `retraining`, until all samples are used.

    Which samples are trained on is looked up before each plan: the live ones, or those of the replay that is promoted.
    A step that has begun is finished and published before this returns. Raises UnusableCheckpoint when the newest
    checkpoint belongs to another base, TrainingDiverged when a gradient is not finite.
    """
    if settings.training.threads is not None:
        torch.set_num_threads(settings.training.threads)
    with ThreadPoolExecutor(1, "torch") as worker:
        loop = await _Loop.open(settings, training_log, worker, retraining)
        readers = [asyncio.create_task(loop.read_policy()), asyncio.create_task(loop.read_control())]
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                if not await loop.advance():
                    if loop.used_up:
                        break
                    await loop.wait_for_more([stopping, *readers, loop.reading[-1]])
        finally:
            for task in (*readers, stopping, *loop.reading):
                task.cancel()
            await asyncio.gather(*readers, stopping, *loop.reading, return_exceptions=True)


class _Loop:
    """A policy in training: its batches, its checkpoints and what the log says of it."""

    def __init__(
        self,
        settings: Settings,
        training_log: TrainingLog,
        worker: ThreadPoolExecutor,
        lived: Lived,
        base: Path,
        retraining: Retraining | None,
    ) -> None:
        self._settings = settings
        self._log = training_log
        self._worker = worker
        self._lived = lived
        self._base = base
        self._trainer: tuple[TrainingSettings, Trainer] | None = None
        self._arrived = asyncio.Event()
        self._retraining = retraining
        self._first_version = retraining.from_version if retraining is not None else 0
        self._started_from = read(retraining.start) if retraining is not None and retraining.start is not None else None
        self._checkpoint = latest(settings.checkpoints_dir)
        self._promoted: list[SamplesPromoted] = []
        self._replay: str | None = None  # whose samples are read; None: the live ones
        self._all_read = False
        self.reading: list[asyncio.Task[None]] = []
        self._batcher = self._new_batcher()

    @classmethod
    async def open(
        cls,
        settings: Settings,
        training_log: TrainingLog,
        worker: ThreadPoolExecutor,
        retraining: Retraining | None,
    ) -> "_Loop":
        """Read what was, and put on the log what a killed process did and did not say."""
        base = settings.engine.model_path
        if base is None:
            raise ConfigError("engine.model_path is not set: name the Hugging Face folder that training starts from")
        lived = Lived()
        async for records in training_log.follow([POLICY_TOPIC], "earliest", until_end=True):
            for event in _of_policy(records, settings.policy.id):
                lived.learn(event)
        loop = cls(settings, training_log, worker, lived, base, retraining)
        async for records in training_log.follow([CONTROL_TOPIC], "earliest", until_end=True):
            loop._learn_promotions(records)
        await loop._say_again()
        pending = loop._batcher.pending()
        loop._read_samples_of(loop._pointer if pending is None else pending[0].replay)
        log.info("training_starts version=%d pending=%s", loop._version, loop._batcher.pending() is not None)
        return loop

    @property
    def _version(self) -> int:
        return self._checkpoint.version if self._checkpoint is not None else self._first_version

    @property
    def used_up(self) -> bool:
        """Whether nothing will ever be left to do: all samples that there are were read and trained on."""
        nothing_left = self._batcher.num_waiting == 0 and self._batcher.pending() is None
        return self._all_read and (nothing_left or self._is_limited)

    @property
    def _pointer(self) -> str | None:
        if self._retraining is not None:
            return self._retraining.replay
        standing = promotions(self._promoted)
        return standing[-1].replay if standing else None

    @property
    def _is_limited(self) -> bool:
        limit = self._settings.training.max_updates
        return limit is not None and self._version - self._first_version >= limit

    def _new_batcher(self) -> Batcher:
        of = self._settings.policy.id if self._retraining is None else self._retraining.of
        return Batcher(rules(self._settings, of=of), self._lived.plans, executed_version=self._version)

    def _read_samples_of(self, replay: str | None) -> None:
        """Train on these samples from now on; what waits of others is read again when they are trained on again."""
        for task in self.reading:
            task.cancel()
        self._replay = replay
        self._batcher = self._new_batcher()
        self._all_read = False
        self.reading.append(asyncio.create_task(self.read_samples(replay, self._batcher)))
        log.info("samples_from replay=%s version=%d", replay, self._version)

    async def _say_again(self) -> None:
        missing: list[Event] = []
        if self._first_version not in self._lived.published:
            missing.append(self._published_first())
        if self._checkpoint is not None:
            if self._version not in self._lived.steps:
                missing.append(self._checkpoint.step)
            if self._version not in self._lived.published:
                missing.append(_published(self._checkpoint))
        if missing:
            await self._log.append(missing)

    def _published_first(self) -> PolicyPublished:
        if self._started_from is None:
            return _published_base(self._settings.policy.id, self._base)
        return replace(_published(self._started_from), policy_id=self._settings.policy.id, parent_version=None)

    async def read_samples(self, replay: str | None, batcher: Batcher) -> None:
        """Take samples in, from where the newest executed plan ends."""
        topic = SAMPLES_TOPIC if replay is None else replay_topic(SAMPLES_TOPIC, replay)
        start = resume_offsets(self._lived.plans, self._version)
        start = {place: offset for place, offset in start.items() if place[0] == topic}
        async for records in self._log.follow([topic], start, until_end=self._retraining is not None):
            for record in records:
                if isinstance(record, Record) and isinstance(record.event, SampleAssembled):
                    batcher.receive(
                        Arrival(
                            topic=record.topic,
                            partition=record.partition,
                            offset=record.offset,
                            timestamp_ms=record.timestamp_ms,
                            sample=record.event,
                        )
                    )
            self._arrived.set()
        self._all_read = True
        self._arrived.set()

    async def read_control(self) -> None:
        """Know which samples are promoted."""
        async for records in self._log.follow([CONTROL_TOPIC], "earliest"):
            self._learn_promotions(records)
            self._arrived.set()

    def _learn_promotions(self, records: Sequence[Arrived]) -> None:
        for event in _of_policy(records, self._settings.policy.id):
            if isinstance(event, SamplesPromoted):
                self._promoted.append(event)

    async def read_policy(self) -> None:
        """Know which version engines serve, so that its checkpoint is never removed."""
        async for records in self._log.follow([POLICY_TOPIC], "latest"):
            for event in _of_policy(records, self._settings.policy.id):
                if isinstance(event, PolicyActivated):
                    self._lived.active = event.policy_version

    async def advance(self) -> bool:
        """Execute the plan that is pending, or write the next one; False: there is nothing to do yet."""
        pending = self._batcher.pending()
        if pending is not None:
            plan, samples = pending
            if samples is None:
                return False
            await self._execute(plan, samples)
            return True
        if self._pointer != self._replay:
            self._read_samples_of(self._pointer)
            return False
        if self._is_limited:
            return False
        now_ms = _FOR_EVER_MS if self._all_read else _now_ms()
        batch = self._batcher.due(parent_version=self._version, now_ms=now_ms)
        if batch is None:
            return False
        plan = self._plan(batch)
        await self._log.append([plan])
        self._batcher.plan(plan)
        self._lived.plans.append(plan)
        return True

    async def wait_for_more(self, watched: Sequence["asyncio.Task[object]"]) -> None:
        """Return once samples came, the oldest waited long enough, or a watched task ended; raise what ended it."""
        arrived = asyncio.create_task(self._arrived.wait())
        done, _ = await asyncio.wait([arrived, *watched], timeout=self._patience_s(), return_when="FIRST_COMPLETED")
        self._arrived.clear()
        arrived.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await arrived
        for task in done - {arrived}:
            task.result()

    def _patience_s(self) -> float | None:
        """How long until the oldest waiting sample fires a smaller batch; None: nothing waits."""
        oldest_ms = self._batcher.oldest_ms
        if oldest_ms is None or self._batcher.pending() is not None:
            return None
        if self._is_limited:
            return None
        return max(0.05, self._settings.training.max_wait_s - (_now_ms() - oldest_ms) / 1000)

    def _plan(self, batch: Batch) -> BatchPlanned:
        training = self._settings.training
        return BatchPlanned(
            policy_id=self._settings.policy.id,
            policy_version=self._version + 1,
            parent_version=self._version,
            sample_ids=tuple(sample.sample_id for sample in batch.samples),
            offsets=batch.offsets,
            seed=training.seed * 1_000_003 + self._version + 1,
            settings=training.model_dump_json().encode(),
            planned_at_ms=_now_ms(),
            replay=self._replay,
        )

    async def _execute(self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...]) -> None:
        checkpoint = await asyncio.get_running_loop().run_in_executor(self._worker, self._step, plan, samples)
        self._checkpoint = checkpoint
        self._batcher.executed(plan)
        await self._log.append([checkpoint.step, _published(checkpoint)])
        log.info(
            "step_taken version=%d samples=%d loss=%s grad_norm=%s step_ms=%d",
            checkpoint.version, len(samples), checkpoint.step.loss_nats, checkpoint.step.grad_norm,
            checkpoint.step.step_ms,
        )  # fmt: skip
        prune(self._settings.checkpoints_dir, keep=self._settings.training.keep_checkpoints, active=self._lived.active)

    def _step(self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...]) -> Checkpoint:
        """Take the step under the settings that its plan names, and return its checkpoint, whole on disk."""
        started = time.perf_counter()
        trainer = self._trainer_for(TrainingSettings.model_validate_json(plan.settings))
        update = trainer.update(samples, version=plan.policy_version, seed=plan.seed)
        step = _step_taken(plan, samples, update, step_ms=round((time.perf_counter() - started) * 1000))
        return write(self._settings.checkpoints_dir, plan, step, trainer.save)

    def _trainer_for(self, training: TrainingSettings) -> Trainer:
        if self._trainer is None or self._trainer[0] != training:
            trainer = Trainer(self._base, training, device=_device(training.device))
            newest = self._checkpoint or self._started_from
            if newest is not None:
                trainer.restore(newest.path)
            self._trainer = (training, trainer)
        return self._trainer[1]


def retraining(settings: Settings, *, replay: str, from_version: int) -> tuple[Settings, Retraining]:
    """Return the settings of the policy POLICY-REPLAY, and what it is trained on; its versions count on from there.

    How old a sample is makes no difference to whether it is used: its recorded log-probs say how much it weighs. Raises
    UnusableCheckpoint where the version that it is to start from is not on disk any more.
    """
    start = settings.checkpoints_dir / f"v{from_version:06d}" if from_version else None
    if start is not None:
        read(start, contents=False)
    policy = settings.policy.model_copy(update={"id": f"{settings.policy.id}-{replay}"})
    training = settings.training.model_copy(update={"max_versions_behind": None})
    what = Retraining(replay=replay, of=settings.policy.id, from_version=from_version, start=start)
    return settings.model_copy(update={"policy": policy, "training": training}), what


def rules(settings: Settings, *, of: str | None = None) -> Rules:
    """Return when a batch is made and of what, as the settings say; `of` names the policy that answered, if another."""
    training = settings.training
    w_binary, w_opd = training.weights
    return Rules(
        policy_id=of or settings.policy.id,
        batch_samples=training.batch_samples,
        max_wait_ms=round(training.max_wait_s * 1000),
        max_versions_behind=training.max_versions_behind,
        rewards_count=w_binary > 0,
        hints_count=w_opd > 0,
    )


def _of_policy(records: Sequence[Arrived], policy_id: str) -> list[PolicyEvent]:
    events = [record.event for record in records if isinstance(record, Record)]
    return [event for event in events if isinstance(event, PolicyEvent) and event.policy_id == policy_id]


def _step_taken(plan: BatchPlanned, samples: Sequence[SampleAssembled], update: Update, *, step_ms: int) -> StepTaken:
    behind = [versions_behind(sample, plan.parent_version) for sample in samples]
    return StepTaken(
        policy_id=plan.policy_id,
        policy_version=plan.policy_version,
        num_samples=update.num_samples,
        num_hinted=update.num_hinted,
        num_rewarded=update.num_rewarded,
        num_tokens=update.loss.num_tokens,
        num_tokens_dropped=update.loss.num_tokens_dropped,
        loss_nats=update.loss.loss_nats,
        kl_reference_nats=update.loss.kl_reference_nats,
        mean_gap_nats=update.mean_gap_nats,
        mean_reward=update.mean_reward,
        clipped_share=update.loss.clipped_share,
        grad_norm=update.grad_norm,
        learning_rate=update.learning_rate,
        mean_versions_behind=sum(behind) / len(behind),
        max_versions_behind=max(behind),
        step_ms=step_ms,
        taken_at_ms=_now_ms(),
    )


def _published(checkpoint: Checkpoint) -> PolicyPublished:
    return PolicyPublished(
        policy_id=checkpoint.plan.policy_id,
        policy_version=checkpoint.version,
        parent_version=checkpoint.plan.parent_version,
        path=str(checkpoint.path.absolute()),
        adapter=None,
        manifest_sha256=checkpoint.manifest_sha256,
        num_bytes=checkpoint.num_bytes,
        published_at_ms=_now_ms(),
    )


def _published_base(policy_id: str, base: Path) -> PolicyPublished:
    return PolicyPublished(
        policy_id=policy_id,
        policy_version=0,
        parent_version=None,
        path=str(base.absolute()),
        adapter=None,
        manifest_sha256=None,
        num_bytes=sum(file.stat().st_size for file in base.iterdir() if file.is_file()),
        published_at_ms=_now_ms(),
    )


def _device(named: str | None) -> str:
    return named or ("cuda" if torch.cuda.is_available() else "cpu")


def _now_ms() -> int:
    return int(time.time() * 1000)
