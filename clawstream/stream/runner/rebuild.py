"""Where a stage begins after a restart, and in which order it folds the records before that.

The one rule: committed records are folded by the log's clock, across topics, before anything is read live.
"""

import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from clawstream.stream.log import Arrived
from clawstream.stream.stage import Record


class Note(NamedTuple):
    """What a stage notes beside a committed offset."""

    rebuild_from: int  # the first offset that the rebuild of a key still needs
    clock_ms: int  # of the log; keys that were silent for longer than `retain_ms` by then are over
    last: str | None = None  # the digest of the record before the offset; None: not known

    def written(self) -> str:
        """Return the note as the broker keeps it."""
        last = {} if self.last is None else {"last": self.last}
        return json.dumps({"from": self.rebuild_from, "clock_ms": self.clock_ms, **last})


def read_note(text: str, committed: int) -> Note:
    """Return the note; a commit by another tool has none, so nothing is rebuilt."""
    try:
        said = json.loads(text)
        last = said.get("last")
        return Note(min(int(said["from"]), committed), int(said["clock_ms"]), None if last is None else str(last))
    except (AttributeError, KeyError, TypeError, ValueError):
        return Note(committed, 0)


async def in_clock_order(streams: Sequence[AsyncIterator[Sequence[Arrived]]]) -> AsyncIterator[Sequence[Record]]:
    """Merge streams that are each in order, by the broker's append time; undecodable records are left out.

    At equal times the earlier stream's record comes first. Yields at most as many records as one stream gave at once.
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
