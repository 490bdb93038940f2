"""A broker whose clock was set wrong for a while: it is said, and no session is forgotten for it."""

import logging
import time

import pytest

from clawstream.config import JudgeSettings
from clawstream.events import TurnPaired, VerdictReached
from clawstream.judging.stage import judging_stage
from clawstream.stream.runner.clock import BELIEVED_MS, Dating, LogClock, capped
from clawstream.stream.stage import DAY_MS
from clawstream.stream.topics import TURNS, VERDICTS
from clawstream.turns.stage import turns_stage
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import Oracle
from tests.sessions import Json, Session, assistant, user
from tests.unit.stream import toys

NOW_MS = 1_800_000_000_000
TOPIC = toys.EXCHANGES


def test_times_that_agree_with_this_machine_are_the_brokers_own_and_nothing_is_said() -> None:
    dating = Dating([TOPIC])
    for ahead_ms in (-5 * DAY_MS, -1000, 0, BELIEVED_MS):
        assert dating.date(TOPIC, NOW_MS + ahead_ms, NOW_MS) == (NOW_MS + ahead_ms, None)


def test_records_from_the_future_are_of_now_and_that_is_said_once_with_the_figure_and_once_when_it_is_over() -> None:
    dating = Dating([TOPIC])
    said = []
    taken = []
    for ahead_ms in (0, 3 * DAY_MS, 3 * DAY_MS + 1000, 20_000, 21_000):
        at_ms, doubt = dating.date(TOPIC, NOW_MS + ahead_ms, NOW_MS + ahead_ms % DAY_MS)
        taken.append(at_ms - NOW_MS)
        said.append(None if doubt is None else str(doubt))
    assert taken == [0, 0, 1000, 20_000, 21_000]
    assert [one is not None for one in said] == [False, True, False, True, False]
    assert said[1] is not None
    assert "259,200 s ahead of this machine's clock" in said[1]
    assert said[3] is not None
    assert "clock=believed" in said[3]


def test_no_record_is_older_than_the_one_before_it_in_its_partition() -> None:
    dating = Dating([TOPIC, toys.TURNS])
    assert dating.date(TOPIC, NOW_MS, NOW_MS) == (NOW_MS, None)
    at_ms, doubt = dating.date(TOPIC, NOW_MS - 3 * DAY_MS, NOW_MS)
    assert at_ms == NOW_MS
    assert "259,200 s behind the record before them" in str(doubt)
    assert dating.date(toys.TURNS, NOW_MS - 3 * DAY_MS, NOW_MS) == (NOW_MS - 3 * DAY_MS, None)
    assert dating.date(TOPIC, NOW_MS - 5, NOW_MS)[0] == NOW_MS


def test_a_clock_that_was_noted_from_the_future_is_not_gone_on_from() -> None:
    clock = LogClock([TOPIC])
    clock.resume(capped(NOW_MS + 3 * DAY_MS, NOW_MS), at_s=0.0)
    assert clock.now_ms([], 1.0) == NOW_MS + 1000


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("days", [3, -3])
async def test_sessions_before_within_and_after_the_jump_of_a_brokers_clock_are_all_paired(
    days: int, restarts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    offset_ms = 0
    log = MemoryLog(MemoryBroker(partitions=1, clock_ms=lambda: int(time.time() * 1000) + offset_ms))
    steps = [(0, "ab", 0), (days * DAY_MS, "bc", 1), (0, "abcd", 2), (0, "abcd", 3)]

    async def write(jump_ms: int, sessions: str, number: int) -> None:
        nonlocal offset_ms
        offset_ms = jump_ms
        await log.append([toys.done(session, number) for session in sessions])
        await toys.settled(log, "pairs")

    with caplog.at_level(logging.WARNING):
        if restarts:
            for step in steps:
                async with toys.running(toys.pairs(), log):
                    await write(*step)
        else:
            async with toys.running(toys.pairs(), log):
                for step in steps:
                    await write(*step)
    expected = {("a", 0), ("a", 2), ("b", 0), ("b", 1), ("b", 2), ("c", 1), ("c", 2), ("d", 2)}
    assert await toys.written(log, toys.TURNS) == toys.ids(toys.paired(*one) for one in expected)
    said = [record.getMessage() for record in caplog.records if "clock=" in record.getMessage()]
    assert any(f"clock=doubted records are dated 259,{'200' if days > 0 else ''}" in one for one in said) or days < 0
    assert any("clock=believed" in one for one in said)


async def test_what_was_said_while_a_brokers_clock_was_three_days_ahead_is_paired_and_judged() -> None:
    offset_ms = 0
    log = MemoryLog(MemoryBroker(partitions=1, clock_ms=lambda: int(time.time() * 1000) + offset_ms))
    histories: dict[str, list[Json]] = {}
    sessions = {name: Session(name) for name in "abcd"}
    asked_in: dict[str, list[str]] = {name: [] for name in sessions}

    async def say(names: str) -> None:
        for name in names:
            asked = [*histories.get(name, ()), user(f"and {len(histories.get(name, ()))}?")]
            exchange = sessions[name].ask(asked, "so")
            asked_in[name].append(exchange.exchange_id)
            await log.append([exchange])
            histories[name] = [*asked, assistant("so")]
        for group in ("turns", "judging"):
            await toys.settled(log, group)

    async with (
        toys.running(turns_stage(), log),
        toys.running(judging_stage(JudgeSettings(votes=1), Oracle()), log),
    ):
        for days, names in ((0, "ab"), (3, "bc"), (3, "c"), (0, "abcd"), (0, "abcd")):
            offset_ms = days * DAY_MS
            await say(names)
        paired = {one.event.turn_id for one in await toys.read(log, TURNS) if isinstance(one.event, TurnPaired)}

        async def all_judged() -> bool:
            verdicts = [one.event for one in await toys.read(log, VERDICTS)]
            return {one.turn_id for one in verdicts if isinstance(one, VerdictReached)} == paired

        await toys.until(all_judged)
    assert paired == {asked for names in asked_in.values() for asked in names[:-1]}
