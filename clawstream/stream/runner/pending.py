"""What follows from a step: events to write, calls to make, records to set aside.

The one rule: an errand ends exactly once, when all that it led to has ended; its record is done then and not before.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from clawstream.errors import ParkedRecord, TryLater, UnusableEvent
from clawstream.events import Event
from clawstream.stream.dead_letters.records import LetterId
from clawstream.stream.log import Log, Outgoing
from clawstream.stream.runner.calling import Caller, wait_before
from clawstream.stream.runner.failures import FailureRate
from clawstream.stream.runner.work import Errand, Share
from clawstream.stream.runner.writing import Parcel, Writer
from clawstream.stream.stage import Stage, Step

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")


@dataclass(slots=True)
class Tally:
    """What a worker has done since it began."""

    records: int = 0
    events: int = 0
    calls: int = 0
    retries: int = 0
    dead_letters: int = 0
    rebuilt_records: int = 0


class Errands(Generic[S, C]):
    """Runs what steps lead to as tasks of `tasks`; `on_done` hears of each record that is done."""

    def __init__(
        self,
        stage: Stage[S, C],
        to: Log,
        tasks: asyncio.TaskGroup,
        *,
        tally: Tally,
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
        self._caller = Caller(stage, retry_s=retry_s, on_retry=self._retried)
        self._writer = Writer(to, retry_s=retry_s)
        self._writing = tasks.create_task(self._writer.run())

    @property
    def waits_for_peer(self) -> bool:
        """Whether no call is made as the peer of all calls is away."""
        return self._caller.waits_for_peer

    def end(self) -> None:
        """Write nothing more."""
        self._writing.cancel()

    def start(self, share: Share[S, C], work: Coroutine[None, None, None]) -> None:
        """Run `work` until it ends, or until the share goes to another worker."""
        task = self._tasks.create_task(work)
        share.tasks.add(task)
        task.add_done_callback(share.tasks.discard)

    def follow_up(self, share: Share[S, C], errand: Errand, step: Step[S, C]) -> None:
        """Write the step's events and make its calls."""
        errand.left += 1
        self._write(share, errand, step.events)
        for call in step.calls:
            errand.left += 1
            self.start(share, self._call(share, errand, call))
        self._ended(share, errand)

    def set_aside(self, share: Share[S, C], errand: Errand, error: Exception) -> None:
        """Copy the errand's record to the dead-letter queue."""
        errand.left += 1
        if not isinstance(error, ParkedRecord):
            self.failures.set_aside()
        self.start(share, self._copy_to_dead_letters(share, errand, error))

    def _write(self, share: Share[S, C], errand: Errand, events: Sequence[Event]) -> None:
        if not events:
            return
        errand.left += 1
        self._writer.add(
            Parcel(
                outgoing=[Outgoing(event, errand.traceparent) for event in events],
                written=lambda: self._written(share, errand, len(events)),
                refused=lambda error: self._refused(share, errand, error),
                wanted=lambda: not share.gone,
            )
        )

    async def _call(self, share: Share[S, C], errand: Errand, call: C) -> None:
        self._tally.calls += 1
        try:
            events = await self._caller.until_done(call)
        except Exception as error:  # noqa: BLE001  # whatever a call breaks on, it must not stop all others
            self._refused(share, errand, error)
            return
        self._write(share, errand, events)
        self._ended(share, errand)

    def _retried(self, why: str) -> None:
        self._tally.retries += 1
        log.warning("stage=%s call=failed reason=%s", self._stage.name, why)

    def _written(self, share: Share[S, C], errand: Errand, num_events: int) -> None:
        self._tally.events += num_events
        self._ended(share, errand)

    def _refused(self, share: Share[S, C], errand: Errand, error: Exception) -> None:
        self.set_aside(share, errand, error)
        self._ended(share, errand)

    async def _copy_to_dead_letters(self, share: Share[S, C], errand: Errand, error: Exception) -> None:
        if errand.place is None:
            log.error("stage=%s partition=%d tick=unusable reason=%s", self._stage.name, share.number, error)
            return
        where = f"{errand.place.topic}-{errand.place.partition}-{errand.offset}"
        level = logging.WARNING if isinstance(error, ParkedRecord) else logging.ERROR
        broke = None if isinstance(error, UnusableEvent) else error
        log.log(level, "stage=%s record=%s dead_letter=%s", self._stage.name, where, error, exc_info=broke)
        letter_id = LetterId(self._stage.name, *errand.place, errand.offset)
        story = errand.story or share.fold.story(errand.key)
        # One after the other: a parked record in the queue without the one that it waits behind would wait for nothing.
        async with share.copying:
            await self._until_set_aside(letter_id, error, attempt=errand.attempt, story=story)
        self._tally.dead_letters += 1
        self._ended(share, errand)

    async def _until_set_aside(
        self, letter_id: LetterId, error: Exception, *, attempt: int, story: Mapping[str, int]
    ) -> None:
        tries = 0
        while True:
            try:
                await self._log.set_aside(letter_id, error=error, attempt=attempt, story=story)
            except TryLater as away:
                log.warning("stage=%s record=%s dead_letter=failed reason=%s", self._stage.name, letter_id, away)
                await asyncio.sleep(wait_before(tries, self._retry_s))
                tries += 1
            else:
                return

    def _ended(self, share: Share[S, C], errand: Errand) -> None:
        errand.left -= 1
        if errand.left == 0 and errand.released is not None:
            errand.released.set()
        elif errand.left == 0 and errand.place is not None:
            share.done(errand.place, errand.offset)
            self._on_done()
