"""Which way records go when calls of one session overlap, and when the gateway stops."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clawstream.errors import TryLater
from clawstream.events import SessionDone
from clawstream.gateway.http.metrics import Metrics
from clawstream.gateway.outbox.delivery import Delivery
from clawstream.gateway.outbox.spool import Spool
from clawstream.gateway.outbox.spool_file import Fsync
from clawstream.stream.log import Sealed
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import WITHIN_S, everything, full_disk
from tests.unit.stream.toys import done, number_of


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


class Slow(MemoryLog):
    """A log that acknowledges what is written to it once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.written: list[Sequence[Sealed]] = []

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Write at once, and acknowledge late."""
        self.written.append(records)
        await super().append_sealed(records, timeout_s=timeout_s)
        await self.may.wait()


@asynccontextmanager
async def delivering(
    log: MemoryLog, folder: Path, *, ack_timeout_s: float = WITHIN_S, fsync: Fsync = os.fsync
) -> AsyncIterator[Delivery]:
    with Spool.opened(folder, "g", max_bytes=2**20, fsync=fsync) as spool:
        delivery = Delivery(log, spool, ack_timeout_s=ack_timeout_s, metrics=Metrics(), now_ms=lambda: 0)
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


async def emptied(delivery: Delivery) -> None:
    """Return once nothing waits."""
    while delivery.num_waiting:
        await asyncio.sleep(0.001)


async def numbers(log: MemoryLog, session_id: str) -> list[int]:
    """What the session said on the log, the first of each."""
    said = [event for event in await everything(log) if isinstance(event, SessionDone)]
    return list(dict.fromkeys(number_of(event) for event in said if event.session_id == session_id))


async def test_an_acknowledgement_that_is_late_is_not_waited_for_and_neither_are_those_behind_it(
    tmp_path: Path,
) -> None:
    log = Slow()
    async with delivering(log, tmp_path, ack_timeout_s=0.02) as delivery, asyncio.timeout(WITHIN_S):
        await delivery.append([done("a", 0)])
        sent = len(log.written)
        for number in range(5):
            await delivery.append([done("a", 1 + number)])
            await delivery.append([done("b", number)])
        assert delivery.num_waiting == 11
        assert delivery.away == "the broker acknowledges slowly"
        assert len(log.written) <= sent + 1  # the spool's oldest, which waits as the first does
        log.may.set()
        await emptied(delivery)
        assert await numbers(log, "a") == list(range(6))
        assert await numbers(log, "b") == list(range(5))
    [first, again, *_] = [records[0] for records in log.written]
    assert first == again


async def test_a_log_that_is_quick_again_is_written_straight_to(tmp_path: Path) -> None:
    log = Slow()
    async with delivering(log, tmp_path, ack_timeout_s=0.02) as delivery, asyncio.timeout(WITHIN_S):
        await delivery.append([done("a", 0)])
        log.may.set()
        for number in range(50):
            await delivery.append([done("a", 1 + number)])
            await emptied(delivery)
        straight = 0
        for number in range(50):
            await delivery.append([done("b", number)])
            straight += delivery.num_waiting == 0
        assert straight >= 45  # a machine that is busy may be late itself
        assert delivery.away is None


async def test_an_acknowledgement_that_comes_before_the_disk_is_done_is_enough(tmp_path: Path) -> None:
    log, disk = Slow(), threading.Event()

    def fsync(_fd: int) -> None:
        assert disk.wait(WITHIN_S)

    async with delivering(log, tmp_path, ack_timeout_s=0.02, fsync=fsync) as delivery, asyncio.timeout(WITHIN_S):
        waiting = asyncio.create_task(delivery.append([done("a", 0)]))
        while not delivery.num_waiting:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        log.may.set()
        await waiting
        disk.set()
        await emptied(delivery)


async def test_where_the_disk_takes_nothing_a_slow_log_is_waited_for(tmp_path: Path) -> None:
    log = Slow()
    async with (
        delivering(log, tmp_path, ack_timeout_s=0.02, fsync=full_disk) as delivery,
        asyncio.timeout(WITHIN_S),
    ):
        asyncio.get_running_loop().call_later(0.2, log.may.set)
        await delivery.append([done("a", 0)])  # late: the spool refuses it
        log.may.clear()
        asyncio.get_running_loop().call_later(0.2, log.may.set)
        late = asyncio.create_task(delivery.append([done("a", 1)]))
        while len(log.written) < 2:
            await asyncio.sleep(0.03)
        await delivery.append([done("b", 0)])  # behind one that is overdue: the spool refuses it too
        await late
    assert await numbers(log, "a") == [0, 1]
    assert await numbers(log, "b") == [0]


class Away(MemoryLog):
    """A log that refuses all until it is there."""

    there = False

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Take the records, if it is there."""
        if not self.there:
            raise TryLater("the broker is not there")
        await super().append_sealed(records, timeout_s=timeout_s)

    def healthy(self) -> bool:
        """Whether it is there."""
        return self.there


def damage(folder: Path, value: bytes) -> None:
    """Change a byte of the record on the disk that holds `value`."""
    path = folder / "g.spool"
    data = bytearray(path.read_bytes())
    data[data.index(value)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("lost", [1, 3])
async def test_a_record_that_the_disk_lost_keeps_no_session_in_the_spool(tmp_path: Path, lost: int) -> None:
    log = Away()
    async with delivering(log, tmp_path) as delivery, asyncio.timeout(WITHIN_S):
        for number, session in enumerate("abab"):
            await delivery.append([done(session, number)])
        damage(tmp_path, log.seal(done("b", lost)).value)
        log.there = True
        await emptied(delivery)
        assert delivery.damaged_bytes > 0
        await delivery.append([done("b", 4)])
        assert delivery.num_waiting == 0
    assert (await numbers(log, "a"), await numbers(log, "b")) == ([0, 2], [4 - lost, 4])


async def test_a_disk_that_fails_stops_no_gateway(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = Away()
    (tmp_path / "g.cut").mkdir()  # what can't be read has nowhere to go
    async with delivering(log, tmp_path) as delivery, asyncio.timeout(WITHIN_S):
        for number, session in enumerate("aba"):
            await delivery.append([done(session, number)])
        damage(tmp_path, log.seal(done("b", 1)).value)
        log.there = True
        while "spool=stuck" not in caplog.text:
            await asyncio.sleep(0.01)
        (tmp_path / "g.cut").rmdir()
        await emptied(delivery)
    assert await numbers(log, "a") == [0, 2]
