"""Hosts a stage on a log: reads its topics as a member of a group, folds, writes, calls, commits.

No record is committed before it is done (see pending_records.py). No record is dropped silently: one that can't be used
is in the dead-letter queue, acknowledged, before the group moves past it. So a worker can be killed at any point: the
worker that reads on writes the same events again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from clawstream.errors import TopicMismatch, TryLater
from clawstream.stream.log import Arrived, Commit, Log, Member, PartitionId
from clawstream.stream.runner.breaker import flooded
from clawstream.stream.runner.calling import until_done, wait_at_most
from clawstream.stream.runner.fold import in_clock_order
from clawstream.stream.runner.offset_reset import TRUST_LOG, contradicted, refuse
from clawstream.stream.runner.partition_state import PartitionState, PendingRecord
from clawstream.stream.runner.pending_records import PendingRecords, WorkerProgress
from clawstream.stream.runner.quarantine import StageQuarantine, key_text
from clawstream.stream.stage import Stage, Step, now_ms

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIntervals:
    """How often the runner does its periodic work; tests use shorter intervals."""

    poll_records: int = 500
    poll_s: float = 0.2
    commit_s: float = 0.2
    tick_s: float = 1.0
    retry_s: float = 0.25  # the longest first wait after a failure; it doubles with each further failure
    drain_s: float = 20.0  # how long unfinished records may take when partitions are revoked or the worker stops
    hold_s: float = 0.02  # how long the runner keeps the event loop at a time, as heartbeats need the loop too


async def run(
    stage: Stage[S, C],
    to: Log,
    *,
    stop: asyncio.Event,
    on_progress: Callable[[WorkerProgress], None] | None = None,
    instance_id: str | None = None,
    pace: RunnerIntervals | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    machine_ms: Callable[[], int] = now_ms,
) -> None:
    """Run the stage until `stop`, then finish the work under way, commit, and leave the group.

    `on_progress` is called once a tick. A worker that comes back under the same `instance_id` gets its partitions back
    at once. Raises TryLater where the broker refuses this member, TopicMismatch where the topics can't be read
    together, LogContradicted where the log is not the one that the group has read.
    """
    worker = _Worker(stage, to, pace or RunnerIntervals(), monotonic, machine_ms)
    try:
        async with asyncio.TaskGroup() as tasks:
            worker.begin(tasks)
            try:
                async with to.join(stage.name, stage.reads, worker, instance_id=instance_id) as worker.member:
                    await worker.run(stop, on_progress or (lambda _: None))
            finally:
                worker.end()
    except BaseExceptionGroup as failures:
        # One task failed, so the others were cancelled: the caller handles that task's error.
        raise _cause(failures) from failures


class _Worker(Generic[S, C]):
    member: Member
    pending_records: PendingRecords[S, C]
    quarantine: StageQuarantine[S, C]

    def __init__(
        self,
        stage: Stage[S, C],
        to: Log,
        pace: RunnerIntervals,
        monotonic: Callable[[], float],
        machine_ms: Callable[[], int],
    ) -> None:
        self._stage = stage
        self._log = to
        self._pace = pace
        self._now_s = monotonic
        self._machine_ms = machine_ms
        self._partitions: dict[int, PartitionState[S, C]] = {}
        self._one_rebuild = asyncio.Lock()
        self._one_commit = asyncio.Lock()
        self._committed_at_s = self._ticked_at_s = monotonic()
        self.tally = WorkerProgress()
        self.room = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event, on_progress: Callable[[WorkerProgress], None]) -> None:
        while not stop.is_set():
            await self._poll()
            for partition in list(self._partitions.values()):
                await self.quarantine.release(partition)
            await self._refuse_a_flood()
            now_s = self._now_s()
            if now_s - self._ticked_at_s >= self._pace.tick_s:
                self._ticked_at_s = now_s
                self._tick()
                on_progress(self._progress())
            if now_s - self._committed_at_s >= self._pace.commit_s:
                self._committed_at_s = now_s
                await self._commit(self._partitions.values())
        await self._let_go(list(self._partitions.values()))
        on_progress(self._progress())

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self.pending_records = PendingRecords(
            self._stage, self._log, tasks, tally=self.tally, retry_s=self._pace.retry_s, on_done=self.room.set
        )

    def end(self) -> None:
        if self._following is not None:
            self._following.cancel()
        for partition in self._partitions.values():
            partition.end()
        self.pending_records.end()

    async def assigned(self, committed: Mapping[PartitionId, Commit | None]) -> Mapping[PartitionId, int]:
        numbers = sorted({place.partition for place in committed})
        self._refuse_uneven(numbers, committed)
        begins = await self._log.begin_offsets(self._stage.reads) if numbers else {}
        refuse(self._stage.name, await contradicted(self._log, committed, begins), TRUST_LOG)
        self._partitions = {
            number: PartitionState(self._stage, number, committed, begins, machine_ms=self._machine_ms)
            for number in numbers
        }
        if self._following is not None:
            self._following.cancel()
        self.quarantine = StageQuarantine(self._stage, self._log, self.pending_records, retry_s=self._pace.retry_s)
        self._following = self._tasks.create_task(self.quarantine.follow())
        log.info("stage=%s partitions=%s", self._stage.name, ",".join(map(str, numbers)) or "none")
        for partition in self._partitions.values():
            self.member.pause(partition.places)
            self.pending_records.start(partition, self._rebuild(partition))
        return {place: offset for partition in self._partitions.values() for place, offset in partition.starts.items()}

    async def revoked(self, places: frozenset[PartitionId]) -> None:
        leaving = [partition for partition in self._partitions.values() if not places.isdisjoint(partition.places)]
        await self._let_go(leaving)
        for partition in leaving:
            self._partitions.pop(partition.number, None)

    def _refuse_uneven(self, numbers: Iterable[int], given: Mapping[PartitionId, Commit | None]) -> None:
        for number in numbers:
            missing = [topic for topic in self._stage.reads if PartitionId(topic, number) not in given]
            if missing:
                raise TopicMismatch(
                    f"{self._stage.name} was given partition {number} without that of {', '.join(missing)}: topics "
                    "that are read together need one partition count. Nothing was read; see `clawstream topics plan`"
                )

    async def _rebuild(self, partition: PartitionState[S, C]) -> None:
        """Fold the committed records without writing or calling anything; then read the partition live."""
        async with self._one_rebuild:
            await self.quarantine.current.wait()
            failed = f"stage={self._stage.name} partition={partition.number} rebuild=failed"
            await until_done(lambda: self._remember(partition), failed, retry_s=self._pace.retry_s)
            partition.go_live(self._now_s())
        self.member.resume(partition.places)

    async def _remember(self, partition: PartitionState[S, C]) -> None:
        partition.restart_rebuild()
        async with contextlib.AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(contextlib.aclosing(self._log.replay({place: ends}, digest=False)))
                for place, ends in partition.to_rebuild().items()
            ]
            async for records in in_clock_order(streams):
                partition.remember(records, self._now_s(), unused=self.quarantine.is_unused)
                self.tally.rebuilt_records += len(records)
                await asyncio.sleep(0)

    async def _poll(self) -> None:
        if self._num_free() <= 0:
            self.room.clear()
            await wait_at_most(self.room, self._pace.poll_s)
        free = self._num_free()
        if free > 0:
            most = min(free, self._pace.poll_records)
            await self._take(await self.member.poll(max_records=most, timeout_s=self._pace.poll_s))
            return
        # Polling goes on while calls wait: the group counts a member that does not poll as dead.
        self.member.pause(self._live_places())
        await self._take(await self.member.poll(max_records=1, timeout_s=0))
        self.member.resume(self._live_places())

    async def _take(self, found: Mapping[PartitionId, Sequence[Arrived]]) -> None:
        began_s = self._now_s()
        for place, records in found.items():
            partition = self._partitions.get(place.partition)
            if partition is None:
                continue
            for record in records:
                if partition.gone:
                    break
                self._fold(partition, place, record)
                if self._now_s() - began_s > self._pace.hold_s:
                    await asyncio.sleep(0)
                    began_s = self._now_s()

    def _fold(self, partition: PartitionState[S, C], place: PartitionId, found: Arrived) -> None:
        record = partition.read(place, found, self._now_s())
        self.tally.records += 1
        pending = PendingRecord(place=place, offset=record.offset, key=key_text(record))
        self.pending_records.failures.read()
        step: Step[S, C] = Step(None)
        if not self.quarantine.is_unused(record):  # otherwise it was set aside before this worker read it
            try:
                usable = self.quarantine.usable(record)
                pending.traceparent = usable.traceparent
                step = partition.fold.apply(usable)
            except Exception as error:  # noqa: BLE001  # otherwise the record would end every worker that reads it
                self.quarantine.refuse(partition, pending, record, error)
                return
        self.pending_records.follow_up(partition, pending, step)

    async def _refuse_a_flood(self) -> None:
        """Stop the stage where too many records are set aside; those stay in the queues, and are committed."""
        flood = self.pending_records.failures.too_many()
        if flood is None:
            return
        await self._let_go(list(self._partitions.values()))
        raise flooded(self._stage.name, *flood)

    def _tick(self) -> None:
        for partition in self._partitions.values():
            now_ms = partition.clock_ms(self.member.caught_up, self._now_s()) if partition.live else None
            if now_ms is not None:
                for step in partition.fold.tick(now_ms, held=self.quarantine.held(partition.number)):
                    self.pending_records.follow_up(partition, PendingRecord(place=None, offset=-1), step)

    async def _commit(self, of: Iterable[PartitionState[S, C]]) -> None:
        async with self._one_commit:
            ours = [partition for partition in of if partition.live and not partition.gone]
            commits: dict[PartitionId, Commit] = {}
            for partition in ours:
                commits |= partition.commits(partition.clock_ms(self.member.caught_up, self._now_s()))
            try:
                taken = bool(commits) and await self.member.commit(commits)
            except TryLater as error:
                log.warning("stage=%s commit=failed reason=%s", self._stage.name, error)
                return
            if taken:
                for partition in ours:
                    partition.committed(commits)

    async def _let_go(self, leaving: Sequence[PartitionState[S, C]]) -> None:
        """Finish the work under way within `drain_s`, commit what is done, and drop the rest."""
        for partition in leaving:
            self.member.pause(partition.places)
        try:
            async with asyncio.timeout(self._pace.drain_s):
                for partition in leaving:
                    await partition.nothing_open.wait()
        except TimeoutError:
            unfinished = sum(partition.num_open for partition in leaving)
            log.warning("stage=%s drain=cut unfinished_records=%d", self._stage.name, unfinished)
        await self._commit(leaving)
        for partition in leaving:
            partition.end()

    def _live_places(self) -> list[PartitionId]:
        return [
            place
            for partition in self._partitions.values()
            if partition.live and not partition.gone
            for place in partition.places
        ]

    def _num_free(self) -> int:
        """How many more records may be read; 0 while calls wait for a peer that is away."""
        if self.pending_records.waits_for_peer:
            return 0
        return self._stage.in_flight - sum(partition.num_open for partition in self._partitions.values())

    def _progress(self) -> WorkerProgress:
        return replace(
            self.tally,
            open_records=sum(partition.num_open for partition in self._partitions.values()),
            open_keys=sum(partition.fold.num_open for partition in self._partitions.values()),
            partitions=len(self._partitions),
        )


def _cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first
