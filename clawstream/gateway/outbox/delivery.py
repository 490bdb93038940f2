"""Writes records to the log, by way of this machine's disk while the log does not take them in time.

The one rule: `append` returns only when every record is acknowledged by the log or fsynced in the spool. A record whose
acknowledgement is late may be on the log all the same; it goes into the spool too, with the same bytes, and of two
records with one id the first counts. While the log is slow (`AckPace`), every record goes to the spool first. How fast
the log then takes the spool's records shows when it is quick again. Appends that come while the disk is busy share an
fsync.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from clawstream.errors import TryLater, UndecodableRecord, UnusableEvent
from clawstream.events import Event
from clawstream.gateway.http.metrics import Metrics
from clawstream.gateway.outbox.frames import record_frame
from clawstream.gateway.outbox.spool import GROUP_BYTES, LARGE_GROUP_BYTES, Spool
from clawstream.gateway.outbox.spooled_sessions import AckPace, SpooledSessions
from clawstream.stream.log import Sealed

LOG = logging.getLogger(__name__)
_AGAIN_AFTER_S = 0.5
_LAST_RESORT_S = 2.0  # how long an acknowledgement is waited for where the spool takes nothing
_TURNS = 8  # of the event loop, between sending a record and seeing its acknowledgement
_SAID_AFTER_S = 5.0  # a shorter use of the spool is logged only where the log fails
T = TypeVar("T")


class SealedLog(Protocol):
    """The methods of a log that are used here."""

    def seal(self, event: Event, traceparent: str | None = None) -> Sealed:
        """Return the event as a record; raises UnusableEvent for one that can't be."""

    def unseal(self, sealed: Sealed) -> Event:
        """Return the record's event; raises UndecodableRecord."""

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Return when all are acknowledged; raises TryLater or UnusableEvent."""

    def healthy(self) -> bool:
        """Whether the broker answered when it was last asked."""


@dataclass(frozen=True, slots=True)
class _Append:
    """One caller's records for the spool, all of them or none."""

    keys: tuple[bytes, ...]  # of its records, which are in the frames
    frames: bytes
    done: asyncio.Future[None]


class Delivery:
    """Delivers one gateway's records to `log`; works while `run` runs."""

    def __init__(
        self, log: SealedLog, spool: Spool, *, ack_timeout_s: float, metrics: Metrics, now_ms: Callable[[], int]
    ) -> None:
        self._log = log
        self._spool = spool
        self._pace = AckPace(bound_s=ack_timeout_s)
        self._metrics = metrics
        self._now_ms = now_ms
        self._spooled_sessions = SpooledSessions()
        self._spooled: deque[tuple[int, tuple[bytes, ...]]] = deque()  # keys, by where each append ends in the spool
        for spooled in spool.waiting():
            self._spooled_sessions.enter((spooled.record.key,))
            self._spooled.append((spooled.end, (spooled.record.key,)))
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spool")
        self._appends: list[_Append] = []
        self._keeping: list[_Append] = []  # the appends that the disk is busy with
        self._stopped = False
        self._under_way: dict[object, float] = {}  # sendings that the log has not acknowledged: when each began
        self._tasks: set[asyncio.Task[Any]] = set()  # they go on when their caller has left
        self._measuring: asyncio.Task[None] | None = None
        self._stuck_by: type[Exception] | None = None
        self._spooling_since: float | None = None  # None: all records go straight to the log
        self._said_in_use = False
        self._has_appends = asyncio.Event()
        self._has_records = asyncio.Event()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # by key
        self.oldest_ms: int | None = None  # of the records that wait; None: none does

    @property
    def num_waiting(self) -> int:
        """How many records wait in the spool."""
        return self._spooled_sessions.num_records

    @property
    def spool_bytes(self) -> int:
        """How much of the spool waits."""
        return self._spool.num_bytes

    @property
    def damaged_bytes(self) -> int:
        """How many bytes that the disk had changed were put aside since the start."""
        return self._spool.damaged_bytes

    @property
    def away(self) -> str | None:
        """Why records go to the spool first, as far as is known; None: they go straight to the log."""
        if not self._log.healthy():
            return "the broker does not answer"
        if self._spooled_sessions.failing:
            return "the broker did not acknowledge in time"
        if self._spooled_sessions.num_records and not self._quick:
            return "the broker acknowledges slowly"
        return None

    @property
    def _quick(self) -> bool:
        oldest = next(iter(self._under_way.values()), None)
        return self._pace.quick(0.0 if oldest is None else perf_counter() - oldest)

    def problem(self, session_id: str) -> str | None:
        """Why nothing of the session can be recorded now; None: it can, as far as is known."""
        key = session_id.encode("utf-8", "surrogatepass")
        if self._spooled_sessions.straight(key, healthy=self._log.healthy()):  # even a slow log takes it in the end
            return None
        problem = self._spool.problem()
        return None if problem is None else f"Kafka is away ({self.away or 'its spool is not empty'}), and {problem}"

    def waiting(self) -> Iterator[Event]:
        """Yield the events that a predecessor left in the spool, in order, without those of unknown schemas."""
        for spooled in self._spool.waiting():
            try:
                yield self._log.unseal(spooled.record)
            except UndecodableRecord as error:
                LOG.warning("spool=unreadable reason=%s; the record goes to the log as it is", error)

    async def append(self, events: Sequence[Event], traceparent: str | None = None) -> None:
        """Return when all events, of one session, are on the log or on the disk; calls of a session keep their order.

        Raises UnusableEvent for an event that can't be recorded, and TryLater where neither log nor spool took it.
        """
        records = [self._log.seal(event, traceparent) for event in events]
        key = records[0].key
        # One at a time: else the log could acknowledge the second append while the first goes to the spool.
        async with self._locks.setdefault(key, asyncio.Lock()):
            sent = None
            if self._quick and self._spooled_sessions.straight(key, healthy=self._log.healthy()):
                sent = self._started(self._straight(records))
                if await self._acknowledged(sent):
                    return
            await self._by_spool(records, key, sent)

    async def run(self) -> None:
        """Fill and empty the spool, until cancelled; records left in it are for the next gateway of its name."""
        if self._spooled_sessions.num_records:
            LOG.warning("spool=found path=%s records=%d", self._spool.path, self._spooled_sessions.num_records)
            self._said_in_use = True
            self._has_records.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep())
                tasks.create_task(self._drain())
        finally:
            self._disk.shutdown()
            self._stopped = True
            for append in (*self._keeping, *self._appends):
                self._refuse(append, "the gateway stops")
            if self._spooled_sessions.num_records:
                LOG.warning("spool=left path=%s records=%d", self._spool.path, self._spooled_sessions.num_records)

    async def _straight(self, records: Sequence[Sealed]) -> bool:
        """Return whether the log acknowledged the records; raises UnusableEvent."""
        try:
            with self._timed():
                await self._log.append_sealed(records, timeout_s=max(self._pace.bound_s, _LAST_RESORT_S))
        except TryLater as error:
            LOG.debug("log=failed reason=%s", error)
            self._spooled_sessions.failed()
            return False
        return True

    async def _acknowledged(self, sent: asyncio.Task[bool]) -> bool:
        """Return whether the log acknowledged it in time."""
        await asyncio.wait((sent,), timeout=self._pace.patience_s)
        if not sent.done():  # the acknowledgement may have come and wait for this event loop
            await self._measure_own_delay()
        return sent.done() and sent.result()

    async def _measure_own_delay(self) -> None:
        """Measure the time that this process, as busy as it is, adds to an acknowledgement."""
        started = perf_counter()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._pace = self._pace.with_own_delay(perf_counter() - started)

    async def _by_spool(self, records: Sequence[Sealed], key: bytes, sent: asyncio.Task[bool] | None) -> None:
        """Return when the spool has the records or the log has acknowledged `sent`, whichever is sooner."""
        spooling = self._started(self._into_spool(records))
        waiting = {spooling} if sent is None or sent.done() else {spooling, sent}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if sent is not None and sent.done() and sent.result():
            return
        try:
            await asyncio.shield(spooling)
        except TryLater:
            if sent is None and self._spooled_sessions.straight(key, healthy=self._log.healthy()):
                sent = self._started(self._straight(records))
            if sent is None or not await asyncio.shield(sent):
                raise

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Measure how long the log takes to acknowledge the records that the block sends."""
        if self._measuring is None or self._measuring.done():
            self._measuring = self._started(self._measure_own_delay())
        ours = object()
        started = self._under_way[ours] = perf_counter()
        try:
            yield
            self._pace = self._pace.after(perf_counter() - started)
        finally:
            del self._under_way[ours]

    def _started(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Return a task that goes on when its caller is cancelled; asyncio does not warn if nobody sees its failure."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _into_spool(self, records: Sequence[Sealed]) -> None:
        if self._stopped:
            raise TryLater("the gateway stops; it can't be recorded")
        started = perf_counter()
        frames = b"".join(record_frame(record, self._now_ms()) for record in records)
        append = _Append(tuple(record.key for record in records), frames, asyncio.get_running_loop().create_future())
        self._spooled_sessions.enter(append.keys)
        self._say_in_use(started)
        self._appends.append(append)
        self._has_appends.set()
        await asyncio.shield(append.done)
        self._metrics.spooled.inc(len(records))
        self._metrics.spool_s.observe(perf_counter() - started)

    async def _keep(self) -> None:
        """Write appends to the spool; those that come during one fsync go together into the next."""
        while True:
            await self._has_appends.wait()
            self._has_appends.clear()
            await self._keep_together()
            if self._spooled_sessions.num_records:
                self._has_records.set()

    async def _keep_together(self) -> None:
        self._keeping, self._appends = self._appends, []
        frames = [append.frames for append in self._keeping]
        try:
            ends = await self._on_disk(lambda: self._spool.append(frames))
            why = "the spool is full (gateway.spool_bytes)"
        except OSError as error:
            ends, why = [None] * len(frames), f"the spool's disk failed ({error.strerror})"
        if None in ends:
            LOG.error("spool=refused path=%s appends=%d reason=%s", self._spool.path, ends.count(None), why)
        for append, end in zip(self._keeping, ends, strict=True):
            if end is None:
                self._refuse(append, f"Kafka is away and {why}")
            else:
                self._spooled.append((end, append.keys))
                append.done.set_result(None)
        self._keeping = []

    def _refuse(self, append: _Append, why: str) -> None:
        self._spooled_sessions.leave(append.keys)
        append.done.set_exception(TryLater(f"{why}; it can't be recorded"))

    async def _drain(self) -> None:
        """Hand waiting records to the log, the oldest first; never returns."""
        num_drained = 0
        while True:
            await self._has_records.wait()
            try:
                group = await self._on_disk(lambda: self._spool.next_group(self._group_bytes))
                self.oldest_ms = group[0].at_ms if group else None
                if not group:
                    self._has_records.clear()
                    self._taken_to(None)
                    if num_drained and not self._spooled_sessions.num_records and not self._pace.slow:
                        self._say_drained(num_drained)
                        num_drained = 0
                    continue
                with self._timed():
                    await self._log.append_sealed([spooled.record for spooled in group])
                # Until `_taken_to` below, newer records of these sessions go to the spool. The note is on the disk
                # before that, so a gateway that is killed never sends the older records again after newer ones.
                await self._on_disk(partial(self._spool.taken_to, group[-1].end))
            except (TryLater, UnusableEvent, OSError) as error:
                self._say_stuck(error)
                await asyncio.sleep(_AGAIN_AFTER_S)
                continue
            self._taken_to(group[-1].end)
            num_drained += len(group)
            self._stuck_by = None

    @property
    def _group_bytes(self) -> int:
        """How many bytes are handed to the log at a time: more while it is slow, as no record then goes straight."""
        return LARGE_GROUP_BYTES if self._pace.slow else GROUP_BYTES

    def _taken_to(self, end: int | None) -> None:
        """Note that the log has every record up to `end`, or the disk has lost it; None: every record in the spool."""
        while self._spooled and (end is None or self._spooled[0][0] <= end):
            _, keys = self._spooled.popleft()
            self._spooled_sessions.taken(keys)

    def _say_in_use(self, now: float) -> None:
        if self._spooling_since is None:
            self._spooling_since = now
        lasts = now - self._spooling_since > _SAID_AFTER_S or self._spooled_sessions.failing or not self._log.healthy()
        if lasts and not self._said_in_use:
            LOG.warning("spool=in_use path=%s reason=%s", self._spool.path, self.away)
            self._said_in_use = True

    def _say_drained(self, num_records: int) -> None:
        self._spooling_since = None
        if self._said_in_use:
            LOG.warning("spool=drained path=%s records=%d", self._spool.path, num_records)
        self._said_in_use = False

    def _say_stuck(self, error: TryLater | UnusableEvent | OSError) -> None:
        """Log the error once, until another one occurs."""
        if self._stuck_by is type(error):
            return
        self._stuck_by = type(error)
        path = self._spool.path
        if isinstance(error, TryLater):
            LOG.info("spool=waits path=%s reason=%s", path, error)
        elif isinstance(error, UnusableEvent):
            LOG.error("spool=stuck path=%s reason=%s; it waits until the topic takes it", path, error)
        else:
            LOG.error("spool=stuck path=%s reason=its disk failed (%s); it waits until the disk is well", path, error)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)
