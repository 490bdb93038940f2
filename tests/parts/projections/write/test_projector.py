"""A database that is away loses nothing, and partitions have one owner."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text

from clawstream.errors import OperatorError, TryLater
from clawstream.projections import database
from clawstream.projections.write.projector import Projector
from clawstream.projections.write.writer import TableWriter
from clawstream.stream.log import PartitionId, RecordBatch
from clawstream.stream.runner import calling
from clawstream.stream.stage import Record
from tests.parts.projections import one_session
from tests.parts.projections.reading import contents, empty, write_all
from tests.unit.projections import logs

PLACED = logs.records(one_session.ONE_SESSION)


def _batch(place: PartitionId, records: Sequence[Record]) -> RecordBatch:
    return RecordBatch(place=place, records=records, next_offset=records[-1].offset + 1)


BATCHES = [_batch(place, records) for place, records in PLACED.items()]


def _projector(engine: Engine) -> Projector:
    return Projector(TableWriter(engine), asyncio.Event())


async def test_a_batch_that_was_read_twice_is_written_once_and_its_rest_follows(emptied: Engine) -> None:
    ours = _projector(emptied)
    assert set((await ours.claim(PLACED)).values()) == {0}
    for n in (1, 2, 100):  # each batch begins at the beginning again
        await ours.take([_batch(place, records[:n]) for place, records in PLACED.items()])
    found = contents(emptied)
    empty(emptied)
    write_all(emptied, PLACED)
    assert found == contents(emptied)


async def test_a_connection_cut_in_the_middle_of_a_transaction_is_retried_until_it_is_whole(emptied: Engine) -> None:
    ours = _projector(emptied)
    await ours.claim(PLACED)
    with emptied.connect() as blocker:
        blocker.execute(text("LOCK TABLE votes IN ACCESS EXCLUSIVE MODE"))
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(ours.take(BATCHES))
            victims = await asyncio.to_thread(_cut_one_that_waits, emptied)
            assert victims == 1
            assert not taking.done()
            blocker.rollback()
    assert len(contents(emptied)["votes"]) == 5


def _cut_one_that_waits(engine: Engine) -> int:
    cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with engine.connect() as connection:
        while True:
            found = connection.execute(text(cut)).scalar()
            connection.rollback()
            if found:
                return int(found)


async def test_a_database_that_is_away_is_waited_for_and_nothing_is_lost(
    postgres_url: str, fresh_database_url: str
) -> None:
    database.upgrade(fresh_database_url)
    engine = database.connect(fresh_database_url)
    ours = _projector(engine)
    await ours.claim(PLACED)
    _admit(postgres_url, engine, False)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(ours.take(BATCHES))
        await _heard("state=waiting_for_database")
        assert not taking.done()
        _admit(postgres_url, engine, True)
    assert len(contents(engine)["exchanges"]) == len(one_session.EXCHANGES)
    engine.dispose()


async def _heard(words: str) -> None:
    """Return when the projector has logged these words."""
    heard = asyncio.Event()
    logger = logging.getLogger(calling.__name__)

    def listen(record: logging.LogRecord) -> bool:
        if words in record.getMessage():
            heard.set()
        return True

    logger.addFilter(listen)
    try:
        await heard.wait()
    finally:
        logger.removeFilter(listen)


def _admit(postgres_url: str, engine: Engine, admitted: bool) -> None:
    """Let the database take connections, or cut those that it has and take none."""
    name = engine.url.database
    admin = database.connect(postgres_url)
    with admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS {admitted}'))
        if not admitted:
            cut = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
            connection.execute(cut, {"name": name})
    admin.dispose()


async def test_a_stop_ends_the_wait_for_a_database_that_is_away() -> None:
    stop = asyncio.Event()
    engine = database.connect("postgresql://nobody@127.0.0.1:1/none")
    ours = Projector(TableWriter(engine), stop)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        claiming = tasks.create_task(_ends_with_try_later(ours))
        await asyncio.sleep(0)
        stop.set()
        await claiming


async def _ends_with_try_later(ours: Projector) -> None:
    with pytest.raises(TryLater, match="can't be reached"):
        await ours.claim(PLACED)


async def test_of_two_projectors_the_newer_writes_and_the_older_gives_the_partition_up(emptied: Engine) -> None:
    older, newer = _projector(emptied), _projector(emptied)
    await older.claim(PLACED)
    place: PartitionId = min(PLACED)
    await newer.claim([place])
    await older.take(BATCHES)
    table_of_place = contents(emptied)
    await newer.take([_batch(place, PLACED[place])])
    both = contents(emptied)
    assert table_of_place != both
    await older.take(BATCHES)
    assert contents(emptied) == both
    empty(emptied)
    write_all(emptied, PLACED)
    assert contents(emptied) == both


@pytest.mark.parametrize("rebuilt", ["chain = '\\x00'", "next_offset = next_offset - 1"])
async def test_a_partition_that_a_rebuild_took_is_known_from_one_that_a_rival_took(
    emptied: Engine, rebuilt: str
) -> None:
    ours, rival = _projector(emptied), _projector(emptied)
    await ours.claim(PLACED)
    firsts = [_batch(place, records[:1]) for place, records in PLACED.items()]
    await ours.take(firsts)
    await rival.claim([min(PLACED)])
    await ours.take(BATCHES)
    assert (ours.overtaken, min(PLACED) in ours.positions()) == (False, False)
    with emptied.begin() as connection:
        connection.execute(text(f"UPDATE offsets SET epoch = 9, {rebuilt}"))
    more = [replace(batch, records=[], next_offset=batch.next_offset + 1) for batch in BATCHES]
    await ours.take(more)
    assert (ours.overtaken, ours.positions()) == (True, {})
    ours.leave()
    assert not ours.overtaken
    await ours.claim(PLACED)
    await ours.take(more)
    assert not ours.overtaken


async def test_a_rival_that_keeps_a_partition_is_an_operators_error(emptied: Engine) -> None:
    ours = Projector(TableWriter(emptied), asyncio.Event(), lost_grace_s=-1.0)
    rival = _projector(emptied)
    await ours.claim(PLACED)
    await rival.claim(PLACED)
    await ours.take(BATCHES)
    with pytest.raises(OperatorError, match="by another projector"):
        await ours.take(BATCHES)
