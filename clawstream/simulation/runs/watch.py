"""Follows what the policy topic says of a run while it runs."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from clawstream.errors import PartUnavailable
from clawstream.events import BatchPlanned, PolicyActivated, PolicyPublished, StepRejected, StepTaken
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record

POLICY_TOPIC = "clawstream.policy.v1"
UPDATE_WITHIN_S = 300.0  # a run that makes no version for this long has failed


class Watch:
    """The versions so far: planned, trained, published, served; and the stages that make samples."""

    def __init__(self, answers_per_hint: int = 1) -> None:
        # Samples lead to prompts answered again, and these to samples: the end is when all are done twice in a row.
        self.refreshes = answers_per_hint > 1
        self.stages = ("turns", "judging", *(("refresh",) if self.refreshes else ()), "samples")
        self.planned = self.taken = self.activated = 0
        self._alive_at_s = 0.0  # by the event loop's clock
        self.steps: list[StepTaken] = []
        self.published: dict[int, Path] = {}
        self.num_planned = self.num_rejected = 0  # batches
        self.rounds: tuple[int, ...] = ()  # the version served after each, the base's first; none: there are no rounds
        self.swaps: list[tuple[float, float]] = []  # (start, end) in ms since the epoch
        self._changed = asyncio.Condition()

    async def read(self, log: KafkaLog) -> None:
        """Follow the topic until cancelled."""
        async for records in log.follow([POLICY_TOPIC], "earliest"):
            async with self._changed:
                for record in records:
                    if isinstance(record, Record):
                        self._learn(record.event)
                self._changed.notify_all()

    def _learn(self, event: object) -> None:
        match event:
            case BatchPlanned():
                self.planned = event.policy_version
                self.num_planned += 1
            case StepTaken():
                self.taken = event.policy_version
                self.steps.append(event)
            case StepRejected():
                self.planned = self.taken  # its number stays unused
                self.num_rejected += 1
            case PolicyPublished():
                self.published[event.policy_version] = Path(event.path)
            case PolicyActivated():
                self.activated = event.policy_version
                self._alive_at_s = asyncio.get_running_loop().time()
                end_ms = float(event.activated_at_ms)
                self.swaps.append((end_ms - event.pause_ms, end_ms))

    @property
    def versions(self) -> tuple[int, ...]:
        """The version after each update, the base's first; rejected steps are no updates."""
        return tuple(sorted({0, *self.published}))

    def begin_rounds(self) -> None:
        """Count rounds from now on; the version served now is the base's."""
        self.rounds = self.rounds or (self.activated,)

    def end_round(self) -> None:
        """Note which version is served at the end of a round."""
        self.rounds = (*self.rounds, self.activated)

    @property
    def reached(self) -> int:
        """How many rounds are over, or, where there are none, how many updates are served."""
        return len(self.rounds) - 1 if self.rounds else self.updates

    @property
    def updates(self) -> int:
        """How many updates are served."""
        return sum(0 < version <= self.activated for version in self.published)

    @property
    def settled(self) -> bool:
        """Whether every batch that was planned is served."""
        return self.planned == self.taken == max(self.published, default=0) == self.activated

    def wait_anew(self) -> None:
        """Restart the time limit of `until`: people were heard, and have more to say."""
        self._alive_at_s = asyncio.get_running_loop().time()

    async def plans_more(self, num_planned: int, *, within_s: float) -> bool:
        """Whether more than so many batches are planned, now or within that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: self.num_planned > num_planned)
        return self.num_planned > num_planned

    async def until_planned(self, batches: int) -> None:
        """Return once so many batches are planned; raises what `until` does."""
        await self.until(lambda: self.num_planned >= batches, what=f"plan of batch {batches}, whose samples are there,")

    async def until_settled(self) -> None:
        """Return once every batch that was planned is served, or rejected; raises what `until` does."""
        await self.until(lambda: self.settled, what=f"version {self.planned} in the engine")

    async def until_served(self, updates: int) -> None:
        """Return once so many updates are served; raises what `until` does."""
        await self.until(lambda: self.updates >= updates, what=f"update {updates}")

    async def until(self, reached: Callable[[], bool], *, what: str) -> None:
        """Return once `reached()`; raise PartUnavailable after too long without a version served or a `wait_anew`."""
        loop = asyncio.get_running_loop()
        asked_at_s = loop.time()
        async with self._changed:
            while not reached():
                until_s = max(asked_at_s, self._alive_at_s) + UPDATE_WITHIN_S
                if loop.time() >= until_s:
                    raise PartUnavailable(
                        f"no {what} within {UPDATE_WITHIN_S:.0f} s: see the logs folder of this run, train.log first"
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until_s):
                        await self._changed.wait()
