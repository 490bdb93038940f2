"""The states of one partition's keys, which of its records are done, and where a stage begins after a restart.

Records may be done in any order, but only a contiguous run of done records is committed; offsets may have holes. After
a restart, committed records are folded in the order of their append times, across topics, before anything is read live.
A key's history begins at its first record after a silence of `retain_ms` and ends at the next such silence. Until then
a rebuild reads all of it again. A state of None does not end a history: else a rebuild that another key needs
could begin in the middle of it, and fold only its second half.
"""

import json
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from clawstream.stream.log import Arrived
from clawstream.stream.stage import Record, Stage, Step

S = TypeVar("S")
C = TypeVar("C")

# The log's clock runs on by this machine's clock, so it may be a little ahead of the next record's append time.
CLOCK_SLACK_MS = 1000


class Watermark:
    """How far a partition was read, and which of its records are not done yet."""

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset  # the offset after the last record that was read
        self._open: dict[int, None] = {}

    def read(self, offset: int) -> None:
        """Note a record that was read; it is open until it is done."""
        assert offset >= self.next_offset, f"offset {offset} was read after {self.next_offset - 1}"
        self._open[offset] = None
        self.next_offset = offset + 1

    def done(self, offset: int) -> None:
        """Note that the record is done."""
        del self._open[offset]

    @property
    def committable(self) -> int:
        """The offset below which every record is done."""
        return next(iter(self._open), self.next_offset)

    @property
    def num_open(self) -> int:
        """How many records were read and are not done yet."""
        return len(self._open)


class Note(NamedTuple):
    """What a stage notes beside a committed offset."""

    rebuild_from: int  # the first offset that the rebuild of any key still needs
    clock_ms: int  # the log's time; the history of a key that was silent for more than `retain_ms` by then is over
    last: str | None = None  # the digest of the last record before the committed offset; None: not known

    def written(self) -> str:
        """Return the note as the broker keeps it."""
        last = {} if self.last is None else {"last": self.last}
        return json.dumps({"from": self.rebuild_from, "clock_ms": self.clock_ms, **last})


def read_note(text: str, committed: int) -> Note:
    """Return the note of a commit. A commit by another tool has no note, so nothing is rebuilt."""
    try:
        note = json.loads(text)
        last = note.get("last")
        return Note(min(int(note["from"]), committed), int(note["clock_ms"]), None if last is None else str(last))
    except (AttributeError, KeyError, TypeError, ValueError):
        return Note(committed, 0)


async def in_clock_order(streams: Sequence[AsyncIterator[Sequence[Arrived]]]) -> AsyncIterator[Sequence[Record]]:
    """Merge streams, each in order already, by append time; records that can't be decoded are left out.

    Of records with equal times, the one of the earlier stream in `streams` is first. Each batch is of bounded size.
    """
    heads: list[deque[Record]] = [deque() for _ in streams]
    running = set(range(len(streams)))
    while True:
        for number in sorted(running):
            while number in running and not heads[number]:
                more = await anext(streams[number], None)
                if more is None:
                    running.discard(number)
                else:
                    heads[number].extend(record for record in more if isinstance(record, Record))
        merged: list[Record] = []
        while any(heads) and all(heads[number] for number in running):
            (_, first), *others = sorted((head[0].timestamp_ms, number) for number, head in enumerate(heads) if head)
            head = heads[first]
            while head and (not others or (head[0].timestamp_ms, first) < others[0]):
                merged.append(head.popleft())
        if not merged:
            return
        yield merged


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
        """Take the stage's step for the record's key. Raises what the step raises, and then the state is unchanged."""
        key = self._touched(record)
        step = self._stage.step(key.state, record)
        key.state = step.state
        return step

    def forget(self, key: str) -> None:
        """Drop the key's state and offsets."""
        known = self._keys.pop(key, None)
        for topic in known.last_offsets if known is not None else ():
            del self._firsts[topic][key]

    def rebuild_offsets(self, key: str) -> dict[str, int]:
        """Return, by topic, the offset of the first record that the key's state follows from."""
        return {topic: firsts[key] for topic, firsts in self._firsts.items() if key in firsts}

    def tick(self, now_ms: int, *, held: Container[str] = ()) -> Iterator[Step[S, C]]:
        """Call the stage's `tick` for each open key that is not `held`; `now_ms` is the log's time."""
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
        """Return the first offset of `topic` that the rebuild of any key may still need."""
        return min(next(iter(self._firsts[topic].values()), committable), committable)

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
            if late:  # the record was set aside, and is used only now
                self._firsts[record.topic] = OrderedDict(sorted(firsts.items(), key=itemgetter(1)))
        self._keys.move_to_end(record.key)
        return key
