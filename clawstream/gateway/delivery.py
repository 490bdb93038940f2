"""Records onto the log, and by way of this machine's disk while the log does not take them in time.

The one rule: `append` returns when every record is acknowledged by the log or fsynced in the spool, never sooner. One
whose acknowledgement did not come in time may be on the log all the same; it goes into the spool too, with the bytes
that it had, and the first of two with one id counts. Appends that come while the disk is busy share the next fsync.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from clawstream.errors import TryLater, UndecodableRecord, UnusableEvent
from clawstream.events import Event
from clawstream.gateway.detours import Detours
from clawstream.gateway.frames import record_frame
from clawstream.gateway.metrics import Metrics
from clawstream.gateway.spool import Spool
from clawstream.stream.log import Sealed

LOG = logging.getLogger(__name__)
_AGAIN_AFTER_S = 0.5
T = TypeVar("T")


class SealedLog(Protocol):
    """The part of a log that is written here."""

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
    """What one caller wants in the spool, as a whole or not at all."""

    records: Sequence[Sealed]
    frames: bytes
    done: asyncio.Future[None]


class Delivery:
    """One gateway's way to `log`; `run` has to run for it."""

    def __init__(
        self, log: SealedLog, spool: Spool, *, ack_timeout_s: float, metrics: Metrics, now_ms: Callable[[], int]
    ) -> None:
        self._log = log
        self._spool = spool
        self._ack_timeout_s = ack_timeout_s
        self._metrics = metrics
        self._now_ms = now_ms
        self._detours = Detours()
        self._detours.enter(spooled.record for spooled in spool.waiting())
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spool")
        self._appends: list[_Append] = []
        self._keeping: list[_Append] = []  # those of them that the disk is busy with
        self._stopped = False
        self._more = asyncio.Event()
        self._waits = asyncio.Event()
        self._alone: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self.oldest_ms: int | None = None  # of the records that wait; None: none does

    @property
    def num_waiting(self) -> int:
        """How many records wait in the spool."""
        return self._detours.num_records

    @property
    def spool_bytes(self) -> int:
        """How large the spool's file is."""
        return self._spool.num_bytes

    @property
    def away(self) -> str | None:
        """Why the log can't be written to, as far as is known."""
        if not self._log.healthy():
            return "the broker does not answer"
        return "the broker did not acknowledge in time" if self._detours.failing else None

    def problem(self, session_id: str) -> str | None:
        """Why nothing of the session can be recorded now; None: it can, as far as is known."""
        key = session_id.encode("utf-8", "surrogatepass")
        if self._detours.straight(key, healthy=self._log.healthy()):
            return None
        problem = self._spool.problem()
        return None if problem is None else f"Kafka is away ({self.away or 'its spool is not empty'}), and {problem}"

    def waiting(self) -> Iterator[Event]:
        """Yield what a predecessor left in the spool, in order; what no schema of ours explains is left out."""
        for spooled in self._spool.waiting():
            try:
                yield self._log.unseal(spooled.record)
            except UndecodableRecord as error:
                LOG.warning("spool=unreadable reason=%s; it goes to the log as it is", error)

    async def append(self, events: Sequence[Event], traceparent: str | None = None) -> None:
        """Return when all events, of one session, are on the log or on the disk; calls of a session keep their order.

        Raises UnusableEvent, before anything is written, for an event that can't be; TryLater where neither took it.
        """
        records = [self._log.seal(event, traceparent) for event in events]
        key = records[0].key
        # One at a time: else what comes second could be acknowledged by the log while the first goes to the spool.
        async with self._alone.setdefault(key, asyncio.Lock()):
            if self._detours.straight(key, healthy=self._log.healthy()):
                try:
                    await self._log.append_sealed(records, timeout_s=self._ack_timeout_s)
                except TryLater as error:
                    LOG.debug("log=failed reason=%s", error)
                    self._detours.failed()
                else:
                    return
            await self._into_spool(records)

    async def run(self) -> None:
        """Keep the spool and empty it, until cancelled; what is left in it is for the next gateway of its name."""
        if self._detours.num_records:
            LOG.warning("spool=found path=%s records=%d", self._spool.path, self._detours.num_records)
            self._waits.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep())
                tasks.create_task(self._drain())
        finally:
            self._disk.shutdown()
            self._stopped = True
            for append in (*self._keeping, *self._appends):
                self._refuse(append, "the gateway stops")
            if self._detours.num_records:
                LOG.warning("spool=left path=%s records=%d", self._spool.path, self._detours.num_records)

    async def _into_spool(self, records: Sequence[Sealed]) -> None:
        if self._stopped:
            raise TryLater("the gateway stops; it can't be recorded")
        started = perf_counter()
        frames = b"".join(record_frame(record, self._now_ms()) for record in records)
        append = _Append(records, frames, asyncio.get_running_loop().create_future())
        if not self._detours.num_records:
            LOG.warning("spool=in_use path=%s reason=%s", self._spool.path, self.away or "no acknowledgement in time")
        self._detours.enter(records)
        self._appends.append(append)
        self._more.set()
        await asyncio.shield(append.done)
        self._metrics.spooled.inc(len(records))
        self._metrics.spool_s.observe(perf_counter() - started)

    async def _keep(self) -> None:
        """Put into the spool what is to go there, all that came during one fsync with the next."""
        while True:
            await self._more.wait()
            self._more.clear()
            self._keeping, self._appends = self._appends, []
            frames = [append.frames for append in self._keeping]
            try:
                kept = await self._on_disk(lambda: self._spool.append(frames))  # noqa: B023
                why = "the spool is full (gateway.spool_bytes)"
            except OSError as error:
                kept, why = [False] * len(frames), f"the spool's disk failed ({error.strerror})"
            if not all(kept):
                LOG.error("spool=refused path=%s appends=%d reason=%s", self._spool.path, kept.count(False), why)
            for append, fits in zip(self._keeping, kept, strict=True):
                if fits:
                    append.done.set_result(None)
                else:
                    self._refuse(append, f"Kafka is away and {why}")
            self._keeping = []
            if self._detours.num_records:
                self._waits.set()

    def _refuse(self, append: _Append, why: str) -> None:
        self._detours.leave(append.records)
        append.done.set_exception(TryLater(f"{why}; it can't be recorded"))

    async def _drain(self) -> None:
        """Hand what waits to the log, the oldest first, for as long as it takes."""
        attempt = 0
        num_drained = 0
        while True:
            await self._waits.wait()
            group = await self._on_disk(self._spool.next_group)
            self.oldest_ms = group[0].at_ms if group else None
            if not group:
                self._waits.clear()
                if num_drained and not self._detours.num_records:
                    LOG.warning("spool=drained path=%s records=%d", self._spool.path, num_drained)
                    num_drained = 0
                continue
            records = [spooled.record for spooled in group]
            try:
                await self._log.append_sealed(records)
            except (TryLater, UnusableEvent) as error:
                self._say_stuck(error, attempt)
                await asyncio.sleep(_AGAIN_AFTER_S)
                attempt += 1
                continue
            # Noted before the sessions go straight again: a gateway that is killed now leaves nothing to be repeated.
            await self._on_disk(lambda: self._spool.taken_to(group[-1].end))  # noqa: B023
            self._detours.taken(records)
            num_drained += len(records)
            attempt = 0

    def _say_stuck(self, error: TryLater | UnusableEvent, attempt: int) -> None:
        if isinstance(error, UnusableEvent):
            LOG.error("spool=stuck path=%s reason=%s; it waits until the topic takes it", self._spool.path, error)
        elif attempt == 0:
            LOG.info("spool=waits path=%s reason=%s", self._spool.path, error)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)
