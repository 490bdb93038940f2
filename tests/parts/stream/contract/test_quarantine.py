"""What becomes of records that can't be used, and of what follows them, on either log."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from clawstream.errors import TooManyFailures, UnusableEvent
from clawstream.events import Event, SessionDone, SessionIdle
from clawstream.stream.dead_letters import Reason
from clawstream.stream.log import Fate
from clawstream.stream.runner.breaker import FEWEST
from clawstream.stream.stage import Record, Stage, Step
from tests.parts.stream.contract.conftest import AnyLog, Connect
from tests.parts.stream.raw import append_bytes
from tests.unit.stream import queues, toys


class Moment(NamedTuple):
    """A session, and when it last said something."""

    session_id: str
    at_ms: int


@pytest.mark.slow
async def test_a_session_waits_behind_its_bad_record_and_others_go_on(log: AnyLog) -> None:
    await log.append([toys.done(session, number) for number in range(5) for session in "ab"])
    async with toys.running(queues.chain({("a", 2)}), log):
        await toys.settled(log, "chain")
    assert await queues.chained(log) == {"a": [0], "b": [0, 1, 2, 3]}
    letters = await queues.dead_letters(log)
    assert [(letter.key, letter.reason) for letter in letters] == [
        (b"a", Reason.UNUSABLE),
        (b"a", Reason.PARKED),
        (b"a", Reason.PARKED),
    ]
    assert "waits behind" in letters[1].error


async def test_what_waits_goes_on_waiting_after_a_restart(log: AnyLog) -> None:
    await log.append([toys.done("a", number) for number in range(3)])
    async with toys.running(queues.chain({("a", 1)}), log):
        await toys.settled(log, "chain")
    await log.append([toys.done("a", number) for number in range(3, 6)])
    # Whoever comes next finds nothing wrong with the record, and still waits to be told.
    async with toys.running(queues.chain(), log):
        await toys.settled(log, "chain")
    assert await queues.chained(log) == {}
    assert [letter.id.offset for letter in await queues.dead_letters(log)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_replayed_record_is_used_where_it_stood_and_what_waited_follows_in_order(
    log: AnyLog, restarted: bool
) -> None:
    bad = {("a", 2)}
    await log.append([toys.done(session, number) for number in range(6) for session in "ab"])
    async with toys.running(queues.chain(bad), log):
        await toys.settled(log, "chain")
        if not restarted:
            bad.clear()
            await queues.rule(log, Fate.REPLAY)
            await toys.until(queues.closed(log))
            await log.append([toys.done("a", 6)])
            await toys.settled(log, "chain")
    if restarted:
        await queues.rule(log, Fate.REPLAY)
        await log.append([toys.done("a", 6)])
        async with toys.running(queues.chain(), log):
            await toys.until(queues.closed(log))
            await toys.settled(log, "chain")
    assert await queues.chained(log) == {"a": [0, 1, 2, 3, 4, 5], "b": [0, 1, 2, 3, 4]}
    assert {letter.fate for letter in await queues.dead_letters(log)} == {Fate.REPLAYED}
    # And after that it is a session like any other.
    await log.append([toys.done("a", 7)])
    async with toys.running(queues.chain(), log):
        await toys.settled(log, "chain")
    assert (await queues.chained(log))["a"] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
async def test_a_discarded_record_is_left_out_and_what_waited_follows_in_order(log: AnyLog) -> None:
    bad = {("a", 2)}
    await log.append([toys.done("a", number) for number in range(5)])
    async with toys.running(queues.chain(bad), log):
        await toys.settled(log, "chain")
        await queues.rule(log, Fate.DISCARD, "a test of ours")
        await toys.until(queues.closed(log))
    assert await queues.chained(log) == {"a": [0, 1, 3]}  # 1 and 3 meet
    fates = {letter.id.offset: (letter.fate, letter.because) for letter in await queues.dead_letters(log)}
    assert fates[2] == (Fate.DISCARDED, "a test of ours")
    assert {fates[3], fates[4]} == {(Fate.REPLAYED, None)}
    await log.append([toys.done("a", 5)])
    async with toys.running(queues.chain(), log):
        await toys.settled(log, "chain")
    assert (await queues.chained(log))["a"] == [0, 1, 3, 4]


@pytest.mark.slow
async def test_a_discarded_record_stays_left_out_after_a_restart(log: AnyLog) -> None:
    await log.append([toys.done("a", number) for number in range(3)])
    async with toys.running(queues.chain({("a", 2)}), log):
        await toys.settled(log, "chain")
        await queues.rule(log, Fate.DISCARD, "a test of ours")
        await toys.until(queues.closed(log))
    # Whoever comes next finds nothing wrong with the record, and folds what was done before.
    await log.append([toys.done("a", 3)])
    async with toys.running(queues.chain(), log):
        await toys.settled(log, "chain")
    assert await queues.chained(log) == {"a": [0, 1]}  # 1 and 3 meet


@pytest.mark.slow
async def test_a_session_that_waits_is_not_asked_as_the_clock_goes(log: AnyLog) -> None:
    def step(_: Moment | None, record: Record) -> Step[Moment, None]:
        if isinstance(record.event, SessionIdle):
            return Step(None)
        if (record.key, toys.number_of(record.event)) == ("a", 1):
            raise UnusableEvent("bad")
        return Step(Moment(record.key, record.timestamp_ms))

    def tick(since: Moment, now_ms: int) -> Step[Moment, None]:
        if now_ms - since.at_ms < 200:
            return Step(since)
        return Step(None, [SessionIdle(session_id=since.session_id, after_exchange_id=str(since.at_ms), idle_s=0)])

    def said_idle(session_id: str, times: int) -> Callable[[], Awaitable[bool]]:
        async def said() -> bool:
            events = [record.event for record in await toys.read(log, toys.EXCHANGES)]
            return sum(isinstance(event, SessionIdle) and event.key == session_id for event in events) == times

        return said

    stage = Stage(name="chain", reads=(toys.EXCHANGES,), step=step, tick=tick, ordered=True)
    await log.append([toys.done("a", 0), toys.done("a", 1), toys.done("b", 0)])
    async with toys.running(stage, log):
        await toys.until(said_idle("b", 1))
        await log.append([toys.done("b", 1)])
        await toys.until(said_idle("b", 2))
        assert await said_idle("a", 0)()
        await queues.rule(log, Fate.DISCARD, "a test of ours")
        await toys.until(said_idle("a", 1))


@pytest.mark.slow
async def test_a_replay_that_fails_again_leaves_the_session_waiting(log: AnyLog) -> None:
    bad = {("a", 1), ("a", 3)}
    await log.append([toys.done("a", number) for number in range(6)])

    async def second_attempt() -> bool:
        return any(letter.attempt == 2 for letter in await queues.dead_letters(log))

    async with toys.running(queues.chain(bad), log):
        await toys.settled(log, "chain")
        await queues.rule(log, Fate.REPLAY)
        await toys.until(second_attempt)
        assert await queues.chained(log) == {}
        bad.discard(("a", 1))
        await queues.rule(log, Fate.REPLAY)

        async def third_waits() -> bool:
            return any(letter.id.offset == 3 and letter.attempt == 2 for letter in await queues.dead_letters(log))

        await toys.until(third_waits)
        assert await queues.chained(log) == {"a": [0, 1]}
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await toys.until(queues.closed(log))
    assert await queues.chained(log) == {"a": [0, 1, 2, 3, 4]}


async def test_bytes_that_can_not_be_read_hold_up_the_session_of_their_key(log: AnyLog) -> None:
    await log.append([toys.done("a", 0)])
    await append_bytes(log, toys.EXCHANGES, b"a", b"\xc3\x01 nonsense", [("x", b"\xff")])
    await log.append([toys.done("a", 1), toys.done("b", 0), toys.done("b", 1)])
    async with toys.running(queues.chain(), log):
        await toys.settled(log, "chain")
        assert await queues.chained(log) == {"b": [0]}
        assert [letter.reason for letter in await queues.dead_letters(log)] == [Reason.UNDECODABLE, Reason.PARKED]
        await queues.rule(log, Fate.DISCARD, "noise")
        await toys.until(queues.closed(log))
    assert await queues.chained(log) == {"a": [0], "b": [0]}


async def test_a_record_that_the_stage_breaks_on_is_set_aside_and_the_stage_goes_on(log: AnyLog) -> None:
    def step(_: None, record: Record) -> Step[None, None]:
        if record.key == "a":
            raise ZeroDivisionError(record.key)
        return Step(None, [toys.paired(record.key, 0)])

    await log.append([toys.done("a", 0), toys.done("b", 0)])
    async with toys.running(Stage(name="chain", reads=(toys.EXCHANGES,), step=step), log):
        await toys.settled(log, "chain")
    assert await toys.written(log, toys.TURNS) == toys.ids([toys.paired("b", 0)])
    [letter] = await queues.dead_letters(log)
    assert letter.reason is Reason.FAILED
    assert letter.error == "ZeroDivisionError: a"


@pytest.mark.slow
async def test_where_order_does_not_matter_a_replayed_record_completes_what_waits_for_it(log: AnyLog) -> None:
    joins, bad = toys.joins(), {"on"}

    def step(state: frozenset[str] | None, record: Record) -> Step[frozenset[str], None]:
        if bad and record.topic == toys.EXCHANGES:
            raise UnusableEvent("not yet")
        return joins.step(state, record)

    stage = replace(joins, step=step)
    await log.append([toys.done("a", 0)])
    async with toys.running(stage, log):
        await toys.settled(log, stage.name)
        await log.append([toys.paired("a", 0)])
        await toys.settled(log, stage.name)
        assert await toys.written(log, toys.HINTS) == set()
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await toys.until(queues.closed(log))
    assert await toys.written(log, toys.HINTS) == toys.ids([toys.joined("a", 0)])


async def test_a_call_that_breaks_is_set_aside_and_made_when_replayed(log: AnyLog) -> None:
    bad = {"on"}

    async def perform(call: SessionDone) -> Sequence[Event]:
        if bad:
            raise KeyError("choices")
        return await toys.answered(call)

    await log.append([toys.done("a", 0)])
    async with toys.running(toys.asks(perform), log):
        await toys.settled(log, "asks")
        bad.clear()
        await queues.rule(log, Fate.REPLAY)
        await toys.until(queues.closed(log))
    assert await toys.written(log, toys.VOTES) == toys.ids([toys.vote("a", 0)])


@pytest.mark.slow
async def test_a_session_that_waits_waits_with_its_next_owner_too(connect: Connect) -> None:
    async with connect() as feeding, connect() as one, connect() as two:
        await feeding.append([toys.done(session, number) for number in range(3) for session in "abcd"])
        bad = {("a", 1)}
        async with toys.running(queues.chain(bad), one):
            await toys.settled(feeding, "chain")
            async with toys.running(queues.chain(bad), two):
                await feeding.append([toys.done(session, number) for number in range(3, 6) for session in "abcd"])
                await toys.settled(feeding, "chain")
                assert "a" not in await queues.chained(feeding)
                bad.clear()
                await queues.rule(feeding, Fate.REPLAY)
                await toys.until(queues.closed(feeding))
        assert await queues.chained(feeding) == {session: [0, 1, 2, 3, 4] for session in "abcd"}


@pytest.mark.slow
async def test_a_flood_of_bad_records_stops_the_stage_and_a_few_do_not(log: AnyLog) -> None:
    few = {(f"x{number}", 0) for number in range(FEWEST - 1)}
    await log.append([toys.done(session, 0) for session, _ in sorted(few)])
    async with toys.running(queues.chain(few), log):
        await toys.settled(log, "chain")
    bad = {(f"y{number}", 0) for number in range(FEWEST)}
    await log.append([toys.done(session, 0) for session, _ in sorted(bad)])
    unhurried = replace(toys.HASTE, drain_s=20.0)
    with pytest.raises(TooManyFailures, match=r"chain set 10 of the last 10 records aside.*clawstream dlq list"):
        async with toys.running(queues.chain(bad), log, pace=unhurried), asyncio.timeout(30):
            await asyncio.Event().wait()
    assert await log.lag("chain") == 0, "what was set aside is committed"
    assert len(await queues.dead_letters(log)) == 2 * FEWEST - 1
