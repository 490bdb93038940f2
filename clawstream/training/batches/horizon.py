"""Tells when everything is read that stood on the log when a group was settled.

A sample is written to the log before its group's settlement. So it lies below the partitions' ends as they are once the
settlement has been read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from clawstream.stream.log import PartitionId


class Ends(Protocol):
    """The part of a log that is needed."""

    async def end_offsets(self, topics: Sequence[str]) -> Mapping[PartitionId, int]: ...


class Horizon:
    """Asks for the topics' ends at the start, and again after settlements were read."""

    def __init__(self, topics: Sequence[str], log: Ends) -> None:
        self._topics = topics
        self._log = log
        self._unsure: list[str] = []  # settled groups for which the ends were not asked yet
        self._ahead: tuple[Mapping[PartitionId, int], list[str]] | None = (
            None  # ends, and the groups settled before them
        )
        self._begun = False

    async def passed(self, settled: Iterable[str], positions: Mapping[tuple[str, int], int]) -> list[str] | None:
        """Return the groups, of all `settled` so far, that are read past now; None: not even the first ends are.

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
    """Return whether records below `end` are unread; `position` None: the partition is new and unread."""
    return end > 0 if position is None else position < end
