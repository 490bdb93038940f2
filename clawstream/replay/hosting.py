"""The folds of turns, judging and samples on one partition, each fed with the others' events. Pure.

The one rule: a fold gives the same events here as its stage does live. Stages give the same events however the topics
interleave, and an event that follows from a record gets that record's time.
"""

from collections import deque
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from clawstream.errors import UnusableEvent
from clawstream.events import Event
from clawstream.stream.runner.fold import Fold
from clawstream.stream.stage import Record, Stage
from clawstream.stream.topics import topic_of

EXPIRE_EVERY = 1000  # records
_ALL = 2**63 - 1


class Said(NamedTuple):
    """What follows from one record: events in order, and calls to make."""

    events: list[Event]
    calls: list[Any]
    num_unusable: int


class Host:
    """The states of the sessions of one partition number, in all folds."""

    def __init__(self, stages: Sequence[Stage[Any, Any]]) -> None:
        self._folds = [Fold(stage) for stage in stages]
        self._readers: dict[str, list[Fold[Any, Any]]] = {}  # of each topic
        for stage, fold in zip(stages, self._folds, strict=True):
            for topic in stage.reads:
                self._readers.setdefault(topic, []).append(fold)
        self._committable = MappingProxyType({topic: _ALL for stage in stages for topic in stage.reads})
        self._num_fed = 0
        self._retain_ms = max(stage.retain_ms for stage in stages)

    def feed(self, record: Record, *, open_since_ms: int | None = None) -> Said:
        """Give the record to every fold that reads its topic, then the events that follow to the folds that read them.

        `open_since_ms` is the time of the oldest record whose calls are not made yet: no later state is let go.
        """
        self._num_fed += 1
        if self._num_fed % EXPIRE_EVERY == 0:
            now_ms = record.timestamp_ms if open_since_ms is None else min(open_since_ms, record.timestamp_ms)
            for fold in self._folds:
                fold.expire(now_ms, self._committable)
        events: list[Event] = []
        calls: list[Any] = []
        num_unusable = 0
        waiting = deque([record])
        while waiting:
            current = waiting.popleft()
            for fold in self._readers[current.topic]:
                try:
                    step = fold.apply(current)
                except UnusableEvent:
                    num_unusable += 1
                    continue
                calls += step.calls
                for event in step.events:
                    events.append(event)
                    topic = topic_of(type(event))
                    if topic in self._readers:
                        waiting.append(following(record, topic, event))
        return Said(events, calls, num_unusable)


def following(cause: Record, topic: str, event: Event) -> Record:
    """Return `event` as a record of `topic`, with the time of the record that it follows from."""
    return Record(
        topic=topic,
        partition=cause.partition,
        offset=cause.offset,
        timestamp_ms=cause.timestamp_ms,
        key=event.key,
        event=event,
        traceparent=cause.traceparent,
    )
