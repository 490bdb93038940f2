"""A stage's events onto the log, in order."""

import asyncio
from collections.abc import Sequence

from clawstream.errors import TryLater
from clawstream.stream.log import Outgoing
from clawstream.stream.runner.pending_records import EventWriter, WriteRequest
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.unit.stream import toys


class Flaky(MemoryLog):
    """Refuses every other group: once having written half of it, once nothing."""

    def __init__(self) -> None:
        super().__init__(MemoryBroker(partitions=1))
        self.attempts = 0

    async def write(self, outgoing: Sequence[Outgoing]) -> None:
        self.attempts += 1
        if self.attempts % 2:
            await super().write(outgoing[: len(outgoing) // 2])
            raise TryLater("away")
        await super().write(outgoing)


def request(number: int, said: list[str], *, wanted: bool = True) -> WriteRequest:
    return WriteRequest(
        outgoing=[Outgoing(toys.paired("a", number))],
        written=lambda: said.append(f"written {number}"),
        refused=lambda _: said.append(f"refused {number}"),
        wanted=lambda: wanted,
    )


async def write(log: MemoryLog, requests: Sequence[WriteRequest], said: list[str], num_ends: int) -> list[int]:
    """Let a writer write until it has said what became of `num_ends` requests; return what is on the log."""

    async def all_said() -> bool:
        return len(said) == num_ends

    writer = EventWriter(log, retry_s=0.001)
    running = asyncio.create_task(writer.run())
    for one in requests:
        writer.add(one)
        await asyncio.sleep(0)
    await toys.until(all_said)
    running.cancel()
    await asyncio.wait([running])
    return [toys.number_of(one.event) for one in await toys.read(log, toys.TURNS)]


async def test_order_holds_where_the_log_fails_in_the_middle() -> None:
    said: list[str] = []
    found = await write(Flaky(), [request(number, said) for number in range(20)], said, 20)
    assert list(dict.fromkeys(found)) == list(range(20))
    assert said == [f"written {number}" for number in range(20)]


async def test_a_request_that_nobody_wants_any_more_is_not_written() -> None:
    said: list[str] = []
    requests = [request(0, said), request(1, said, wanted=False), request(2, said)]
    assert await write(MemoryLog(), requests, said, 2) == [0, 2]
    assert said == ["written 0", "written 2"]


async def test_an_event_that_can_not_be_written_is_refused_alone() -> None:
    said: list[str] = []
    found = await write(MemoryLog(), [request(number, said) for number in (0, 2**63, 2)], said, 3)
    assert found == [0, 2]
    assert said == ["written 0", f"refused {2**63}", "written 2"]
