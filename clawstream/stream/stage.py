"""What a stage is: a pure fold over the log, by key. Every runner (Kafka, memory, replay) hosts the same `Stage`.

    step(state of the key, record) -> Step(state, events to write, calls to make)

Rules that make a stage safe to kill at any point and to run on any number of workers:
- `step` depends on nothing but its arguments, and an event that is written again is the same event, with the same id.
- Records of one topic and key come in log order. Records of different topics come in any order, so a stage that joins
  topics has to give the same events whichever record comes first.
- A record is done when its events are acknowledged, its calls have returned, and the events of those calls are
  acknowledged. Only a contiguous run of done records is committed.
- After a restart the state of each open key is rebuilt first: its done records are folded in the order of their append
  times, without writing or calling anything. Then the rest is read live.
- A key without a record for more than `retain_ms`, by the log's clock, starts with no state; this bounds the rebuild.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from clawstream.events import Event

S = TypeVar("S")
C = TypeVar("C")

DAY_MS = 86_400_000
HEARD_MS = 7 * DAY_MS  # feedback counts, and a session stays in memory, so long after the session's last record


def now_ms() -> int:
    """Return the time of this machine's clock, in ms since the epoch, UTC."""
    return time.time_ns() // 1_000_000


class Record(NamedTuple):
    """An event as it stands on the log."""

    topic: str  # without the installation's prefix
    partition: int
    offset: int
    timestamp_ms: int  # when the broker appended it, since the epoch, UTC
    key: str
    event: Event
    traceparent: str | None = None
    digest: bytes | None = None  # of its key, headers and value; None: not computed


class Step(NamedTuple, Generic[S, C]):
    """What follows from one record."""

    state: S | None  # None: this key needs no state any more
    events: Sequence[Event] = ()
    calls: Sequence[C] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[S, C]):
    """A fold by key, with what it reads and how its slow calls are made.

    step     (state or None, record) -> Step; pure
    tick     (state, now in ms of the log's clock) -> Step; pure; if given, it is asked every second for each open key
    clock    record -> the time in ms that the log's clock takes from it, or None; without `clock`: the append time
    perform  makes one call and returns the events that came of it; when it raises TryLater the call is made again after
             a random wait, and nothing more is read while too many calls wait
    give_up  turns a call into events once `deadline_s` is over or `perform` raised TooLate
    """

    name: str  # with the installation's prefix in front, also the consumer group
    reads: tuple[str, ...]  # topics, all with the same key and partition count
    step: Callable[[S | None, Record], Step[S, C]]
    tick: Callable[[S, int], Step[S, C]] | None = None
    clock: Callable[[Record], int | None] | None = None
    perform: Callable[[C], Awaitable[Sequence[Event]]] | None = None
    give_up: Callable[[C, str], Sequence[Event]] | None = None  # (call, why) -> events
    calls_at_once: int = 64  # per worker
    call_timeout_s: float = 60.0
    deadline_s: float = 600.0
    waits_for_peer: bool = True  # True: while all calls fail, nothing is read or given up. False: deadlines run on
    retain_ms: int = DAY_MS
    ordered: bool = False  # whether a record that is set aside holds up the later ones of its key
    in_flight: int = field(default=1024)  # the most records that are read and not yet done, per worker
