"""When a worker writes to its dead-letter queues, and what the keys of released records know then."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

from clawstream.errors import ParkedRecord, TryLater, UnusableEvent
from clawstream.events import Event, SessionDone
from clawstream.stream.dead_letters import EXPIRED
from clawstream.stream.log import Arrived, DeadLetterId, DeadLetterMark, Fate, PartitionId
from clawstream.stream.runner.pending_records import WorkerProgress
from clawstream.stream.stage import Record, Stage, Step
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.unit.stream import queues, toys


class _SlowCopies(MemoryLog):
    """A log that acknowledges the copy of a parked record once it may."""

    def __init__(self, like: MemoryLog) -> None:
        super().__init__(like.broker)
        self.may = asyncio.Event()
        self.copying = asyncio.Event()
        self.marked: list[DeadLetterMark] = []

    async def set_aside(
        self,
        dead_letter_id: DeadLetterId,
        *,
        error: Exception,
        attempt: int = 1,
        rebuild_offsets: Mapping[str, int] | None = None,
    ) -> None:
        if isinstance(error, ParkedRecord):
            self.copying.set()
            await self.may.wait()
        await super().set_aside(dead_letter_id, error=error, attempt=attempt, rebuild_offsets=rebuild_offsets)

    async def mark(self, marks: Sequence[DeadLetterMark]) -> None:
        self.marked += marks
        await super().mark(marks)


class _Expired(MemoryLog):
    """A log that has lost its first records, on which nobody can read or copy them."""

    begin = 0

    async def begin_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        return dict.fromkeys(await super().begin_offsets(topics), self.begin)

    async def replay(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        async for records in super().replay(ranges, key=key, digest=digest):
            yield [record for record in records if record.offset >= self.begin]

    async def set_aside(
        self,
        dead_letter_id: DeadLetterId,
        *,
        error: Exception,
        attempt: int = 1,
        rebuild_offsets: Mapping[str, int] | None = None,
    ) -> None:
        if dead_letter_id.offset < self.begin:
            raise TryLater("the offset is out of range")
        await super().set_aside(dead_letter_id, error=error, attempt=attempt, rebuild_offsets=rebuild_offsets)


async def test_a_replayed_letter_whose_record_is_past_its_retention_is_discarded_and_the_rest_is_used() -> None:
    log = _Expired(MemoryBroker(partitions=1))
    bad = {("a", 1)}
    await log.append([toys.done("a", number) for number in range(4)])
    async with toys.running(queues.chain(bad), log):
        await toys.settled(log, "chain")
        log.begin = 2
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await toys.until(queues.closed(log))
    fates = [
        (dead_letter.id.offset, dead_letter.fate, dead_letter.because) for dead_letter in await queues.dead_letters(log)
    ]
    assert fates == [(1, Fate.DISCARDED, EXPIRED), (2, Fate.REPLAYED, None), (3, Fate.REPLAYED, None)]
    assert await queues.chained(log) == {"a": [2]}


class _WithoutOne(MemoryLog):
    """A log on which one record can't be found, although later ones of the same retention can."""

    lost: int | None = None

    async def replay(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        async for records in super().replay(ranges, key=key, digest=digest):
            yield [record for record in records if record.offset != self.lost]


async def test_a_replayed_letter_whose_record_is_missing_for_another_reason_waits_on_with_what_is_behind_it() -> None:
    log = _WithoutOne(MemoryBroker(partitions=1))
    bad = {("a", 1)}
    await log.append([toys.done("a", number) for number in range(4)])
    async with toys.running(queues.chain(bad), log):
        await toys.settled(log, "chain")
        bad.clear()
        log.lost = 1
        await queues.rule(log, Fate.REPLAY)
        await toys.until(lambda: _attempts(log, 2))
        found = await queues.dead_letters(log)
        assert [(one.id.offset, one.waits) for one in found] == [(1, True), (2, True), (3, True)]
        assert "not found on its topic" in found[0].error
        log.lost = None
        await queues.rule(log, Fate.REPLAY)
        await toys.until(queues.closed(log))
    assert [one.fate for one in await queues.dead_letters(log)] == [Fate.REPLAYED] * 3


async def _attempts(log: MemoryLog, number: int) -> bool:
    return any(one.attempt == number for one in await queues.dead_letters(log))


async def test_nothing_is_said_of_a_letter_in_its_queue_before_its_copy_stands_there() -> None:
    log, bad = MemoryLog(), {("a", 1)}
    slow = _SlowCopies(log)
    progress: list[WorkerProgress] = []

    async def is_used() -> bool:
        return await queues.chained(log) == {"a": [0, 1]}

    await log.append([toys.done("a", number) for number in range(3)])
    async with toys.running(queues.chain(bad), slow, progress=progress):
        await slow.copying.wait()
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await toys.until(is_used)
        await _goes_on(progress)
        assert slow.marked == []
        slow.may.set()
        await toys.until(queues.closed(log))
    assert {dead_letter.fate for dead_letter in await queues.dead_letters(log)} == {Fate.REPLAYED}


async def _goes_on(progress: Sequence[WorkerProgress]) -> None:
    """Return once the worker has polled, released and ticked again."""
    before = len(progress)

    async def went_on() -> bool:
        return len(progress) > before + 1

    await toys.until(went_on)


async def test_a_replay_is_not_said_to_be_done_before_the_call_that_it_leads_to_has_returned() -> None:
    bad, asked, may = {"on"}, asyncio.Event(), asyncio.Event()
    progress: list[WorkerProgress] = []

    async def perform(call: SessionDone) -> Sequence[Event]:
        if bad:
            raise KeyError("choices")
        asked.set()
        await may.wait()
        return await toys.answered(call)

    log = MemoryLog()
    await log.append([toys.done("a", 0)])
    async with toys.running(toys.asks(perform), log, progress=progress):
        await toys.settled(log, "asks")
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await asked.wait()
        await _goes_on(progress)
        assert [dead_letter.fate for dead_letter in await queues.dead_letters(log)] == [Fate.REPLAY]
        may.set()
        await toys.until(queues.closed(log))


def _counts(bad: Collection[Event] = ()) -> Stage[int, None]:
    """Writes how many records of the session were folded; refuses the `bad` events."""

    def step(before: int | None, record: Record) -> Step[int, None]:
        if record.event in bad:
            raise UnusableEvent("bad")
        seen = (before or 0) + 1
        return Step(seen, [toys.joined(record.key, seen)])

    return Stage(name="counts", reads=(toys.EXCHANGES, toys.TURNS), step=step, ordered=True)


async def test_a_replay_that_fails_again_leaves_what_the_session_knows_from_another_topic() -> None:
    async def failed_again() -> bool:
        return any(dead_letter.attempt == 2 for dead_letter in await queues.dead_letters(log))

    log = MemoryLog()
    async with toys.running(_counts([toys.paired("a", 0)]), log):
        await log.append([toys.paired("a", 0)])
        await toys.settled(log, "counts")
        await log.append([toys.done("a", 0)])
        await toys.settled(log, "counts")
        await queues.rule(log, Fate.REPLAY)
        await toys.until(failed_again)
        await log.append([toys.done("a", 1)])
        await toys.settled(log, "counts")
    assert await toys.written(log, toys.HINTS) == toys.ids([toys.joined("a", 1), toys.joined("a", 2)])


async def test_a_ruling_about_a_record_without_a_key_leaves_the_sessions_around_it_as_they_are() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    await log.append([toys.done("a", 0)])
    log.broker.put(queues.PLACE, None, b"nonsense", [])
    await log.append([toys.done("a", 1)])
    async with toys.running(_counts(), log):
        await toys.settled(log, "counts")
        await queues.rule(log, Fate.DISCARD)
        await toys.until(queues.closed(log))
        await log.append([toys.done("a", 2)])
        await toys.settled(log, "counts")
    assert await toys.written(log, toys.HINTS) == toys.ids(toys.joined("a", seen) for seen in (1, 2, 3))


async def test_a_ruling_about_a_record_that_is_still_to_be_read_again_waits_for_it() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    await log.append([toys.done("a", number) for number in range(40)])
    await log.set_aside(DeadLetterId("chain", *queues.PLACE, 30), error=UnusableEvent("by a life before"))
    await queues.rule(log, Fate.REPLAY)
    async with toys.running(queues.chain(), log):
        await toys.until(queues.closed(log))
        await toys.settled(log, "chain")
        await toys.until(queues.closed(log))
    assert {(dead_letter.attempt, dead_letter.fate) for dead_letter in await queues.dead_letters(log)} == {
        (1, Fate.REPLAYED)
    }
    assert await queues.chained(log) == {"a": list(range(39))}


async def test_a_discarded_record_stays_left_out_where_a_later_one_of_its_session_is_replayed() -> None:
    log, bad = MemoryLog(), [toys.done("a", 1)]
    async with toys.running(_counts(bad), log):
        await log.append([toys.done("a", number) for number in range(3)])
        await toys.settled(log, "counts")
        await queues.rule(log, Fate.DISCARD)
        await toys.until(queues.closed(log))
        bad[:] = [toys.done("a", 3)]
        await log.append([toys.done("a", 3)])
        await toys.settled(log, "counts")
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await toys.until(queues.closed(log))
    assert await toys.written(log, toys.HINTS) == toys.ids(toys.joined("a", seen) for seen in (1, 2, 3))


async def test_a_record_that_was_replayed_and_is_refused_when_it_is_read_again_waits_to_be_ruled_about() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    await log.append([toys.done("a", number) for number in range(3)])
    before = DeadLetterId("chain", *queues.PLACE, 1)
    await log.set_aside(before, error=UnusableEvent("by a life before"))
    await log.mark([DeadLetterMark(id=before, key=b"a", attempt=1, fate=Fate.REPLAYED)])
    async with toys.running(queues.chain({("a", 1)}), log):
        await toys.settled(log, "chain")
    assert [(one.id.offset, one.attempt, one.fate) for one in await queues.dead_letters(log)] == [
        (1, 2, Fate.OPEN),
        (2, 1, Fate.OPEN),
    ]
