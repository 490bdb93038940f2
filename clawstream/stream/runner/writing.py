"""Writes a stage's events to the log, in the order in which its records were folded.

The one rule: one group of events is under way at a time, and all that come meanwhile form the next group. So the order
holds even where the log fails in the middle, and a busy stage waits for one acknowledgement per group.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clawstream.errors import TryLater, UnusableEvent
from clawstream.stream.log import Log, Outgoing
from clawstream.stream.runner.calling import wait_before

log = logging.getLogger(__name__)

GROUP_EVENTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """Events that belong together, and what to do once they are on the log or can never be written."""

    outgoing: Sequence[Outgoing]
    written: Callable[[], None]
    refused: Callable[[UnusableEvent], None]
    wanted: Callable[[], bool]  # False: the partition went to another member, which writes the same events


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
            requests = self._next_group()
            await self._write(requests)

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
            await self._until_taken([one for request in requests for one in request.outgoing])
        except UnusableEvent as error:
            if len(requests) == 1:
                requests[0].refused(error)
                return
            for request in requests:
                await self._write([request])
            return
        for request in requests:
            request.written()

    async def _until_taken(self, outgoing: Sequence[Outgoing]) -> None:
        attempt = 0
        while outgoing:
            try:
                await self._log.write(outgoing)
            except TryLater as error:
                wait_s = wait_before(attempt, self._retry_s)
                log.warning("write=failed events=%d wait_s=%.2f reason=%s", len(outgoing), wait_s, error)
                await asyncio.sleep(wait_s)
                attempt += 1
            else:
                return
