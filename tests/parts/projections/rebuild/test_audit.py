"""What an audit finds: nothing where nobody meddled, and else the row, the column, the record."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from clawstream.errors import DatabaseMismatch
from clawstream.events import Event, VoteCast
from clawstream.projections.rebuild.comparing import Difference, scratch
from clawstream.projections.rebuild.verifying import Audit, Sample, verify
from clawstream.projections.tables import TOPICS, metadata
from clawstream.projections.write.projector import Projector, in_batches
from clawstream.projections.write.writer import TableWriter
from clawstream.stream import topics
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import PartitionId, Raw
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.projections import one_session
from tests.parts.projections.reading import contents


def session(n: int) -> list[Event]:
    """The story's session as the n-th of many."""
    ids = ("session_id", "exchange_id", "turn_id", "feedback_id", "after_exchange_id", "next_exchange_id")
    told: list[Event] = []
    for event in one_session.ONE_SESSION:
        named = {name: f"{getattr(event, name)}-{n}" for name in ids if hasattr(event, name)}
        if named:
            told.append(replace(event, **named))
    return told


MANY = [event for n in range(40) for event in session(n)]


async def projected(engine: Engine, log: MemoryLog) -> None:
    """Let the projector's own code take all that is on the log and not in the tables."""
    projector = Projector(TableWriter(engine), asyncio.Event())
    ends = await log.end_offsets(TOPICS)
    claims = await projector.claim(ends)
    arrived = [
        one async for some in log.replay({place: (claims[place], end) for place, end in ends.items()}) for one in some
    ]
    await projector.take(in_batches(arrived))


async def audited(url: str, log: MemoryLog | KafkaLog, sample: Sample | None = None) -> Audit:
    return await verify(url, log, sample=sample, tell=lambda *_: None)


@pytest.fixture
async def told(emptied: Engine) -> MemoryLog:
    """A log with much on it, and the tables filled from it."""
    log = MemoryLog()
    await log.append(MANY)
    await projected(emptied, log)
    return log


def _edit(engine: Engine, statement: str, **values: object) -> int:
    with engine.begin() as connection:
        return connection.execute(text(statement), values).rowcount


@pytest.mark.parametrize("sample", [None, Sample(keys=7, seed=1)])
async def test_tables_that_nobody_touched_are_as_the_log_says(
    told: MemoryLog, migrated_url: str, emptied: Engine, sample: Sample | None
) -> None:
    before = contents(emptied)
    found = await audited(migrated_url, told, sample)
    assert (found.ok, found.records, found.records_chained) == (True, len(MANY), len(MANY))
    keys = 40 if sample is None else 7
    assert found.keys == (None if sample is None else keys)
    assert found.rows == keys * (len(session(0)) + 1)  # and the session's own row
    assert contents(emptied) == before


async def test_a_row_edited_by_hand_is_named_with_its_column_and_both_values(
    told: MemoryLog, migrated_url: str, emptied: Engine
) -> None:
    vote = next(event for event in MANY if isinstance(event, VoteCast) and event.score == -1)
    assert _edit(emptied, "UPDATE votes SET score = 1 WHERE event_id = :id", id=vote.event_id) == 1
    found = await audited(migrated_url, told)
    assert (found.chain_ok, found.rows_differ) == (True, 1)
    assert found.differences == [
        Difference(table="votes", key=vote.event_id, what="different", column="score", expected="-1", found="1")
    ]


async def test_a_row_deleted_and_a_row_added_by_hand_are_named(
    told: MemoryLog, migrated_url: str, emptied: Engine
) -> None:
    gone = next(event for event in MANY if isinstance(event, VoteCast))
    _edit(emptied, "DELETE FROM votes WHERE event_id = :id", id=gone.event_id)
    _edit(emptied, "DELETE FROM sessions WHERE session_id = 'session-1-3'")
    added = "00000000-0000-0000-0000-000000000001"
    _edit(
        emptied,
        "INSERT INTO settlements (event_id, source_topic, source_partition, source_offset, log_time, session_id, "
        "after_exchange_id, done) VALUES (:id, 'clawstream.turns.v1', 0, 0, now(), 's', 'x', true)",
        id=added,
    )
    found = await audited(migrated_url, told)
    assert {(one.table, one.key, one.what) for one in found.differences} == {
        ("votes", gone.event_id, "missing"),
        ("sessions", "session-1-3", "missing"),
        ("settlements", added, "extra"),
    }
    assert found.rows_differ == 3


async def test_a_sample_of_all_keys_finds_what_a_whole_audit_finds_and_another_seed_chooses_other_keys(
    told: MemoryLog, migrated_url: str, emptied: Engine
) -> None:
    _edit(emptied, "UPDATE sessions SET num_main = 9 WHERE session_id = 'session-1-5'")
    everything = await audited(migrated_url, told, Sample(keys=1000, seed=0))
    assert [(one.key, one.column) for one in everything.differences] == [("session-1-5", "num_main")]
    hits = [(await audited(migrated_url, told, Sample(keys=20, seed=seed))).rows_differ for seed in range(6)]
    assert 0 < sum(hits) < len(hits)


def tampered(log: MemoryLog, topic: str, offset: int) -> tuple[MemoryLog, PartitionId]:
    """A log like this one, but for the last byte of one record of the topic's fullest partition; and the partition."""
    place = max(log.broker.places([topic]), key=lambda place: len(log.broker.records(place)))
    other = MemoryBroker()
    for there in other.places(TOPICS):
        other._partitions[there] = list(log.broker.records(there))
    raw = other._partitions[place][offset]
    assert raw.value is not None
    other._partitions[place][offset] = replace(raw, value=raw.value[:-1] + bytes([raw.value[-1] ^ 2]))
    return MemoryLog(other), place


@pytest.mark.parametrize("offset", [0, 57])
async def test_a_record_of_which_one_byte_was_changed_is_named_and_no_other_is(
    told: MemoryLog, migrated_url: str, offset: int
) -> None:
    changed, place = tampered(told, topics.VOTES, offset)
    found = await audited(migrated_url, changed)
    assert not found.chain_ok
    assert [(one.place, one.first_offset, one.end_offset) for one in found.breaks] == [(place, offset, offset + 1)]


async def test_a_database_of_another_log_is_refused(told: MemoryLog, migrated_url: str) -> None:
    del told
    with pytest.raises(DatabaseMismatch, match="this log ends at 0"):
        await audited(migrated_url, MemoryLog())


async def test_records_that_stand_in_no_chain_are_no_records_that_were_compared(
    told: MemoryLog, migrated_url: str, emptied: Engine
) -> None:
    """As after an upgrade from a version without chains, or once somebody has taken them away."""
    _edit(emptied, "UPDATE offsets SET chain = NULL, chain_from = NULL")
    _edit(emptied, "DELETE FROM chain_blocks")
    found = await audited(migrated_url, told)
    assert (found.records, found.records_chained, found.rows_differ) == (len(MANY), 0, 0)
    assert (found.chain_ok, found.ok) == (None, False)
    assert sum(found.unchained.values()) == len(MANY)
    assert f"{len(MANY)} records" in found.verdict
    assert "clawstream projection rebuild" in found.verdict


async def test_one_partition_without_a_chain_is_named(told: MemoryLog, migrated_url: str, emptied: Engine) -> None:
    place = max(told.broker.places([topics.VOTES]), key=lambda place: len(told.broker.records(place)))
    at = {"topic": place.topic, "partition": place.partition}
    _edit(
        emptied,
        "UPDATE offsets SET chain = NULL, chain_from = NULL WHERE (topic, partition) = (:topic, :partition)",
        **at,
    )
    _edit(emptied, "DELETE FROM chain_blocks WHERE (topic, partition) = (:topic, :partition)", **at)
    found = await audited(migrated_url, told)
    assert found.unchained == {place: len(told.broker.records(place))}
    assert (found.chain_ok, found.ok) == (True, False)


class _Slow(MemoryLog):
    """A log during whose reading something happens."""

    meanwhile: Callable[[], object]

    async def replay_raw(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None
    ) -> AsyncGenerator[Sequence[Raw], None]:
        await asyncio.to_thread(self.meanwhile)
        async for raws in super().replay_raw(ranges, key=key):
            yield raws


async def test_rows_are_compared_as_of_the_moment_at_which_the_offsets_were_read(
    told: MemoryLog, migrated_url: str, emptied: Engine
) -> None:
    log = _Slow(told.broker)
    log.meanwhile = lambda: _edit(emptied, "DELETE FROM votes")
    assert (await audited(migrated_url, log)).ok
    assert (await audited(migrated_url, told)).rows_differ > 0


def test_no_table_is_swapped_from_the_moment_on_that_is_compared(migrated_url: str, emptied: Engine) -> None:
    with scratch(migrated_url):
        for name in metadata.tables:
            with emptied.connect() as connection, pytest.raises(OperationalError, match="could not obtain lock"):
                connection.execute(text(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE NOWAIT"))
