"""`clawstream audit verify`: checks that the tables say what the log says, as far as the projector has read it."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from hashlib import blake2b

from clawstream.errors import OperatorError
from clawstream.projections.rebuild.comparing import COMPARED, Difference, Scratch, scratch
from clawstream.projections.rebuild.rebuilding import Tell, on_a_thread
from clawstream.projections.rebuild.schemas import Overruled, overruled_of
from clawstream.projections.tables import TOPICS
from clawstream.projections.write.chain import Break, ChainCheck, Link, chain_check
from clawstream.projections.write.progress import (
    PartitionProgress,
    blocks_of,
    left_out,
    partition_progress,
    refuse_another_log,
)
from clawstream.projections.write.rows import UnusableRecords, indexable, rows_of
from clawstream.stream.avro import codec
from clawstream.stream.log import Log, PartitionId, Raw, Undecodable, arrived, digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How many keys are compared, and the seed that chooses them."""

    keys: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was compared, and what is wrong."""

    records: int  # read from the log
    records_chained: int  # compared with the chain; others came before the chain, or before its first whole block
    records_set_aside: int  # set aside by the projector, so without a row; they are not compared
    records_unread: int | None  # others that can't be decoded and have no row; None: not counted, as with a sample
    unchained: Mapping[PartitionId, int]  # partitions without a chain, and how many records of each were read
    breaks: Sequence[Break]
    rows: int  # rows made from the log and compared
    rows_differ: int
    differences: Sequence[Difference]  # the first differences of each table
    expired: Mapping[PartitionId, int]  # partitions whose beginning the log has lost, and the first offset it has
    keys: int | None  # how many keys were compared; None: all
    answers_without_outcome: int  # neither paired nor orphaned, though a later answer or a day of silence followed
    without_outcome: Sequence[str]  # the ids of the first of these
    overruled: Sequence[Overruled]  # recorded offsets that a rebuild overruled as a person asked, the oldest first

    @property
    def chain_ok(self) -> bool | None:
        """Whether every record that was compared is the one that was projected; None: none could be compared."""
        if self.breaks:
            return False
        return None if self.records and not self.records_chained else True

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and every projected partition has a chain."""
        return not self.breaks and not self.unchained and self.rows_differ == 0

    @property
    def verdict(self) -> str:
        """What is wrong and what to do about it, for people; only where `ok` is false."""
        wrong = [f"{len(self.breaks)} breaks of the hash chain"] if self.breaks else []
        wrong += [f"{self.rows_differ} rows differ"] if self.rows_differ else []
        if wrong:
            trust = " --trust-log" if self.breaks else ""
            kept = " and keeps the old ones" if self.breaks else ""
            return (
                f"the database does not say what the log says: {', '.join(wrong)}. Nothing was changed. Find out first "
                "who changed the database or the log. Then, if the log is right, `clawstream projection "
                f"rebuild{trust}` makes the tables again{kept}"
            )
        return (
            f"{sum(self.unchained.values())} records in {len(self.unchained)} partitions stand in no hash chain, so "
            "nobody can say that they are those that were projected: the tables are older than the chain, or somebody "
            "removed it. The rows are as the log says. `clawstream projection rebuild` chains every record"
        )

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        return asdict(self) | {
            "unchained": {f"{place.topic}-{place.partition}": number for place, number in self.unchained.items()},
            "chain_ok": self.chain_ok,
            "breaks": [asdict(one) | {"place": f"{one.place.topic}-{one.place.partition}"} for one in self.breaks],
            "expired": {f"{place.topic}-{place.partition}": offset for place, offset in self.expired.items()},
            "overruled": [one.as_dict() for one in self.overruled],
        }


async def verify(url: str, log: Log, *, sample: Sample | None, tell: Tell) -> Audit:
    """Compare chain and rows with the log up to the recorded offsets; the database is left as it was.

    With `sample` the whole chain is compared, but only the rows of some keys. Raises DatabaseMismatch where the
    database belongs to another log or revision, OperatorError where a record can't become a row.
    """
    try:
        async with on_a_thread(scratch(url)) as beside:
            return await _verify(beside, log, sample, tell)
    except UnusableRecords as error:
        raise OperatorError(f"no row can be made of some records of the log: {error}. Nothing was changed") from error


async def _verify(beside: Scratch, log: Log, sample: Sample | None, tell: Tell) -> Audit:
    begins = await log.begin_offsets(TOPICS)
    ends = await log.end_offsets(TOPICS)
    reading = await asyncio.to_thread(_LogReading, beside, begins, ends, sample)
    ranges = {place: (begins[place], progress.next_offset) for place, progress in reading.progress_of.items()}
    total = sum(max(0, end - begin) for begin, end in ranges.values())
    async with aclosing(log.replay_raw(ranges)) as arriving:
        async for raws in arriving:
            await asyncio.to_thread(reading.take, raws)
            tell("reading the log", reading.num_read.total(), total)
    await asyncio.to_thread(reading.finish)
    differences: list[Difference] = []
    rows = rows_differ = 0
    for number, table in enumerate(COMPARED):
        tell(f"comparing {table.name}", number, len(COMPARED))
        found = await asyncio.to_thread(beside.compare, table, reading.chosen)
        differences += found.named
        rows += found.num_rows
        rows_differ += found.num_different
    tell("done", len(COMPARED), len(COMPARED))
    return Audit(
        records=reading.num_read.total(),
        records_chained=sum(check.num_records for check in reading.checks.values()),
        records_set_aside=sum(map(len, reading.left_out.values())),
        records_unread=reading.num_unread if sample is None else None,
        unchained={
            place: number for place, number in reading.num_read.items() if reading.progress_of[place].chain is None
        },
        breaks=[one for check in reading.checks.values() for one in check.breaks],
        rows=rows,
        rows_differ=rows_differ,
        differences=differences,
        expired={place: begin for place, begin in begins.items() if begin > 0},
        keys=None if reading.chosen is None else len(reading.chosen),
        answers_without_outcome=reading.num_without_outcome,
        without_outcome=reading.without_outcome,
        overruled=reading.overruled,
    )


class _LogReading:
    """The state while the log is read; its methods block."""

    def __init__(
        self, beside: Scratch, begins: Mapping[PartitionId, int], ends: Mapping[PartitionId, int], sample: Sample | None
    ) -> None:
        self._beside = beside
        self.progress_of: dict[PartitionId, PartitionProgress] = partition_progress(beside.cursor)
        refuse_another_log({place: progress.next_offset for place, progress in self.progress_of.items()}, ends)
        recorded = blocks_of(beside.cursor)
        self.checks: dict[PartitionId, ChainCheck] = {
            place: chain_check(place, recorded.get(place, ()), chain_from=progress.chain_from, log_begin=begins[place])
            for place, progress in self.progress_of.items()
        }
        self.left_out = left_out(beside.cursor)
        self.overruled = overruled_of(beside.cursor)
        self.num_without_outcome, self.without_outcome = beside.without_outcome()
        self.num_read: Counter[PartitionId] = Counter()
        self.num_unread = 0
        self._choice = None if sample is None else _Choice(sample, beside.keys())
        beside.begin({place: begin for place, begin in begins.items() if begin > 0})

    @property
    def chosen(self) -> set[str] | None:
        """The keys whose rows are compared; None: all."""
        return None if self._choice is None else self._choice.keys

    def take(self, raws: Sequence[Raw]) -> None:
        """Take the next records; those of chosen keys wait for the rest."""
        for raw in raws:
            place = PartitionId(raw.topic, raw.partition)
            self.num_read[place] += 1
            self.checks[place].tell([Link(raw.offset, digest_of(raw))])
        if self._choice is None:
            self._put(raws)
        else:
            self._choice.offer(raws)

    def finish(self) -> None:
        """Note that all records were taken: end the checks of the rows and of the chains."""
        if self._choice is not None:
            self._put(self._choice.records())
        for place, check in self.checks.items():
            check.finish(self.progress_of[place].chain)

    def _put(self, raws: Sequence[Raw]) -> None:
        records = [
            arrived(raw, codec(), digest=False)
            for raw in raws
            if raw.offset not in self.left_out.get(PartitionId(raw.topic, raw.partition), ())
        ]
        self.num_unread += sum(isinstance(record, Undecodable) for record in records)
        self._beside.put(rows_of(records))


class _Choice:
    """Chooses keys, of those in the tables and on the log, by the smallest hashes under the seed; keeps their records.

    A key that drops out never comes back, so one pass over the log finds all records of the keys that stay.
    """

    def __init__(self, sample: Sample, stored: set[str]) -> None:
        self._seed = sample.seed
        self._limit = sample.keys
        self._records: dict[str, list[Raw]] = {}
        self._largest: list[tuple[int, str]] = []  # a heap, the largest hash first
        for key in stored:
            self._admit(key)

    @property
    def keys(self) -> set[str]:
        """The keys that are chosen."""
        return set(self._records)

    def offer(self, records: Sequence[Raw]) -> None:
        """Keep the records whose keys are among the smallest so far."""
        for record in records:
            key = _stored_key(record)
            if key is not None and (key in self._records or self._admit(key)):
                self._records[key].append(record)

    def records(self) -> list[Raw]:
        """Return the records of the chosen keys."""
        return [record for some in self._records.values() for record in some]

    def _admit(self, key: str) -> bool:
        hashed = blake2b(f"{self._seed} {key}".encode(), digest_size=8).digest()
        entry = (-int.from_bytes(hashed, "big"), key)
        if len(self._largest) < self._limit:
            heapq.heappush(self._largest, entry)
        elif entry > self._largest[0]:
            _, gone = heapq.heapreplace(self._largest, entry)
            del self._records[gone]
        else:
            return False
        self._records[key] = []
        return True


def _stored_key(record: Raw) -> str | None:
    """Return the key as rows store it; None: it is not UTF-8, so no event has it and its record has no row."""
    try:
        return indexable((record.key or b"").decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return None
