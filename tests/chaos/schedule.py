"""Which fault comes when: a function of the seed and nothing else. Pure.

Kinds are drawn like cards, so that each comes within some half a minute; a part that is stopped is left alone until it
goes on, and of the faults that take the broker away one comes at a time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SESSION_TIMEOUT_S = 10.0  # of a member of a consumer group: clawstream.stream.kafka.member
_FIRST_S = 2.0
_GAP_S = (0.8, 2.2)


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "sigkill"
    FREEZE = "sigstop"  # past the session timeout, then SIGCONT
    STOP = "sigterm"
    BROKER_STOP = "broker_stop"
    BROKER_KILL = "broker_kill"
    DATABASE_RESTART = "database_restart"
    ACKS_DROPPED = "acks_dropped"  # the broker has what was written, and its writers are never told
    DISK_FULL = "disk_full"  # of the spools, while the broker is away
    JUDGES_SLEEP = "judges_sleep"
    JUDGES_BUSY = "judges_429"
    JUDGES_BABBLE = "judges_garbage"


OF_PARTS = (Kind.KILL, Kind.FREEZE, Kind.STOP)
OF_BROKER = (Kind.BROKER_STOP, Kind.BROKER_KILL, Kind.ACKS_DROPPED, Kind.DISK_FULL)
_DECK = (
    *[Kind.KILL] * 4, *[Kind.STOP] * 3, *[Kind.FREEZE] * 2, Kind.BROKER_STOP, Kind.BROKER_KILL, Kind.DATABASE_RESTART,
    Kind.ACKS_DROPPED, Kind.DISK_FULL, Kind.JUDGES_SLEEP, Kind.JUDGES_BUSY, Kind.JUDGES_BABBLE,
)  # fmt: skip
_LASTS_S = {
    Kind.FREEZE: (SESSION_TIMEOUT_S + 1.5, SESSION_TIMEOUT_S + 4.0),
    Kind.BROKER_STOP: (0.5, 2.0),  # and a start
    Kind.BROKER_KILL: (0.1, 1.0),
    Kind.ACKS_DROPPED: (1.0, 2.5),
    Kind.DISK_FULL: (1.5, 3.0),
    Kind.JUDGES_SLEEP: (2.0, 5.0),
    Kind.JUDGES_BUSY: (1.0, 4.0),
    Kind.JUDGES_BABBLE: (1.0, 4.0),
}
_BROKER_STARTS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float  # since the load began
    kind: Kind
    part: str | None = None  # whose process; None: it is none of the parts'
    lasts_s: float = 0.0


def schedule(seed: int, seconds: float, parts: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of so many seconds, in order."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    busy_until: dict[str, float] = {}
    deck: list[Kind] = []
    at_s = _FIRST_S
    while at_s < seconds:
        if not deck:
            deck = list(_DECK)
            rng.shuffle(deck)
        kind = deck.pop()
        lasts_s = round(rng.uniform(*_LASTS_S.get(kind, (0.0, 0.0))), 2)
        part = None
        if kind in OF_PARTS:
            part = rng.choice([name for name in parts if busy_until.get(name, 0.0) <= at_s])
        what = part or ("broker" if kind in OF_BROKER else kind)
        begins_s = max(at_s, busy_until.get(what, 0.0))
        if begins_s < seconds:
            faults.append(Fault(at_s=round(begins_s, 2), kind=kind, part=part, lasts_s=lasts_s))
            busy_until[what] = begins_s + lasts_s + (_BROKER_STARTS_S if kind in OF_BROKER else 1.0)
        at_s += rng.uniform(*_GAP_S)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
