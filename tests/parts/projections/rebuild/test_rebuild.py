"""Tables rebuilt under readers and a projector that go on, and what a rebuild refuses."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from clawstream.errors import OperatorError
from clawstream.events import ExchangeCompleted
from clawstream.projections import database
from clawstream.projections.look.sql import ask, snapshot
from clawstream.projections.rebuild import rebuilding as rebuilding
from clawstream.projections.rebuild import schemas
from clawstream.projections.rebuild.rebuilding import Rebuilt, rebuild
from clawstream.projections.rebuild.schemas import BUILDING
from clawstream.projections.tables import TOPICS
from clawstream.projections.write.projector import Projector, in_batches
from clawstream.projections.write.writer import TableWriter
from clawstream.stream import topics
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import PartitionId, Raw
from tests.fakes.memory_log import MemoryLog
from tests.parts.projections.reading import contents
from tests.parts.projections.rebuild.test_audit import MANY, audited, projected, session, tampered
from tests.parts.projections.write.test_stage import caught_up, projecting


@pytest.fixture
async def told(live: Engine) -> MemoryLog:
    """A log with much on it, and the tables filled from it."""
    log = MemoryLog()
    await log.append(MANY)
    await projected(live, log)
    return log


async def rebuilt(engine: Engine, log: MemoryLog | KafkaLog, *, keep: bool = False, forget: bool = False) -> Rebuilt:
    return await rebuild(url_of(engine), log, keep=keep, forget_expired=forget, tell=lambda *_: None)


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def asked(engine: Engine, query: str) -> list[object]:
    with engine.connect() as connection:
        return list(connection.execute(text(query)).scalars())


def done(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


_SHAPE = """
    SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relname !~ '^pg_toast'
    UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    UNION ALL SELECT 'constraint ' || conname FROM pg_constraint WHERE connamespace = 'public'::regnamespace ORDER BY 1
"""


@pytest.mark.slow
async def test_a_rebuild_restores_what_the_log_says_and_leaves_nothing_else_behind(
    live: Engine, told: MemoryLog
) -> None:
    before, shape = contents(live), asked(live, _SHAPE)
    commits = asked(live, "SELECT commits::text FROM commits ORDER BY 1")
    done(live, "UPDATE votes SET score = 0", "DELETE FROM sessions", "DELETE FROM turns")
    made = await rebuilt(live, told)
    assert (made.records, made.kept_schema) == (len(MANY), None)
    assert contents(live) == before
    assert asked(live, _SHAPE) == shape
    assert asked(live, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'clawstream%'") == []
    assert asked(live, "SELECT commits::text FROM commits ORDER BY 1") == commits
    assert len(asked(live, "SELECT turn_id FROM turn_scores WHERE sample_id IS NOT NULL")) == 40
    database.check(live)
    assert (await audited(url_of(live), told)).ok


@pytest.mark.slow
async def test_the_projector_goes_on_and_readers_see_no_error_and_no_fewer_rows(
    live: Engine, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuilding, "HELD_RECORDS", 20)
    url = url_of(live)
    async with projecting(url, log), asyncio.TaskGroup() as tasks:
        await log.append(MANY[: len(MANY) // 2])
        await caught_up(live, log)
        stop = asyncio.Event()
        readers = [
            tasks.create_task(_keep_counting(count, url, stop)) for count in (_count_plainly, _count_in_snapshot)
        ]
        writing = tasks.create_task(_keep_appending(log, stop))
        for _ in range(2):
            await rebuilt(live, log)
        stop.set()
        counts = [await reader for reader in readers]
        await writing
        await caught_up(live, log)
    assert all(len(seen) > 20 and seen == sorted(seen) for seen in counts), counts
    assert all(seen[-1] > seen[0] for seen in counts)
    found = await audited(url, log)
    assert found.ok
    assert found.records == sum((await log.end_offsets(TOPICS)).values())


async def _keep_appending(log: KafkaLog, stop: asyncio.Event) -> None:
    n = 1000
    while not stop.is_set():
        await log.append(session(n))
        n += 1
        await asyncio.sleep(0.05)  # a load that leaves room for the others


async def _keep_counting(
    count: Callable[[str], list[tuple[int, ...]]], url: str, stop: asyncio.Event
) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    while not stop.is_set():
        seen += await asyncio.to_thread(count, url)
    return seen


_COUNTS = "SELECT (SELECT count(*) FROM votes), (SELECT count(*) FROM newest_verdicts), (SELECT count(*) FROM sessions)"


def _count_plainly(url: str) -> list[tuple[int, ...]]:
    """As any program reads, each statement by itself, on a connection that it keeps."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        return [found for _ in range(20) if (found := connection.execute(_COUNTS).fetchone()) is not None]


def _count_in_snapshot(url: str) -> list[tuple[int, ...]]:
    """As `clawstream sql` and `export` do: several statements of one moment."""
    with snapshot(url, timeout_s=30) as cursor:
        found = []
        for _ in range(2):
            with ask(cursor, _COUNTS) as answer:
                found += [tuple(map(int, map(str, row))) for row in answer.rows]
        assert found[0] == found[1]
        return found[:1]


@pytest.mark.slow
async def test_a_query_that_does_not_end_is_waited_for_and_the_others_are_not_kept_waiting(
    live: Engine, told: MemoryLog
) -> None:
    with live.connect() as reader:
        assert reader.execute(text("SELECT count(*) FROM votes")).scalar() is not None  # and holds the table
        building = asyncio.create_task(rebuilt(live, told))
        while asked(live, "SELECT count(*) FROM pg_locks WHERE NOT granted") == [0]:
            await asyncio.sleep(0.01)
        assert len(await asyncio.to_thread(asked, live, "SELECT count(*) FROM votes")) == 1
        assert not building.done()
        reader.rollback()
        async with asyncio.timeout(30):
            await building


async def test_no_projector_writes_while_the_tables_change_places_and_readers_read_the_books(
    live: Engine, told: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap(cursor: psycopg.Cursor, old: str) -> None:
        assert asked(live, "SELECT count(*) > 0 FROM offsets") == [True]
        with pytest.raises(OperationalError, match="lock timeout"):
            done(live, "SET LOCAL lock_timeout = 100", "UPDATE offsets SET epoch = epoch + 1")
        swapped.append(old)
        really(cursor, old)

    swapped: list[str] = []
    really = schemas.swap
    monkeypatch.setattr(schemas, "swap", swap)
    await rebuilt(live, told)
    assert len(swapped) == 1


async def test_who_may_read_the_tables_may_read_the_new_ones(live: Engine, told: MemoryLog) -> None:
    role = f"reader_{live.url.database}"
    done(live, f"CREATE ROLE {role} ROLE CURRENT_USER", f"GRANT SELECT ON votes, lineage TO {role} WITH GRANT OPTION")
    try:
        await rebuilt(live, told)
        for relation in ("votes", "lineage"):
            query = f"SELECT has_table_privilege('{role}', '{relation}', 'SELECT WITH GRANT OPTION')"
            assert asked(live, query) == [True]
        assert asked(live, f"SELECT has_table_privilege('{role}', 'turns', 'SELECT')") == [False]
    finally:
        done(live, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.slow
async def test_old_tables_are_kept_where_wanted_or_where_something_of_others_rests_on_them(
    live: Engine, told: MemoryLog
) -> None:
    first = await rebuilt(live, told, keep=True)
    assert first.kept_schema is not None
    assert asked(live, f"SELECT count(*) FROM {first.kept_schema}.votes") == asked(live, "SELECT count(*) FROM votes")
    done(live, "CREATE VIEW of_others AS SELECT count(*) FROM votes")
    second = await rebuilt(live, told)
    assert second.kept_schema is not None
    assert "of_others" in str(second.kept_because)
    assert asked(live, "SELECT * FROM of_others") == asked(live, "SELECT count(*) FROM votes")


class _Expired(MemoryLog):
    """A log that has lost the first record of one partition."""

    lost: PartitionId

    async def begin_offsets(self, topics: Sequence[str]) -> dict[PartitionId, int]:
        return await super().begin_offsets(topics) | {self.lost: 1}


@pytest.mark.slow
async def test_a_log_that_lost_its_beginning_is_said_to_and_what_it_lost_is_not_compared(
    live: Engine, told: MemoryLog
) -> None:
    log = _Expired(told.broker)
    log.lost = max(told.broker.places(TOPICS), key=lambda place: len(told.broker.records(place)))
    before = contents(live)
    found = await audited(url_of(live), log)
    assert (found.ok, found.expired, found.records) == (True, {log.lost: 1}, len(MANY) - 1)
    assert found.records_chained < found.records
    with pytest.raises(OperatorError, match=r"begins at offset 1 of clawstream.*--forget-expired"):
        await rebuilt(live, log)
    with pytest.raises(OperatorError, match="`clawstream projection rebuild --forget-expired --trust-log`"):
        await rebuild(url_of(live), log, keep=False, forget_expired=False, trust_log=True, tell=lambda *_: None)
    assert contents(live) == before
    await rebuilt(live, log, forget=True)
    assert (await audited(url_of(live), log)).ok
    assert sum(map(len, contents(live).values())) < sum(map(len, before.values()))


async def test_a_log_that_is_not_the_one_that_was_projected_is_no_source_of_tables(
    live: Engine, told: MemoryLog
) -> None:
    changed, place = tampered(told, topics.VOTES, 3)
    before = contents(live)
    with pytest.raises(
        OperatorError, match=f"{place.topic} partition {place.partition} is not the one .* audit verify"
    ):
        await rebuilt(live, changed)
    assert contents(live) == before


async def test_a_projector_does_not_go_on_from_a_chain_that_a_rebuild_has_made_again(
    live: Engine, told: MemoryLog
) -> None:
    """As on tables from before there were chains; the one that is started next goes on."""
    done(live, "UPDATE offsets SET chain = NULL, chain_from = NULL", "DELETE FROM chain_blocks")
    running = Projector(TableWriter(live), asyncio.Event())
    starts = await running.claim(await told.end_offsets(TOPICS))
    made = await rebuilt(live, told)
    assert made.overruled == []
    assert len(made.fenced) == len([end for end in (await told.end_offsets(TOPICS)).values() if end])
    await told.append(more := session(1000))
    ranges = {place: (starts[place], end) for place, end in (await told.end_offsets(TOPICS)).items()}
    await running.take(in_batches([one async for some in told.replay(ranges) for one in some]))
    assert (await audited(url_of(live), told)).records == len(MANY)
    await projected(live, told)
    found = await audited(url_of(live), told)
    assert (found.ok, found.records_chained) == (True, len(MANY) + len(more))


@pytest.mark.slow
async def test_a_projector_that_a_rebuild_locked_out_goes_on_by_itself_and_drops_nothing(
    live: Engine, told: MemoryLog
) -> None:
    done(live, "UPDATE offsets SET chain = NULL, chain_from = NULL", "DELETE FROM chain_blocks")
    async with projecting(url_of(live), told):
        for n in (1000, 1001):
            await told.append(session(n))
            await caught_up(live, told)
            assert bool((await rebuilt(live, told)).fenced) == (n == 1000)
        await told.append(session(1002))
        await caught_up(live, told)
    found = await audited(url_of(live), told)
    num_records = len(MANY) + 3 * len(session(0))
    assert (found.ok, found.records, found.records_chained) == (True, num_records, num_records)


async def test_two_rebuilds_at_once_are_refused(live: Engine, told: MemoryLog) -> None:
    async with asyncio.timeout(30):
        found = await asyncio.gather(rebuilt(live, told), rebuilt(live, told), return_exceptions=True)
    assert [type(one) for one in found].count(Rebuilt) == 1
    assert any("another rebuild" in str(one) for one in found)


def test_a_rebuild_may_begin_before_postgres_has_noticed_that_the_session_of_the_last_one_was_closed(
    live: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with schemas.session(live) as cursor:
        with monkeypatch.context() as patch:
            patch.setattr(schemas, "session", lambda _: nullcontext(cursor))
            with rebuilding._alone(live):
                pass
        with rebuilding._alone(live):
            pass


def test_a_rebuild_whose_session_was_ended_at_the_end_of_its_work_has_done_its_work(live: Engine) -> None:
    with rebuilding._alone(live) as cursor:
        done(live, f"SELECT pg_terminate_backend({cursor.connection.info.backend_pid}, 5000)")


async def test_what_a_rebuild_that_was_cut_off_left_behind_is_in_nobodys_way(live: Engine, told: MemoryLog) -> None:
    done(live, f"CREATE SCHEMA {BUILDING}", f"CREATE TABLE {BUILDING}.votes (n integer)")
    before = contents(live)
    await rebuilt(live, told)
    assert contents(live) == before


class _InPieces(MemoryLog):
    """A log that gives a few records at a time."""

    async def replay_raw(
        self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None
    ) -> AsyncGenerator[Sequence[Raw], None]:
        async for raws in super().replay_raw(ranges, key=key):
            for at in range(0, len(raws), 20):
                yield raws[at : at + 20]


@pytest.mark.slow
async def test_records_written_twice_and_records_that_can_not_be_read_give_the_projectors_rows(live: Engine) -> None:
    log = _InPieces()
    await log.append(MANY[:300])
    for event in MANY[100:400]:
        log.broker.write(topics.VOTES, event.key.encode(), b"nonsense", [])
        await log.append([replace(event, model="another")] if isinstance(event, ExchangeCompleted) else [event])
    await log.append(MANY[200:])
    await projected(live, log)
    before = contents(live)
    made = await rebuilt(live, log)
    assert (made.records, made.records_unread) == (2 * 300 + 300 + len(MANY) - 200, 300)
    assert contents(live) == before
    found = await audited(url_of(live), log)
    assert (found.ok, found.rows_differ, found.records_unread) == (True, 0, 300)


async def test_a_rebuild_whose_sessions_end_in_the_middle_of_its_work_changes_nothing_and_can_be_done_again(
    live: Engine, told: MemoryLog
) -> None:
    """Once its lock has gone with its session, another rebuild may fill the tables that this one would swap in."""
    before = contents(live)
    ended: list[object] = []

    def end(doing: str, *_: int) -> None:
        if doing == "reading the log" and not ended:
            ended.extend(asked(live, _END_ITS_SESSIONS))

    with pytest.raises(OperatorError, match="They are as they were"):
        await rebuild(url_of(live), told, keep=False, forget_expired=False, tell=end)
    assert ended
    assert contents(live) == before
    assert (await rebuilt(live, told)).records == len(MANY)
    assert contents(live) == before


_END_ITS_SESSIONS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name = 'clawstream rebuild' AND datname = current_database()
"""
