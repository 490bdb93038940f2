"""The folds of turns, judging and samples on one partition, each fed with what the others say. Pure.

The one rule: what a fold says here is what its stage would say live, since stages give the same events however the
topics interleave; a fact that follows from a record has that record's time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from clawstream.errors import UnusableEvent
from clawstream.events import Event
from clawstream.stream.fold import Fold
from clawstream.stream.stage import Record, Stage
from clawstream.stream.topics import topic_of

EXPIRE_EVERY = 1000  # records
_ALL = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Said:
    """What follows from one record: events in the order in which they were said, and calls to make."""

    events: list[Event] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    num_unusable: int = 0


class Host:
    """The states of one partition number's sessions, in all folds."""

    def __init__(self, stages: Sequence[Stage[Any, Any]]) -> None:
        self._folds = [(frozenset(stage.reads), Fold(stage)) for stage in stages]
        self._committable = MappingProxyType({topic: _ALL for stage in stages for topic in stage.reads})
        self._num_fed = 0
        self._retain_ms = max(stage.retain_ms for stage in stages)

    def feed(self, record: Record, *, open_since_ms: int | None = None) -> Said:
        """Let every fold that reads the record's topic see it, and what the folds say of it.

        `open_since_ms` is the time of the oldest record whose calls are not made yet: no state from then on is let go.
        """
        self._num_fed += 1
        if self._num_fed % EXPIRE_EVERY == 0:
            now_ms = record.timestamp_ms if open_since_ms is None else min(open_since_ms, record.timestamp_ms)
            for _, fold in self._folds:
                fold.expire(now_ms, self._committable)
        events: list[Event] = []
        calls: list[Any] = []
        num_unusable = 0
        waiting = deque([record])
        while waiting:
            current = waiting.popleft()
            for reads, fold in self._folds:
                if current.topic not in reads:
                    continue
                try:
                    step = fold.apply(current)
                except UnusableEvent:
                    num_unusable += 1
                    continue
                events += step.events
                calls += step.calls
                waiting.extend(_following(record, event) for event in step.events)
        return Said(events, calls, num_unusable)


def _following(cause: Record, event: Event) -> Record:
    return following(cause, topic_of(type(event)), event)


def following(cause: Record, topic: str, event: Event) -> Record:
    """Return `event` as the record that would stand on `topic` had it been written when its cause was."""
    return Record(
        topic=topic,
        partition=cause.partition,
        offset=cause.offset,
        timestamp_ms=cause.timestamp_ms,
        key=event.key,
        event=event,
        traceparent=cause.traceparent,
    )
