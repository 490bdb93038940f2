"""What the runner promises a stage, on either log."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from clawstream.errors import TryLater, UnusableEvent
from clawstream.events import Event, SessionDone, SessionIdle, VoteStatus
from clawstream.stream.log import PartitionId, Undecodable
from clawstream.stream.runner.pending_records import WorkerProgress
from clawstream.stream.stage import Record, Stage, Step
from tests.parts.stream.contract.conftest import AnyLog, Connect
from tests.parts.stream.raw import append_bytes
from tests.unit.stream import toys

SESSIONS = "abcdefgh"


def some(numbers: range) -> list[SessionDone]:
    return [toys.done(session, number) for number in numbers for session in SESSIONS]


def all_pairs(end: int) -> set[str]:
    return toys.ids(toys.paired(session, number) for session in SESSIONS for number in range(end - 1))


@pytest.mark.slow
async def test_every_pair_is_written_once(log: AnyLog) -> None:
    await log.append(some(range(10)))
    async with toys.running(toys.pairs(), log):
        await toys.settled(log, "pairs")
        await log.append(some(range(10, 20)))
        await toys.settled(log, "pairs")
    found = await toys.read(log, toys.TURNS)
    assert len(found) == len(all_pairs(20))
    assert toys.ids(one.event for one in found) == all_pairs(20)


@pytest.mark.slow
async def test_outputs_of_a_session_come_in_its_order(log: AnyLog) -> None:
    await log.append(some(range(30)))
    async with toys.running(toys.pairs(), log):
        await toys.settled(log, "pairs")
    found = await toys.read(log, toys.TURNS)
    for session in SESSIONS:
        assert [toys.number_of(one.event) for one in found if one.key == session] == list(range(29))


@pytest.mark.slow
async def test_a_worker_that_comes_back_in_mid_session_goes_on_with_its_state(log: AnyLog) -> None:
    for end in (3, 4, 9):
        await log.append(some(range({3: 0, 4: 3, 9: 4}[end], end)))
        async with toys.running(toys.pairs(), log):
            await toys.settled(log, "pairs")
    found = await toys.read(log, toys.TURNS)
    assert len(found) == len(all_pairs(9))
    assert toys.ids(one.event for one in found) == all_pairs(9)


async def test_what_was_done_is_remembered_and_not_done_again(log: AnyLog) -> None:
    asked: list[str] = []

    async def perform(call: SessionDone) -> list[Event]:
        asked.append(call.event_id)
        return await toys.answered(call)

    await log.append(some(range(3)))
    for _ in range(2):
        async with toys.running(toys.asks(perform), log):
            await toys.settled(log, "asks")
    assert len(asked) == len(set(asked)) == 3 * len(SESSIONS)


@pytest.mark.slow
async def test_workers_that_come_and_go_lose_and_invent_nothing(connect: Connect) -> None:
    async with connect() as feeding, connect() as one, connect() as two, connect() as three:
        await feeding.append(some(range(5)))
        async with toys.running(toys.pairs(), one):
            await toys.settled(feeding, "pairs")
            async with toys.running(toys.pairs(), two):
                await feeding.append(some(range(5, 10)))
                await toys.settled(feeding, "pairs")
                async with toys.running(toys.pairs(), three):
                    await feeding.append(some(range(10, 15)))
                    await toys.settled(feeding, "pairs")
                await feeding.append(some(range(15, 20)))
            await toys.settled(feeding, "pairs")
        assert await toys.written(feeding, toys.TURNS) == all_pairs(20)


async def test_topics_read_together_meet_in_one_worker(connect: Connect) -> None:
    async with connect() as feeding, connect() as one, connect() as two:
        async with toys.running(toys.joins(), one), toys.running(toys.joins(), two):
            await feeding.append(some(range(4)))
            await feeding.append([toys.paired(session, number) for number in range(4) for session in SESSIONS])
            await toys.settled(feeding, "joins")
        expected = toys.ids(toys.joined(session, number) for session in SESSIONS for number in range(4))
        assert await toys.written(feeding, toys.HINTS) == expected


async def test_nothing_is_committed_past_a_call_that_has_not_returned(log: AnyLog) -> None:
    let_go = asyncio.Event()

    async def perform(call: SessionDone) -> list[Event]:
        if call.after_exchange_id == "1":
            await let_go.wait()
        return await toys.answered(call)

    await log.append([toys.done("a", number) for number in range(5)])
    [place] = {PartitionId(one.topic, one.partition) for one in await toys.read(log, toys.EXCHANGES)}

    async def four_voted_and_one_committed() -> bool:
        votes, committed = await toys.written(log, toys.VOTES), await log.committed("asks")
        return len(votes) == 4 and committed[place].offset > 0

    async with toys.running(toys.asks(perform), log):
        await toys.until(four_voted_and_one_committed)
        assert (await log.committed("asks"))[place].offset == 1
        let_go.set()
        await toys.settled(log, "asks")
    assert (await log.committed("asks"))[place].offset == 5


async def test_calls_that_wait_hold_up_neither_polling_nor_other_calls(log: AnyLog) -> None:
    at_once: list[int] = [0, 0]

    async def perform(call: SessionDone) -> list[Event]:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.05)
        at_once[0] -= 1
        return await toys.answered(call)

    stage = replace(toys.asks(perform), calls_at_once=4, in_flight=8)
    await log.append(some(range(5)))
    progress: list[WorkerProgress] = []
    async with toys.running(stage, log, progress=progress):
        await toys.settled(log, "asks")
    assert at_once == [0, 4]
    assert max(one.open_records for one in progress) <= 8
    assert len(await toys.written(log, toys.VOTES)) == 5 * len(SESSIONS)


async def test_a_call_that_fails_is_made_again_and_given_up_after_its_deadline(log: AnyLog) -> None:
    tries: dict[str, int] = {}

    async def perform(call: SessionDone) -> list[Event]:
        tries[call.session_id] = tries.get(call.session_id, 0) + 1
        if call.session_id == "dead" or tries[call.session_id] < 3:
            raise TryLater("busy")
        return await toys.answered(call)

    def give_up(call: SessionDone, why: str) -> list[Event]:
        assert why == "busy"
        return [toys.vote(call.session_id, 0, VoteStatus.FAILED)]

    stage = toys.asks(perform, give_up=give_up, deadline_s=0.5)
    await log.append([toys.done("late", 0), toys.done("dead", 0)])
    async with toys.running(stage, log):
        await toys.settled(log, "asks")
    statuses = {one.key: one.event.status for one in await toys.read(log, toys.VOTES)}  # type: ignore[attr-defined]
    assert statuses == {"late": VoteStatus.READABLE, "dead": VoteStatus.FAILED}
    assert tries["late"] == 3


async def test_a_call_that_does_not_return_is_timed_out(log: AnyLog) -> None:
    async def perform(call: SessionDone) -> list[Event]:
        await asyncio.sleep(60)
        return await toys.answered(call)

    def give_up(call: SessionDone, why: str) -> list[Event]:
        assert why.startswith("no answer within 0.0")
        return [toys.vote(call.session_id, 0, VoteStatus.FAILED)]

    stage = toys.asks(perform, give_up=give_up, deadline_s=0.2, call_timeout_s=0.05)
    await log.append([toys.done("a", 0)])
    async with toys.running(stage, log):
        await toys.settled(log, "asks")
    assert len(await toys.read(log, toys.VOTES)) == 1


@pytest.mark.slow
async def test_a_call_that_outlasts_its_partition_is_cut_and_made_by_the_next_owner(connect: Connect) -> None:
    cut: list[str] = []

    async def never(call: SessionDone) -> list[Event]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut.append(call.event_id)
            raise
        return []

    async def some_cut() -> bool:
        return bool(cut)

    hasty = replace(toys.HASTE, drain_s=0.05)
    calls = some(range(1))
    async with connect() as feeding, connect() as one, connect() as two:
        await feeding.append(calls)
        async with toys.running(toys.asks(never), one, pace=hasty):
            await toys.until(at_work(feeding))
            async with toys.running(toys.asks(toys.answered), two, pace=hasty):
                await toys.until(some_cut)
        assert set(cut) == toys.ids(calls)
        async with toys.running(toys.asks(toys.answered), two):
            await toys.settled(feeding, "asks")
        assert await toys.written(feeding, toys.VOTES) == toys.ids(toys.vote(session, 0) for session in SESSIONS)


def at_work(log: AnyLog) -> Callable[[], Awaitable[bool]]:
    """Whether a worker has been given its partitions: it has noted where it begins."""

    async def noted() -> bool:
        return bool(await log.committed("asks"))

    return noted


async def test_a_record_that_can_not_be_read_is_set_aside_byte_for_byte(log: AnyLog) -> None:
    headers = [("a", b"\0\xff"), ("a", b"again")]
    await append_bytes(log, toys.EXCHANGES, b"a", b"\xc3\x01 nonsense", headers)
    await append_bytes(log, toys.EXCHANGES, b"a", None, [])
    await log.append([toys.done("a", 0), toys.done("a", 1)])
    progress: list[WorkerProgress] = []
    async with toys.running(toys.pairs(), log, progress=progress):
        await toys.settled(log, "pairs")
    assert progress[-1].dead_letters == 2
    assert await toys.written(log, toys.TURNS) == toys.ids([toys.paired("a", 0)])
    found = [one async for one in log.follow([toys.EXCHANGES + ".dlq"], until_end=True)]
    letters = [letter for letters in found for letter in letters if isinstance(letter, Undecodable)]
    by_value = {letter.value: letter for letter in letters}
    assert set(by_value) == {b"\xc3\x01 nonsense", None}
    letter = by_value[b"\xc3\x01 nonsense"]
    assert letter.key == b"a"
    assert list(letter.headers[:2]) == headers
    said = dict(letter.headers[2:])
    assert said["dlq.topic"] == toys.EXCHANGES.encode()
    assert said["dlq.offset"] == b"0"
    assert said["dlq.group"] == b"pairs"
    assert said["dlq.error.class"] == b"UndecodableRecord"
    assert said["dlq.error.message"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "events", "call"])
async def test_an_event_that_can_not_be_used_is_set_aside_and_the_others_go_on(log: AnyLog, where: str) -> None:
    def step(_: None, record: Record) -> Step[None, SessionDone]:
        event = record.event
        assert isinstance(event, SessionDone)
        bad = event.after_exchange_id == "1"
        if bad and where == "step":
            raise UnusableEvent("no good")
        if where == "call":
            return Step(None, (), [event])
        return Step(None, [toys.paired(record.key, 2**63 if bad else toys.number_of(event))])

    async def perform(call: SessionDone) -> list[Event]:
        if call.after_exchange_id == "1":
            raise UnusableEvent("no good")
        return [toys.paired(call.session_id, toys.number_of(call))]

    stage = Stage(name="picky", reads=(toys.EXCHANGES,), step=step, perform=perform)
    await log.append([toys.done("a", number) for number in range(4)])
    async with toys.running(stage, log):
        await toys.settled(log, "picky")
    assert await toys.written(log, toys.TURNS) == toys.ids(toys.paired("a", number) for number in (0, 2, 3))
    assert await toys.written(log, toys.EXCHANGES + ".dlq") == toys.ids([toys.done("a", 1)])


async def test_open_keys_are_asked_as_the_clock_goes(log: AnyLog) -> None:
    def step(_: int | None, record: Record) -> Step[int, None]:
        return Step(None if isinstance(record.event, SessionIdle) else record.timestamp_ms)

    def tick(since_ms: int, now_ms: int) -> Step[int, None]:
        if now_ms - since_ms < 200:
            return Step(since_ms)
        return Step(None, [SessionIdle(session_id="a", after_exchange_id="0", idle_s=0)])

    stage = Stage(name="idle", reads=(toys.EXCHANGES,), step=step, tick=tick)
    await log.append([toys.done("a", 0)])

    async def idle_said() -> bool:
        return len(await toys.read(log, toys.EXCHANGES)) == 2

    async with toys.running(stage, log):
        await toys.until(idle_said)
        await toys.settled(log, "idle")
    first, second = await toys.read(log, toys.EXCHANGES)
    assert second.timestamp_ms - first.timestamp_ms >= 190
