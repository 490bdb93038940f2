"""Which way records go when calls of one session overlap, and when the gateway stops."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clawstream.errors import TryLater
from clawstream.events import SessionDone
from clawstream.gateway.delivery import Delivery
from clawstream.gateway.metrics import Metrics
from clawstream.gateway.spool import Spool
from clawstream.stream.log import Sealed
from clawstream.stream.memory import MemoryLog
from tests.gateway.house import WITHIN_S, everything
from tests.stream.toys import done, number_of


class FirstLost(MemoryLog):
    """A log that loses the first write, and says so only once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.tell = asyncio.Event()

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Lose the first, take all others at once."""
        if not self.asked.is_set():
            self.asked.set()
            await self.tell.wait()
            raise TryLater("no acknowledgement")
        await super().append_sealed(records, timeout_s=timeout_s)


@asynccontextmanager
async def delivering(log: MemoryLog, folder: Path) -> AsyncIterator[Delivery]:
    with Spool.opened(folder, "g", max_bytes=2**20) as spool:
        delivery = Delivery(log, spool, ack_timeout_s=WITHIN_S, metrics=Metrics(), now_ms=lambda: 0)
        running = asyncio.create_task(delivery.run())
        try:
            yield delivery
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_what_a_session_says_second_waits_for_what_it_said_first(tmp_path: Path) -> None:
    log = FirstLost()
    async with delivering(log, tmp_path) as delivery, asyncio.timeout(WITHIN_S):
        first = asyncio.create_task(delivery.append([done("a", 0)]))
        await log.asked.wait()
        second = asyncio.create_task(delivery.append([done("a", 1)]))
        await delivery.append([done("b", 7)])
        log.tell.set()
        await asyncio.gather(first, second)
        while delivery.num_waiting:
            await asyncio.sleep(0)
        ended = [event for event in await everything(log) if isinstance(event, SessionDone)]
    assert [number_of(event) for event in ended if event.session_id == "a"] == [0, 1]


async def test_a_gateway_that_stops_leaves_nobody_waiting(tmp_path: Path) -> None:
    log = FirstLost()
    async with delivering(log, tmp_path) as delivery, asyncio.timeout(WITHIN_S):
        late = asyncio.create_task(delivery.append([done("a", 0)]))
        await log.asked.wait()
    log.tell.set()
    with pytest.raises(TryLater, match="the gateway stops"):
        await late
