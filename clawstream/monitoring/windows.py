"""Counts events in one-minute windows over the last hour, and tells whether the broker's clock is wrong. Pure.

A record counts once, however often it is delivered, and so does an event that was written twice within the hour. Counts
can be added up in any order. An average over nothing is None, not 0. The broker's clock is wrong if it dates an
exchange in the future, or before its end. A date long after its end proves nothing, as exchanges may wait in a spool.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

from clawstream import events
from clawstream.events import Event
from clawstream.stream.log import Arrived
from clawstream.stream.runner.clock import BELIEVED_MS, Dating
from clawstream.stream.stage import Record

RECENT_MS = 60_000  # partitions whose newest exchange is older than the newest of all by more than this don't count
A = TypeVar("A", Record, Arrived)
MINUTE_MS = 60_000
KEPT_MINUTES = 60


class _Dated(NamedTuple):
    offset: int
    appended_ms: int
    ended_ms: int  # when the exchange ended, by the gateway's clock

    def off_ms(self, now_ms: int) -> int:
        """Return by how much the broker's clock was ahead (negative: behind); 0: not found wrong."""
        if self.appended_ms - now_ms > BELIEVED_MS:
            return self.appended_ms - now_ms
        before_ms = self.ended_ms - self.appended_ms
        is_brokers = self.ended_ms - now_ms <= BELIEVED_MS  # otherwise it is the gateway's clock that is wrong
        return -before_ms if before_ms > BELIEVED_MS and is_brokers else 0


class BrokerClock:
    """Tells how wrong the broker's clock is, by each partition's newest exchange, which the gateway dated too."""

    def __init__(self) -> None:
        self._newest: dict[int, _Dated] = {}

    def learn(self, found: Arrived) -> None:
        """Take in a record with the broker's date. Records may come in any order; only exchanges count."""
        if not isinstance(found, Record) or not isinstance(
            found.event, events.ExchangeCompleted | events.ExchangeFailed
        ):
            return
        dated = _Dated(found.offset, found.timestamp_ms, found.event.finished_at_ms)
        self._newest[found.partition] = max(dated, self._newest.get(found.partition, dated))

    def off_ms(self, now_ms: int) -> int | None:
        """Return by how much the broker's clock is ahead (negative: behind); 0: not found wrong; None: not known."""
        ended_ms = [min(dated.ended_ms, now_ms) for dated in self._newest.values()]
        recent = [
            dated
            for dated, over in zip(self._newest.values(), ended_ms, strict=True)
            if over >= max(ended_ms) - RECENT_MS
        ]
        return max((dated.off_ms(now_ms) for dated in recent), key=abs, default=None)


def alarm(off_ms: int | None) -> str | None:
    """Return a message for a person if the broker's clock is wrong; None: nothing says that it is."""
    if not off_ms:
        return None
    where = "ahead of this machine's clock" if off_ms > 0 else "behind the gateway's clock"
    return (
        f"the newest exchanges are dated {abs(off_ms) / 1000:,.0f} s {where}. No stage ends a session because of it. "
        "Set the clocks of broker and machines: the next exchange with a right date ends this alarm"
    )


class AppendTimes:
    """Corrects append times as stages do: none is in the future, or before that of the partition's previous record."""

    def __init__(self) -> None:
        self._dating: dict[tuple[str, int], Dating] = {}

    def corrected(self, found: A, now_ms: int) -> A:
        """Return `found`, the next record of its partition, with the append time that it has for stages."""
        dating = self._dating.setdefault((found.topic, found.partition), Dating([found.topic]))
        taken_ms, _ = dating.date(found.topic, found.timestamp_ms, now_ms)
        if taken_ms == found.timestamp_ms:
            return found
        if isinstance(found, Record):
            return found._replace(timestamp_ms=taken_ms)
        return replace(found, timestamp_ms=taken_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCounts:
    """How much happened in some stretch of time.

    exchanges   how many by outcome: "completed", or the reason of the failure
    votes       how many by the vote's status
    refusals    how many turns or sessions gave no sample, by the reason
    refreshed   how many outcomes of refreshed answers: "sampled", "unanswered", or the reason why there is no sample
    """

    exchanges: Mapping[str, int] = field(default_factory=dict)
    output_tokens: int = 0
    turns_paired: int = 0
    turns_orphaned: int = 0
    votes: Mapping[str, int] = field(default_factory=dict)
    verdicts: int = 0
    verdicts_scored: int = 0
    score_sum: int = 0
    samples: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)
    refreshed: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    steps_rejected: int = 0
    activations: int = 0
    rejections: int = 0
    pause_ms_max: float | None = None
    undecodable: int = 0

    def __add__(self, other: "EventCounts") -> "EventCounts":
        return EventCounts(
            **{name: _summed(getattr(self, name), getattr(other, name)) for name in _SUMMED},
            pause_ms_max=max((ms for ms in (self.pause_ms_max, other.pause_ms_max) if ms is not None), default=None),
        )

    @property
    def mean_score(self) -> float | None:
        """The mean score of the verdicts that have one; None: none has."""
        return _share(self.score_sum, self.verdicts_scored)

    @property
    def unreadable_share(self) -> float | None:
        """The share of the replies that could not be read; None: no reply arrived."""
        unreadable = self.votes.get("unreadable", 0)
        return _share(unreadable, unreadable + self.votes.get("readable", 0))

    @property
    def failed_share(self) -> float | None:
        """The share of the votes to which no reply arrived; None: there are no votes."""
        return _share(self.votes.get("failed", 0), sum(self.votes.values()))


_SUMMED = tuple(field.name for field in fields(EventCounts) if field.name != "pause_ms_max")
NOTHING = EventCounts()
UNDECODABLE = EventCounts(undecodable=1)


def tally(event: Event) -> EventCounts:
    """Return the counts that `event` adds."""
    match event:
        case events.ExchangeCompleted():
            return EventCounts(exchanges={"completed": 1}, output_tokens=len(event.output_ids))
        case events.ExchangeFailed():
            return EventCounts(exchanges={event.reason.value: 1}, output_tokens=len(event.output_ids))
        case events.TurnPaired():
            return EventCounts(turns_paired=1)
        case events.TurnOrphaned():
            return EventCounts(turns_orphaned=1)
        case events.VoteCast():
            return EventCounts(votes={event.status.value: 1})
        case events.VerdictReached(score=None):
            return EventCounts(verdicts=1)
        case events.VerdictReached(score=int(score)):
            return EventCounts(verdicts=1, verdicts_scored=1, score_sum=score)
        case events.SampleAssembled(refreshed_id=None):
            return EventCounts(samples=1)
        case events.SampleRefused(refreshed_id=None):
            return EventCounts(refusals={event.reason.value: 1})
        case events.SampleAssembled():
            return EventCounts(refreshed={"sampled": 1})
        case events.SampleRefused():
            return EventCounts(refreshed={event.reason.value: 1})
        case events.AnswerRefreshed(error=str()):
            return EventCounts(refreshed={"unanswered": 1})
        case events.StepTaken():
            return EventCounts(steps=1)
        case events.StepRejected():
            return EventCounts(steps_rejected=1)
        case events.PolicyActivated():
            return EventCounts(activations=1, pause_ms_max=event.pause_ms)
        case events.PolicyRejected():
            return EventCounts(rejections=1)
        case _:
            return NOTHING


def _summed(one: Any, other: Any) -> Any:
    if isinstance(one, int):
        return one + other
    return {key: one.get(key, 0) + other.get(key, 0) for key in sorted({*one, *other})}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A minute of the log."""

    start_ms: int  # since the epoch, UTC
    tally: EventCounts


class Windows:
    """The windows of the last hour. The memory needed is bounded by the events of one hour."""

    def __init__(self) -> None:
        self._tallies: dict[int, EventCounts] = {}  # by start
        self._ids: dict[int, set[int]] = {}  # of the events of each window, hashed
        self._next_offsets: dict[tuple[str, int], int] = {}
        self._oldest_ms = 0

    def record(self, arrived: Arrived) -> bool:
        """Count a record in its minute; return whether it is new: neither delivered before nor a repeated event."""
        place = (arrived.topic, arrived.partition)
        if arrived.offset < self._next_offsets.get(place, 0):
            return False
        self._next_offsets[place] = arrived.offset + 1
        start_ms = arrived.timestamp_ms - arrived.timestamp_ms % MINUTE_MS
        self._forget_before(start_ms - (KEPT_MINUTES - 1) * MINUTE_MS)
        if start_ms < self._oldest_ms:
            return True
        if isinstance(arrived, Record) and self._repeated(arrived.event, start_ms):
            return False
        added = tally(arrived.event) if isinstance(arrived, Record) else UNDECODABLE
        self._tallies[start_ms] = self._tallies.get(start_ms, NOTHING) + added
        return True

    def last_hour(self, now_ms: int) -> tuple[Window, ...]:
        """Return the last hour's windows in order, empty ones included; `now_ms` lies in the last one."""
        newest = now_ms - now_ms % MINUTE_MS
        starts = range(newest - (KEPT_MINUTES - 1) * MINUTE_MS, newest + 1, MINUTE_MS)
        return tuple(Window(start_ms=start, tally=self._tallies.get(start, NOTHING)) for start in starts)

    def _repeated(self, event: Event, start_ms: int) -> bool:
        name = hash(event.event_id)
        if any(name in ids for ids in self._ids.values()):
            return True
        self._ids.setdefault(start_ms, set()).add(name)
        return False

    def _forget_before(self, oldest_ms: int) -> None:
        if oldest_ms <= self._oldest_ms:
            return
        self._oldest_ms = oldest_ms
        for kept in (self._tallies, self._ids):
            for start_ms in [start for start in kept if start < oldest_ms]:
                del kept[start_ms]


def total(windows: Iterable[Window]) -> EventCounts:
    """Return the sum of `windows`."""
    return reduce(add, (window.tally for window in windows), NOTHING)
