"""From the real broker to the real database: started, killed, shared and begun again, the tables are the log."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text

from clawstream.errors import DatabaseMismatch, OperatorError, TryLater
from clawstream.projections import database
from clawstream.projections.tables import TOPICS
from clawstream.projections.write.rows import GROUP
from clawstream.projections.write.stage import project
from clawstream.stream import topics
from clawstream.stream.dead_letters import Reason
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Fate, PartitionId
from clawstream.stream.quarantine import dead_letters, rule
from clawstream.stream.runner.breaker import FEWEST
from tests.fakes.memory_log import MemoryLog
from tests.parts.projections import one_session
from tests.parts.projections.reading import contents
from tests.parts.stream.raw import append_bytes


@asynccontextmanager
async def projecting(url: str, log: KafkaLog | MemoryLog) -> AsyncIterator[None]:
    """A projector runs for the length of the block."""
    stop = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(project(url, log, stop=stop))
        try:
            yield
        finally:
            stop.set()
        await running


async def caught_up(engine: Engine, log: KafkaLog | MemoryLog) -> None:
    """Return when the tables have all that is on the log now."""
    ends = {place: end for place, end in (await log.end_offsets(TOPICS)).items() if end}
    while True:
        with engine.connect() as connection:
            read = connection.execute(text("SELECT topic, partition, next_offset FROM offsets")).all()
        if ends.items() <= {(topic, partition): offset for topic, partition, offset in read}.items():
            return
        await _tick()


async def _tick() -> None:
    await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_what_is_on_the_log_is_in_the_tables_and_the_group_has_no_lag(
    emptied: Engine, migrated_url: str, log: KafkaLog
) -> None:
    async with projecting(migrated_url, log):
        await log.append(one_session.ONE_SESSION)
        await caught_up(emptied, log)
        while await log.lag(GROUP) != 0:
            await _tick()
    with emptied.connect() as connection:
        [row] = connection.execute(text("SELECT DISTINCT exchange_id FROM lineage WHERE exchange_id IS NOT NULL"))
    assert row.exchange_id == one_session.FIRST
    assert await log.lag(GROUP) == 0


@pytest.mark.slow
async def test_a_projector_that_stops_in_the_middle_goes_on_and_a_rebuild_gives_equal_rows(
    emptied: Engine, migrated_url: str, fresh_database_url: str, log: KafkaLog
) -> None:
    async with projecting(migrated_url, log):
        await log.append(one_session.ONE_SESSION[:6])
        await caught_up(emptied, log)
    await log.append(one_session.ONE_SESSION[3:])  # three of them for the second time
    async with projecting(migrated_url, log):
        await caught_up(emptied, log)
    database.upgrade(fresh_database_url)
    rebuilt = database.connect(fresh_database_url)
    async with projecting(fresh_database_url, log):
        await caught_up(rebuilt, log)
    assert contents(rebuilt) == contents(emptied)
    assert len(contents(rebuilt)["votes"]) == 5
    rebuilt.dispose()


@pytest.mark.slow
async def test_two_projectors_share_the_work_and_write_nothing_twice_or_never(
    emptied: Engine, migrated_url: str, kafka_bootstrap: str, topic_prefix: str, log: KafkaLog
) -> None:
    many = [replace(one_session.EXCHANGES[0], session_id=f"s{n}", exchange_id=f"x{n}") for n in range(300)]
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as second, projecting(migrated_url, log):
        await log.append(many[:100])
        async with projecting(migrated_url, second):
            await log.append(many[100:200])
            await caught_up(emptied, log)
        await log.append(many[200:])
        await caught_up(emptied, log)
    with emptied.connect() as connection:
        assert connection.execute(text("SELECT count(*), sum(num_main) FROM sessions")).one() == (300, 300)


@pytest.mark.slow
async def test_a_database_of_another_log_is_refused(emptied: Engine, migrated_url: str, log: KafkaLog) -> None:
    with emptied.begin() as connection:
        connection.execute(
            text("INSERT INTO offsets SELECT unnest(CAST(:topics AS text[])), 0, 99, 1"), {"topics": list(TOPICS)}
        )
    with pytest.raises(DatabaseMismatch, match=r"up to offset 99, but this log ends at 0"):
        await project(migrated_url, log, stop=asyncio.Event())


@pytest.mark.slow
async def test_what_another_projector_wrote_while_this_one_waited_for_its_claim_is_of_this_log(
    emptied: Engine, migrated_url: str, log: KafkaLog
) -> None:
    waiting = text("SELECT 1 FROM pg_locks WHERE relation = 'offsets'::regclass AND NOT granted")
    with emptied.connect() as rival:
        rival.execute(text("LOCK TABLE offsets"))
        async with projecting(migrated_url, log):
            while rival.execute(waiting).first() is None:
                await _tick()
            await log.append(one_session.ONE_SESSION)
            for place, end in (await log.end_offsets(TOPICS)).items():
                row = {"topic": place.topic, "partition": place.partition, "end": end}
                rival.execute(text("INSERT INTO offsets VALUES (:topic, :partition, :end, 1)"), row)
            rival.commit()
            while await log.lag(GROUP) != 0:
                await _tick()


@pytest.mark.slow
async def test_a_projector_that_kafka_did_not_answer_when_it_got_its_partitions_gets_them_again(
    emptied: Engine, migrated_url: str, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_offsets, asked = log.begin_offsets, iter((1, 2))

    async def stumbling(topics: Sequence[str]) -> dict[PartitionId, int]:
        if next(asked, None) is not None:
            raise TryLater("Kafka is away")
        return await begin_offsets(topics)

    monkeypatch.setattr(log, "begin_offsets", stumbling)
    await log.append(one_session.ONE_SESSION)
    async with projecting(migrated_url, log):
        await caught_up(emptied, log)
    assert next(asked, None) is None


async def test_a_database_without_the_tables_is_refused(fresh_database_url: str, log: KafkaLog) -> None:
    with pytest.raises(DatabaseMismatch, match="clawstream db upgrade"):
        await project(fresh_database_url, log, stop=asyncio.Event())


@pytest.mark.slow
async def test_what_follows_a_record_that_can_not_be_read_waits_and_other_sessions_go_on(
    emptied: Engine, migrated_url: str, log: KafkaLog
) -> None:
    await append_bytes(log, topics.EXCHANGES, one_session.SESSION.encode(), b"nonsense", [])
    async with projecting(migrated_url, log):
        await log.append([*one_session.ONE_SESSION, replace(one_session.EXCHANGES[0], session_id="other")])
        await caught_up(emptied, log)
        head, *parked = await dead_letters(log)
        assert (head.id.group, head.key, head.reason) == (GROUP, one_session.SESSION.encode(), Reason.UNDECODABLE)
        assert [dead_letter.reason for dead_letter in parked] == [Reason.PARKED] * 4
        assert _sessions(emptied) == ["other"]
        await rule(log, Fate.DISCARD, dead_letter="/".join(map(str, head.id)), stage=None, because="noise")
        while any(dead_letter.waits for dead_letter in await dead_letters(log)):
            await _tick()
    assert _sessions(emptied) == ["other", one_session.SESSION]
    assert [dead_letter.fate for dead_letter in await dead_letters(log)] == [Fate.DISCARDED] + [Fate.REPLAYED] * 4


def _sessions(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT session_id FROM sessions ORDER BY 1")).scalars())


@pytest.mark.slow
async def test_a_flood_of_records_that_can_not_be_read_stops_the_projector_with_all_of_them_in_their_queue(
    emptied: Engine, migrated_url: str, log: KafkaLog
) -> None:
    await log.append([replace(one_session.EXCHANGES[0], session_id=f"s{n}") for n in range(50)])
    for n in range(FEWEST):
        await append_bytes(log, topics.EXCHANGES, f"s{n}".encode(), b"nonsense", [])
    async with asyncio.timeout(60):
        with pytest.raises(
            OperatorError, match=rf"project set {FEWEST} of the last \d+ records aside within 5 minutes"
        ):
            await project(migrated_url, log, stop=asyncio.Event())
    assert len(await dead_letters(log)) == FEWEST
    async with projecting(migrated_url, log):  # it goes on where it was
        await log.append([one_session.EXCHANGES[1]])
        await caught_up(emptied, log)


@pytest.mark.slow
async def test_a_few_records_that_can_not_be_read_do_not_stop_it(
    emptied: Engine, migrated_url: str, log: KafkaLog
) -> None:
    for n in range(FEWEST - 1):
        await append_bytes(log, topics.EXCHANGES, f"s{n}".encode(), b"nonsense", [])
    async with projecting(migrated_url, log):
        await log.append([one_session.EXCHANGES[1]])
        await caught_up(emptied, log)
