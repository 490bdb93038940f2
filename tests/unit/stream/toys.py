"""Small stages for tests of the runner, and what each must have written of a given log.

`Pairs` joins each SessionDone of a session with the one before it; `Joins` waits for two topics; `Asks` makes a call
for each record. `after_exchange_id` counts up in each session.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from clawstream.events import (
    Event,
    HintAbsence,
    HintAbsent,
    Question,
    SessionDone,
    TurnPaired,
    VoteCast,
    VoteStatus,
)
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Log
from clawstream.stream.runner.hosting import RunnerIntervals, run
from clawstream.stream.runner.pending_records import WorkerProgress
from clawstream.stream.stage import DAY_MS, Record, Stage, Step
from tests.fakes.memory_log import MemoryLog

EXCHANGES, TURNS, VOTES, HINTS = (f"clawstream.{name}.v1" for name in ("exchanges", "turns", "votes", "hints"))
HASTE = RunnerIntervals(poll_records=7, poll_s=0.02, commit_s=0.0, tick_s=0.05, retry_s=0.001, drain_s=2.0)


def done(session_id: str, number: int) -> SessionDone:
    return SessionDone(session_id=session_id, after_exchange_id=str(number))


def paired(session_id: str, number: int) -> TurnPaired:
    """The pair of records `number` and `number + 1`."""
    return TurnPaired(
        session_id=session_id, turn_id=f"{session_id}-{number}", next_exchange_id=str(number + 1), next_state=(number,)
    )


def joined(session_id: str, number: int) -> HintAbsent:
    return HintAbsent(
        session_id=session_id,
        turn_id=f"{session_id}-{number}",
        judge="j",
        prompt_version="1",
        revision=0,
        reason=HintAbsence.NONE_OFFERED,
        num_offered=0,
    )


def vote(session_id: str, number: int, status: VoteStatus = VoteStatus.READABLE) -> VoteCast:
    return VoteCast(
        session_id=session_id, turn_id=f"{session_id}-{number}", question=Question.SCORE, judge="j", prompt_version="1",
        revision=0, ballot=0, status=status, score=None, hint=None, text=None, error=None, prompt_tokens=None,
        completion_tokens=None, latency_ms=0, cast_at_ms=0,
    )  # fmt: skip


def pairs(retain_ms: int = DAY_MS, last: int | None = None) -> Stage[int, None]:
    """Pairs a record with the one before it in its session; record number `last` closes the session."""

    def step(before: int | None, record: Record) -> Step[int, None]:
        number = number_of(record.event)
        events = [] if before is None or number == before else [paired(record.key, before)]
        return Step(None if number == last else number, events)

    return Stage(name="pairs", reads=(EXCHANGES,), step=step, retain_ms=retain_ms)


def joins() -> Stage[frozenset[str], None]:
    """Writes once for each number that stands in both topics, whichever side comes first."""

    def step(before: frozenset[str] | None, record: Record) -> Step[frozenset[str], None]:
        number = number_of(record.event)
        mine, other = (f"{record.topic}/{number}", f"{TURNS if record.topic == EXCHANGES else EXCHANGES}/{number}")
        seen = before or frozenset()
        events = [joined(record.key, number)] if other in seen and mine not in seen else []
        return Step(seen | {mine}, events)

    return Stage(name="joins", reads=(EXCHANGES, TURNS), step=step)


def asks(perform: Callable[[SessionDone], Awaitable[Sequence[Event]]], **options: Any) -> Stage[None, SessionDone]:
    """Makes a call for each record, and keeps nothing."""

    def step(_: None, record: Record) -> Step[None, SessionDone]:
        assert isinstance(record.event, SessionDone)
        return Step(None, (), [record.event])

    return replace(Stage(name="asks", reads=(EXCHANGES,), step=step, perform=perform), **options)


async def answered(call: SessionDone) -> list[Event]:
    return [vote(call.session_id, number_of(call))]


def number_of(event: Event) -> int:
    if isinstance(event, SessionDone):
        return int(event.after_exchange_id or 0)
    assert isinstance(event, TurnPaired)
    return event.next_state[0]


def ids(events: Iterable[Event]) -> set[str]:
    return {event.event_id for event in events}


async def read(log: KafkaLog | MemoryLog, topic: str) -> list[Record]:
    """Everything on the topic."""
    found: list[Record] = []
    async for records in log.follow([topic], until_end=True):
        found += [record for record in records if isinstance(record, Record)]
    return found


async def written(log: KafkaLog | MemoryLog, topic: str) -> set[str]:
    return ids(record.event for record in await read(log, topic))


@asynccontextmanager
async def running(
    stage: Stage[Any, Any], log: Log, *, pace: RunnerIntervals = HASTE, progress: list[WorkerProgress] | None = None
) -> AsyncIterator[None]:
    """A worker that runs for the length of the block and is then stopped in good order."""
    stop = asyncio.Event()
    on_progress = (lambda _: None) if progress is None else progress.append
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run(stage, log, stop=stop, pace=pace, on_progress=on_progress))
            yield
            stop.set()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures


async def settled(log: KafkaLog | MemoryLog, group: str) -> None:
    """Return when the group has done everything that is on its topics."""

    async def nothing_left() -> bool:
        return await log.lag(group) == 0

    await until(nothing_left)


async def until(claim: Callable[[], Awaitable[bool]], *, within_s: float = 30.0) -> None:
    """Return when the claim is true."""
    async with asyncio.timeout(within_s):
        for _ in count():
            if await claim():
                return
            await asyncio.sleep(0.005)
