"""The training loop: it reads samples and publishes versions. It may be killed at any line and started again.

A batch is planned on the log before its step, and only a checkpoint that is whole on disk is published. If the gate
refuses a step, a rejection is written. So after a restart the log and the checkpoints show what is left to do: publish
the newest checkpoint, execute a plan that was not rejected, or read on from the newest plan's offsets.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from clawstream.config import Settings
from clawstream.config.training import CORRECTION_EPOCHS
from clawstream.errors import UnusableCheckpoint
from clawstream.events import (
    BatchPlanned,
    PolicyActivated,
    PolicyEvent,
    SampleAssembled,
    StepRejected,
    StepTaken,
    is_of_policy,
)
from clawstream.events.control import pinned
from clawstream.inference.model_folder import version_name
from clawstream.stream import topics
from clawstream.stream.log import Log, of_policy
from clawstream.stream.shared import SharedLog
from clawstream.stream.stage import now_ms
from clawstream.training.base_folder import limits_of
from clawstream.training.batches.following import Following, Retraining, first_publication, policies_of
from clawstream.training.batches.planning import Batch, Batcher, turn_of
from clawstream.training.batches.progress import PolicyProgress, gone, rejection
from clawstream.training.batches.quarantine import TrainingQuarantine
from clawstream.training.batches.trainable import ModelLimits
from clawstream.training.checkpoints import alone_on, latest, prune, read
from clawstream.training.rehearsing import Rehearsing
from clawstream.training.stepping import Stepper, refuse_what_cannot_be

log = logging.getLogger(__name__)

_FOR_EVER_MS = 2**62


async def train(
    settings: Settings, training_log: Log, *, stop: asyncio.Event, retraining: Retraining | None = None
) -> None:
    """Train until `stop`, making at most `max_updates` updates; with `retraining`, until all samples are used.

    Where each API key has an adapter of its own, the keys' policies take turns, a step at a time. Before each plan the
    control topic decides which samples are used: the live ones, or those of the promoted replay. A step that has begun
    is finished and published before this returns. Raises ConfigError when the trainer can't train this base here,
    UnusableCheckpoint when the newest checkpoint belongs to another base or is not what was published, TrainingDiverged
    when a step can't be taken, PartUnavailable when another process trains this policy or a process of this trainer
    ended, LogContradicted when the log is not the one that the newest step read, SamplesGone when a plan's samples are
    past their retention, TooManyFailures when more than one in a hundred records can't be used.
    """
    refuse_what_cannot_be(settings.engine.base_policy, settings.training)
    with alone_on(settings.checkpoints_dir), ThreadPoolExecutor(1, "torch") as thread:
        policies = _Policies(settings, training_log, thread, retraining)
        stopping = asyncio.create_task(stop.wait())
        try:
            await policies.open()
            while not stop.is_set():
                if not await policies.advance(stop):
                    if policies.used_up:
                        break
                    await policies.wait_for_more(stopping)
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, policies.close(), return_exceptions=True)


class _Policies:
    """What is trained here: the policy that all share, and, where adapters are by key, that of each key with samples.

    They have one model in memory, whose adapter and optimizer are exchanged where another policy's turn comes.
    """

    def __init__(
        self, settings: Settings, training_log: Log, thread: ThreadPoolExecutor, retraining: Retraining | None
    ) -> None:
        self._by_key = settings.policy.by_key and retraining is None
        training_log = SharedLog.of(training_log) if self._by_key else training_log
        base, arrived = settings.engine.base_policy, asyncio.Event()
        limits = limits_of(base)
        stepper = Stepper(base, limits, machine=settings.training)
        quarantine = TrainingQuarantine(topics.SAMPLES, training_log, on_change=arrived.set)
        self._settings = settings
        self._parts = _Parts(training_log, thread, stepper, limits, arrived, quarantine)
        self._shared = _Loop(settings, self._parts, retraining)
        self._loops: dict[str, _Loop] = {}
        self._readers: list[asyncio.Task[None]] = []

    @property
    def used_up(self) -> bool:
        """Whether a retraining is over."""
        return self._shared.used_up

    async def open(self) -> None:
        """Read the log so far, and write to it the outcomes that a killed process did not write."""
        self._readers.append(asyncio.create_task(self._parts.quarantine.follow()))
        await self._add(self._shared)
        await self._add_keys()

    async def advance(self, stop: asyncio.Event) -> bool:
        """Let each policy do what there is to do, one step at most; False: there was nothing."""
        await self._add_keys()
        moved = False
        for loop in tuple(self._loops.values()):
            if not stop.is_set():
                moved |= await loop.advance()
        return moved

    async def wait_for_more(self, stopping: "asyncio.Task[bool]") -> None:
        """Return once samples came, the oldest waited long enough, or a reader ended; raise that reader's error."""
        arrived = asyncio.create_task(self._parts.arrived.wait())
        reading = [loop.samples.reading[-1] for loop in self._loops.values()]
        patience_s = min((s for loop in self._loops.values() if (s := loop.patience_s) is not None), default=None)
        watched: list[asyncio.Task[Any]] = [stopping, *self._readers, *reading]
        done, _ = await asyncio.wait([arrived, *watched], timeout=patience_s, return_when="FIRST_COMPLETED")
        self._parts.arrived.clear()
        arrived.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await arrived
        for task in done - {arrived}:
            task.result()

    async def close(self) -> None:
        """Stop reading, and end the trainer's processes."""
        ending = [*self._readers, *(task for loop in self._loops.values() for task in loop.samples.reading)]
        for task in ending:
            task.cancel()
        keeping = [task for loop in self._loops.values() for task in loop.samples.keeping]
        await asyncio.gather(*ending, *keeping, return_exceptions=True)
        self._parts.stepper.close()

    async def _add(self, loop: "_Loop") -> None:
        self._loops[loop.policy_id] = loop
        await loop.open()
        self._readers += map(asyncio.create_task, loop.readers())

    async def _add_keys(self) -> None:
        """Begin with the policy of each key that is on the log, and was not here yet."""
        if not self._by_key:
            return
        known = self._shared.found | self._shared.samples.found
        for policy_id in sorted(known - self._loops.keys()):
            if is_of_policy(policy_id, self._settings.policy.id):
                await self._add(_Loop(self._settings.of_policy(policy_id), self._parts, began_with=self._shared))


class _Parts(NamedTuple):
    """What the policies that are trained here share."""

    log: Log
    thread: ThreadPoolExecutor  # runs torch, so that the event loop stays free for the log
    stepper: Stepper
    limits: ModelLimits
    arrived: asyncio.Event
    quarantine: TrainingQuarantine


class _Loop:
    """The training of one policy. One of a key begins with the version that the shared policy `began_with` has then."""

    def __init__(
        self, settings: Settings, parts: _Parts, retraining: Retraining | None = None, *,
        began_with: "_Loop | None" = None,
    ) -> None:  # fmt: skip
        self.policy_id = settings.policy.id
        self.found: set[str] = set()  # other policies on the log
        self._settings, self._parts, self._log = settings, parts, parts.log
        self._progress = PolicyProgress()
        self._began_with = began_with
        self._first_version = retraining.from_version if retraining is not None else 0
        self._start = retraining.start if retraining is not None else None
        self.lent: set[int] = set()  # versions that keys' policies began with
        self._checkpoint = latest(settings.checkpoints_dir)
        self.samples = Following(
            settings, parts.log, self._progress, retraining, parts.limits,
            arrived=parts.arrived, quarantine=parts.quarantine,
        )  # fmt: skip
        self.rehearsing = Rehearsing(settings, parts.log, on_change=parts.arrived.set)

    async def open(self) -> None:
        """Read the log so far, and write to it the outcomes that a killed process did not write."""
        async for records in self._log.follow([topics.POLICY], "earliest", until_end=True):
            for event in of_policy(records, self.policy_id):
                self._progress.learn(event)
            self.found |= policies_of(records)
        self._begin()
        await self.rehearsing.open([step for _, step in sorted(self._progress.steps.items())])
        await self.samples.read_promotions(until_end=True)
        missing: list[PolicyEvent] = []
        if self._first_version not in self._progress.published:
            start = None if self._start is None else read(self._start)
            base = self._settings.engine.base_policy
            missing.append(first_publication(self.policy_id, base, start, now_ms=now_ms()))
        if self._checkpoint is not None:
            missing += self._progress.missing_events(self._checkpoint, now_ms=now_ms())
        await self._write(missing)
        written = self._progress.pending(self._version)
        self.samples.turn_to(written[0].replay if written else self.samples.wanted, executed_version=self._decided)
        log.info("training_starts policy=%s version=%d pending=%s", self.policy_id, self._version, bool(written))

    def readers(self) -> list[Coroutine[None, None, None]]:
        """Return what reads on in the log for as long as this policy is trained, beside its samples."""
        promotions = self.samples.read_promotions(until_end=False)
        return [self._read_policy(), promotions, self.rehearsing.follow()]

    def _begin(self) -> None:
        """Set the version that a key's policy began with, or, where it has none yet, begins with."""
        shared = self._began_with
        if shared is None:
            return
        if self._progress.published:
            first = self._progress.published[min(self._progress.published)]
            self._start = None if first.manifest_sha256 is None else Path(first.path)
            self._first_version = first.policy_version
        else:
            self._first_version, self._start = shared.newest
        shared.lent.add(self._first_version)

    @property
    def newest(self) -> tuple[int, Path | None]:
        """The newest version, and where it lies; None: it is what this policy started from, the base."""
        return self._version, self._start if self._checkpoint is None else self._checkpoint.path

    @property
    def used_up(self) -> bool:
        """Whether a retraining is over: all samples are read, and all are trained on or `max_updates` is reached."""
        nothing_left = self._batcher.num_waiting == 0 and self._batcher.pending() is None
        return self.samples.all_read and (nothing_left or self._is_limited)

    async def _read_policy(self) -> None:
        """Follow which version engines serve, so that its checkpoint is never removed."""
        async for records in self._log.follow([topics.POLICY], "latest"):
            for event in of_policy(records, self.policy_id):
                if isinstance(event, PolicyActivated):
                    self._progress.learn(event)

    async def advance(self) -> bool:
        """Execute the plan that is pending, or write the next one; False: there is nothing to do yet."""
        if self.samples.reading[-1].done():
            self.samples.reading[-1].result()
        await self.samples.rule()
        pending = self._batcher.pending()
        if pending is not None:
            plan, samples = pending
            if samples is None:
                if self.samples.is_past(plan):
                    raise gone(plan, self._batcher.missing(plan))
                return False
            if self.samples.is_live:
                await self.rehearsing.hold(plan, samples)
            await self._execute(plan, samples)
            return True
        if self.samples.wanted != self.samples.replay:
            self.samples.turn_to(self.samples.wanted, executed_version=self._decided)
            return False
        if (back := self._rollback()) is not None:
            await self._write([back])
            self._batcher.plan(back)
            return True
        if self._is_limited:
            return False
        if corrections := self._batcher.to_correct():
            await self.rehearsing.correct(corrections)
            self._batcher.corrected(corrections, now_ms())
        if self.samples.is_live:
            await self.rehearsing.merge(self._decided)
        at_ms = _FOR_EVER_MS if self.samples.all_read else now_ms()
        batch = self._batcher.due(parent_version=self._version, now_ms=at_ms, merging=self.rehearsing.merging)
        self.samples.tell_dropped()
        if batch is None:
            return False
        plan = self._plan(batch)
        await self._write([plan])
        self._batcher.plan(plan)
        return True

    @property
    def _version(self) -> int:
        return self._checkpoint.version if self._checkpoint is not None else self._first_version

    @property
    def _decided(self) -> int:
        """The newest version number that is taken: `_version`, or the number of a later step that was rejected."""
        return self._progress.decided(self._version)

    @property
    def _batcher(self) -> Batcher:
        return self.samples.batcher

    @property
    def _is_limited(self) -> bool:
        limit = self._settings.training.max_updates
        return limit is not None and self._progress.num_updates(self._first_version, self._version) >= limit

    @property
    def patience_s(self) -> float | None:
        """How long until a smaller batch is due, as its oldest sample waited long enough; None: none will be due."""
        due_ms = min((ms for ms in (self._batcher.due_ms, self.rehearsing.due_ms) if ms is not None), default=None)
        if due_ms is None or self._batcher.pending() is not None or self._is_limited:
            return None
        return max(0.05, (due_ms - now_ms()) / 1000)

    def _plan(self, batch: Batch) -> BatchPlanned:
        training = self._settings.training
        if batch.samples and all(sample.hint_id is not None for sample in batch.samples):  # of merged hints
            training = training.model_copy(update={"cadence": "correction", "epochs": CORRECTION_EPOCHS})
        return BatchPlanned(
            policy_id=self.policy_id,
            policy_version=self._decided + 1,
            parent_version=self._version,
            sample_ids=tuple(sample.sample_id for sample in batch.samples),
            offsets=batch.offsets,
            seed=training.seed * 1_000_003 + self._decided + 1,
            settings=training.resolved.model_dump_json().encode(),
            planned_at_ms=now_ms(),
            replay=self.samples.replay,
            turns=tuple(map(turn_of, batch.samples)),
            advantages=batch.advantages,
        )

    def _rollback(self) -> BatchPlanned | None:
        asked = self._progress.rollback(self.samples.rollbacks)
        if asked is None:
            return None
        plan = self._plan(Batch(samples=(), offsets=()))
        return replace(plan, parent_version=asked.to_version, rollback=asked.number)

    def _folder_of(self, version: int) -> Path | None:
        """Return where a version lies, verified; None: it is the base. Raises UnusableCheckpoint."""
        if version == self._first_version:
            return None if self._start is None else read(self._start).path
        if self._checkpoint is not None and version == self._checkpoint.version:
            return self._checkpoint.path
        return read(self._settings.checkpoints_dir / version_name(version)).path

    async def _execute(self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...]) -> None:
        recorded = self._progress.steps.get(plan.policy_version)
        try:
            parent = self._folder_of(plan.parent_version)
        except UnusableCheckpoint as error:
            if plan.rollback is None or recorded is not None:
                raise
            # Without a rejection on the log the rollback would be carried out later, once the folder is back.
            why = f"rollback {plan.rollback} can't be carried out: {error} Ask for it again once it is there"
            await self._reject(plan, rejection(plan, why, step_ms=0, now_ms=now_ms()))
            return
        rejected = frozenset(self._progress.rejected)
        execute = partial(
            self._parts.stepper.execute, plan, samples, parent=parent, versions=self._settings.checkpoints_dir,
            recorded=recorded, rejected=rejected,
        )  # fmt: skip
        outcome = await asyncio.get_running_loop().run_in_executor(self._parts.thread, execute)
        if isinstance(outcome, StepRejected):
            await self._reject(plan, outcome)
            await self._rehearse(plan, None)
            return
        checkpoint = self._checkpoint = outcome
        await self.samples.executed(plan)
        await self._write(self._progress.missing_events(checkpoint, now_ms=now_ms()))
        step = checkpoint.step
        await self._rehearse(plan, step)
        log.info(
            "step_taken policy=%s version=%d samples=%d loss=%s grad_norm=%s step_ms=%d",
            self.policy_id, checkpoint.version, len(samples), step.loss_nats, step.grad_norm, step.step_ms,
        )  # fmt: skip
        needed = self._progress.needed(self.samples.rollbacks, checkpoint.version) | pinned(self.samples.pins)
        needed |= self.lent
        prune(self._settings.checkpoints_dir, keep=self._settings.training.keep_checkpoints, needed=needed)

    async def _rehearse(self, plan: BatchPlanned, step: StepTaken | None) -> None:
        """Ask for the rehearsals of the next batch; engines serve only the policy of the live samples."""
        if self.samples.is_live:
            await self.rehearsing.ask(plan, step)

    async def _reject(self, plan: BatchPlanned, rejected: StepRejected) -> None:
        """Write the rejection; training goes on from the version before, and the samples are used up."""
        await self._write([rejected])
        await self.samples.executed(plan, rejected=True)
        log.error(
            "step_rejected policy=%s version=%d stays=%d samples=%d reason=%r",
            self.policy_id, plan.policy_version, plan.parent_version, len(plan.sample_ids), rejected.reason,
        )  # fmt: skip

    async def _write(self, events: Sequence[PolicyEvent]) -> None:
        if events:
            await self._log.append(events)
        for event in events:
            self._progress.learn(event)
