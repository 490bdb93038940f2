"""The training of one policy: a step at a time, planned on the log before it is taken, and published after it.

It may be killed at any line and started again: the log and the checkpoints show what is left to do.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from clawstream.config import Settings
from clawstream.config.training import CORRECTION_EPOCHS
from clawstream.errors import ServiceAway, ServiceRefused, UnusableCheckpoint
from clawstream.events import (
    BatchPlanned,
    PolicyActivated,
    PolicyEvent,
    PolicyPublished,
    SampleAssembled,
    StepRejected,
    StepTaken,
)
from clawstream.events.control import pinned
from clawstream.inference.model_folder import version_name
from clawstream.stream import topics
from clawstream.stream.log import Log, of_policy
from clawstream.stream.stage import now_ms
from clawstream.training.batches.following import Following, Retraining, first_publication, policies_of
from clawstream.training.batches.memory import Trial
from clawstream.training.batches.planning import Batch, Batcher, turn_of
from clawstream.training.batches.progress import PolicyProgress, gone, rejection
from clawstream.training.batches.quarantine import TrainingQuarantine
from clawstream.training.batches.trainable import ModelLimits
from clawstream.training.checkpoints import latest, prune, read, resumable, unfinished
from clawstream.training.rehearsing import Rehearsing
from clawstream.training.stepping import Stepper

log = logging.getLogger(__name__)

_FOR_EVER_MS = 2**62
ASKED_AGAIN_S = 10.0  # after what trains elsewhere did not answer


class SharedParts(NamedTuple):
    """What the policies that are trained here share."""

    log: Log
    thread: ThreadPoolExecutor  # runs torch, so that the event loop stays free for the log
    stepper: Stepper
    limits: ModelLimits
    arrived: asyncio.Event
    quarantine: TrainingQuarantine


class PolicyLoop:
    """The training of one policy. A key's policy begins, at its first plan, as the shared `began_with` is then."""

    def __init__(
        self, settings: Settings, parts: SharedParts, retraining: Retraining | None = None, *,
        began_with: "PolicyLoop | None" = None,
    ) -> None:  # fmt: skip
        self.policy_id = settings.policy.id
        self.found: set[str] = set()  # other policies on the log
        self._settings, self._parts, self._log = settings, parts, parts.log
        self._progress = PolicyProgress()
        self._began_with = began_with
        self._first_version = retraining.from_version if retraining is not None else 0
        self._start = retraining.start if retraining is not None else None
        self._again_ms = 0  # when a plan is executed again that what trains elsewhere did not answer
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
        self._find_start()
        await self.samples.read_promotions(until_end=True)
        missing: list[PolicyEvent] = []
        if self._began_with is None and self._first_version not in self._progress.published:
            missing.append(self._first_publication())
        cut_short = unfinished(self._settings.checkpoints_dir, above=self._version)
        if cut_short is not None:
            log.warning(
                "version=%d state=missing reason=the trainer ended before it was written: its step is taken again, and "
                "its weights stay", cut_short.version,
            )  # fmt: skip
        for checkpoint in filter(None, (self._checkpoint, cut_short)):
            missing += self._progress.missing_events(checkpoint, now_ms=now_ms())
        await self._write(missing)
        written = self._progress.pending(self._version)
        await self.rehearsing.open([step for _, step in sorted(self._progress.steps.items())], written)
        self.samples.turn_to(written[0].replay if written else self.samples.wanted, executed_version=self._decided)
        log.info("training_starts policy=%s version=%d pending=%s", self.policy_id, self._version, bool(written))

    def readers(self) -> list[Coroutine[None, None, None]]:
        """Return the coroutines that read on in the log while this policy is trained; none reads its samples."""
        promotions = self.samples.read_promotions(until_end=False)
        return [self._read_policy(), promotions, self.rehearsing.follow()]

    def _find_start(self) -> None:
        """Set the version that a key's policy began with, if it has begun."""
        if self._began_with is not None and self._progress.published:
            self._first_version = min(self._progress.published)
            if self._progress.published[self._first_version].manifest_sha256 is not None:
                self._start = self._began_with.folder_of(self._first_version)
            self._began_with.lent.add(self._first_version)

    async def _begin(self) -> None:
        """Have a key's policy begin as the shared one is now, unless it has begun."""
        if self._began_with is not None and not self._progress.published:
            self._first_version, self._start = self._began_with.newest
            self._began_with.lent.add(self._first_version)
            await self._write([self._first_publication()])

    def _first_publication(self) -> PolicyPublished:
        start, base = None if self._start is None else read(self._start), self._settings.engine.base_policy
        return first_publication(self.policy_id, base, start, now_ms=now_ms())

    def folder_of(self, version: int) -> Path:
        """Return where a version lies, if it is still there."""
        return self._settings.checkpoints_dir / version_name(version)

    @property
    def newest(self) -> tuple[int, Path | None]:
        """The newest version and its folder; None: it is the base."""
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
            return await self._carried_out(plan, samples)
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
            asked = await self.rehearsing.correct(corrections)
            self._batcher.corrected(asked, now_ms())
        if self.samples.is_live:
            await self.rehearsing.merge(self._decided)
        at_ms = _FOR_EVER_MS if self.samples.all_read else now_ms()
        held = self.rehearsing.held if self.samples.is_live else None
        merging = self.rehearsing.merging
        batch = self._batcher.due(parent_version=self._version, now_ms=at_ms, merging=merging, held=held)
        self.samples.tell_dropped()
        if batch is None:
            return False
        await self._begin()
        plan = self._plan(batch)
        await self._write([plan])
        self._batcher.plan(plan)
        return True

    async def _carried_out(self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...]) -> bool:
        """Execute the plan; False: what trains elsewhere does not answer, and the plan waits."""
        if now_ms() < self._again_ms:
            return False
        try:
            samples = await self._with_hints_chosen(plan, samples)
            if self.samples.is_live:
                await self.rehearsing.hold(plan, samples)
            await self._execute(plan, samples)
        except ServiceAway as error:
            self._again_ms = now_ms() + round(1000 * ASKED_AGAIN_S)
            log.warning("version=%d state=waits reason=%s", plan.policy_version, error)
            return False
        except (UnusableCheckpoint, ServiceRefused) as error:
            goes_back = plan.rollback is not None or self._progress.rollback(self.samples.rollbacks) is not None
            if not (goes_back or isinstance(error, ServiceRefused)) or plan.policy_version in self._progress.steps:
                raise
            await self._reject(plan, rejection(plan, str(error), step_ms=0, now_ms=now_ms()))
        return True

    @property
    def _version(self) -> int:
        if self._began_with is not None and not self._progress.published:
            return self._began_with.newest[0]
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
        """How long until the waiting samples become a batch, though they are few; None: they become none."""
        if self._again_ms > now_ms():
            return (self._again_ms - now_ms()) / 1000
        due_ms = min((ms for ms in (self._batcher.due_ms, self.rehearsing.due_ms) if ms is not None), default=None)
        if due_ms is None or self._batcher.pending() is not None or self._is_limited:
            return None
        return max(0.05, (due_ms - now_ms()) / 1000)

    def _plan(self, batch: Batch) -> BatchPlanned:
        training = self._settings.training
        if batch.samples and all(sample.hint_id is not None for sample in batch.samples):  # of merged hints
            correcting = {"cadence": "correction", "epochs": CORRECTION_EPOCHS, "hint_choice": "longest"}
            training = training.model_copy(update=correcting)
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
            return None if self._start is None else resumable(self._start).path
        if self._checkpoint is not None and version == self._checkpoint.version:
            return self._checkpoint.path
        return resumable(self.folder_of(version)).path

    async def _with_hints_chosen(
        self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...]
    ) -> tuple[SampleAssembled, ...]:
        """Return the samples, each with the one hint that the step trains on."""
        if not any(sample.other_hints for sample in samples):
            return samples
        choose = partial(
            self._parts.stepper.choose, plan, samples, parent=self._folder_of(plan.parent_version),
            recorded=plan.policy_version in self._progress.steps,
        )  # fmt: skip
        return await asyncio.get_running_loop().run_in_executor(self._parts.thread, choose)

    async def _execute(self, plan: BatchPlanned, samples: tuple[SampleAssembled, ...]) -> None:
        recorded = self._progress.steps.get(plan.policy_version)
        try:
            parent = self._folder_of(plan.parent_version)
        except UnusableCheckpoint as error:
            if plan.rollback is None or recorded is not None:
                raise
            # Without a rejection on the log the rollback would be carried out later, once the folder is back.
            why = f"rollback {plan.rollback} can't be carried out: {error} Ask for it again once the folder is there"
            await self._reject(plan, rejection(plan, why, step_ms=0, now_ms=now_ms()))
            return
        rejected = frozenset(self._progress.rejected)
        execute = partial(
            self._parts.stepper.execute, plan, samples, parent=parent, versions=self._settings.checkpoints_dir,
            recorded=recorded, rejected=rejected, trials=self._trials(samples, recorded),
            held=self.rehearsing.held,
        )  # fmt: skip
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._parts.thread)
        outcome = await in_thread(execute)
        if isinstance(outcome, StepRejected):
            await self._reject(plan, outcome)
            await self._rehearse(plan, None)
            return
        # Engines take the weights over while the state, several times as large, is written.
        await self._write(self._progress.missing_events(outcome, now_ms=now_ms()))
        await in_thread(self._parts.stepper.keep, outcome)
        checkpoint = self._checkpoint = outcome
        await self.samples.executed(plan)
        step = checkpoint.step
        await self._rehearse(plan, step, samples)
        log.info(
            "step_taken policy=%s version=%d samples=%d loss=%s grad_norm=%s step_ms=%d",
            self.policy_id, checkpoint.version, len(samples), step.loss_nats, step.grad_norm, step.step_ms,
        )  # fmt: skip
        needed = self._progress.needed(self.samples.rollbacks, checkpoint.version) | pinned(self.samples.pins)
        needed |= self.lent
        prune(self._settings.checkpoints_dir, keep=self._settings.training.keep_checkpoints, needed=needed)

    def _trials(self, samples: Sequence[SampleAssembled], recorded: StepTaken | None) -> list[Trial]:
        return self.rehearsing.to_try(samples) if recorded is None and self.samples.is_live else []

    async def _rehearse(
        self, plan: BatchPlanned, step: StepTaken | None, samples: Sequence[SampleAssembled] = ()
    ) -> None:
        """Ask for the rehearsals of the next batch; engines serve only the policy of the live samples."""
        if self.samples.is_live:
            await self.rehearsing.ask(plan, step, samples)

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
