"""What waits for the log and what does not, where the log or this process is slow."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clawstream.errors import TryLater
from clawstream.events import SessionDone
from clawstream.gateway.http.metrics import Metrics
from clawstream.gateway.outbox.delivery import Delivery
from clawstream.gateway.outbox.spool import Spool
from clawstream.stream.log import Sealed
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import WITHIN_S
from tests.unit.stream.toys import done

ACK_TIMEOUT_S = 0.02
LARGE_BYTES = 2**17


class Steady(MemoryLog):
    """A log that acknowledges all so long after it was asked."""

    def __init__(self, ack_s: float) -> None:
        super().__init__()
        self.ack_s = ack_s
        self.asked: list[Sequence[Sealed]] = []

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Write at once, and acknowledge later."""
        await super().append_sealed(records, timeout_s=timeout_s)
        acknowledged = asyncio.Event()
        asyncio.get_running_loop().call_later(self.ack_s, acknowledged.set)
        self.asked.append(records)
        await acknowledged.wait()
        for _ in range(5):  # as many turns of the loop as a client needs between its socket and its caller
            await asyncio.sleep(0)

    @property
    def times(self) -> Counter[Sealed]:
        """How often each record was written."""
        return Counter(record for records in self.asked for record in records)


class Away(MemoryLog):
    """A log that is not there."""

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Refuse them."""
        raise TryLater(f"the broker is not there for {len(records)} records, nor within {timeout_s} s")

    def healthy(self) -> bool:
        """It is not."""
        return False


@asynccontextmanager
async def delivering(log: MemoryLog, folder: Path, metrics: Metrics | None = None) -> AsyncIterator[Delivery]:
    with Spool.opened(folder, "g", max_bytes=2**26) as spool:
        delivery = Delivery(
            log, spool, ack_timeout_s=ACK_TIMEOUT_S, metrics=metrics or Metrics(), now_ms=lambda: 0
        )  # fmt: skip
        running = asyncio.create_task(delivery.run())
        try:
            async with asyncio.timeout(WITHIN_S):
                yield delivery
        finally:
            running.cancel()
            await asyncio.wait([running])


async def until_empty(delivery: Delivery) -> None:
    while delivery.num_waiting:
        await asyncio.sleep(0.001)


async def test_no_finish_waits_for_a_log_that_is_slow_all_the_time(tmp_path: Path) -> None:
    log = Steady(2.5 * ACK_TIMEOUT_S)
    async with delivering(log, tmp_path) as delivery:
        for number in range(30):
            await delivery.append([done("a", number)])
            await until_empty(delivery)  # the session thinks for longer than an acknowledgement takes
            if number == 10:
                log.asked.clear()
        assert set(log.times.values()) == {1}  # none was sent straight, waited for in vain, and sent again


async def test_an_acknowledgement_that_waits_for_this_process_is_found(tmp_path: Path) -> None:
    log, metrics = Steady(ACK_TIMEOUT_S / 2), Metrics()
    async with delivering(log, tmp_path, metrics) as delivery:
        for number in range(3):
            waiting = asyncio.create_task(delivery.append([done("a", number)]))
            while len(log.asked) == number:
                await asyncio.sleep(0)
            time.sleep(3 * ACK_TIMEOUT_S)  # noqa: ASYNC251 - a busy event loop
            await waiting
    assert metrics.registry.get_sample_value("clawstream_spooled_records_total") == 0


def num_in_memory() -> int:
    """How many records this process holds."""
    return sum(type(found) is Sealed and len(found.value) > 10_000 for found in gc.get_objects())


@pytest.mark.slow
async def test_what_waits_on_the_disk_takes_no_memory(tmp_path: Path) -> None:
    log = Away()
    async with delivering(log, tmp_path) as delivery:
        for number in range(50):
            await delivery.append([large(number)])
        gc.collect()
        assert num_in_memory() <= 5  # one group, for the next attempt
    async with delivering(log, tmp_path) as delivery:
        assert delivery.num_waiting == 50
        gc.collect()
        assert num_in_memory() <= 5


async def test_a_slow_log_is_given_as_much_at_a_time_as_it_takes(tmp_path: Path) -> None:
    log = Steady(8 * ACK_TIMEOUT_S)  # far above what a busy machine takes by itself
    async with delivering(log, tmp_path) as delivery:
        for number in range(10):
            await delivery.append([done("a", number)])
            await until_empty(delivery)
        log.asked.clear()
        for number in range(100):
            await delivery.append([large(number)])
        await until_empty(delivery)
    assert sum(map(len, log.asked)) == 100
    assert max(map(len, log.asked)) > 20


def large(number: int) -> SessionDone:
    """An event of as many bytes as a long conversation's."""
    return SessionDone(session_id=f"s{number}", after_exchange_id="x" * LARGE_BYTES)
