"""Slow calls, made until they succeed or their deadlines are over.

The one rule: a call that failed is not an answer; only the stage's own `give_up` makes events of it, and not while all
calls fail: then the peer is away, and they wait for it.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

from clawstream.errors import TryLater
from clawstream.events import Event
from clawstream.stream.breaker import Breaker
from clawstream.stream.stage import Stage

log = logging.getLogger(__name__)

S = TypeVar("S")
C = TypeVar("C")

LONGEST_WAIT_S = 30.0


def wait_before(attempt: int, retry_s: float) -> float:
    """Return how long to wait after failed attempt 0, 1, ..: anything up to a bound that doubles (full jitter)."""
    return random.uniform(0, min(LONGEST_WAIT_S, retry_s * 2 ** min(attempt, 20)))


class Caller(Generic[S, C]):
    """Makes a stage's calls, `calls_at_once` of them, behind one breaker; `on_retry` hears of each that failed."""

    def __init__(self, stage: Stage[S, C], *, retry_s: float, on_retry: Callable[[str], None]) -> None:
        self._stage = stage
        self._retry_s = retry_s
        self._on_retry = on_retry
        self._slots = asyncio.Semaphore(stage.calls_at_once)
        self._breaker = Breaker(first_wait_s=4 * retry_s)
        self._change = asyncio.Event()
        self._numbers = count()
        self._now_s = asyncio.get_running_loop().time

    @property
    def waits_for_peer(self) -> bool:
        """Whether no call is made until one that tries has come through."""
        return self._breaker.is_open

    async def until_done(self, call: C) -> Sequence[Event]:
        """Return the events that came of `call`; each attempt takes a slot, waiting between them takes none.

        The deadline runs from the first attempt, so calls that wait for their turn are not given up unasked; and it
        stands still while the peer is away.
        """
        number, attempt = next(self._numbers), 0
        deadline_s: float | None = None
        give_up = self._stage.give_up
        while True:
            async with self._slots:
                await self._passage(number)
                deadline_s = self._closed_s() + self._stage.deadline_s if deadline_s is None else deadline_s
                left_s = math.inf if give_up is None else max(0.0, deadline_s - self._closed_s())
                try:
                    return await self._attempt(number, call, min(self._stage.call_timeout_s, left_s))
                except TryLater as error:
                    why, at_least_s = str(error), error.retry_after_s or 0.0
            wait_s = max(wait_before(attempt, self._retry_s), at_least_s)
            if give_up is not None and wait_s >= deadline_s - self._closed_s():
                away_s = self._breaker.open_for_s(self._now_s())
                await asyncio.sleep(max(0.0, deadline_s - self._closed_s()))
                if self._breaker.open_for_s(self._now_s()) == away_s and not self._breaker.is_open:
                    return give_up(call, why)
            else:
                self._on_retry(why)
                await asyncio.sleep(wait_s)
            attempt += 1

    async def _attempt(self, number: int, call: C, within_s: float) -> Sequence[Event]:
        """Make the call once. Raises TryLater also where it does not return in time; the breaker knows how it went."""
        assert self._stage.perform is not None, f"{self._stage.name} makes calls and has no perform"
        try:
            async with asyncio.timeout(within_s):
                events = await self._stage.perform(call)
        except TimeoutError as error:
            missed = TryLater(f"no answer within {within_s:.3g} s")
            self._failed(number, missed)
            raise missed from error
        except TryLater as error:
            self._failed(number, error)
            raise
        except BaseException:
            self._breaker.abandon(number)
            self._changed()
            raise
        if self._breaker.succeed(self._now_s()):
            log.warning("stage=%s breaker=closed", self._stage.name)
            self._changed()
        return events

    async def _passage(self, number: int) -> None:
        """Return when the call may go; where the breaker is open, as the one that finds out."""
        while (wait_s := self._breaker.wait_s(self._now_s())) != 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._change.wait()
        self._breaker.start(number)

    def _failed(self, number: int, error: TryLater) -> None:
        opened = self._breaker.fail(number, self._now_s(), retry_after_s=error.retry_after_s or 0.0)
        if opened:
            log.error(
                "stage=%s breaker=open reason=%s. No call is made until one that is tried now and then comes through; "
                "nothing is recorded as failed meanwhile. Look at the peer: its address, its key, its limits",
                self._stage.name,
                error,
            )
        self._changed()

    def _closed_s(self) -> float:
        """Return the seconds of a clock that stands still while the breaker is open."""
        return self._now_s() - self._breaker.open_for_s(self._now_s())

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
