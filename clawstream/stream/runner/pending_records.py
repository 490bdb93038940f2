"""Does what follows from a step: writes events, makes calls, sets records aside.

One group of events is being written at a time, and all that come meanwhile form the next group. So the order holds even
where the log fails in the middle, and a busy stage waits for one acknowledgement per group. A pending record ends
exactly once, when all that followed from it has ended; then the record is done.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from clawstream.errors import ParkedRecord, UnusableEvent
from clawstream.events import Event
from clawstream.stream.log import DeadLetterId, Log, Outgoing
from clawstream.stream.runner.breaker import FailureRate
from clawstream.stream.runner.calling import StageCaller, until_done
from clawstream.stream.runner.partition_state import PartitionState, PendingRecord
from clawstream.stream.stage import Stage, Step

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")

GROUP_EVENTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """Events that belong together, and what to do once they are on the log or can never be written."""

    outgoing: Sequence[Outgoing]
    written: Callable[[], None]
    refused: Callable[[UnusableEvent], None]
    wanted: Callable[[], bool]  # False: the partition went to another worker, which writes the same events


class EventWriter:
    """Writes all events of a worker."""

    def __init__(self, to: Log, *, retry_s: float) -> None:
        self._log = to
        self._retry_s = retry_s
        self._waiting: deque[WriteRequest] = deque()
        self._more = asyncio.Event()

    def add(self, request: WriteRequest) -> None:
        """Queue the request behind those added before it."""
        self._waiting.append(request)
        self._more.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._more.wait()
            await self._write(self._next_group())

    def _next_group(self) -> list[WriteRequest]:
        requests: list[WriteRequest] = []
        num_events = 0
        while self._waiting and num_events < GROUP_EVENTS:
            request = self._waiting.popleft()
            if request.wanted():
                requests.append(request)
                num_events += len(request.outgoing)
        if not self._waiting:
            self._more.clear()
        return requests

    async def _write(self, requests: Sequence[WriteRequest]) -> None:
        try:
            outgoing = [one for request in requests for one in request.outgoing]
            if outgoing:
                failed = f"write=failed events={len(outgoing)}"
                await until_done(lambda: self._log.write(outgoing), failed, retry_s=self._retry_s)
        except UnusableEvent as error:
            if len(requests) == 1:
                requests[0].refused(error)
                return
            for request in requests:
                await self._write([request])
            return
        for request in requests:
            request.written()


@dataclass(slots=True)
class WorkerProgress:
    """What a worker has done since it began, and what it still has to do."""

    records: int = 0
    events: int = 0
    calls: int = 0
    retries: int = 0
    dead_letters: int = 0
    rebuilt_records: int = 0
    open_records: int = 0
    open_keys: int = 0
    partitions: int = 0


class PendingRecords(Generic[S, C]):
    """Runs the work that follows from steps, in `tasks`; `on_done` is called whenever a record is done."""

    def __init__(
        self,
        stage: Stage[S, C],
        to: Log,
        tasks: asyncio.TaskGroup,
        *,
        tally: WorkerProgress,
        retry_s: float,
        on_done: Callable[[], None],
    ) -> None:
        self._stage = stage
        self._log = to
        self._tasks = tasks
        self._tally = tally
        self._retry_s = retry_s
        self._on_done = on_done
        self.failures = FailureRate(asyncio.get_running_loop().time)
        self._caller = StageCaller(stage, retry_s=retry_s, on_retry=self._retried)
        self._writer = EventWriter(to, retry_s=retry_s)
        self._writing = tasks.create_task(self._writer.run())

    @property
    def waits_for_peer(self) -> bool:
        """Whether no call is made, as the peer of all calls is away."""
        return self._caller.waits_for_peer

    def end(self) -> None:
        """Write nothing more."""
        self._writing.cancel()

    def start(self, partition: PartitionState[S, C], work: Coroutine[None, None, None]) -> None:
        """Run `work` until it ends, or until the partition goes to another worker."""
        task = self._tasks.create_task(work)
        partition.tasks.add(task)
        task.add_done_callback(partition.tasks.discard)

    def follow_up(self, partition: PartitionState[S, C], pending: PendingRecord, step: Step[S, C]) -> None:
        """Write the step's events and make its calls."""
        pending.left += 1
        self._write(partition, pending, step.events)
        for call in step.calls:
            pending.left += 1
            self.start(partition, self._call(partition, pending, call))
        self._ended(partition, pending)

    def set_aside(self, partition: PartitionState[S, C], pending: PendingRecord, error: Exception) -> None:
        """Begin to copy the record to the dead-letter queue; it is done once that is acknowledged."""
        pending.left += 1
        if not isinstance(error, ParkedRecord):
            self.failures.set_aside()
        self.start(partition, self._copy_to_dead_letters(partition, pending, error))

    def _write(self, partition: PartitionState[S, C], pending: PendingRecord, events: Sequence[Event]) -> None:
        if not events:
            return
        pending.left += 1
        self._writer.add(
            WriteRequest(
                outgoing=[Outgoing(event, pending.traceparent) for event in events],
                written=lambda: self._written(partition, pending, len(events)),
                refused=lambda error: self._refused(partition, pending, error),
                wanted=lambda: not partition.gone,
            )
        )

    async def _call(self, partition: PartitionState[S, C], pending: PendingRecord, call: C) -> None:
        self._tally.calls += 1
        try:
            events = await self._caller.until_done(call)
        except Exception as error:  # noqa: BLE001  # a call that breaks must not stop the others
            self._refused(partition, pending, error)
            return
        self._write(partition, pending, events)
        self._ended(partition, pending)

    def _retried(self, why: str) -> None:
        self._tally.retries += 1
        log.warning("stage=%s call=failed reason=%s", self._stage.name, why)

    def _written(self, partition: PartitionState[S, C], pending: PendingRecord, num_events: int) -> None:
        self._tally.events += num_events
        self._ended(partition, pending)

    def _refused(self, partition: PartitionState[S, C], pending: PendingRecord, error: Exception) -> None:
        self.set_aside(partition, pending, error)
        self._ended(partition, pending)

    async def _copy_to_dead_letters(
        self, partition: PartitionState[S, C], pending: PendingRecord, error: Exception
    ) -> None:
        if pending.place is None:
            log.error("stage=%s partition=%d tick=unusable reason=%s", self._stage.name, partition.number, error)
            return
        where = f"{pending.place.topic}-{pending.place.partition}-{pending.offset}"
        level = logging.WARNING if isinstance(error, ParkedRecord) else logging.ERROR
        broke = None if isinstance(error, UnusableEvent) else error
        log.log(level, "stage=%s record=%s dead_letter=%s", self._stage.name, where, error, exc_info=broke)
        dead_letter_id = DeadLetterId(self._stage.name, *pending.place, pending.offset)
        rebuild_offsets = pending.rebuild_offsets or partition.fold.rebuild_offsets(pending.key)
        # One after the other, so that a parked record comes into the queue after the one that it waits behind.
        async with partition.copying:
            await until_done(
                lambda: self._log.set_aside(
                    dead_letter_id, error=error, attempt=pending.attempt, rebuild_offsets=rebuild_offsets
                ),
                f"stage={self._stage.name} record={where} dead_letter=failed",
                retry_s=self._retry_s,
            )
        self._tally.dead_letters += 1
        self._ended(partition, pending)

    def _ended(self, partition: PartitionState[S, C], pending: PendingRecord) -> None:
        pending.left -= 1
        if pending.left == 0 and pending.released is not None:
            pending.released.set()
        elif pending.left == 0 and pending.place is not None:
            partition.done(pending.place, pending.offset)
            self._on_done()
