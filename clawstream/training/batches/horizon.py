"""When all is read that stood on the log when a group was settled.

The one rule: a sample stands on the log before its group's settlement is written, so it is before the ends of the
partitions as they are once the settlement is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from clawstream.stream.log import PartitionId


class Ends(Protocol):
    """The part of a log that this needs."""

    async def end_offsets(self, topics: Sequence[str]) -> Mapping[PartitionId, int]: ...


class Horizon:
    """Asks for the ends of the topics at the start, and again for settlements that were read since."""

    def __init__(self, topics: Sequence[str], log: Ends) -> None:
        self._topics = topics
        self._log = log
        self._unsure: list[str] = []  # settled groups that no ends were asked for yet
        self._ahead: tuple[Mapping[PartitionId, int], list[str]] | None = (
            None  # ends, and the groups settled before them
        )
        self._begun = False

    async def passed(self, settled: Iterable[str], positions: Mapping[tuple[str, int], int]) -> list[str] | None:
        """Return the groups, of all `settled` so far, that are read past now; None: not even what was there at first.

        `positions` are the next offsets to read.
        """
        self._unsure += settled
        found: list[str] | None = None
        while self._ahead is not None or self._unsure or not self._begun:
            if self._ahead is None:
                self._ahead = await self._log.end_offsets(self._topics), self._unsure
                self._unsure, self._begun = [], True
            ends, groups = self._ahead
            if any(_is_unread(positions.get(place), end) for place, end in ends.items()):
                break
            found = [*(found or []), *groups]
            self._ahead = None
        return found


def _is_unread(position: int | None, end: int) -> bool:
    """Whether a partition holds more before `end`; None: it came to be after the start, and nothing of it was read."""
    return end > 0 if position is None else position < end
