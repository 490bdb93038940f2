"""The guards that the rig can take out of a process.

No production code knows of this: a guard is taken out, or watched, by replacing it in the process that is under test.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class Guard(StrEnum):
    """What keeps a promise."""

    COMMIT_LATE = "commit-early"  # the removal's name, as `--break` has it
    DEDUPE = "skip-dedupe"
    FSYNC = "ack-before-fsync"
    MANIFEST = "train-without-manifest"
    FENCE = "drop-fence"
    BUFFERS = "keep-buffers"  # on revoke


HOLDS = "rig: rows wait for the database"
WROTE = "rig: rows are written"
FENCED = "rig: rows came to be written where another had claimed the partition"
_SLOW_FSYNC_S = 1.0
_UNFENCED = "UPDATE offsets SET next_offset = %s, chain = %s WHERE topic = %s AND partition = %s"


def watch(stage: str) -> None:
    """Have a projector say `HOLDS`, `WROTE` and, when it comes to the fence, whether that holds or not, `FENCED`."""
    if stage != "project":
        return
    from clawstream.errors import TryLater
    from clawstream.projections.write import writer

    def write(self: Any, batch: Any, own: Any = writer.TableWriter.write) -> Any:
        try:
            lost = own(self, batch)
        except TryLater:
            print(HOLDS, file=sys.stderr, flush=True)
            raise
        if not lost:
            print(WROTE, file=sys.stderr, flush=True)
        return lost

    def advance(cursor: Any, part: Any, own: Any = writer._advance) -> Any:
        state = own(cursor, part)
        if state is writer._WriteState.LOST:
            print(FENCED, file=sys.stderr, flush=True)
        return state

    writer.TableWriter.write = write  # type: ignore[method-assign]
    writer._advance = advance


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
            _write_unfenced()
        case Guard.BUFFERS, "turns" | "judging" | "samples":
            _go_on_where_we_were()


def _commit_what_was_read() -> None:
    from clawstream.stream.runner.fold import Watermark

    def all_that_was_read(self: Watermark) -> int:
        return self.next_offset

    Watermark.committable = property(all_that_was_read)  # type: ignore[assignment]


def _take_samples_again() -> None:
    from clawstream.training.batches.choosing import Arrival
    from clawstream.training.batches.planning import Batcher, DropReason

    def receive(self: Batcher, arrival: Arrival, own: Any = Batcher.receive) -> DropReason | None:
        self._taken.discard(arrival.sample.sample_id)
        self._turns.pop(arrival.sample.turn_id, None)
        found: DropReason | None = own(self, arrival)
        return found

    Batcher.receive = receive  # type: ignore[method-assign]


def _acknowledge_before_fsync() -> None:
    from clawstream.gateway.outbox.delivery import Delivery
    from clawstream.gateway.outbox.spool import Spool
    from clawstream.stream.log import Sealed

    spooling: set[asyncio.Task[None]] = set()
    into_spool, append = Delivery._into_spool, Spool.append

    async def at_once(self: Delivery, records: Sequence[Sealed]) -> None:
        task = asyncio.create_task(into_spool(self, records))
        spooling.add(task)
        await asyncio.sleep(0)  # its place is taken

    def slowly(self: Spool, frames: Sequence[bytes]) -> list[int | None]:
        time.sleep(_SLOW_FSYNC_S)  # on the disk's thread
        return append(self, frames)

    Delivery._into_spool = at_once  # type: ignore[method-assign]
    Spool.append = slowly  # type: ignore[method-assign]


def _forget_plans() -> None:
    from clawstream.events import BatchPlanned, PolicyEvent
    from clawstream.training.batches.progress import PolicyProgress

    learn = PolicyProgress.learn

    def without_plans(self: PolicyProgress, event: PolicyEvent) -> None:
        if not isinstance(event, BatchPlanned):
            learn(self, event)

    PolicyProgress.learn = without_plans  # type: ignore[method-assign]


def _write_unfenced() -> None:
    from clawstream.projections.write import writer

    def advance(cursor: Any, part: Any, own: Any = writer._advance) -> Any:
        state = own(cursor, part)
        if state is not writer._WriteState.LOST:
            return state
        cursor.execute(_UNFENCED, (part.next_offset, part.chain, *part.place))
        return writer._WriteState.ADVANCED

    writer._advance = advance
    writer._COMMITTED += "ON CONFLICT DO NOTHING"  # its key is a second lock on the same door


def _go_on_where_we_were() -> None:
    from clawstream.stream.log import Commit, PartitionId
    from clawstream.stream.runner.hosting import _Worker

    assign = _Worker.assigned

    async def revoked(_self: Any, _places: frozenset[PartitionId]) -> None:
        return

    async def assigned(self: Any, committed: Mapping[PartitionId, Commit | None]) -> Mapping[PartitionId, int]:
        kept = dict(self._partitions)
        starts = dict(await assign(self, committed))
        for number in kept.keys() & self._partitions.keys():
            partition = kept[number]
            self._partitions[number].end()
            self._partitions[number] = partition
            self.member.resume(partition.places)
            starts |= {place: max(starts[place], partition.read_up_to(place)) for place in partition.places}
        return starts

    _Worker.revoked = revoked  # type: ignore[method-assign, assignment]
    _Worker.assigned = assigned  # type: ignore[method-assign]
