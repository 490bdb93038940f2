"""A stage that chains the records of a session, and what stands in its dead-letter queues.

`Chain` joins each SessionDone with the one that it folded before it; it refuses the (session, number) pairs in `bad`.
"""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

from clawstream.errors import UnusableEvent
from clawstream.events import SessionDone, TurnPaired
from clawstream.stream.dead_letters import DeadLetter, KnownDeadLetters, Reason
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import DeadLetterMark, Fate, PartitionId
from clawstream.stream.stage import Record, Stage, Step
from tests.fakes.memory_log import MemoryLog
from tests.unit.stream import toys

PLACE = PartitionId(toys.EXCHANGES, 0)
QUEUES = tuple(f"{topic}.dlq" for topic in (toys.EXCHANGES, toys.TURNS, toys.VOTES, toys.HINTS))


def chain(bad: Collection[tuple[str, int]] = ()) -> Stage[int, None]:
    """The stage, in which order matters."""

    def step(before: int | None, record: Record) -> Step[int, None]:
        event = record.event
        assert isinstance(event, SessionDone)
        number = toys.number_of(event)
        if (record.key, number) in bad:
            raise UnusableEvent("bad")
        return Step(
            number, () if before is None else (replace(toys.paired(record.key, before), next_exchange_id=str(number)),)
        )

    return Stage(name="chain", reads=(toys.EXCHANGES,), step=step, ordered=True)


async def chained(log: KafkaLog | MemoryLog) -> dict[str, list[int]]:
    """By session, what was joined with what came next, in the order written; what was written again counts once."""
    found: dict[str, list[int]] = {}
    for record in await toys.read(log, toys.TURNS):
        assert isinstance(record.event, TurnPaired)
        numbers = found.setdefault(record.key, [])
        if record.event.next_state[0] not in numbers:
            numbers.append(record.event.next_state[0])
    return found


async def dead_letters(log: KafkaLog | MemoryLog) -> list[DeadLetter]:
    """All dead letters, in the order in which they were set aside."""
    found = KnownDeadLetters()
    async for raws in log.follow_raw(QUEUES, until_end=True):
        for raw in raws:
            found.read(raw)
    return list(found)


async def rule_if_any(log: KafkaLog | MemoryLog, fate: Fate) -> None:
    """Do as `rule` does, where there is anything to rule about."""
    if any(
        dead_letter.fate is Fate.OPEN and dead_letter.reason is not Reason.PARKED
        for dead_letter in await dead_letters(log)
    ):
        await rule(log, fate, "a test")


async def rule(log: KafkaLog | MemoryLog, fate: Fate, because: str | None = None) -> None:
    """Ask for this fate for all that is open and waits behind nothing."""
    marks = [
        DeadLetterMark(id=dead_letter.id, key=dead_letter.key, attempt=dead_letter.attempt, fate=fate, because=because)
        for dead_letter in await dead_letters(log)
        if dead_letter.fate is Fate.OPEN and dead_letter.reason is not Reason.PARKED
    ]
    assert marks
    await log.mark(marks)


def closed(log: KafkaLog | MemoryLog) -> Callable[[], Awaitable[Any]]:
    """Whether nothing waits any more."""

    async def all_closed() -> bool:
        return not any(dead_letter.waits for dead_letter in await dead_letters(log))

    return all_closed
