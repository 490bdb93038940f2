"""One stage's dead letters, read from its dead-letter queues.

A reader adds the records that it sets aside itself at once; when the queue delivers them later, nothing changes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from clawstream.errors import TryLater
from clawstream.stream.dead_letters.records import KnownDeadLetters
from clawstream.stream.log import Raw
from clawstream.stream.runner.calling import wait_before
from clawstream.stream.topics import dead_letter_topic

log = logging.getLogger(__name__)


class DeadLetterQueues(Protocol):
    """The part of a log that is needed."""

    def follow_raw(self, topics: Sequence[str], *, until_end: bool = False) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes on the topics from their beginning, then what arrives."""


class DeadLetterReader:
    """The dead letters of the stage `name`, which reads `topics`; `on_change` is called after each change."""

    def __init__(
        self,
        name: str,
        topics: Iterable[str],
        to: DeadLetterQueues,
        *,
        retry_s: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._log = to
        self._retry_s = retry_s
        self._on_change = on_change
        self._queues = [queue for queue in map(dead_letter_topic, topics) if queue is not None]
        self.dead_letters = KnownDeadLetters(name)
        self.current = asyncio.Event()  # set once everything that stood in the queues when `follow` began is read

    async def follow(self) -> None:
        """Read the queues, then what arrives, until cancelled."""
        attempt = 0
        while self._queues:
            try:
                async with aclosing(self._log.follow_raw(self._queues, until_end=True)) as there:
                    async for raws in there:
                        self._take(raws)
                self.current.set()
                self._on_change()
                async with aclosing(self._log.follow_raw(self._queues)) as coming:
                    async for raws in coming:
                        self._take(raws)
            except TryLater as error:
                log.warning("stage=%s dead_letters=unread reason=%s", self._name, error)
                await asyncio.sleep(wait_before(attempt, self._retry_s))
                attempt += 1
        self.current.set()

    def _take(self, raws: Sequence[Raw]) -> None:
        for raw in raws:
            self.dead_letters.read(raw)
        self._on_change()
