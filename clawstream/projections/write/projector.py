"""Owns partitions of the log and puts the records read from them into the tables.

No record that was read is dropped: a batch that the database did not take is tried again until it is taken, or until
the partition has another owner, who starts where the tables end. After a rebuild the owner may be this projector again.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from clawstream.errors import OperatorError
from clawstream.projections.write.chain import Link, blocks, seed
from clawstream.projections.write.rows import Release, rows_of
from clawstream.projections.write.writer import PartitionClaim, PartitionRows, TableWriter
from clawstream.stream.dead_letters import DeadLetter
from clawstream.stream.log import Arrived, PartitionId, RecordBatch, Undecodable, digest_in
from clawstream.stream.runner.calling import until_done

T = TypeVar("T")

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0
LOST_GRACE_S = 60.0  # within this time a rebalance of the group tells a member which partitions it lost

_NOTHING: Mapping[PartitionId, Sequence[DeadLetter]] = MappingProxyType({})
_log = logging.getLogger(__name__)


class Projector:
    """The partitions that are ours, and the writer. One task uses it. It waits for the database until `stop` is set."""

    def __init__(self, writer: TableWriter, stop: asyncio.Event, *, lost_grace_s: float = LOST_GRACE_S) -> None:
        self._writer = writer
        self._stop = stop
        self._lost_grace_s = lost_grace_s
        self._claims: dict[PartitionId, PartitionClaim] = {}
        self._lost_at_s: dict[PartitionId, float] = {}
        # True: a rebuild has rewritten the recorded offsets of partitions of ours, so `leave` and claim them again.
        self.overtaken = False

    async def claim(self, places: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """Claim these partitions; return where each is to be read from. Raises TryLater only once `stop` is set."""
        claims = await self._until_taken(partial(self._writer.claim, list(places)))
        self.release(claims)
        self._claims |= claims
        return {place: claim.next_offset for place, claim in claims.items()}

    def release(self, places: Iterable[PartitionId]) -> None:
        """Give these partitions up. The next owner reads the records that were read here but not written."""
        for place in places:
            self._claims.pop(place, None)
            self._lost_at_s.pop(place, None)

    def leave(self) -> None:
        """Give all partitions up. The next owner, which may be this projector, reads again what was not written."""
        self._claims.clear()
        self._lost_at_s.clear()
        self.overtaken = False

    def positions(self) -> dict[PartitionId, int]:
        """Return, for each partition that is ours, the first offset that the tables lack."""
        return {place: claim.next_offset for place, claim in self._claims.items()}

    def missing(self, batches: Iterable[RecordBatch]) -> list[RecordBatch]:
        """Return the batches of our partitions, with only the records that the tables lack."""
        ours = [(batch, self._claims[batch.place].next_offset) for batch in batches if batch.place in self._claims]
        return [
            replace(batch, records=[record for record in batch.records if record.offset >= start])
            for batch, start in ours
            if batch.next_offset > start
        ]

    async def take(
        self, batches: Sequence[RecordBatch], set_aside: Mapping[PartitionId, Sequence[DeadLetter]] = _NOTHING
    ) -> None:
        """Put the batches' records of our partitions into the tables, and `set_aside` into the progress tables.

        Raises TryLater only once `stop` is set, UnusableRecords as `TableWriter.write` does, and OperatorError where
        somebody else keeps writing a partition that the group says is ours.
        """
        self._refuse_rivals(batch.place for batch in batches)
        parts = await asyncio.to_thread(_rows_to_write, self.missing(batches), dict(self._claims), set_aside)
        while parts:
            lost = await self._until_taken(partial(self._writer.write, parts))
            if not lost:
                break
            await self._lose({part.place: part.claim for part in parts if part.place in lost})
            parts = [part for part in parts if part.place not in lost]
        for part in parts:
            if self._claims.get(part.place) == part.claim:
                self._claims[part.place] = replace(part.claim, next_offset=part.next_offset, chain=part.chain)

    async def waiting(self) -> list[DeadLetter]:
        """Return the dead letters that wait according to the tables. Raises TryLater only once `stop` is set."""
        return await self._until_taken(self._writer.waiting)

    async def use(self, place: PartitionId, release: Release) -> bool:
        """Write the outcome for dead letters of the partition; False: it is not ours. Raises what `take` raises."""
        claim = self._claims.get(place)
        if claim is None:
            return False
        ours = await self._until_taken(partial(self._writer.release, place, claim, release))
        if not ours:
            await self._lose({place: claim})
        return ours

    async def _lose(self, claims: Mapping[PartitionId, PartitionClaim]) -> None:
        overtaken = await self._until_taken(partial(self._writer.overtaken, claims))
        for place, claim in claims.items():
            if self._claims.get(place) != claim:
                continue
            del self._claims[place]
            if place in overtaken:
                self.overtaken = True
                _log.warning("partition=%s-%s state=lost reason=made_again_by_a_rebuild", *place)
            else:
                self._lost_at_s[place] = time.monotonic()
                _log.warning("partition=%s-%s state=lost reason=claimed_by_another_projector", *place)

    def _refuse_rivals(self, places: Iterable[PartitionId]) -> None:
        for place in places:
            since_s = self._lost_at_s.get(place)
            if since_s is not None and time.monotonic() - since_s > self._lost_grace_s:
                raise OperatorError(
                    f"{place.topic} partition {place.partition} of this database was claimed by another projector that "
                    "is not of our consumer group. This one stops: stop the other, or give each a database of its own"
                )

    async def _until_taken(self, work: Callable[[], T]) -> T:
        return await until_done(
            lambda: asyncio.to_thread(work), "state=waiting_for_database",
            retry_s=FIRST_WAIT_S, longest_s=LONGEST_WAIT_S, stop=self._stop,
        )  # fmt: skip


def _rows_to_write(
    batches: Sequence[RecordBatch],
    claims: Mapping[PartitionId, PartitionClaim],
    set_aside: Mapping[PartitionId, Sequence[DeadLetter]],
) -> list[PartitionRows]:
    """Return what is to be written; run it on a thread, as it takes a while."""
    parts = []
    for batch in batches:
        dead_letters = set_aside.get(batch.place, ())
        part = partition_rows(batch, claims[batch.place], {dead_letter.id.offset for dead_letter in dead_letters})
        parts.append(replace(part, set_aside=dead_letters))
    return parts


def in_batches(records: Iterable[Arrived]) -> list[RecordBatch]:
    """Return the records as one batch per partition."""
    placed: defaultdict[PartitionId, list[Arrived]] = defaultdict(list)
    for record in records:
        placed[PartitionId(record.topic, record.partition)].append(record)
    return [batch_of(place, some) for place, some in placed.items()]


def batch_of(place: PartitionId, records: Sequence[Arrived]) -> RecordBatch:
    """Return the partition's records as a batch."""
    return RecordBatch(place=place, records=records, next_offset=records[-1].offset + 1)


def partition_rows(batch: RecordBatch, claim: PartitionClaim, left_out: Container[int] = ()) -> PartitionRows:
    """Return what the tables lack of the batch, without rows for the records whose offsets are in `left_out`.

    Raises UnusableRecords where a record can't become a row.
    """
    records = [record for record in batch.records if record.offset >= claim.next_offset]
    for record in records:
        if isinstance(record, Undecodable) and record.offset not in left_out:
            _log.warning("record=%s-%s-%s state=skipped reason=%r", *batch.place, record.offset, record.reason)
    return PartitionRows(
        place=batch.place,
        claim=claim,
        next_offset=batch.next_offset,
        rows=rows_of(record for record in records if record.offset not in left_out),
        blocks=blocks(claim.chain or seed(batch.place), map(link_of, records)),
        first_offset=records[0].offset if records else None,
    )


def link_of(record: Arrived) -> Link:
    """Return the record's link for the chain, made of its offset and its bytes, whether or not they can be decoded."""
    digest = digest_in(record)
    assert digest is not None, "the record was read from a log"
    return Link(record.offset, digest)
