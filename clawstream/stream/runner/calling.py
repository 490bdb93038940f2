"""Slow calls, made again until they succeed or their deadlines are over.

A failed call is not an answer. Only the stage's own `give_up` makes events of it. While all calls fail the peer counts
as away: calls wait for it and none is given up, except where the stage does not wait for its peer.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

from clawstream.errors import ClawstreamError, NotYet, TooLate, TryLater
from clawstream.events import Event
from clawstream.stream.runner.breaker import LONGEST_WAIT_S, Breaker
from clawstream.stream.stage import Stage

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")
T = TypeVar("T")


def wait_before(attempt: int, retry_s: float, longest_s: float = LONGEST_WAIT_S) -> float:
    """Return how long to wait after failed attempt 0, 1, ..: a random time up to a bound that doubles (full jitter)."""
    return random.uniform(0, min(longest_s, retry_s * 2 ** min(attempt, 20)))


async def until_done(
    work: Callable[[], Awaitable[T]],
    failed: str,
    *,
    retry_s: float,
    longest_s: float = LONGEST_WAIT_S,
    stop: asyncio.Event | None = None,
    again_on: tuple[type[ClawstreamError], ...] = (TryLater,),
) -> T:
    """Return what `work` returns; try again while it raises `again_on`, but let that through once `stop` is set."""
    stop = stop or asyncio.Event()
    attempt = 0
    while True:
        try:
            return await work()
        except again_on as error:
            if stop.is_set():
                raise
            wait_s = wait_before(attempt, retry_s, longest_s)
            log.warning("%s wait_s=%.2f reason=%s", failed, wait_s, error)
        await wait_at_most(stop, wait_s)
        attempt += 1


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Return once the event is set or the time is over; None: the time is not limited."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class StageCaller(Generic[S, C]):
    """Makes a stage's calls, `calls_at_once` at a time, behind one breaker; `on_retry` is told why one is retried."""

    def __init__(self, stage: Stage[S, C], *, retry_s: float, on_retry: Callable[[str], None]) -> None:
        self._stage = stage
        self._retry_s = retry_s
        self._on_retry = on_retry
        self._slots = asyncio.Semaphore(stage.calls_at_once)
        self._breaker = Breaker(first_wait_s=4 * retry_s)
        self._change = asyncio.Event()
        self._numbers = count()
        self._now_s = asyncio.get_running_loop().time
        self._why_away = ""

    @property
    def waits_for_peer(self) -> bool:
        """Whether all calls wait until the probing call succeeds."""
        return self._stage.waits_for_peer and self._breaker.is_open

    async def until_done(self, call: C) -> Sequence[Event]:
        """Return the events that came of `call`. An attempt takes a slot; the wait between two attempts takes none.

        The deadline runs from the first attempt, so a call that waits for its turn is not given up before it was made.
        The deadline stands still while the peer is away. Where the stage does not wait for its peer (`waits_for_peer`),
        the deadline runs on, and a call that was never made is given up once the peer was away for `deadline_s`.
        """
        number, attempt, asked_at_s = next(self._numbers), 0, self._now_s()
        deadline_s: float | None = None
        why: str | None = None
        give_up = self._stage.give_up

        def patience_s() -> float:
            if self._stage.waits_for_peer or give_up is None:
                return math.inf
            if deadline_s is not None:
                return deadline_s - self._now_s()
            away_at_s = self._breaker.opened_at_s
            return self._stage.deadline_s - (0 if away_at_s is None else self._now_s() - max(asked_at_s, away_at_s))

        while True:
            async with self._turn(number, patience_s) as may_go:
                if not may_go:
                    assert give_up is not None, "without `give_up` a call waits for its turn without a limit"
                    return give_up(call, self._why_away if why is None else why)
                if deadline_s is None:
                    deadline_s = self._clock_s() + min(self._stage.deadline_s, patience_s())
                left_s = math.inf if give_up is None else max(0.0, deadline_s - self._clock_s())
                try:
                    return await self._attempt(number, call, min(self._stage.call_timeout_s, left_s))
                except TooLate as error:
                    assert give_up is not None, f"{self._stage.name} gives up no call"
                    return give_up(call, str(error))
                except TryLater as error:
                    why, at_least_s = str(error), error.retry_after_s or 0.0
            wait_s = max(wait_before(attempt, self._retry_s), at_least_s)
            if give_up is not None and wait_s >= deadline_s - self._clock_s():
                away_s = self._breaker.open_for_s(self._now_s())
                await asyncio.sleep(max(0.0, deadline_s - self._clock_s()))
                stood_still = self._breaker.open_for_s(self._now_s()) != away_s or self._breaker.is_open
                if not (stood_still and self._stage.waits_for_peer):
                    return give_up(call, why)
            else:
                self._on_retry(why)
                await asyncio.sleep(wait_s)
            attempt += 1

    async def _attempt(self, number: int, call: C, within_s: float) -> Sequence[Event]:
        """Make the call once and tell the breaker the outcome. Raises TryLater also where no answer came in time."""
        assert self._stage.perform is not None, f"{self._stage.name} makes calls and has no perform"
        try:
            async with asyncio.timeout(within_s):
                events = await self._stage.perform(call)
        except TimeoutError as error:
            missed = TryLater(f"no answer within {within_s:.3g} s")
            self._failed(number, missed)
            raise missed from error
        except BaseException as error:
            if isinstance(error, TryLater) and not isinstance(error, NotYet):
                self._failed(number, error)
            else:
                self._breaker.abandon(number)
                self._changed()
            raise
        if self._breaker.succeed(self._now_s()):
            log.warning("stage=%s breaker=closed", self._stage.name)
            self._changed()
        return events

    @contextlib.asynccontextmanager
    async def _turn(self, number: int, patience_s: Callable[[], float]) -> AsyncIterator[bool]:
        """Yield True once the call has a slot and may be made, or False where its time is over before."""
        while (within_s := patience_s()) > 0:
            async with contextlib.AsyncExitStack() as slot:
                try:
                    async with asyncio.timeout(None if within_s == math.inf else within_s):
                        await slot.enter_async_context(self._slots)
                        await self._passage(number)
                except TimeoutError:
                    continue
                yield True
                return
        yield False

    async def _passage(self, number: int) -> None:
        """Return once the call may be made; if the breaker is open then, this call is the probe."""
        while (wait_s := self._breaker.wait_s(self._now_s())) != 0:
            await wait_at_most(self._change, wait_s)
        self._breaker.start(number)

    def _failed(self, number: int, error: TryLater) -> None:
        opened = self._breaker.fail(number, self._now_s(), retry_after_s=error.retry_after_s or 0.0)
        self._why_away = str(error)
        if opened:
            log.error(
                "stage=%s breaker=open reason=%s. From now on one call at a time is tried, until one succeeds; "
                "%s. Look at the peer: its address, its key, its limits",
                self._stage.name,
                error,
                "nothing is recorded as failed meanwhile"
                if self._stage.waits_for_peer
                else f"each call is recorded as failed after {self._stage.deadline_s:g} s",
            )
        self._changed()

    def _clock_s(self) -> float:
        """Return the time of the clock for deadlines, which stands still while the stage waits for its peer."""
        return self._now_s() - (self._breaker.open_for_s(self._now_s()) if self._stage.waits_for_peer else 0.0)

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
