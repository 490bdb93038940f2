"""The registry of replays: their names, the ranges of records that each reads, and which one is promoted.

The end of a range is fixed when the replay begins, so records that are written later change nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clawstream.errors import ConfigError
from clawstream.events import OffsetRange, ReplayEnded, ReplayStarted, SamplesPromoted, VotesFrom
from clawstream.events.control import promotions
from clawstream.projections.look.tail import start_ms
from clawstream.stream import topics
from clawstream.stream.log import Log, PartitionId
from clawstream.stream.stage import Record


async def frozen(
    log: Log, *, since: str | None, until: str | None, votes_from: VotesFrom, now_ms: int, scored: bool = False
) -> tuple[OffsetRange, ...]:
    """Return the ranges of exchanges from `since` up to but not including `until`, and of the records about them.

    Records about exchanges are feedback, refreshed answers, votes if they come from the log, and an engine's scores if
    `scored`. `since` and `until` are offsets, which hold in each partition, or times: 90s, 5m, 2h or 1d (ago), or ISO
    form. None: no limit. Raises OperatorError for other text, ConfigError where no exchange is in the ranges.
    """
    begins, ends = await log.begin_offsets([topics.EXCHANGES]), await log.end_offsets([topics.EXCHANGES])
    first = begins if since is None else await _offsets_at(log, since, now_ms, begins)
    end = ends if until is None else await _offsets_at(log, until, now_ms, begins)
    ranges = [_range(place, first[place], min(end[place], ends[place])) for place in sorted(ends)]
    if all(part.first_offset >= part.end_offset for part in ranges):
        raise ConfigError(
            f"no exchange stands on the log from {since or 'its beginning'} to {until or 'its end'}: no replay was "
            "begun. Name another range with --from and --to"
        )
    votes = (topics.VOTES,) if votes_from is VotesFrom.LOG else ()
    for topic in (*votes, topics.FEEDBACK, topics.ANSWERS, *((topics.HINTS,) if scored else ())):
        begins, ends = await log.begin_offsets([topic]), await log.end_offsets([topic])
        if since is not None and not since.isdecimal():
            # No record is older than the exchange that it is about.
            begins = await log.offsets_at([topic], start_ms(since, now_ms))
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
    """Return how many offsets of the topic are in the ranges."""
    return sum(max(0, part.end_offset - part.first_offset) for part in ranges if part.topic == topic)


async def _offsets_at(
    log: Log, offset_or_time: str, now_ms: int, begins: Mapping[PartitionId, int]
) -> Mapping[PartitionId, int]:
    if offset_or_time.isdecimal():
        return {place: max(int(offset_or_time), begin) for place, begin in begins.items()}
    return await log.offsets_at([topics.EXCHANGES], start_ms(offset_or_time, now_ms))


def _range(place: PartitionId, first: int, end: int) -> OffsetRange:
    return OffsetRange(topic=place.topic, partition=place.partition, first_offset=first, end_offset=max(first, end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The replays and promotions on the control topic; of two events with one id the first counts."""

    started: dict[str, ReplayStarted] = field(default_factory=dict)  # by name, in order
    ended: dict[str, ReplayEnded] = field(default_factory=dict)
    promoted: dict[str, list[SamplesPromoted]] = field(default_factory=dict)  # by policy, undone ones included

    @classmethod
    async def read(cls, log: Log) -> "Registry":
        """Read the topic up to its present end."""
        found = cls()
        async for records in log.follow([topics.CONTROL], until_end=True):
            for event in (record.event for record in records if isinstance(record, Record)):
                match event:
                    case ReplayStarted():
                        found.started.setdefault(event.replay, event)
                    case ReplayEnded():
                        found.ended.setdefault(event.replay, event)
                    case SamplesPromoted():
                        found.promoted.setdefault(event.policy_id, []).append(event)
        return found

    def finished(self, name: str) -> ReplayEnded:
        """Return how the replay ended; raises ConfigError where it does not exist or has not ended."""
        if name not in self.started:
            there = ", ".join(self.started) or "none"
            raise ConfigError(f"there is no replay {name!r}: there are {there}. See `clawstream replay list`")
        if name not in self.ended:
            raise ConfigError(
                f"replay {name!r} was begun but has not ended: nothing was done. Run `clawstream replay start --name "
                f"{name}` again, which finishes it"
            )
        return self.ended[name]

    def pointer(self, policy_id: str) -> str | None:
        """Return the name of the replay whose samples the policy is trained on; None: live samples."""
        standing = promotions(self.promoted.get(policy_id, []))
        return standing[-1].replay if standing else None


async def promote(log: Log, name: str, *, policy_id: str, now_ms: int) -> SamplesPromoted:
    """Train the policy on the replay's samples from its next batch on; raises ConfigError unless the replay ended."""
    registry = await Registry.read(log)
    registry.finished(name)
    event = _next(registry, policy_id, name, undoes=None, now_ms=now_ms)
    await log.append([event])
    return event


async def rollback(log: Log, *, policy_id: str, now_ms: int) -> SamplesPromoted:
    """Undo the newest promotion that stands; raises ConfigError where none does."""
    registry = await Registry.read(log)
    standing = promotions(registry.promoted.get(policy_id, []))
    if not standing:
        raise ConfigError(f"nothing is promoted for policy {policy_id!r}: it is trained on its live samples already")
    before = standing[-2].replay if len(standing) > 1 else None
    event = _next(registry, policy_id, before, undoes=standing[-1].number, now_ms=now_ms)
    await log.append([event])
    return event


def _next(
    registry: Registry, policy_id: str, replay: str | None, *, undoes: int | None, now_ms: int
) -> SamplesPromoted:
    number = max((event.number for event in registry.promoted.get(policy_id, [])), default=0) + 1
    return SamplesPromoted(policy_id=policy_id, number=number, replay=replay, undoes=undoes, promoted_at_ms=now_ms)
