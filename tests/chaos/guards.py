"""The guards that the rig can take out of a process, and the faults that reach what each keeps.

No production code knows of this: a guard is taken out by replacing it in the process that is under test.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from tests.chaos.schedule import Fault, Kind


class Guard(StrEnum):
    """What keeps a promise."""

    COMMIT_LATE = "commit-early"  # the removal's name, as `--break` has it
    DEDUPE = "skip-dedupe"
    FSYNC = "ack-before-fsync"
    MANIFEST = "train-without-manifest"
    FENCE = "drop-fence"
    BUFFERS = "keep-buffers"  # on revoke


_SLOW_FSYNC_S = 1.0


def remove(guard: Guard, stage: str) -> None:
    """Take the guard out of this process, which runs `stage`."""
    match guard, stage:
        case Guard.COMMIT_LATE, "turns" | "judging" | "samples":
            _commit_what_was_read()
        case Guard.DEDUPE, "train":
            _take_samples_again()
        case Guard.FSYNC, "gateway":
            _acknowledge_before_fsync()
        case Guard.MANIFEST, "train":
            _forget_plans()
        case Guard.FENCE, "project":
            _write_without_the_books()
        case Guard.BUFFERS, "turns" | "judging" | "samples":
            _go_on_where_we_were()


def _commit_what_was_read() -> None:
    from clawstream.stream.watermark import Watermark

    Watermark.committable = property(lambda self: self._next_offset)  # type: ignore[assignment]


def _take_samples_again() -> None:
    from clawstream.training.batches import Arrival, Batcher, DropReason

    def receive(self: Batcher, arrival: Arrival, own: Any = Batcher.receive) -> DropReason | None:
        self._taken.discard(arrival.sample.sample_id)
        found: DropReason | None = own(self, arrival)
        return found

    Batcher.receive = receive  # type: ignore[method-assign]


def _acknowledge_before_fsync() -> None:
    from clawstream.gateway.delivery import Delivery
    from clawstream.gateway.spool import Spool
    from clawstream.stream.log import Sealed

    spooling: set[asyncio.Task[None]] = set()
    into_spool, append = Delivery._into_spool, Spool.append

    async def at_once(self: Delivery, records: Sequence[Sealed]) -> None:
        task = asyncio.create_task(into_spool(self, records))
        spooling.add(task)
        await asyncio.sleep(0)  # its place is taken

    def slowly(self: Spool, frames: Sequence[bytes]) -> list[bool]:
        time.sleep(_SLOW_FSYNC_S)  # on the disk's thread
        return append(self, frames)

    Delivery._into_spool = at_once  # type: ignore[method-assign]
    Spool.append = slowly  # type: ignore[method-assign]


def _forget_plans() -> None:
    from clawstream.events import BatchPlanned, PolicyEvent
    from clawstream.training.lived import Lived

    learn = Lived.learn

    def without_plans(self: Lived, event: PolicyEvent) -> None:
        if not isinstance(event, BatchPlanned):
            learn(self, event)

    Lived.learn = without_plans  # type: ignore[method-assign]


def _write_without_the_books() -> None:
    from clawstream.projections import writer

    writer._ADVANCED = """
        UPDATE offsets SET next_offset = %s, chain = %s, chain_from = coalesce(chain_from, %s)
        WHERE topic = %s AND partition = %s AND (%s, %s) IS NOT NULL
    """


def _go_on_where_we_were() -> None:
    from clawstream.stream.log import Commit, Place
    from clawstream.stream.runner import _Worker

    assign = _Worker.assigned

    async def revoked(_self: Any, _places: frozenset[Place]) -> None:
        return

    async def assigned(self: Any, committed: Mapping[Place, Commit | None]) -> Mapping[Place, int]:
        kept = dict(self._shares)
        starts = dict(await assign(self, committed))
        for number in kept.keys() & self._shares.keys():
            share = kept[number]
            self._shares[number].end()
            self._shares[number] = share
            self.member.resume(share.places)
            starts |= {place: share.read_up_to(place) for place in share.places}
        return starts

    _Worker.revoked = revoked  # type: ignore[method-assign, assignment]
    _Worker.assigned = assigned  # type: ignore[method-assign]


def directed(guard: Guard) -> tuple[Fault, ...]:
    """Return the faults that reach what the guard keeps, in a minute or less."""
    match guard:
        case Guard.COMMIT_LATE:
            return (
                Fault(at_s=4.0, kind=Kind.JUDGES_SLEEP, lasts_s=8.0),
                *(Fault(at_s=at_s, kind=Kind.KILL, part=f"judging-{at_s % 2:.0f}") for at_s in (6.0, 7.0, 10.0, 11.0)),
            )
        case Guard.DEDUPE:
            # What it had delivered without hearing of it, the next one that has its partitions delivers again.
            return tuple(
                fault
                for at_s in (6.0, 14.0)
                for fault in (
                    Fault(at_s=at_s, kind=Kind.ACKS_DROPPED, lasts_s=3.0),
                    Fault(at_s=at_s + 2.5, kind=Kind.KILL, part="samples-0"),
                    Fault(at_s=at_s + 2.5, kind=Kind.KILL, part="samples-1"),
                )
            )
        case Guard.FSYNC:
            return (
                Fault(at_s=4.0, kind=Kind.BROKER_STOP, lasts_s=5.0),
                *(Fault(at_s=at_s, kind=Kind.KILL, part=f"gateway-{at_s % 2:.0f}") for at_s in (8.0, 9.0)),
            )
        case Guard.MANIFEST:
            return tuple(Fault(at_s=at_s, kind=Kind.KILL, part="train") for at_s in (12.0, 20.0))
        case Guard.BUFFERS:
            # It wakes to slow judges, so that it is far behind its successor when it is given its partitions again.
            return (
                Fault(at_s=4.0, kind=Kind.FREEZE, part="judging-0", lasts_s=14.0),
                Fault(at_s=17.0, kind=Kind.JUDGES_SLEEP, lasts_s=8.0),
            )
        case Guard.FENCE:
            return (
                Fault(at_s=5.0, kind=Kind.FREEZE, part="project-0", lasts_s=13.0),
                Fault(at_s=22.0, kind=Kind.FREEZE, part="project-1", lasts_s=13.0),
            )


def needed(guard: Guard) -> frozenset[str]:
    """Return the stages that its directed faults need; the others would only take time."""
    joined = {"gateway", "turns", "judging", "samples"}
    match guard:
        case Guard.COMMIT_LATE:
            return frozenset(joined)
        case Guard.DEDUPE | Guard.MANIFEST:
            return frozenset(joined | {"train"})
        case Guard.FSYNC:
            return frozenset({"gateway"})
        case Guard.FENCE:
            return frozenset({"gateway", "turns", "project"})
        case Guard.BUFFERS:
            return frozenset({"gateway", "turns", "judging"})
