"""The states of one partition's keys, and from where on the log they could be rebuilt. Pure.

The one rule: every record that a key's state follows from can be read again. A key's records are needed from the first
one after a silence of `retain_ms` until the key has been silent that long again. Only time ends a key's history; a
state of None does not, since another key's rebuild may begin in the middle of it.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, TypeVar

from clawstream.stream.stage import Record, Stage, Step

S = TypeVar("S")
C = TypeVar("C")

# The log's clock comes from records and this machine's clock, so it may be a little ahead of a record.
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
        self._keys: OrderedDict[str, _Key[S]] = OrderedDict()  # the key touched longest ago first
        self._firsts: dict[str, OrderedDict[str, int]] = {topic: OrderedDict() for topic in stage.reads}

    @property
    def num_open(self) -> int:
        """How many keys have a state."""
        return sum(key.state is not None for key in self._keys.values())

    def apply(self, record: Record) -> Step[S, C]:
        """Step the record's key; raises what the stage's step raises, and then leaves the state unchanged."""
        key = self._touched(record)
        step = self._stage.step(key.state, record)
        key.state = step.state
        return step

    def forget(self, key: str) -> None:
        """Drop all that is known of the key."""
        known = self._keys.pop(key, None)
        for topic in known.last_offsets if known is not None else ():
            del self._firsts[topic][key]

    def rebuild_offsets(self, key: str) -> dict[str, int]:
        """Return, by topic, the first record that the key's state follows from."""
        return {topic: firsts[key] for topic, firsts in self._firsts.items() if key in firsts}

    def tick(self, now_ms: int, *, held: Container[str] = ()) -> Iterator[Step[S, C]]:
        """Ask the stage about each open key that is not held; `now_ms` is the log's clock."""
        if self._stage.tick is None:
            return
        for name, key in self._keys.items():
            if key.state is not None and name not in held and now_ms - key.last_ms <= self._stage.retain_ms:
                step = self._stage.tick(key.state, now_ms)
                key.state = step.state
                yield step

    def expire(self, now_ms: int, committable: Mapping[str, int]) -> None:
        """Forget keys that were silent for longer than `retain_ms` and whose records are all committed."""
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
        """Return the first offset of `topic` that a key's rebuild may still need."""
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
        firsts = self._firsts[record.topic]
        if record.key not in firsts:
            late = bool(firsts) and record.offset < next(reversed(firsts.values()))
            firsts[record.key] = record.offset
            if late:  # a record that was set aside and is used after all
                self._firsts[record.topic] = OrderedDict(sorted(firsts.items(), key=itemgetter(1)))
        self._keys.move_to_end(record.key)
        return key
