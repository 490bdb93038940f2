"""A slow call, made until it succeeds or its deadline is over.

The one rule: a call that failed is not an answer; only the stage's own `give_up` makes events of it.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from clawstream.errors import TryLater
from clawstream.events import Event
from clawstream.stream.stage import Stage

S = TypeVar("S")
C = TypeVar("C")

LONGEST_WAIT_S = 30.0


def wait_before(attempt: int, retry_s: float) -> float:
    """Return how long to wait after failed attempt 0, 1, ..: anything up to a bound that doubles (full jitter)."""
    return random.uniform(0, min(LONGEST_WAIT_S, retry_s * 2 ** min(attempt, 20)))


async def call_until_done(
    stage: Stage[S, C], call: C, slots: asyncio.Semaphore, *, retry_s: float, on_retry: Callable[[str], None]
) -> Sequence[Event]:
    """Return the events that came of `call`; each attempt takes one of `slots`, waiting between them takes none.

    The deadline runs from the first attempt, so calls that wait for their turn are not given up unasked.
    """
    assert stage.perform is not None, f"{stage.name} makes calls and has no perform"
    now = asyncio.get_running_loop().time
    deadline_s: float | None = None
    attempt = 0
    while True:
        async with slots:
            deadline_s = now() + stage.deadline_s if deadline_s is None else deadline_s
            left_s = math.inf if stage.give_up is None else deadline_s - now()
            try:
                async with asyncio.timeout(min(stage.call_timeout_s, left_s)):
                    return await stage.perform(call)
            except TimeoutError:
                why, at_least_s = f"no answer within {min(stage.call_timeout_s, left_s):.3g} s", 0.0
            except TryLater as error:
                why, at_least_s = str(error), error.retry_after_s or 0.0
        wait_s = max(wait_before(attempt, retry_s), at_least_s)
        if stage.give_up is not None and wait_s >= deadline_s - now():
            await asyncio.sleep(deadline_s - now())
            return stage.give_up(call, why)
        on_retry(why)
        await asyncio.sleep(wait_s)
        attempt += 1
