"""The faults that reach what each guard keeps, with the load and the stages that they need: others only take time."""

from collections.abc import Sequence

from tests.chaos.guards import Guard
from tests.chaos.plan import Plan, over_s
from tests.chaos.schedule import SESSION_TIMEOUT_S, Fault, Kind

_JOINED = frozenset(("gateway", "turns", "judging", "samples"))
_CLIENTS = 16
_BEGINS_S = 1.0  # for what goes on until it has come about


def directed(guard: Guard) -> Plan:
    """Return the run in which this guard is missed, if it is not there, in a minute or less (the fence's: in some)."""
    match guard:
        case Guard.COMMIT_LATE:
            return _plan(_killed_with_calls_open(), _JOINED)
        case Guard.DEDUPE:
            return _plan(_delivered_unheard(), _JOINED | {"train"})
        case Guard.FSYNC:
            return _plan(_killed_while_spooling(), frozenset({"gateway"}))
        case Guard.MANIFEST:
            return _plan(_trainer_killed(), _JOINED | {"train"})
        case Guard.BUFFERS:
            return _plan(_frozen("turns-0", at_s=3.0), frozenset({"gateway", "turns"}))
        case Guard.FENCE:
            # On one partition, so that who has rows and who writes them next have the same.
            stages = frozenset({"gateway", "project"})
            return Plan(faults=(), seconds=_BEGINS_S, clients=_CLIENTS, partition=0, stages=stages, stale_writer=True)


def _plan(faults: Sequence[Fault], stages: frozenset[str]) -> Plan:
    return Plan(faults=tuple(faults), seconds=over_s(faults), clients=_CLIENTS, stages=stages)


def _killed_with_calls_open() -> Sequence[Fault]:
    return (
        Fault(at_s=4.0, kind=Kind.JUDGES_SLEEP, lasts_s=8.0),
        *(Fault(at_s=at_s, kind=Kind.KILL, part=f"judging-{at_s % 2:.0f}") for at_s in (6.0, 7.0, 10.0, 11.0)),
    )


def _delivered_unheard() -> Sequence[Fault]:
    """What two workers had to do when they woke is delivered, unheard, and delivered again by who comes after them."""
    both = ("samples-0", "samples-1")
    return (
        *(Fault(at_s=4.0, kind=Kind.FREEZE, part=part, lasts_s=6.0) for part in both),
        Fault(at_s=9.5, kind=Kind.ACKS_DROPPED, lasts_s=4.0),
        *(Fault(at_s=13.0, kind=Kind.KILL, part=part) for part in both),
    )


def _killed_while_spooling() -> Sequence[Fault]:
    return (
        Fault(at_s=4.0, kind=Kind.BROKER_STOP, lasts_s=5.0),
        *(Fault(at_s=at_s, kind=Kind.KILL, part=f"gateway-{at_s % 2:.0f}") for at_s in (8.0, 9.0)),
    )


def _trainer_killed() -> Sequence[Fault]:
    return tuple(Fault(at_s=at_s, kind=Kind.KILL, part="train") for at_s in (12.0, 20.0))


def _frozen(part: str, *, at_s: float) -> Sequence[Fault]:
    return (Fault(at_s=at_s, kind=Kind.FREEZE, part=part, lasts_s=SESSION_TIMEOUT_S + 10.0),)
