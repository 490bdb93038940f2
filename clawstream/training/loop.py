"""The training loop: it reads samples and publishes versions. It may be killed at any line and started again.

A batch is planned on the log before its step, and only a checkpoint that is whole on disk is published. If the gate
refuses a step, a rejection is written. So after a restart the log and the checkpoints show what is left to do: publish
the newest checkpoint, execute a plan that was not rejected, or read on from the newest plan's offsets.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from clawstream.config import Settings
from clawstream.errors import OperatorError, PartUnavailable
from clawstream.events import (
    is_of_policy,
)
from clawstream.inference.tinker_service import TinkerService
from clawstream.stream import topics
from clawstream.stream.log import Log
from clawstream.stream.shared import SharedLog
from clawstream.stream.stage import HEARD_MS, now_ms
from clawstream.training.base_folder import limits_of
from clawstream.training.batches.following import Retraining, policies_of
from clawstream.training.batches.quarantine import TrainingQuarantine
from clawstream.training.checkpoints import alone_on
from clawstream.training.policy_loop import PolicyLoop, SharedParts
from clawstream.training.processes import Ranks
from clawstream.training.stepping import Stepper, refuse_unlike_machines, refuse_what_cannot_be

log = logging.getLogger(__name__)


async def train(
    settings: Settings, training_log: Log, *, stop: asyncio.Event, retraining: Retraining | None = None,
    ranks: Ranks | None = None,
) -> None:  # fmt: skip
    """Train until `stop`, making at most `max_updates` updates; with `retraining`, until all samples are used.

    On several machines this is what the first of torchrun's `ranks` does; the others serve it.

    Where there are adapters beside the shared one, their policies take turns, a step at a time. Before each plan the
    control topic decides which samples are used: the live ones, or those of the promoted replay. A step that has begun
    is finished and published before this returns.

    Raises ConfigError when the trainer can't train this base here; UnusableCheckpoint when the newest checkpoint is of
    another base, or is not what was published; TrainingDiverged when a step can't be taken; PartUnavailable when
    another process trains this policy, or a process of this trainer ended; LogContradicted when the log is not the one
    that the newest step read; SamplesGone when a plan's samples are past their retention; TooManyFailures when more
    than one in a hundred records can't be used.
    """
    base = settings.engine.base_policy
    refuse_what_cannot_be(base, settings.training)
    with alone_on(settings.checkpoints_dir), ThreadPoolExecutor(1, "torch") as thread:
        if ranks is not None:
            asked = (ranks, base, settings.checkpoints_dir, settings.cache_dir)
            await asyncio.get_running_loop().run_in_executor(thread, refuse_unlike_machines, *asked)
        policies = _Policies(settings, training_log, thread, retraining, ranks)
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
    """The policies that are trained here: the shared one and, where keys have their own, that of each key with samples.

    They have one model in memory; its adapter and optimizer state are exchanged when another policy's turn comes.
    """

    def __init__(
        self, settings: Settings, training_log: Log, thread: ThreadPoolExecutor, retraining: Retraining | None,
        ranks: Ranks | None,
    ) -> None:  # fmt: skip
        self._by_key = settings.policy.by_key and retraining is None
        training_log = SharedLog.of(training_log) if self._by_key else training_log
        base, arrived = settings.engine.base_policy, asyncio.Event()
        limits = limits_of(base)
        service = TinkerService(settings) if settings.training.by_service else None
        stepper = Stepper(base, limits, machine=settings.training, service=service, ranks=ranks)
        quarantine = TrainingQuarantine(topics.SAMPLES, training_log, on_change=arrived.set)
        self._settings = settings
        self._parts = SharedParts(training_log, thread, stepper, limits, arrived, quarantine)
        self._shared = PolicyLoop(settings, self._parts, retraining)
        self._loops: dict[str, PolicyLoop] = {}
        self._left_out: set[str] = set()
        self._readers: list[asyncio.Task[None]] = []

    @property
    def used_up(self) -> bool:
        """Whether a retraining is over."""
        return self._shared.used_up

    async def open(self) -> None:
        """Read the log so far, and write to it the outcomes that a killed process did not write."""
        self._readers.append(asyncio.create_task(self._parts.quarantine.follow()))
        await self._add(self._shared)
        if self._by_key:  # finds keys with fewer samples than a batch: they have no version yet
            async for records in self._parts.log.follow([topics.SAMPLES], now_ms() - HEARD_MS, until_end=True):
                self._shared.found |= policies_of(records)
        await self._add_keys()

    async def advance(self, stop: asyncio.Event) -> bool:
        """Let each policy do what there is to do, one step at most; False: there was nothing."""
        await self._add_keys()
        moved = False
        for loop in tuple(self._loops.values()):
            if not stop.is_set():
                async with self._alone(loop):
                    moved |= await loop.advance()
        return moved

    @contextlib.asynccontextmanager
    async def _alone(self, loop: "PolicyLoop") -> AsyncIterator[None]:
        """Where a key's policy can't be trained, say so and go on with the others until the next start."""
        try:
            yield
        except PartUnavailable:
            raise
        except OperatorError as error:
            if loop is self._shared:
                raise
            log.error("policy=%s state=not_trained reason=%s", loop.policy_id, error)
            self._loops.pop(loop.policy_id, None)
            self._left_out.add(loop.policy_id)
            for task in loop.samples.reading:
                task.cancel()

    async def wait_for_more(self, stopping: "asyncio.Task[bool]") -> None:
        """Return once samples came, the oldest waited long enough, or a reader ended; raise that reader's error."""
        arrived = asyncio.create_task(self._parts.arrived.wait())
        reading = [loop.samples.reading[-1] for loop in self._loops.values()]  # `advance` raises their errors
        patience_s = min((s for loop in self._loops.values() if (s := loop.patience_s) is not None), default=None)
        watched: list[asyncio.Task[Any]] = [stopping, *self._readers, *reading]
        done, _ = await asyncio.wait([arrived, *watched], timeout=patience_s, return_when="FIRST_COMPLETED")
        self._parts.arrived.clear()
        arrived.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await arrived
        for task in done.difference({arrived}, reading):
            task.result()

    async def close(self) -> None:
        """Stop reading, and end the trainer's processes."""
        ending = [*self._readers, *(task for loop in self._loops.values() for task in loop.samples.reading)]
        for task in ending:
            task.cancel()
        keeping = [task for loop in self._loops.values() for task in loop.samples.keeping]
        await asyncio.gather(*ending, *keeping, return_exceptions=True)
        self._parts.stepper.close()

    async def _add(self, loop: "PolicyLoop") -> None:
        self._loops[loop.policy_id] = loop
        await loop.open()
        self._readers += map(asyncio.create_task, loop.readers())

    async def _add_keys(self) -> None:
        """Add the policy of each key that the log names and that is not trained here yet."""
        if not self._by_key:
            return
        known = self._shared.found | self._shared.samples.found
        for policy_id in sorted(known - self._loops.keys() - self._left_out):
            if is_of_policy(policy_id, self._settings.policy.id):
                loop = PolicyLoop(self._settings.of_policy(policy_id), self._parts, began_with=self._shared)
                async with self._alone(loop):
                    await self._add(loop)
