"""Which records a replay reads, frozen when it begins.

The one rule: a range ends at an offset that existed when the replay began, so later writes change nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from clawstream.errors import ConfigError
from clawstream.events import OffsetRange, VotesFrom
from clawstream.projections.look.tail import start_ms
from clawstream.stream.log import PartitionId, Start

EXCHANGES = "clawstream.exchanges.v1"
VOTES = "clawstream.votes.v1"
FEEDBACK = "clawstream.feedback.v1"
HINTS = "clawstream.hints.v1"
ANSWERS = "clawstream.answers.v1"


class OffsetLog(Protocol):
    """The part of a log that answers about offsets."""

    async def begin_offsets(self, topics: Sequence[str]) -> Mapping[PartitionId, int]: ...
    async def end_offsets(self, topics: Sequence[str]) -> Mapping[PartitionId, int]: ...
    async def offsets_at(self, topics: Sequence[str], start: Start) -> Mapping[PartitionId, int]: ...


async def frozen(
    log: OffsetLog, *, since: str | None, until: str | None, votes_from: VotesFrom, now_ms: int, scored: bool = False
) -> tuple[OffsetRange, ...]:
    """Return the ranges of exchanges from `since` up to but not including `until`, and of all that may be about them.

    The latter are votes, feedback and answers given again; where an engine `scored` hints, those scores too. Each end
    is an offset on each partition, or a time: 90s, 5m, 2h, 1d before now, or ISO. None: no limit. Raises OperatorError
    for text that is neither, ConfigError for a range without a record.
    """
    ends = await log.end_offsets([EXCHANGES])
    first = await _at(log, since, now_ms, dict(await log.begin_offsets([EXCHANGES])))
    end = await _at(log, until, now_ms, dict(ends))
    ranges = [_range(place, first[place], min(end[place], ends[place])) for place in sorted(ends)]
    if all(part.first_offset >= part.end_offset for part in ranges):
        raise ConfigError(
            f"no exchange stands on the log from {since or 'its beginning'} to {until or 'its end'}: nothing was "
            "begun. Name another range with --from and --to"
        )
    votes = (VOTES,) if votes_from is VotesFrom.LOG else ()
    for topic in (*votes, FEEDBACK, ANSWERS, *((HINTS,) if scored else ())):
        begins, ends = dict(await log.begin_offsets([topic])), await log.end_offsets([topic])
        if since is not None and not since.isdecimal():
            # No such record is older than the exchange it is about.
            begins = dict(await log.offsets_at([topic], start_ms(since, now_ms)))
        ranges += [_range(place, begins[place], ends[place]) for place in sorted(ends)]
    return tuple(ranges)


def by_partition(ranges: Sequence[OffsetRange], number: int) -> dict[PartitionId, tuple[int, int]]:
    """Return the ranges of this partition number that hold a record."""
    return {
        PartitionId(part.topic, part.partition): (part.first_offset, part.end_offset)
        for part in ranges
        if part.partition == number and part.first_offset < part.end_offset
    }


def num_records(ranges: Sequence[OffsetRange], topic: str) -> int:
    """Return how many offsets of a topic the ranges hold."""
    return sum(max(0, part.end_offset - part.first_offset) for part in ranges if part.topic == topic)


async def _at(log: OffsetLog, said: str | None, now_ms: int, unsaid: dict[PartitionId, int]) -> dict[PartitionId, int]:
    if said is None:
        return unsaid
    if said.isdecimal():
        begins = await log.begin_offsets([EXCHANGES])
        return {place: max(int(said), begins[place]) for place in unsaid}
    return dict(await log.offsets_at([EXCHANGES], start_ms(said, now_ms)))


def _range(place: PartitionId, first: int, end: int) -> OffsetRange:
    return OffsetRange(topic=place.topic, partition=place.partition, first_offset=first, end_offset=max(first, end))
