"""Hosts a stage on a log: reads its topics as a member of a group, folds, writes, calls, commits.

The one rule: nothing is committed before it is done (see work.py), and nothing is done silently: a record that can't be
used is in the dead-letter queue, acknowledged, before the group moves past it. So a worker can be killed anywhere, and
whoever reads on writes the same events again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from clawstream.errors import TopicMismatch, TryLater, UndecodableRecord
from clawstream.stream.ends import refuse
from clawstream.stream.log import Arrived, Commit, Log, Member, Place, Undecodable
from clawstream.stream.runner.calling import wait_before
from clawstream.stream.runner.failures import flooded
from clawstream.stream.runner.pending import Errands, Tally
from clawstream.stream.runner.putting_back import TRUST_LOG, contradicted
from clawstream.stream.runner.quarantine import Quarantine
from clawstream.stream.runner.rebuild import in_clock_order
from clawstream.stream.runner.work import Errand, Share
from clawstream.stream.stage import Stage, Step

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the runner does what it does in turns; tests are in more of a hurry."""

    poll_records: int = 500
    poll_s: float = 0.2
    commit_s: float = 0.2
    tick_s: float = 1.0
    retry_s: float = 0.25  # the bound of the first wait after a failure; it doubles
    drain_s: float = 20.0  # how long unfinished records may take when partitions, or the worker, go
    hold_s: float = 0.02  # how long the event loop is held at most; heartbeats live on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a worker has done since it began, and what it has before it."""

    records: int
    events: int
    calls: int
    retries: int
    dead_letters: int
    rebuilt_records: int
    open_records: int
    open_keys: int
    partitions: int


async def run(
    stage: Stage[S, C],
    to: Log,
    *,
    stop: asyncio.Event,
    on_progress: Callable[[Progress], None] | None = None,
    instance_id: str | None = None,
    pace: Pace | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    machine_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> None:
    """Run the stage until `stop`, then finish what is under way, commit, and leave the group.

    `on_progress` is called once a tick. With an `instance_id` a worker that comes back under it has its partitions at
    once. Raises TryLater where the broker refuses this member, TopicMismatch where the topics can't be read together,
    LogContradicted where the log is not the one that the group has read.
    """
    worker = _Worker(stage, to, pace or Pace(), monotonic, machine_ms)
    try:
        async with asyncio.TaskGroup() as tasks:
            worker.begin(tasks)
            try:
                async with to.join(stage.name, stage.reads, worker, instance_id=instance_id) as worker.member:
                    await worker.run(stop, on_progress or (lambda _: None))
            finally:
                worker.end()
    except BaseExceptionGroup as failures:
        # One task failed and took the others with it: its error is what the caller handles.
        raise _cause(failures) from failures


class _Worker(Generic[S, C]):
    member: Member
    errands: Errands[S, C]
    quarantine: Quarantine[S, C]

    def __init__(
        self,
        stage: Stage[S, C],
        to: Log,
        pace: Pace,
        monotonic: Callable[[], float],
        machine_ms: Callable[[], int],
    ) -> None:
        self._stage = stage
        self._log = to
        self._pace = pace
        self._now_s = monotonic
        self._machine_ms = machine_ms
        self._shares: dict[int, Share[S, C]] = {}
        self._one_rebuild = asyncio.Lock()
        self._one_commit = asyncio.Lock()
        self._committed_at_s = self._ticked_at_s = monotonic()
        self.tally = Tally()
        self.room = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event, on_progress: Callable[[Progress], None]) -> None:
        while not stop.is_set():
            await self._poll()
            for share in list(self._shares.values()):
                await self.quarantine.release(share)
            await self._refuse_a_flood()
            now_s = self._now_s()
            if now_s - self._ticked_at_s >= self._pace.tick_s:
                self._ticked_at_s = now_s
                self._tick()
                on_progress(self._progress())
            if now_s - self._committed_at_s >= self._pace.commit_s:
                self._committed_at_s = now_s
                await self._commit(self._shares.values())
        await self._let_go(list(self._shares.values()))
        on_progress(self._progress())

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self.errands = Errands(
            self._stage, self._log, tasks, tally=self.tally, retry_s=self._pace.retry_s, on_done=self.room.set
        )
        self.quarantine = Quarantine(self._stage, self._log, self.errands, retry_s=self._pace.retry_s)

    def end(self) -> None:
        if self._following is not None:
            self._following.cancel()
        for share in self._shares.values():
            share.end()
        self.errands.end()

    async def assigned(self, committed: Mapping[Place, Commit | None]) -> Mapping[Place, int]:
        numbers = sorted({place.partition for place in committed})
        self._refuse_uneven(numbers, committed)
        begins = await self._log.begin_offsets(self._stage.reads) if numbers else {}
        refuse(self._stage.name, await contradicted(self._log, committed, begins), TRUST_LOG)
        self._shares = {
            number: Share(self._stage, number, committed, begins, machine_ms=self._machine_ms) for number in numbers
        }
        if self._following is not None:
            self._following.cancel()
        self.quarantine = Quarantine(self._stage, self._log, self.errands, retry_s=self._pace.retry_s)
        self._following = self._tasks.create_task(self.quarantine.follow())
        log.info("stage=%s partitions=%s", self._stage.name, ",".join(map(str, numbers)) or "none")
        for share in self._shares.values():
            self.member.pause(share.places)
            self.errands.start(share, self._rebuild(share))
        return {place: offset for share in self._shares.values() for place, offset in share.starts.items()}

    async def revoked(self, places: frozenset[Place]) -> None:
        leaving = [share for share in self._shares.values() if not places.isdisjoint(share.places)]
        await self._let_go(leaving)
        for share in leaving:
            self._shares.pop(share.number, None)

    def _refuse_uneven(self, numbers: Iterable[int], given: Mapping[Place, Commit | None]) -> None:
        for number in numbers:
            missing = [topic for topic in self._stage.reads if Place(topic, number) not in given]
            if missing:
                raise TopicMismatch(
                    f"{self._stage.name} was given partition {number} without that of {', '.join(missing)}: topics "
                    "that are read together need one partition count. Nothing was read; see `clawstream topics plan`"
                )

    async def _rebuild(self, share: Share[S, C]) -> None:
        """Fold what was committed without writing or calling anything; then the share is live."""
        attempt = 0
        async with self._one_rebuild:
            while not share.live:
                share.forget()
                await self.quarantine.current()
                try:
                    await self._remember(share)
                except TryLater as error:
                    log.warning("stage=%s partition=%d rebuild=failed reason=%s", self._stage.name, share.number, error)
                    await asyncio.sleep(wait_before(attempt, self._pace.retry_s))
                    attempt += 1
                else:
                    share.go_live(self._now_s())
        self.member.resume(share.places)

    async def _remember(self, share: Share[S, C]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(contextlib.aclosing(self._log.replay({place: ends}, digest=False)))
                for place, ends in share.to_rebuild().items()
            ]
            async for records in in_clock_order(streams):
                share.remember(records, self._now_s(), unused=self.quarantine.unused)
                self.tally.rebuilt_records += len(records)
                await asyncio.sleep(0)

    async def _poll(self) -> None:
        if self._num_free() <= 0:
            self.room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.poll_s):
                    await self.room.wait()
        free = self._num_free()
        if free > 0:
            most = min(free, self._pace.poll_records)
            await self._take(await self.member.poll(max_records=most, timeout_s=self._pace.poll_s))
            return
        # Polling goes on, or the group would take a member that waits for its calls for dead.
        self.member.pause(self._live_places())
        await self._take(await self.member.poll(max_records=1, timeout_s=0))
        self.member.resume(self._live_places())

    async def _take(self, found: Mapping[Place, Sequence[Arrived]]) -> None:
        began_s = self._now_s()
        for place, records in found.items():
            share = self._shares.get(place.partition)
            if share is None:
                continue
            for record in records:
                if share.gone:
                    break
                self._fold(share, place, record)
                if self._now_s() - began_s > self._pace.hold_s:
                    await asyncio.sleep(0)
                    began_s = self._now_s()

    def _fold(self, share: Share[S, C], place: Place, found: Arrived) -> None:
        record = share.read(place, found, self._now_s())
        self.tally.records += 1
        errand = Errand(place=place, offset=record.offset, key="" if isinstance(record, Undecodable) else record.key)
        self.errands.failures.read()
        if self.quarantine.unused(record):
            self.errands.follow_up(share, errand, Step(None))  # it was set aside before this worker came
            return
        parked = self.quarantine.blocked(place, record)
        if parked is not None:
            self.quarantine.set_aside(share, errand, record, parked)
            return
        if isinstance(record, Undecodable):
            self.quarantine.set_aside(share, errand, record, UndecodableRecord(record.reason))
            return
        errand.traceparent = record.traceparent
        try:
            step = share.fold.apply(record)
        except Exception as error:  # noqa: BLE001  # a record that the stage breaks on would break each worker in turn
            self.quarantine.set_aside(share, errand, record, error)
            return
        self.errands.follow_up(share, errand, step)

    async def _refuse_a_flood(self) -> None:
        """Stop where too many records are set aside; those that are stay so, acknowledged and committed."""
        flood = self.errands.failures.too_many()
        if flood is None:
            return
        await self._let_go(list(self._shares.values()))
        bad, read = flood
        raise flooded(self._stage.name, bad, read)

    def _tick(self) -> None:
        for share in self._shares.values():
            now_ms = share.clock_ms(self.member.caught_up, self._now_s()) if share.live else None
            if now_ms is not None:
                for step in share.fold.tick(now_ms, held=self.quarantine.held(share.number)):
                    self.errands.follow_up(share, Errand(place=None, offset=-1), step)

    async def _commit(self, of: Iterable[Share[S, C]]) -> None:
        async with self._one_commit:
            ours = [share for share in of if share.live and not share.gone]
            commits: dict[Place, Commit] = {}
            for share in ours:
                commits |= share.commits(share.clock_ms(self.member.caught_up, self._now_s()))
            try:
                taken = bool(commits) and await self.member.commit(commits)
            except TryLater as error:
                log.warning("stage=%s commit=failed reason=%s", self._stage.name, error)
                return
            if taken:
                for share in ours:
                    share.committed(commits)

    async def _let_go(self, leaving: Sequence[Share[S, C]]) -> None:
        """Finish what is under way, as long as that may take; commit; drop the rest."""
        for share in leaving:
            self.member.pause(share.places)
        try:
            async with asyncio.timeout(self._pace.drain_s):
                for share in leaving:
                    await share.nothing_open()
        except TimeoutError:
            unfinished = sum(share.num_open for share in leaving)
            log.warning("stage=%s drain=cut unfinished_records=%d", self._stage.name, unfinished)
        await self._commit(leaving)
        for share in leaving:
            share.end()

    def _live_places(self) -> list[Place]:
        return [place for share in self._shares.values() if share.live and not share.gone for place in share.places]

    def _num_free(self) -> int:
        """How many records may be read; none while calls wait for a peer that is away."""
        if self.errands.waits_for_peer:
            return 0
        return self._stage.in_flight - sum(share.num_open for share in self._shares.values())

    def _progress(self) -> Progress:
        return Progress(
            records=self.tally.records,
            events=self.tally.events,
            calls=self.tally.calls,
            retries=self.tally.retries,
            dead_letters=self.tally.dead_letters,
            rebuilt_records=self.tally.rebuilt_records,
            open_records=sum(share.num_open for share in self._shares.values()),
            open_keys=sum(share.fold.num_open for share in self._shares.values()),
            partitions=len(self._shares),
        )


def _cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first
