"""The states of one partition's keys, and from where on the log they could be rebuilt. Pure.

The one rule: whatever a key's state follows from can be read again. A key's records are needed from the first one after
a silence of `retain_ms`, until it was silent that long again: what ends a key's story is time, and not that its state
was None for a while, since another key's rebuild may begin in the middle of it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from clawstream.stream.stage import Record, Stage, Step

S = TypeVar("S")
C = TypeVar("C")

# The log's clock is read off records and a clock of ours, so it may be ahead of a record by a little.
CLOCK_SLACK_MS = 1000


@dataclass(slots=True)
class _Key(Generic[S]):
    state: S | None
    last_ms: int
    last_offsets: dict[str, int]  # by topic


class Fold(Generic[S, C]):
    """A stage's states for one partition number of all its topics."""

    def __init__(self, stage: Stage[S, C]) -> None:
        self._stage = stage
        self._keys: OrderedDict[str, _Key[S]] = OrderedDict()  # the one touched longest ago first
        self._firsts: dict[str, OrderedDict[str, int]] = {topic: OrderedDict() for topic in stage.reads}

    @property
    def num_open(self) -> int:
        """How many keys have a state."""
        return sum(key.state is not None for key in self._keys.values())

    def apply(self, record: Record) -> Step[S, C]:
        """Step the record's key; raises what the stage's step raises, and leaves the state then."""
        key = self._touched(record)
        step = self._stage.step(key.state, record)
        key.state = step.state
        return step

    def tick(self, now_ms: int) -> Iterator[Step[S, C]]:
        """Ask the stage about each open key; `now_ms` is the log's clock."""
        if self._stage.tick is None:
            return
        for key in self._keys.values():
            if key.state is not None and now_ms - key.last_ms <= self._stage.retain_ms:
                step = self._stage.tick(key.state, now_ms)
                key.state = step.state
                yield step

    def expire(self, now_ms: int, committable: Mapping[str, int]) -> None:
        """Forget keys that were silent for longer than they are retained and whose records are all committed."""
        deadline_ms = now_ms - self._stage.retain_ms - CLOCK_SLACK_MS
        gone: list[str] = []
        for name, key in self._keys.items():
            if key.last_ms >= deadline_ms:
                break
            key.state = None
            if all(offset < committable[topic] for topic, offset in key.last_offsets.items()):
                gone.append(name)
        for name in gone:
            for topic in self._keys.pop(name).last_offsets:
                del self._firsts[topic][name]

    def rebuild_from(self, topic: str, committable: int) -> int:
        """Return the first offset of `topic` that a key which may still be asked about needs."""
        first = next(iter(self._firsts[topic].values()), committable)
        return min(first, committable)

    def _touched(self, record: Record) -> _Key[S]:
        key = self._keys.get(record.key)
        if key is None:
            key = self._keys[record.key] = _Key(state=None, last_ms=record.timestamp_ms, last_offsets={})
        elif record.timestamp_ms - key.last_ms > self._stage.retain_ms:
            key.state = None
        key.last_ms = max(key.last_ms, record.timestamp_ms)
        key.last_offsets[record.topic] = record.offset
        self._firsts[record.topic].setdefault(record.key, record.offset)
        self._keys.move_to_end(record.key)
        return key
