"""The projector's process: a member of a consumer group whose offsets are kept in Postgres, beside the rows.

The tables say where to read on; the group's offsets are only for people who look at its lag. A record that can't be
used is in its dead-letter queue before the tables' offset moves past it, and later records of its key wait there behind
it (see quarantine.py). Too many such records stop the projector, as they stop any stage.
"""

import asyncio
import logging
from collections.abc import Mapping

from clawstream.errors import TryLater
from clawstream.projections import database
from clawstream.projections.tables import TOPICS
from clawstream.projections.write.progress import refuse_another_log
from clawstream.projections.write.projector import Projector, batch_of
from clawstream.projections.write.quarantine import ProjectionQuarantine
from clawstream.projections.write.rows import GROUP
from clawstream.projections.write.writer import TableWriter
from clawstream.stream.log import Commit, Log, Member, PartitionId
from clawstream.stream.runner.breaker import FailureRate, flooded
from clawstream.stream.runner.calling import wait_at_most

POLL_S = 0.2
POLL_RECORDS = 1000
NOTE_EVERY_S = 0.5
RETRY_S = 0.5

_log = logging.getLogger(__name__)


async def project(url: str, log: Log, *, stop: asyncio.Event, instance_id: str | None = None) -> None:
    """Keep the tables at `url` up to date with the log until `stop`; wait where the database or the broker goes away.

    Where a rebuild has rewritten the recorded offsets of our partitions, this leaves the group, joins it again and goes
    on from the new ones. A projector that comes back under its `instance_id` gets its partitions back at once. Raises
    DatabaseMismatch for a database of another revision, or one that has read beyond this log's end.
    """
    engine = database.connect(url, application="clawstream project")
    projector = Projector(TableWriter(engine), stop)
    failures = FailureRate(asyncio.get_running_loop().time)
    assignment = _ProjectorAssignment(projector, log, stop, failures)
    try:
        await asyncio.to_thread(database.check, engine)
        while not stop.is_set():
            try:
                async with log.join(GROUP, TOPICS, assignment, instance_id=instance_id) as member:
                    await _follow(member, projector, assignment, stop, failures)
            except TryLater as error:
                # The broker never gives partitions to a member whose assignment failed once, but to a new member.
                _log.warning("state=waiting_for_kafka reason=%r", str(error))
                await wait_at_most(stop, RETRY_S)
            assignment.end()
            projector.leave()
    finally:
        assignment.end()
        engine.dispose()


async def _follow(
    member: Member, projector: Projector, assignment: "_ProjectorAssignment", stop: asyncio.Event, failures: FailureRate
) -> None:
    """Return once `stop` is set, or when partitions have to be claimed again.

    Raises TryLater where the broker refuses to let this member read or to give it partitions.
    """
    noted: dict[PartitionId, int] = {}
    noted_at_s = 0.0
    clock = asyncio.get_running_loop().time
    while not (stop.is_set() or projector.overtaken):
        found = await member.poll(max_records=POLL_RECORDS, timeout_s=POLL_S)
        if found:
            for _ in range(sum(map(len, found.values()))):
                failures.read()
            if assignment.quarantine is not None:
                await assignment.quarantine.take([batch_of(place, records) for place, records in found.items()])
            too_many = failures.too_many()
            if too_many is not None:
                await _note(member, projector.positions(), noted)
                raise flooded(GROUP, *too_many)
        if assignment.quarantine is not None:
            await assignment.quarantine.release()
        if not found or clock() - noted_at_s > NOTE_EVERY_S:
            noted = await _note(member, projector.positions(), noted)
            noted_at_s = clock()


async def _note(
    member: Member, positions: dict[PartitionId, int], noted: dict[PartitionId, int]
) -> dict[PartitionId, int]:
    """Commit those of `positions` that changed; return what the group has now."""
    changed = {place: Commit(offset) for place, offset in positions.items() if noted.get(place) != offset}
    if not changed:
        return noted
    try:
        await member.commit(changed)
    except TryLater as error:
        _log.warning("state=lag_not_noted reason=%r", str(error))
        return noted
    return positions


class _ProjectorAssignment:
    """Tells the projector which partitions are ours."""

    def __init__(self, projector: Projector, log: Log, stop: asyncio.Event, failures: FailureRate) -> None:
        self._projector = projector
        self._log = log
        self._stop = stop
        self._failures = failures
        self.quarantine: ProjectionQuarantine | None = None  # None: no partition is ours

    async def assigned(self, committed: Mapping[PartitionId, Commit | None]) -> Mapping[PartitionId, int]:
        """Start where the tables end, or where the log begins if retention has deleted records that they lack."""
        self.end()
        begins = await self._log.begin_offsets(TOPICS)
        claimed = await self._projector.claim(committed)
        # Asked after the claim: that waits while the database is away, and another projector may write meanwhile.
        ends = await self._log.end_offsets(TOPICS)
        refuse_another_log(claimed, ends)
        waiting = await self._projector.waiting()
        self.quarantine = ProjectionQuarantine(self._projector, self._log, self._stop, self._failures, waiting)
        for place, offset in claimed.items():
            if offset < begins[place]:
                _log.warning("partition=%s-%s state=gap from=%d to=%d reason=retention", *place, offset, begins[place])
        return {place: max(offset, begins[place]) for place, offset in claimed.items()}

    async def revoked(self, places: frozenset[PartitionId]) -> None:
        """Give the partitions up; a write that is under way changes nothing if another projector claims them first."""
        self.end()
        self._projector.release(places)

    def end(self) -> None:
        """Decide nothing more about records that are set aside: the partitions are being reassigned."""
        if self.quarantine is not None:
            self.quarantine.end()
        self.quarantine = None
