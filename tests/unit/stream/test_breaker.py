"""A peer that is away is left alone and asked now and then; a call that fails alone is not taken for that."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from clawstream.errors import NotYet, TooLate, TryLater
from clawstream.events import Event, SessionDone, VoteCast, VoteStatus
from clawstream.stream.runner.breaker import FAILING_CALLS, LONGEST_WAIT_S, Breaker
from clawstream.stream.runner.calling import StageCaller
from clawstream.stream.runner.pending_records import WorkerProgress
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.unit.stream import toys


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker(first_wait_s=1.0)
    assert [breaker.fail(call, at_s) for call in range(FAILING_CALLS)] == [False] * (FAILING_CALLS - 1) + [True]
    return breaker


def test_one_call_that_fails_on_and_on_does_not_open_it() -> None:
    breaker = Breaker()
    assert not any(breaker.fail(7, float(now_s)) for now_s in range(100))
    assert breaker.wait_s(100.0) == 0


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker()
    for call in range(100):
        assert not breaker.fail(call, 0.0)
        breaker.succeed(0.0)
    assert not breaker.is_open


def test_while_it_is_open_one_call_at_a_time_finds_out() -> None:
    breaker = opened()
    assert breaker.wait_s(0.25) == 0.75
    assert breaker.wait_s(1.0) == 0
    breaker.start(5)
    assert breaker.wait_s(1.0) is None
    breaker.fail(1, 1.0)  # it was under way when the breaker opened
    assert breaker.wait_s(1.0) is None
    breaker.fail(5, 2.0)
    assert breaker.wait_s(2.0) == 2.0
    breaker.start(6)
    assert breaker.succeed(4.0)
    assert breaker.wait_s(4.0) == 0
    assert breaker.open_for_s(9.0) == 4.0


def test_waits_double_up_to_a_bound_and_are_as_long_as_the_peer_asks_for() -> None:
    breaker = opened()
    now_s, waits = 0.0, []
    for probe in range(8):
        wait_s = breaker.wait_s(now_s)
        assert wait_s is not None
        waits.append(wait_s)
        now_s += wait_s
        breaker.start(probe)
        breaker.fail(probe, now_s, retry_after_s=100.0 if probe == 6 else 0.0)
    assert waits == [1, 2, 4, 8, 16, LONGEST_WAIT_S, LONGEST_WAIT_S, 100.0]


def test_a_call_that_is_cut_lets_another_find_out() -> None:
    breaker = opened()
    breaker.start(5)
    breaker.abandon(5)
    assert breaker.wait_s(1.0) == 0


def given_up(call: SessionDone, _: str) -> list[Event]:
    return [toys.vote(call.session_id, toys.number_of(call), VoteStatus.FAILED)]


async def test_a_peer_that_is_away_for_longer_than_the_deadline_gives_no_failed_vote_and_is_asked_rarely() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    asked: list[str] = []
    back = asyncio.Event()

    async def perform(call: SessionDone) -> Sequence[Event]:
        asked.append(call.event_id)
        if not back.is_set():
            raise TryLater("status 429")
        return await toys.answered(call)

    stage = toys.asks(perform, give_up=given_up, deadline_s=0.2)
    # Only the probes are made: waits of 0.4, 0.8, 1.6 s and so on.
    pace = replace(toys.HASTE, retry_s=0.1)
    calls = [toys.done(session, number) for number in range(25) for session in "abcd"]
    await log.append(calls)
    async with toys.running(stage, log, pace=pace):
        await asyncio.sleep(2.0)  # ten deadlines
        failing = len(asked)
        back.set()
        await toys.settled(log, "asks")
    votes = [record.event for record in await toys.read(log, toys.VOTES)]
    assert {vote.status for vote in votes} == {VoteStatus.READABLE}  # type: ignore[attr-defined]
    assert toys.ids(votes) == toys.ids(toys.vote(call.session_id, toys.number_of(call)) for call in calls)
    assert failing <= stage.calls_at_once + 3, "each call under way failed once, and then the probes did"


async def test_nothing_more_is_read_while_the_peer_is_away() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    back = asyncio.Event()
    asked: set[str] = set()

    async def perform(call: SessionDone) -> Sequence[Event]:
        asked.add(call.event_id)
        if not back.is_set():
            raise TryLater("status 500")
        return await toys.answered(call)

    async def some_asked() -> bool:
        return len(asked) >= FAILING_CALLS

    await log.append([toys.done("a", number) for number in range(FAILING_CALLS)])
    progress: list[WorkerProgress] = []
    async with toys.running(toys.asks(perform), log, pace=replace(toys.HASTE, retry_s=0.25), progress=progress):
        await toys.until(some_asked)
        await log.append([toys.done("b", number) for number in range(50)])
        await asyncio.sleep(0.3)
        assert len(asked) == FAILING_CALLS
        assert progress[-1].records == FAILING_CALLS
        back.set()
        await toys.settled(log, "asks")
    assert len(asked) == FAILING_CALLS + 50


async def test_a_call_that_fails_alone_is_given_up_after_its_deadline_while_others_go_on() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))

    async def perform(call: SessionDone) -> Sequence[Event]:
        if call.session_id == "poison":
            raise TryLater("status 500")
        return await toys.answered(call)

    await log.append([toys.done("poison", 0), *(toys.done("a", number) for number in range(20))])
    async with toys.running(toys.asks(perform, give_up=given_up, deadline_s=0.3), log):
        await toys.settled(log, "asks")
    statuses = {record.key: record.event.status for record in await toys.read(log, toys.VOTES)}  # type: ignore[attr-defined]
    assert statuses == {"poison": VoteStatus.FAILED, "a": VoteStatus.READABLE}


async def test_time_that_the_peer_was_away_is_not_counted_once_it_is_back() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    back, late = asyncio.Event(), {"left": 2}

    async def perform(call: SessionDone) -> Sequence[Event]:
        if not back.is_set():
            raise TryLater("status 503")
        if call.session_id == "late" and late["left"]:
            late["left"] -= 1
            raise TryLater("status 500")
        return await toys.answered(call)

    stage = toys.asks(perform, give_up=given_up, deadline_s=1.0)
    await log.append([toys.done(session, 0) for session in ("late", "b", "c", "d")])
    async with toys.running(stage, log, pace=replace(toys.HASTE, retry_s=0.02)):
        await asyncio.sleep(1.1)
        back.set()
        await toys.settled(log, "asks")
    statuses = {record.event.status for record in await toys.read(log, toys.VOTES)}  # type: ignore[attr-defined]
    assert (statuses, late["left"]) == ({VoteStatus.READABLE}, 0)


async def test_a_stage_that_does_not_wait_for_its_peer_reads_on_and_gives_each_call_up_after_its_deadline() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    back, failed, numbers = asyncio.Event(), set[str](), itertools.count()

    async def perform(call: SessionDone) -> Sequence[Event]:
        if not back.is_set():
            failed.add(call.event_id)
            raise TryLater("status 503")
        return await toys.answered(call)

    async def away() -> bool:
        return len(failed) >= FAILING_CALLS

    async def statuses() -> dict[str, list[VoteStatus]]:
        found: dict[str, list[VoteStatus]] = {}
        for record in await toys.read(log, toys.VOTES):
            assert isinstance(record.event, VoteCast)
            found.setdefault(record.key, []).append(record.event.status)
        return found

    async def one_is_answered() -> bool:
        """One that waits when the peer is tried again; those before it are given up too."""
        await log.append([toys.done("c", next(numbers))])
        await toys.settled(log, "asks")
        return VoteStatus.READABLE in (await statuses())["c"]

    async def read_all() -> bool:
        return bool(progress) and progress[-1].records == 60

    stage = toys.asks(perform, give_up=given_up, deadline_s=0.5, calls_at_once=2, waits_for_peer=False)
    progress: list[WorkerProgress] = []
    await log.append([toys.done("a", number) for number in range(20)])
    async with toys.running(stage, log, pace=replace(toys.HASTE, retry_s=0.1), progress=progress):
        await toys.until(away)
        await log.append([toys.done("b", number) for number in range(40)])
        await toys.until(read_all)
        await toys.settled(log, "asks")
        given_up_before = await statuses()
        back.set()
        await toys.until(one_is_answered)
    assert given_up_before == {"a": [VoteStatus.FAILED] * 20, "b": [VoteStatus.FAILED] * 40}


async def test_calls_that_wait_for_their_turn_are_not_given_up_for_want_of_a_peer_that_was_never_away() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))

    async def perform(call: SessionDone) -> Sequence[Event]:
        await asyncio.sleep(0.05)
        return await toys.answered(call)

    stage = toys.asks(perform, give_up=given_up, deadline_s=0.2, calls_at_once=1, waits_for_peer=False)
    await log.append([toys.done("a", number) for number in range(12)])
    async with toys.running(stage, log):
        await toys.settled(log, "asks")
    statuses = [record.event.status for record in await toys.read(log, toys.VOTES)]  # type: ignore[attr-defined]
    assert statuses == [VoteStatus.READABLE] * 12


async def test_what_is_still_to_come_is_given_up_in_time_and_nobody_is_taken_for_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = MemoryLog(MemoryBroker(partitions=1))

    async def perform(call: SessionDone) -> Sequence[Event]:
        if call.session_id == "early":
            raise NotYet("it is a version behind")
        return await toys.answered(call)

    await log.append([*(toys.done("early", number) for number in range(10)), toys.done("a", 0)])
    async with toys.running(toys.asks(perform, give_up=given_up, deadline_s=0.3), log):
        await toys.settled(log, "asks")
    statuses = {record.key: record.event.status for record in await toys.read(log, toys.VOTES)}  # type: ignore[attr-defined]
    assert statuses == {"early": VoteStatus.FAILED, "a": VoteStatus.READABLE}
    assert "breaker=open" not in caplog.text


async def test_what_is_too_late_is_given_up_at_once_and_says_nothing_of_a_peer_that_is_away() -> None:
    async def perform(call: SessionDone) -> Sequence[Event]:
        raise TooLate("too old") if call.session_id == "old" else TryLater("status 500")

    caller = StageCaller(toys.asks(perform, give_up=given_up), retry_s=0.001, on_retry=lambda _: None)
    away = [asyncio.create_task(caller.until_done(toys.done("a", number))) for number in range(FAILING_CALLS)]
    async with asyncio.timeout(10):
        while not caller.waits_for_peer:
            await asyncio.sleep(0.001)
        for task in away:  # else they too find out whether the peer is back, in turns that nobody knows
            task.cancel()
        await asyncio.gather(*away, return_exceptions=True)
        [vote] = await caller.until_done(toys.done("old", 0))
    assert vote == toys.vote("old", 0, VoteStatus.FAILED)
    assert caller.waits_for_peer
