"""What waits behind a record without a row is used or left out once it is ruled about, whatever happens meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text

from clawstream.errors import TryLater
from clawstream.events import VoteCast
from clawstream.projections.rebuild import rebuilding
from clawstream.projections.tables import set_aside
from clawstream.projections.write import rows
from clawstream.projections.write.projector import Projector, in_batches
from clawstream.projections.write.quarantine import ProjectionQuarantine
from clawstream.projections.write.rows import GROUP, Release
from clawstream.projections.write.stage import project
from clawstream.projections.write.writer import TableWriter
from clawstream.stream import topics
from clawstream.stream.dead_letters import EXPIRED, Reason
from clawstream.stream.log import Arrived, DeadLetterId, DeadLetterMark, Fate, PartitionId, Raw, Start
from clawstream.stream.runner.breaker import FailureRate
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.projections import one_session
from tests.parts.projections.reading import contents, empty
from tests.parts.projections.rebuild.test_audit import audited
from tests.parts.projections.rebuild.test_rebuild import rebuilt, url_of
from tests.parts.projections.write.quarantined import (
    NONSENSE,
    PLACE,
    breaking_on,
    exchange,
    exchanges,
    fates,
    rule,
    ruled_and_closed,
    survive,
    tell,
)
from tests.parts.projections.write.test_stage import caught_up, projecting
from tests.parts.stream.raw import append_bytes
from tests.unit.stream import queues, toys


@pytest.fixture
async def waiting(emptied: Engine, migrated_url: str) -> MemoryLog:
    """A log on which session a waits behind nonsense, its second record."""
    del emptied
    log = MemoryLog(MemoryBroker(partitions=1))
    await survive(migrated_url, log.broker, [("a", 0), ("a", NONSENSE), ("a", 2), ("b", 0), ("a", 3)], [])
    return log


@pytest.mark.slow
async def test_what_a_rebuild_left_out_and_was_released_before_it_ends_has_its_rows_in_order(
    live: Engine, waiting: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(live)
    async with projecting(url, waiting):
        await caught_up(live, waiting)

        async def catch_up(build: rebuilding._Build) -> None:
            """After the tables are filled, and before they are swapped."""
            await rule(waiting, True)
            await toys.until(queues.closed(waiting))
            await waiting.append([exchange("a", 4)])
            await caught_up(live, waiting)
            await really(build)

        really = rebuilding._Build.catch_up
        monkeypatch.setattr(rebuilding._Build, "catch_up", catch_up)
        await rebuilt(live, waiting)
    assert exchanges(live) == ["a0", "a2", "a3", "a4", "b0"]
    found = await audited(url, waiting)
    assert (found.ok, found.rows_differ, found.records_set_aside) == (True, 0, 1)


async def test_who_does_not_own_the_partition_any_more_releases_nothing(emptied: Engine, waiting: MemoryLog) -> None:
    old, new = TableWriter(emptied), TableWriter(emptied)
    claim = old.claim([PLACE])[PLACE]
    ours = new.claim([PLACE])[PLACE]
    made = rows.rows_of([one async for some in waiting.replay({PLACE: (2, 3)}) for one in some])
    closed = [
        DeadLetterMark(id=DeadLetterId(GROUP, *PLACE, offset), key=b"a", attempt=1, fate=fate)
        for offset, fate in ((1, Fate.DISCARDED), (2, Fate.REPLAYED))
    ]
    release = Release(rows=made, closed=closed)
    before = contents(emptied)
    assert not old.release(PLACE, claim, release)
    assert contents(emptied) == before
    assert new.release(PLACE, ours, release)
    assert fates(emptied) == {1: "discarded", 4: "open"}
    assert exchanges(emptied) == ["a0", "a2", "b0"]


async def test_tables_do_not_move_past_a_record_that_is_not_in_its_queue(emptied: Engine, migrated_url: str) -> None:
    class Refusing(MemoryLog):
        refused = asyncio.Event()

        async def set_aside(
            self,
            dead_letter_id: DeadLetterId,
            *,
            error: Exception,
            attempt: int = 1,
            rebuild_offsets: Mapping[str, int] | None = None,
        ) -> None:
            del dead_letter_id, error, attempt, rebuild_offsets
            self.refused.set()
            raise TryLater("the queue is away")

    log = Refusing(MemoryBroker(partitions=1))
    await tell(log, [("a", NONSENSE), ("b", 0)])
    stop = asyncio.Event()
    working = asyncio.create_task(project(migrated_url, log, stop=stop))
    async with asyncio.timeout(30):
        await log.refused.wait()
        stop.set()
        await working
    assert exchanges(emptied) == []
    with emptied.connect() as connection:
        query = "SELECT next_offset FROM offsets WHERE topic = :topic"
        assert connection.execute(text(query), {"topic": topics.EXCHANGES}).scalars().all() == [0]


async def test_what_was_decided_before_the_partitions_were_reassigned_is_not_written(
    emptied: Engine,
) -> None:
    """Whoever reads on may know of dead letters that this decision did not."""

    class Rebalancing(MemoryLog):
        async def set_aside(
            self,
            dead_letter_id: DeadLetterId,
            *,
            error: Exception,
            attempt: int = 1,
            rebuild_offsets: Mapping[str, int] | None = None,
        ) -> None:
            await super().set_aside(dead_letter_id, error=error, attempt=attempt, rebuild_offsets=rebuild_offsets)
            decided.end()
            await projector.claim([PLACE])

    log = Rebalancing(MemoryBroker(partitions=1))
    stop = asyncio.Event()
    projector = Projector(TableWriter(emptied), stop)
    await tell(log, [("b", 0), ("a", NONSENSE)])
    read = [one async for some in log.replay({PLACE: (0, 2)}) for one in some]
    await projector.claim([PLACE])
    decided = ProjectionQuarantine(projector, log, stop, FailureRate(lambda: 0.0))
    await decided.take(in_batches(read))
    assert projector.positions() == {PLACE: 0}
    assert exchanges(emptied) == []
    second = ProjectionQuarantine(projector, log, stop, FailureRate(lambda: 0.0))
    await second.take(in_batches(read))
    second.end()
    assert projector.positions() == {PLACE: 2}
    assert exchanges(emptied) == ["b0"]


async def test_nothing_is_decided_before_all_that_stands_in_the_queues_is_known(
    emptied: Engine, migrated_url: str
) -> None:
    class Slow(MemoryLog):
        async def follow_raw(
            self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
        ) -> AsyncGenerator[Sequence[Raw], None]:
            for _ in range(1000):
                await asyncio.sleep(0)
            async for raws in super().follow_raw(topics, start, until_end=until_end):
                yield raws

    broker = MemoryBroker(partitions=1)
    with breaking_on({("a", 0)}):
        await survive(migrated_url, broker, [("a", 0), ("a", 1)], [])
        await ruled_and_closed(migrated_url, broker, True)
    empty(emptied)
    async with projecting(migrated_url, Slow(broker)):
        await caught_up(emptied, MemoryLog(broker))
    assert exchanges(emptied) == ["a1"]
    assert fates(emptied) == {0: "discarded"}


async def test_what_waits_by_the_tables_and_is_in_no_queue_any_more_goes_on_waiting_and_can_be_ruled_about(
    emptied: Engine, migrated_url: str, waiting: MemoryLog
) -> None:
    waiting.broker._partitions[PartitionId(f"{topics.EXCHANGES}.dlq", 0)].clear()  # as its retention does
    await waiting.append([exchange("a", 4), exchange("b", 1)])
    async with projecting(migrated_url, waiting):
        await caught_up(emptied, waiting)
        assert exchanges(emptied) == ["a0", "b0", "b1"]
        found = [(dead_letter.id.offset, dead_letter.reason) for dead_letter in await queues.dead_letters(waiting)]
        assert found == [(1, Reason.UNDECODABLE), *((offset, Reason.PARKED) for offset in (2, 4, 5))]
        await rule(waiting, True)
        await toys.until(queues.closed(waiting))
    assert exchanges(emptied) == ["a0", "a2", "a3", "a4", "b0", "b1"]


async def test_a_letter_whose_record_the_log_has_lost_is_discarded_and_what_waited_behind_it_is_used(
    emptied: Engine, migrated_url: str, waiting: MemoryLog
) -> None:
    class Expired(MemoryLog):
        async def replay(
            self, ranges: Mapping[PartitionId, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
        ) -> AsyncGenerator[Sequence[Arrived], None]:
            async for records in super().replay(ranges, key=key, digest=digest):
                yield [record for record in records if record.offset > 1]

    async with projecting(migrated_url, Expired(waiting.broker)):
        await queues.rule(waiting, Fate.REPLAY)
        await toys.until(queues.closed(waiting))
    assert exchanges(emptied) == ["a0", "a2", "a3", "b0"]
    assert fates(emptied) == {1: "discarded"}
    assert (await queues.dead_letters(waiting))[0].because == EXPIRED


async def test_what_waits_on_one_topic_is_used_once_its_first_is_ruled_about_whatever_waits_on_another(
    emptied: Engine, migrated_url: str, waiting: MemoryLog
) -> None:
    votes = [replace(event, session_id="a") for event in one_session.ONE_SESSION if isinstance(event, VoteCast)]
    async with projecting(migrated_url, waiting):
        await append_bytes(waiting, topics.VOTES, b"a", b"nonsense", [])
        await waiting.append(votes[:2])
        await caught_up(emptied, waiting)
        head = DeadLetterId(GROUP, topics.VOTES, 0, 0)
        await waiting.mark([DeadLetterMark(id=head, key=b"a", attempt=1, fate=Fate.DISCARD)])
        await toys.until(_closed_on(topics.VOTES, waiting))
        await waiting.append(votes[2:])
        await caught_up(emptied, waiting)
        assert {dead_letter.id.topic for dead_letter in await queues.dead_letters(waiting) if dead_letter.waits} == {
            topics.EXCHANGES
        }
    assert len(contents(emptied)["votes"]) == len(votes)
    assert exchanges(emptied) == ["a0", "b0"]


def _closed_on(topic: str, log: MemoryLog) -> Callable[[], Awaitable[bool]]:
    async def closed() -> bool:
        return not any(
            dead_letter.waits for dead_letter in await queues.dead_letters(log) if dead_letter.id.topic == topic
        )

    return closed


async def test_what_was_released_and_is_set_aside_in_tables_of_a_backup_is_released_again(
    emptied: Engine, migrated_url: str, waiting: MemoryLog
) -> None:
    with emptied.begin() as connection:
        backup = [dict(one) for one in connection.execute(set_aside.select()).mappings()]
    await ruled_and_closed(migrated_url, waiting.broker, True)
    assert exchanges(emptied) == ["a0", "a2", "a3", "b0"]
    with emptied.begin() as connection:
        connection.execute(text("DELETE FROM exchanges WHERE source_offset > 1 AND session_id = 'a'"))
        connection.execute(set_aside.delete())
        connection.execute(set_aside.insert(), backup)
    async with projecting(migrated_url, waiting):
        while len(exchanges(emptied)) < 4:
            await asyncio.sleep(0.01)
    assert exchanges(emptied) == ["a0", "a2", "a3", "b0"]
