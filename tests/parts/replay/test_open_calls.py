"""Calls that are open for long, on the log's clock or while much else is read: what they rest on stays."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from clawstream.events import (
    Event,
    OffsetRange,
    Question,
    ReplayStarted,
    RewardWeights,
    VoteCast,
    VotesFrom,
)
from clawstream.judging.votes import VoteKey
from clawstream.replay import work
from clawstream.replay.stages import EXPIRE_EVERY, Host, following
from clawstream.replay.work import ReplayWorker
from clawstream.stream.log import PartitionId, Sealed
from clawstream.stream.stage import Record, Stage, Step
from clawstream.stream.topics import replay_topic, replay_topics
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.unit.stream import toys

RETAIN_MS = 1000
LONG_MS = 3600_000
OWN_TURNS, OWN_VOTES = replay_topic(toys.TURNS, "r"), replay_topic(toys.VOTES, "r")


_KEY = VoteKey("judge", "v1", "", Question.SCORE, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is asked about one record of a session."""

    session_id: str
    asked: int
    key: VoteKey = _KEY
    number: int = 0


def stage(
    *, asking: bool = True, perform: Callable[[Call], Awaitable[Sequence[Event]]] | None = None
) -> Stage[int, Call]:
    """Asks about each record of session "slow", and says a turn once the answer meets the record that it is about."""

    def step(number: int | None, record: Record) -> Step[int, Call]:
        event = record.event
        if isinstance(event, VoteCast):
            if number is None or event.turn_id != f"slow-{number}":
                return Step(number)
            return Step(number, [toys.paired(record.key, number)])
        number = toys.number_of(event)
        if asking and record.key == "slow":
            return Step(number, [], [Call(session_id="slow", asked=number)])
        return Step(number, [] if asking else [toys.paired(record.key, number)])

    return Stage(name="slowly", reads=(toys.EXCHANGES, toys.VOTES), step=step, perform=perform, retain_ms=RETAIN_MS)


def vote(call: Call) -> list[Event]:
    return [toys.vote("slow", call.asked)]


def record(session_id: str, number: int, at_ms: int) -> Record:
    event = toys.done(session_id, number)
    return Record(
        topic=toys.EXCHANGES, partition=0, offset=number, timestamp_ms=at_ms, key=session_id, event=event
    )  # fmt: skip


@pytest.mark.parametrize("is_open", [True, False])
def test_a_state_is_let_go_after_a_silence_and_not_while_a_call_about_it_is_open(is_open: bool) -> None:
    host = Host([stage()])
    first = record("slow", 0, at_ms=0)
    [call] = host.feed(first).calls
    for number in range(EXPIRE_EVERY):
        host.feed(record("other", number, at_ms=LONG_MS), open_since_ms=0 if is_open else None)
    [answer] = vote(call)
    said = host.feed(following(first, toys.VOTES, answer))
    assert said.events == ([toys.paired("slow", 0)] if is_open else [])


async def replayed(log: MemoryLog, what: Stage[int, Call]) -> list[int]:
    """Replay the log on one worker, and return the numbers of session "slow" of which a turn was said."""
    log.broker.create(replay_topics("r", partitions=1, retention_ms=LONG_MS))
    end = (await log.end_offsets([toys.EXCHANGES]))[PartitionId(toys.EXCHANGES, 0)]
    started = ReplayStarted(
        replay="r", votes_from=VotesFrom.NEW, judge="j", prompt_version="1", session_id=None, num_votes=1, quorum=1,
        ranges=(OffsetRange(topic=toys.EXCHANGES, partition=0, first_offset=0, end_offset=end),), started_at_ms=0,
        reward_weights=RewardWeights(), hint_quorum=1,
    )  # fmt: skip
    async with asyncio.timeout(30):
        await ReplayWorker(started, log, lambda: [what], judging=what).run([0])
    turns = [record.event for record in await toys.read(log, OWN_TURNS) if record.key == "slow"]
    return [toys.number_of(turn) for turn in turns]


class Clocked:
    """A broker of one partition on which time is what a test says."""

    def __init__(self) -> None:
        self.now_ms = 1
        self.log = MemoryLog(MemoryBroker(partitions=1, clock_ms=lambda: self.now_ms))


async def test_an_answer_that_comes_after_much_else_was_read_meets_what_it_was_asked_about() -> None:
    clocked, much_was_read = Clocked(), asyncio.Event()

    async def perform(call: Call) -> Sequence[Event]:
        await much_was_read.wait()
        return vote(call)

    asks = stage(perform=perform)

    def step(state: int | None, record: Record) -> Step[int, Call]:
        if record.key == "last":
            much_was_read.set()
        return asks.step(state, record)

    await clocked.log.append([toys.done("slow", 0)])
    clocked.now_ms += LONG_MS
    await clocked.log.append([toys.done("other", number) for number in range(EXPIRE_EVERY)])
    await clocked.log.append([toys.done("last", 0)])
    assert await replayed(clocked.log, replace(asks, step=step)) == [0]


async def test_a_session_that_begins_again_after_a_silence_waits_for_what_was_asked_about_it_before() -> None:
    clocked = Clocked()

    async def perform(call: Call) -> Sequence[Event]:
        for _ in range(100):  # turns of the loop, in which whoever does not wait reads on
            await asyncio.sleep(0)
        return vote(call)

    await clocked.log.append([toys.done("slow", 0)])
    clocked.now_ms += LONG_MS
    await clocked.log.append([toys.done("slow", 1)])
    assert await replayed(clocked.log, stage(perform=perform)) == [0, 1]


class _SlowVotes(MemoryLog):
    """A log on which a vote is not acknowledged before something else was written."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.wrote_turns = asyncio.Event()
        self.order: list[str] = []

    async def put(self, records: Sequence[Sealed], partition: int) -> None:
        if any(record.topic == OWN_VOTES for record in records):
            await self.wrote_turns.wait()
        await super().put(records, partition)
        self.order += [record.topic for record in records if record.key == b"slow"]
        if any(record.topic == OWN_TURNS for record in records):
            self.wrote_turns.set()


async def test_a_vote_is_acknowledged_before_what_follows_from_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "GROUP_RECORDS", 150)
    log = _SlowVotes(MemoryBroker(partitions=1))
    asks, says = stage(perform=_at_once), stage(asking=False)

    def step(state: int | None, record: Record) -> Step[int, Call]:
        return (says if record.key == "other" else asks).step(state, record)

    await log.append([toys.done("slow", 0), *(toys.done("other", number) for number in range(400))])
    assert await replayed(log, replace(asks, step=step)) == [0]
    assert log.order == [OWN_VOTES, OWN_TURNS]


async def _at_once(call: Call) -> Sequence[Event]:
    return vote(call)
