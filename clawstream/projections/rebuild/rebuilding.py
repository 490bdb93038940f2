"""`clawstream projection rebuild`: makes every table again from the log, beside the tables in use, then swaps them.

Readers and the projector go on meanwhile; the table names that they use stay. At the swap the projector is held until
the new tables hold as much of the log as the old ones. Then it goes on with the new ones; readers wait a moment. Where
the log and the recorded offsets contradict each other nothing is changed, unless a person says that the log is right.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from clawstream.errors import OperatorError, TryLater
from clawstream.projections import database
from clawstream.projections.rebuild import schemas
from clawstream.projections.rebuild.schemas import BUILDING, fence, overrule
from clawstream.projections.tables import TOPICS
from clawstream.projections.write.progress import (
    LeftOut,
    PartitionProgress,
    left_out,
    partition_progress,
    refuse_another_log,
)
from clawstream.projections.write.projector import in_batches, partition_rows
from clawstream.projections.write.rows import Release, TableRow, UnusableRecords, rows_of
from clawstream.projections.write.writer import PartitionClaim, TableWriter
from clawstream.stream.log import Arrived, Log, PartitionId, Undecodable, past_the_end

T = TypeVar("T")

Tell = Callable[[str, int, int], None]  # (what is being done, how much is done, of how much)
_BUILD_LOCK = 0x636C6178  # an arbitrary lock number that no other program on this database uses
HELD_RECORDS = 2000  # at most this many are read while the projector is held, unless it reads as fast as the rebuild
SWAP_TRIES = 600
SWAP_AGAIN_S = 0.5
_IN_USE = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected)


@asynccontextmanager
async def on_a_thread(blocking: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave, on another thread, a context that blocks."""
    value = await asyncio.to_thread(blocking.__enter__)
    try:
        yield value
    except BaseException as error:
        if not await asyncio.to_thread(blocking.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(blocking.__exit__, None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """The result of a rebuild."""

    records: int
    records_set_aside: int  # set aside by the projector, so without a row
    records_unread: int  # others that can't be decoded and have no row
    seconds: Mapping[str, float]  # by phase
    kept_schema: str | None  # the schema of the old tables; None: they are dropped
    kept_because: str | None
    overruled: Sequence[str]  # partitions whose recorded offsets were replaced; the table `overruled` keeps the old
    fenced: Sequence[str]  # partitions that a running projector has to claim again, which it does by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """How far the projector has read, and which of those records have no row, as they are set aside."""

    progress_of: Mapping[PartitionId, PartitionProgress]
    left_out: LeftOut


async def rebuild(
    url: str, log: Log, *, keep: bool, forget_expired: bool, trust_log: bool = False, tell: Tell
) -> Rebuilt:
    """Make the tables again and swap them in; without `keep` the old ones are dropped.

    Raises OperatorError, with the tables as they were, where another rebuild runs, where the log has lost records that
    the tables may have and `forget_expired` is not set, or where the log is not the one that was projected. With
    `trust_log` the last is no error: the new tables follow the log as it is, the old ones are kept, and their recorded
    offsets are noted.
    """
    engine = database.connect(url, application="clawstream rebuild")
    building = database.connect(url, application="clawstream rebuild", schema=BUILDING)
    try:
        async with on_a_thread(_alone(engine)) as lock:
            build = _Build(lock, engine, building, log, tell, trust_log=trust_log)
            with build.phase("preparing"):
                await build.begin(forget_expired=forget_expired)
                await asyncio.to_thread(schemas.make_building, engine)
                await asyncio.to_thread(database.upgrade, url, schema=BUILDING)
            with build.phase("reading"):
                await build.fill()
            with build.phase("catching_up"):
                await build.catch_up()
            with build.phase("swapping"):
                old = f"clawstream_before_{datetime.now(UTC):%Y%m%d_%H%M%S_%f}"
                await build.swap_in(old)
                because = "--keep" if keep else "--trust-log" if trust_log else None
                because = because or await asyncio.to_thread(schemas.dropped, engine, old)
            return Rebuilt(
                records=build.records,
                records_set_aside=build.num_left_out,
                records_unread=build.num_unread,
                seconds=build.seconds,
                kept_schema=old if because else None,
                kept_because=because,
                overruled=[f"{place.topic}-{place.partition}" for place in build.overruled],
                fenced=[f"{place.topic}-{place.partition}" for place in build.fenced],
            )
    except OperationalError as error:
        raise database.unreachable(engine, error) from error
    except (psycopg.Error, TryLater, UnusableRecords) as error:
        raise OperatorError(f"the tables could not be rebuilt: {error}. They are as they were") from error
    finally:
        building.dispose()
        engine.dispose()


@contextmanager
def _alone(engine: Engine) -> Iterator[psycopg.Cursor]:
    """Be the only rebuild of the database until the block ends, or the session of the cursor does."""
    database.check(engine)
    with schemas.session(engine) as cursor:
        if cursor.execute("SELECT pg_try_advisory_lock(%s)", (_BUILD_LOCK,)).fetchone() != (True,):
            raise OperatorError("another rebuild of this database runs; nothing was changed. Wait for it, or stop it")
        try:
            yield cursor
        finally:
            # Postgres may notice only later that a session was closed; one that it has ended itself has no lock.
            with suppress(psycopg.Error):
                cursor.execute("SELECT pg_advisory_unlock(%s)", (_BUILD_LOCK,))


class _Build:
    """The tables that are being built in a schema of their own, and how far each partition was read into them."""

    def __init__(
        self, lock: psycopg.Cursor, engine: Engine, building: Engine, log: Log, tell: Tell, *, trust_log: bool
    ) -> None:
        self._lock = lock
        self._engine = engine
        self._writer = TableWriter(building)
        self._building = building
        self._log = log
        self._tell = tell
        self._claims: dict[PartitionId, PartitionClaim] = {}
        self._trust_log = trust_log
        self._begins: Mapping[PartitionId, int] = {}
        self._cut: dict[PartitionId, int] = {}  # the log's end, of partitions whose recorded offset lies beyond it
        self._left_out: LeftOut = {}
        self.records = 0
        self.num_unread = 0
        self.overruled: Sequence[PartitionId] = ()
        self.fenced: Sequence[PartitionId] = ()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note how many seconds the block takes."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begun, 2)

    @property
    def num_left_out(self) -> int:
        """How many records have no row, as they are set aside."""
        return sum(map(len, self._left_out.values()))

    def recorded(self) -> Recorded:
        """Return how far the projector has read by now; this call blocks."""
        with schemas.session(self._engine) as cursor:
            return _without(_recorded(cursor), self._cut)

    async def begin(self, *, forget_expired: bool) -> None:
        """Raise where the tables can't be made from this log."""
        recorded = await asyncio.to_thread(self.recorded)
        ends, self._begins = await asyncio.gather(self._log.end_offsets(TOPICS), self._log.begin_offsets(TOPICS))
        offsets = {place: progress.next_offset for place, progress in recorded.progress_of.items()}
        if not self._trust_log:
            refuse_another_log(offsets, ends)
        self._cut = {place: ends.get(place, 0) for place in past_the_end(offsets, ends)}
        lost = [place for place in offsets if self._begins[place] > 0]
        if lost and not forget_expired:
            first = lost[0]
            raise OperatorError(
                f"the log begins at offset {self._begins[first]} of {first.topic} partition {first.partition}, and the "
                "tables may have rows of records before it, which a rebuild would lose. Nothing was changed; "
                f"`clawstream projection rebuild --forget-expired{' --trust-log' if self._trust_log else ''}` rebuilds "
                "without them"
            )

    async def fill(self) -> None:
        """Fill the empty tables with all records that the projector has read by now."""
        recorded = await asyncio.to_thread(self.recorded)
        await self._read_to(recorded, self.left(recorded), "reading the log")
        await asyncio.to_thread(schemas.analyze, self._building)

    async def catch_up(self) -> None:
        """Read on until few records are left that the projector has read, or until it reads as fast as this rebuild."""
        before = None
        recorded = await asyncio.to_thread(self.recorded)
        await self._use_released(recorded.left_out)
        while (left := self.left(recorded)) > HELD_RECORDS and (before is None or left < before):
            await self._read_to(recorded, left)
            before, recorded = left, await asyncio.to_thread(self.recorded)

    async def swap_in(self, old: str) -> None:
        """Put the new tables in the place of the old ones, and move those to the schema `old`."""
        for _ in range(SWAP_TRIES):
            try:
                async with on_a_thread(schemas.projector_held(self._engine)) as cursor:
                    found = await asyncio.to_thread(_recorded, cursor)
                    recorded = _without(found, self._cut)
                    await self._read_to(recorded, self.left(recorded))
                    self._find_contradictions(found.progress_of)
                    await asyncio.to_thread(self._lock.execute, "SELECT 1")  # raises if the lock's session has ended
                    await asyncio.to_thread(schemas.swap, cursor, old)
                    wrong = {place: found.progress_of[place] for place in self.overruled}
                    await asyncio.to_thread(overrule, cursor, wrong, self._claims, old)
                    await asyncio.to_thread(fence, cursor, self.fenced)
                    return
            except _IN_USE:
                self._tell("waiting for a long query to end, to swap", 0, 0)
                await asyncio.sleep(SWAP_AGAIN_S)
            await self.catch_up()
        raise OperatorError(
            f"queries kept the tables in use: {SWAP_TRIES} tries to swap them failed. They are as they were. End the "
            "long queries, which pg_stat_activity shows, and rebuild again"
        )

    def left(self, recorded: Recorded) -> int:
        """Return how many of these records are not in the tables yet."""
        return sum(max(0, end - start) for start, end in self._ranges(recorded).values())

    def _ranges(self, recorded: Recorded) -> dict[PartitionId, tuple[int, int]]:
        read = {place: claim.next_offset for place, claim in self._claims.items()}
        return {
            place: (max(self._begins[place], read.get(place, 0)), progress.next_offset)
            for place, progress in recorded.progress_of.items()
        }

    async def _read_to(self, recorded: Recorded, left: int, doing: str = "catching up") -> None:
        new = [place for place in recorded.progress_of if place not in self._claims]
        if new:
            self._claims |= await asyncio.to_thread(self._writer.claim, new)
        # First, so that each key's rows are made in order: the projector used these before later records of the key.
        await self._use_released(recorded.left_out)
        if not left:
            return
        ranges = {place: range_ for place, range_ in self._ranges(recorded).items() if range_[0] < range_[1]}
        done = 0
        async with aclosing(self._log.replay(ranges)) as arriving:
            async for records in arriving:
                await asyncio.to_thread(self._take, records)
                done += len(records)
                self._tell(doing, done, left)
        self.records += done

    async def _use_released(self, left_out: LeftOut) -> None:
        """Make the rows of records that are not left out any more; from now on the new `left_out` counts."""
        before, self._left_out = self._left_out, left_out
        for place, offsets in before.items():
            wanted = offsets - left_out.get(place, frozenset())
            if not wanted:
                continue
            async with aclosing(self._log.replay({place: (min(wanted), max(wanted) + 1)})) as arriving:
                async for records in arriving:
                    rows = rows_of(record for record in records if record.offset in wanted)
                    await asyncio.to_thread(self._put, place, rows)

    def _put(self, place: PartitionId, rows: Sequence[TableRow]) -> None:
        if not self._writer.release(place, self._claims[place], Release(rows=rows)):
            raise _another_writer()

    def _take(self, records: Sequence[Arrived]) -> None:
        parts = []
        for batch in in_batches(records):
            left_out = self._left_out.get(batch.place, frozenset())
            unread = {record.offset for record in batch.records if isinstance(record, Undecodable)} - left_out
            self.num_unread += len(unread)  # the projector has logged a warning for each
            parts.append(partition_rows(batch, self._claims[batch.place], left_out | unread))
        if self._writer.write(parts):
            raise _another_writer()
        for part in parts:
            self._claims[part.place] = replace(part.claim, next_offset=part.next_offset, chain=part.chain)

    def _find_contradictions(self, found: Mapping[PartitionId, PartitionProgress]) -> None:
        """Find partitions that contradict the log, and those to be claimed again; or raise, unless the log is trusted.

        Chains are compared only where log and chain begin at offset 0.
        """
        other = [place for place, progress in found.items() if self._is_other(place, progress)]
        if other and not self._trust_log:
            first = other[0]
            raise OperatorError(
                f"the log of {first.topic} partition {first.partition} is not the one that was projected: their "
                "hash chains differ. The tables are as they were; `clawstream audit verify` names the records. Where "
                "the log is right, `clawstream projection rebuild --trust-log` makes new tables and chains from it, "
                "keeps the old tables and notes their recorded offsets"
            )
        self.overruled = sorted({*other, *self._cut})
        changed = [place for place, claim in self._claims.items() if claim.chain != found[place].chain]
        self.fenced = sorted({*changed, *self.overruled})

    def _is_other(self, place: PartitionId, progress: PartitionProgress) -> bool:
        whole = progress.chain_from == self._begins[place] == 0
        return whole and progress.chain != self._claims[place].chain


def _recorded(cursor: psycopg.Cursor) -> Recorded:
    # Offsets first: of the records before them, none is set aside later, and some may be released.
    return Recorded(progress_of=partition_progress(cursor), left_out=left_out(cursor))


def _without(recorded: Recorded, cut: Mapping[PartitionId, int]) -> Recorded:
    """Return the part of `recorded` that the log still has, which ends where `cut` says."""
    progress_of, left_out = dict(recorded.progress_of), dict(recorded.left_out)
    for place, end in cut.items():
        progress_of[place] = replace(progress_of[place], next_offset=end)
        left_out[place] = frozenset(offset for offset in left_out.get(place, ()) if offset < end)
    return Recorded(progress_of=progress_of, left_out=left_out)


def _another_writer() -> OperatorError:
    return OperatorError(f"somebody else writes to the schema {BUILDING}; the tables are as they were")
