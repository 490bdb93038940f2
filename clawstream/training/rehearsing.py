"""Keeps a policy's hint memory on the log, and asks for the answers that rehearse its hints.

A hint is held on the log before the first step that trains on it, so no restart loses it. After each step it is held
for prompts where it was followed, and rehearsals are asked for. A restart may lose these prompts and requests of one
step: the next batch then has fewer rehearsals. Where corrections are trained on at once, the answers to a new hint's
prompts are asked for before its step. A restart asks for the same answers again, unless more is held by then.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from clawstream.config import Settings
from clawstream.events import BatchPlanned, HintHeld, HintRetired, Retired, SampleAssembled, StepTaken
from clawstream.stream import topics
from clawstream.stream.log import Log, of_policy
from clawstream.stream.stage import now_ms
from clawstream.training.batches.choosing import ANSWERED_WITHIN_MS, CORRECTION_ANSWERS, Merging, rehearsals_beside
from clawstream.training.batches.memory import OPEN_NATS, HintMemory, Trial

log = logging.getLogger(__name__)


class Rehearsing:
    """The hint memory of the policy that engines serve."""

    def __init__(self, settings: Settings, training_log: Log, *, on_change: Callable[[], None]) -> None:
        """`on_change` is called when people retired or merged hints."""
        self._on_change = on_change
        training = settings.training
        self._policy_id = settings.policy.id
        self._log = training_log
        self._memory = HintMemory()
        self._read: dict[tuple[str, int], int] = {}  # by partition, the offset that `open` read up to
        self._planned_before: frozenset[int] = frozenset()  # versions that another process planned, and didn't execute
        self._noted: set[int] = set()  # versions whose steps the memory knows: a step may be executed again
        self._num_asked = rehearsals_beside(training.batch_samples, share=training.rehearsed_share)
        self._holds = self._num_asked > 0 or training.corrects
        self._merged_for: int | None = None  # the version after which a merged hint's answers were last asked for
        self.merging: Merging | None = None  # None: no answers to merged hints are waited for

    async def open(self, steps: Sequence[StepTaken], pending: Iterable[BatchPlanned]) -> None:
        """Read what is held so far; `steps` are those on the log, in order, and `pending` the plans without one."""
        self._planned_before = frozenset(plan.policy_version for plan in pending)
        async for records in self._log.follow([topics.MEMORY], "earliest", until_end=True):
            self._read |= {(record.topic, record.partition): record.offset + 1 for record in records}
            for event in of_policy(records, self._policy_id):
                if isinstance(event, HintHeld | HintRetired):
                    self._memory.learn(event)
        for step in steps:
            self._note(step, was_read=True)

    @property
    def due_ms(self) -> int | None:
        """When merged hints are trained on with whatever answers came; None: that is past, or none are awaited."""
        due_ms = None if self.merging is None else self.merging.since_ms + ANSWERED_WITHIN_MS
        return None if due_ms is None or due_ms < now_ms() else due_ms

    async def merge(self, decided: int) -> None:
        """Ask for answers to the merged hints that are still open, once after each version that was `decided`."""
        if self._merged_for == decided:
            return
        self._merged_for, hint_ids, at_ms = decided, self._memory.merging, now_ms()
        self.merging = Merging(hint_ids=hint_ids, since_ms=at_ms) if hint_ids else None
        if asks := self._memory.to_merge(version=decided + 1, now_ms=at_ms):
            await self._log.append(asks)

    async def follow(self) -> None:
        """Follow the log from where `open` ended, and take in which hints people retire or merge."""
        async for records in self._log.follow([topics.MEMORY], self._read):
            for event in of_policy(records, self._policy_id):
                if isinstance(event, HintRetired) and event.reason is Retired.ASKED:
                    self._memory.learn(event)
                    self._on_change()
                elif isinstance(event, HintHeld) and event.merged:
                    self._memory.learn(event)
                    self._merged_for = None
                    self._on_change()

    async def hold(self, plan: BatchPlanned, samples: Sequence[SampleAssembled]) -> None:
        """Write which hints of the plan's samples are held from now on."""
        await self._write(self._memory.to_hold(plan, samples, now_ms=now_ms()) if self._holds else [])

    def to_try(self, samples: Sequence[SampleAssembled]) -> list[Trial]:
        """Return which held hints the batch's answers are to be tried against."""
        return self._memory.to_try(samples) if self._holds else []

    @property
    def held(self) -> frozenset[str]:
        """The ids of the held hints."""
        return frozenset(one.hint_id for one in self._memory.held)

    async def correct(self, corrections: Sequence[SampleAssembled]) -> dict[str, frozenset[str]]:
        """Ask for answers to these corrections' prompts; return the requests' sessions, by the correction's sample."""
        at_ms = now_ms()
        asks = {one.sample_id: self._memory.to_correct(one, CORRECTION_ANSWERS, now_ms=at_ms) for one in corrections}
        if together := [ask for own in asks.values() for ask in own]:
            await self._log.append(together)
        return {name: frozenset(ask.session_id for ask in own) for name, own in asks.items()}

    async def ask(self, plan: BatchPlanned, step: StepTaken | None, samples: Sequence[SampleAssembled] = ()) -> None:
        """Hold hints for prompts where they were followed, retire the contradicted ones, and ask for the next batch's
        rehearsals. `samples` are the step's; `step` None: it was rejected.
        """
        if step is not None:
            self._note(step)
            await self._write(self._memory.to_extend(step, samples, now_ms=now_ms()) if self._holds else [])
        retired = self._memory.to_retire(self._policy_id, now_ms=now_ms()) if self._holds else []
        await self._write(retired)
        for event in retired:
            log.info("hint_retired policy=%s hint=%s reason=%s", self._policy_id, event.hint_id, event.reason)
        asks = self._memory.to_ask(self._num_asked, version=plan.policy_version, now_ms=now_ms())
        if asks:
            await self._log.append(asks)
        if step is not None:
            self._tell_lost(step, {ask.hint_id for ask in asks})

    async def _write(self, events: Sequence[HintHeld | HintRetired]) -> None:
        """Append what changes in the memory, and take it in."""
        if events:
            await self._log.append(events)
        for event in events:
            self._memory.learn(event)

    def _note(self, step: StepTaken, *, was_read: bool = False) -> None:
        if step.policy_version not in self._noted:
            self._noted.add(step.policy_version)
            asked_elsewhere = was_read or step.policy_version in self._planned_before
            self._memory.note(step, asked_elsewhere=asked_elsewhere)

    def _tell_lost(self, step: StepTaken, asked: Collection[str]) -> None:
        """Log how many held hints the step lost; answers to the hints in `asked` were asked for, for the next batch."""
        lost = {one.hint_id: one.lost_nats for one in step.kept if one.lost_nats > OPEN_NATS}
        if lost:
            log.warning(
                "hints_lost policy=%s version=%d lost=%d looked_at=%d most_nats=%.3f asked_for_next_batch=%d",
                self._policy_id, step.policy_version, len(lost), len(step.kept), max(lost.values()),
                len(lost.keys() & asked),
            )  # fmt: skip
