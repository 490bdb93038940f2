"""The training loop: it reads samples and publishes versions. It may be killed at any line and started again.

A batch is planned on the log before its step, and only a checkpoint that is whole on disk is published. If the gate
refuses a step, a rejection is written. So after a restart the log and the checkpoints show what is left to do: publish
the newest checkpoint, execute a plan that was not rejected, or read on from the newest plan's offsets.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from clawstream.config import Settings
from clawstream.errors import SamplesGone, UnusableCheckpoint
from clawstream.events import BatchPlanned, PolicyActivated, PolicyEvent, SampleAssembled, StepRejected, StepTaken
from clawstream.events.control import pinned
from clawstream.inference.model_folder import version_name
from clawstream.stream import topics
from clawstream.stream.log import Log, of_policy
from clawstream.stream.stage import now_ms
from clawstream.training.base_folder import limits_of
from clawstream.training.batches.following import Following, Retraining, first_publication
from clawstream.training.batches.planning import Batch, Batcher, turn_of
from clawstream.training.batches.progress import PolicyProgress, rejection
from clawstream.training.checkpoints import alone_on, latest, prune, read
from clawstream.training.rehearsing import Rehearsing
from clawstream.training.stepping import Stepper, refuse_what_cannot_be

log = logging.getLogger(__name__)

_FOR_EVER_MS = 2**62


async def train(
    settings: Settings, training_log: Log, *, stop: asyncio.Event, retraining: Retraining | None = None
) -> None:
    """Train until `stop`, making at most `max_updates` updates; with `retraining`, until all samples are used.

    Before each plan the control topic decides which samples are used: the live ones, or those of the promoted replay. A
    step that has begun is finished and published before this returns. Raises ConfigError when the trainer can't train
    this base here, UnusableCheckpoint when the newest checkpoint belongs to another base or is not what was published,
    TrainingDiverged when a step can't be taken, PartUnavailable when another process trains this policy or a process of
    this trainer ended, LogContradicted when the log is not the one that the newest step read, SamplesGone when a plan's
    samples are past their retention, TooManyFailures when more than one in a hundred records can't be used.
    """
    refuse_what_cannot_be(settings.engine.base_policy, settings.training)
    with alone_on(settings.checkpoints_dir), ThreadPoolExecutor(1, "torch") as thread:
        loop = _Loop(settings, training_log, thread, retraining)
        await loop.open()
        readers = [
            asyncio.create_task(loop.read_policy()),
            asyncio.create_task(loop.samples.read_promotions(until_end=False)),
            asyncio.create_task(loop.samples.quarantine.follow()),
            asyncio.create_task(loop.rehearsing.follow()),
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                if loop.samples.reading[-1].done():
                    loop.samples.reading[-1].result()
                await loop.samples.rule()
                if not await loop.advance():
                    if loop.used_up:
                        break
                    await loop.wait_for_more([stopping, *readers, loop.samples.reading[-1]])
        finally:
            for task in (*readers, stopping, *loop.samples.reading):
                task.cancel()
            ending = (*readers, stopping, *loop.samples.reading, *loop.samples.keeping)
            await asyncio.gather(*ending, return_exceptions=True)
            loop.stepper.close()


class _Loop:
    def __init__(
        self, settings: Settings, training_log: Log, thread: ThreadPoolExecutor, retraining: Retraining | None
    ) -> None:
        self._settings = settings
        self._log = training_log
        limits = limits_of(settings.engine.base_policy)
        self._thread = thread  # runs torch, so that the event loop stays free for the log
        self.stepper = Stepper(settings.engine.base_policy, settings.checkpoints_dir, limits, machine=settings.training)
        self._progress = PolicyProgress()
        self._first_version = retraining.from_version if retraining is not None else 0
        self._start = read(retraining.start) if retraining is not None and retraining.start is not None else None
        self._checkpoint = latest(settings.checkpoints_dir)
        self.samples = Following(settings, training_log, self._progress, retraining, limits)
        self.rehearsing = Rehearsing(settings, training_log)

    async def open(self) -> None:
        """Read the log so far, and write to it the outcomes that a killed process did not write."""
        async for records in self._log.follow([topics.POLICY], "earliest", until_end=True):
            for event in of_policy(records, self._settings.policy.id):
                self._progress.learn(event)
        await self.rehearsing.open([step for _, step in sorted(self._progress.steps.items())])
        await self.samples.read_promotions(until_end=True)
        missing: list[PolicyEvent] = []
        if self._first_version not in self._progress.published:
            policy_id, base = self._settings.policy.id, self._settings.engine.base_policy
            missing.append(first_publication(policy_id, base, self._start, now_ms=now_ms()))
        if self._checkpoint is not None:
            missing += self._progress.missing_events(self._checkpoint, now_ms=now_ms())
        await self._write(missing)
        written = self._progress.pending(self._version)
        self.samples.turn_to(written[0].replay if written else self.samples.wanted, executed_version=self._decided)
        log.info("training_starts version=%d pending=%s", self._version, bool(written))

    @property
    def used_up(self) -> bool:
        """Whether a retraining is over: all samples are read, and all are trained on or `max_updates` is reached."""
        nothing_left = self._batcher.num_waiting == 0 and self._batcher.pending() is None
        return self.samples.all_read and (nothing_left or self._is_limited)

    async def read_policy(self) -> None:
        """Follow which version engines serve, so that its checkpoint is never removed."""
        async for records in self._log.follow([topics.POLICY], "latest"):
            for event in of_policy(records, self._settings.policy.id):
                if isinstance(event, PolicyActivated):
                    self._progress.learn(event)

    async def advance(self) -> bool:
        """Execute the plan that is pending, or write the next one; False: there is nothing to do yet."""
        pending = self._batcher.pending()
        if pending is not None:
            plan, samples = pending
            if samples is None:
                if self.samples.is_past(plan):
                    raise _gone(plan, self._batcher.missing(plan))
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
        at_ms = _FOR_EVER_MS if self.samples.all_read else now_ms()
        batch = self._batcher.due(parent_version=self._version, now_ms=at_ms)
        self.samples.tell_dropped()
        if batch is None:
            return False
        plan = self._plan(batch)
        await self._write([plan])
        self._batcher.plan(plan)
        return True

    async def wait_for_more(self, watched: Sequence["asyncio.Task[object]"]) -> None:
        """Return once samples came, the oldest waited long enough, or a watched task ended; raise that task's error."""
        arrived = asyncio.create_task(self.samples.arrived.wait())
        done, _ = await asyncio.wait([arrived, *watched], timeout=self._patience_s(), return_when="FIRST_COMPLETED")
        self.samples.arrived.clear()
        arrived.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await arrived
        for task in done - {arrived}:
            task.result()

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

    def _patience_s(self) -> float | None:
        """How long until a smaller batch is due, as its oldest sample waited long enough; None: none will be due."""
        due_ms = self._batcher.due_ms
        if due_ms is None or self._batcher.pending() is not None or self._is_limited:
            return None
        return max(0.05, (due_ms - now_ms()) / 1000)

    def _plan(self, batch: Batch) -> BatchPlanned:
        training = self._settings.training
        return BatchPlanned(
            policy_id=self._settings.policy.id,
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
            return self._start.path if self._start is not None else None
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
        execute = partial(self.stepper.execute, plan, samples, parent=parent, recorded=recorded, rejected=rejected)
        outcome = await asyncio.get_running_loop().run_in_executor(self._thread, execute)
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
            "step_taken version=%d samples=%d loss=%s grad_norm=%s step_ms=%d",
            checkpoint.version, len(samples), step.loss_nats, step.grad_norm, step.step_ms,
        )  # fmt: skip
        needed = self._progress.needed(self.samples.rollbacks, checkpoint.version) | pinned(self.samples.pins)
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
            "step_rejected version=%d stays=%d samples=%d reason=%r",
            plan.policy_version, plan.parent_version, len(plan.sample_ids), rejected.reason,
        )  # fmt: skip

    async def _write(self, events: Sequence[PolicyEvent]) -> None:
        if events:
            await self._log.append(events)
        for event in events:
            self._progress.learn(event)


def _gone(plan: BatchPlanned, missing: Sequence[str]) -> SamplesGone:
    places = ", ".join(f"{o.topic}-{o.partition} before {o.next_offset}" for o in plan.offsets)
    return SamplesGone(
        f"the plan of version {plan.policy_version} of {plan.policy_id} names {len(missing)} samples of "
        f"{len(plan.sample_ids)} that are not on the log any more, {missing[0]} first. They stood in {places}, and are "
        "past their topic's retention. Its step is not taken, nor any later one. Restore the topic from a backup; or "
        "derive the samples again with `clawstream replay start --votes-from log --name again` and go on with "
        f"`clawstream train --samples again --from-policy {plan.parent_version}`, as a policy of its own"
    )
