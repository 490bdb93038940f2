"""Records that no row can be made of hold up their session until somebody has ruled, and then leave no trace."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from clawstream.errors import TryLater
from clawstream.events import ExchangeCompleted, VoteCast
from clawstream.projections import rebuild, sorting, stage
from clawstream.projections.projector import Projector, in_batches
from clawstream.projections.quarantine import Quarantine
from clawstream.projections.rows import Row, row
from clawstream.projections.sorting import GROUP, Release
from clawstream.projections.stage import project
from clawstream.projections.tables import EXCHANGES, VOTES, set_aside
from clawstream.projections.writer import Writer
from clawstream.stream import admin
from clawstream.stream.cut import Cut
from clawstream.stream.desk import letters
from clawstream.stream.failures import FailureRate
from clawstream.stream.kafka import KafkaLog
from clawstream.stream.letters import EXPIRED, Fate, LetterId, Mark, Reason
from clawstream.stream.log import Arrived, Place, Raw
from clawstream.stream.memory import MemoryBroker, MemoryLog
from clawstream.stream.stage import Record
from tests.projections import story
from tests.projections.reading import contents, empty
from tests.projections.test_audit import audited
from tests.projections.test_rebuild import rebuilt, url_of
from tests.projections.test_stage import caught_up, projecting
from tests.stream import queues, toys
from tests.stream.raw import append_bytes
from tests.stream.test_desk import command

NONSENSE = -1
Told = tuple[str, int]  # a session, and the number of one of its exchanges, or NONSENSE
TOLD = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=16)
CUTS = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=3)


def exchange(session: str, number: int) -> ExchangeCompleted:
    return replace(story.EXCHANGES[0], session_id=session, exchange_id=f"{session}{number}")


@contextmanager
def breaking_on(bad: set[Told]) -> Iterator[None]:
    """No row can be made of these while the block lasts."""

    def made(record: Record) -> Row | None:
        event = record.event
        assert isinstance(event, ExchangeCompleted)
        if (event.session_id, int(event.exchange_id[1:])) in bad:
            raise ValueError("bad")
        return row(record)

    with patch.object(sorting, "row", made), patch.object(stage, "POLL_S", 0.005):
        yield


async def tell(log: MemoryLog, told: Sequence[Told]) -> None:
    for session, number in told:
        if number == NONSENSE:
            await append_bytes(log, EXCHANGES, session.encode(), b"nonsense", [])
        else:
            await log.append([exchange(session, number)])


async def survive(url: str, broker: MemoryBroker, told: Sequence[Told], cuts: Sequence[tuple[int, bool]]) -> None:
    """Tell the log in pieces; let a projector die at each cut and another go on; the last one has read all."""
    size = -(-len(told) // (len(cuts) + 1))
    for number, (operations, takes_effect) in enumerate(cuts):
        await tell(MemoryLog(broker), told[number * size : (number + 1) * size])
        cut = Cut(operations=operations, takes_effect=takes_effect)
        working = asyncio.create_task(project(url, MemoryLog(broker, cut=cut), stop=asyncio.Event()))
        dead = asyncio.create_task(cut.happened.wait())
        await asyncio.wait([working, dead], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        await asyncio.wait([working, dead])
    await tell(MemoryLog(broker), told[len(cuts) * size :])
    async with projecting(url, MemoryLog(broker)):
        await toys.settled(MemoryLog(broker), GROUP)


async def ruled_and_closed(url: str, broker: MemoryBroker, discard: bool) -> None:
    """Rule until nothing waits: what is nonsense is discarded, other things too with `discard`."""
    log = MemoryLog(broker)
    async with projecting(url, log):
        await toys.settled(log, GROUP)
        while not await queues.closed(log)():
            await rule(log, discard)
            await asyncio.sleep(0.005)


async def rule(log: MemoryLog, discard: bool) -> None:
    marks = [
        Mark(
            id=letter.id,
            key=letter.key,
            attempt=letter.attempt,
            fate=Fate.DISCARD if discard or letter.reason is Reason.UNDECODABLE else Fate.REPLAY,
        )
        for letter in await queues.letters(log)
        if letter.fate is Fate.OPEN and letter.reason is not Reason.PARKED
    ]
    await log.mark(marks)


def rows(engine: Engine) -> dict[str, list[int]]:
    """By session, the offsets of the records that its rows are of."""
    with engine.connect() as connection:
        found: dict[str, list[int]] = {}
        query = "SELECT session_id, source_offset FROM exchanges ORDER BY source_offset"
        for session, offset in connection.execute(text(query)):
            found.setdefault(session, []).append(offset)
        return found


def fates(engine: Engine) -> dict[int, str]:
    """By offset, what became of the records that the tables say are set aside."""
    with engine.connect() as connection:
        found = connection.execute(text("SELECT source_offset, fate FROM set_aside"))
        return {int(offset): str(fate) for offset, fate in found}


async def begun_anew(engine: Engine, url: str, broker: MemoryBroker) -> None:
    """Let a projector fill the tables, emptied, from the beginning; the queues are as they were."""
    empty(engine)
    broker.group(GROUP).committed.clear()
    await survive(url, broker, [], [])


def expected(
    broker: MemoryBroker, told: Sequence[Told], left_out: set[int], *, until: set[Told]
) -> dict[str, list[int]]:
    """What a log without the records at these places in `told` gives, of each session up to what is in `until`."""
    found: dict[str, list[int]] = {}
    counts: dict[int, int] = {}
    seen: set[Told] = set()
    ended: set[str] = set()
    for at, (session, number) in enumerate(told):
        place = broker_place(broker, session)
        offset = counts.get(place, 0)
        counts[place] = offset + 1
        if (session, number) in until:
            ended.add(session)
        if number != NONSENSE and at not in left_out and session not in ended and (session, number) not in seen:
            seen.add((session, number))
            found.setdefault(session, []).append(offset)
    return found


def broker_place(broker: MemoryBroker, session: str) -> int:
    [partition] = [
        place.partition for place in broker.places([EXCHANGES]) if any(
            raw.key == session.encode() for raw in broker.records(place)
        )
    ]  # fmt: skip
    return partition


def heads(told: Sequence[Told], bad: set[Told]) -> set[int]:
    """Where in `told` the first record of each session stands that no row can be made of."""
    firsts: dict[str, int] = {}
    for at, (session, number) in enumerate(told):
        if number == NONSENSE or (session, number) in bad:
            firsts.setdefault(session, at)
    return set(firsts.values())


@settings(max_examples=15)
@given(
    TOLD,
    TOLD,
    st.sets(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=3),
    st.sets(st.integers(0, 31), max_size=4),
    CUTS,
    CUTS,
    st.booleans(),
)
def test_a_session_has_its_rows_up_to_the_bad_record_and_once_ruled_about_all_others(
    migrated: Engine,
    migrated_url: str,
    before: list[Told],
    after: list[Told],
    bad: set[Told],
    nonsense: set[int],
    cuts: list[tuple[int, bool]],
    later_cuts: list[tuple[int, bool]],
    discard: bool,
) -> None:
    every = [(session, NONSENSE if at in nonsense else n) for at, (session, n) in enumerate([*before, *after])]
    before = every[: len(before)]
    first = heads(before, bad)

    async def scenario() -> None:
        broker = MemoryBroker(partitions=2)
        with breaking_on(bad):
            await survive(migrated_url, broker, before, cuts)
        prefixes = expected(broker, before, set(), until=bad | {(s, NONSENSE) for s in "abc"})
        assert rows(migrated) == prefixes
        found = await audited(migrated_url, MemoryLog(broker))
        assert (found.ok, found.rows_differ, found.records_unread) == (True, 0, 0)
        assert found.records_set_aside == sum(
            any(told[0] == every[at][0] and at <= number for at in first) for number, told in enumerate(before)
        )
        with breaking_on(set()):
            await begun_anew(migrated, migrated_url, broker)
            assert rows(migrated) == prefixes
            await rule(MemoryLog(broker), discard)
            await survive(migrated_url, broker, every[len(before) :], later_cuts)
            await ruled_and_closed(migrated_url, broker, discard)
        # Of what broke the projector only the first of a session waited to be ruled about.
        discarded = first if discard else {at for at in first if every[at][1] == NONSENSE}
        left_out = {at for at, (_, number) in enumerate(every) if number == NONSENSE} | discarded
        assert rows(migrated) == expected(broker, every, discarded, until=set())
        found = await audited(migrated_url, MemoryLog(broker))
        assert (found.ok, found.rows_differ, found.records_unread) == (True, 0, 0)
        assert found.records_set_aside == len(left_out)
        await begun_anew(migrated, migrated_url, broker)
        assert rows(migrated) == expected(broker, every, discarded, until=set())
        assert set(fates(migrated).values()) <= {"discarded"}

    empty(migrated)
    asyncio.run(scenario())


async def test_a_session_waits_behind_a_row_that_the_database_refuses_through_audit_and_rebuild_until_it_is_replayed(
    live: Engine, tmp_path: Path, kafka_bootstrap: str, topic_prefix: str
) -> None:
    config = tmp_path / "clawstream.toml"
    config.write_text(f'[kafka]\nbootstrap = "{kafka_bootstrap}"\nprefix = "{topic_prefix}"\n')
    with live.begin() as connection:
        connection.execute(text("ALTER TABLE exchanges ADD CONSTRAINT no_a2 CHECK (exchange_id <> 'a2')"))
    await admin.apply(kafka_bootstrap, topic_prefix)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log, projecting(url_of(live), log):
        await log.append([exchange(session, number) for number in range(5) for session in "ab"])
        await caught_up(live, log)
        assert _exchanges(live) == ["a0", "a1", "b0", "b1", "b2", "b3", "b4"]
        found = await audited(url_of(live), log)
        assert (found.ok, found.rows_differ, found.records_set_aside, found.records_unread) == (True, 0, 3, 0)
        before = contents(live)
        made = await rebuilt(live, log)
        assert (made.records, made.records_set_aside, made.records_unread) == (10, 3, 0)
        assert contents(live) == before
        assert (await audited(url_of(live), log)).ok

        head, *parked = await letters(log)
        assert (head.key, head.reason) == (b"a", Reason.UNUSABLE)
        assert head.error == "UnusableEvent: Postgres refuses its row: CheckViolation (no_a2)"
        assert [letter.reason for letter in parked] == [Reason.PARKED] * 2
        code, _, said = await command(config, "replay", "/".join(map(str, head.id)))
        assert (code, "1 to replay: project" in said) == (0, True), said
        await toys.until(queues.closed(log))
        await log.append([exchange("a", 5)])
        await caught_up(live, log)
        assert _exchanges(live) == [f"a{n}" for n in range(6)] + [f"b{n}" for n in range(5)]
        found = await audited(url_of(live), log)
        assert (found.ok, found.rows_differ, found.records_set_aside) == (True, 0, 0)


def _exchanges(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT exchange_id FROM exchanges ORDER BY 1")).scalars())


PLACE = Place(EXCHANGES, 0)


@pytest.fixture
async def waiting(emptied: Engine, migrated_url: str) -> MemoryLog:
    """A log on which session a waits behind nonsense, its second record."""
    del emptied
    log = MemoryLog(MemoryBroker(partitions=1))
    await survive(migrated_url, log.broker, [("a", 0), ("a", NONSENSE), ("a", 2), ("b", 0), ("a", 3)], [])
    return log


async def test_what_a_rebuild_left_out_and_was_released_before_it_ends_has_its_rows_in_order(
    live: Engine, waiting: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(live)
    async with projecting(url, waiting):
        await caught_up(live, waiting)

        async def catch_up(build: rebuild._Build) -> None:
            """After the tables are filled, and before they are swapped."""
            await rule(waiting, True)
            await toys.until(queues.closed(waiting))
            await waiting.append([exchange("a", 4)])
            await caught_up(live, waiting)
            await really(build)

        really = rebuild._Build.catch_up
        monkeypatch.setattr(rebuild._Build, "catch_up", catch_up)
        await rebuilt(live, waiting)
    assert _exchanges(live) == ["a0", "a2", "a3", "a4", "b0"]
    found = await audited(url, waiting)
    assert (found.ok, found.rows_differ, found.records_set_aside) == (True, 0, 1)


async def test_who_does_not_own_the_partition_any_more_releases_nothing(emptied: Engine, waiting: MemoryLog) -> None:
    old, new = Writer(emptied), Writer(emptied)
    claim = old.claim([PLACE])[PLACE]
    ours = new.claim([PLACE])[PLACE]
    made = sorting.rows_of([one async for some in waiting.replay({PLACE: (2, 3)}) for one in some])
    release = Release(rows=made, used=[2], discarded=[1], again=None, closed=())
    before = contents(emptied)
    assert not old.release(PLACE, claim, release)
    assert contents(emptied) == before
    assert new.release(PLACE, ours, release)
    assert fates(emptied) == {1: "discarded", 4: "open"}
    assert _exchanges(emptied) == ["a0", "a2", "b0"]


async def test_tables_do_not_move_past_a_record_that_is_not_in_its_queue(emptied: Engine, migrated_url: str) -> None:
    class Refusing(MemoryLog):
        refused = asyncio.Event()

        async def set_aside(
            self, letter_id: LetterId, *, error: Exception, attempt: int = 1, story: Mapping[str, int] | None = None
        ) -> None:
            del letter_id, error, attempt, story
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
    assert _exchanges(emptied) == []
    with emptied.connect() as connection:
        query = "SELECT next_offset FROM offsets WHERE topic = :topic"
        assert connection.execute(text(query), {"topic": EXCHANGES}).scalars().all() == [0]


async def test_what_was_decided_before_the_partitions_were_given_anew_is_not_written(
    emptied: Engine,
) -> None:
    """Whoever reads on may know of letters that this decision did not."""

    class Rebalancing(MemoryLog):
        async def set_aside(
            self, letter_id: LetterId, *, error: Exception, attempt: int = 1, story: Mapping[str, int] | None = None
        ) -> None:
            await super().set_aside(letter_id, error=error, attempt=attempt, story=story)
            quarantine.end()
            await projector.claim([PLACE])
            await quarantine.begin()

    log = Rebalancing(MemoryBroker(partitions=1))
    stop = asyncio.Event()
    projector = Projector(Writer(emptied), stop)
    quarantine = Quarantine(projector, log, stop, FailureRate(lambda: 0.0))
    await tell(log, [("b", 0), ("a", NONSENSE)])
    read = [one async for some in log.replay({PLACE: (0, 2)}) for one in some]
    await projector.claim([PLACE])
    await quarantine.begin()
    try:
        await quarantine.take(in_batches(read))
        assert projector.positions() == {PLACE: 0}
        assert _exchanges(emptied) == []
        await quarantine.take(in_batches(read))
        assert projector.positions() == {PLACE: 2}
        assert _exchanges(emptied) == ["b0"]
    finally:
        quarantine.end()


async def test_nothing_is_decided_before_all_that_stands_in_the_queues_is_known(
    emptied: Engine, migrated_url: str
) -> None:
    class Slow(MemoryLog):
        async def follow_raw(
            self, topics: Sequence[str], *, until_end: bool = False
        ) -> AsyncGenerator[Sequence[Raw], None]:
            for _ in range(1000):
                await asyncio.sleep(0)
            async for raws in super().follow_raw(topics, until_end=until_end):
                yield raws

    broker = MemoryBroker(partitions=1)
    with breaking_on({("a", 0)}):
        await survive(migrated_url, broker, [("a", 0), ("a", 1)], [])
        await ruled_and_closed(migrated_url, broker, True)
    empty(emptied)
    async with projecting(migrated_url, Slow(broker)):
        await caught_up(emptied, MemoryLog(broker))
    assert _exchanges(emptied) == ["a1"]
    assert fates(emptied) == {0: "discarded"}


async def test_what_waits_by_the_tables_and_is_in_no_queue_any_more_goes_on_waiting_and_can_be_ruled_about(
    emptied: Engine, migrated_url: str, waiting: MemoryLog
) -> None:
    waiting.broker._partitions[Place(f"{EXCHANGES}.dlq", 0)].clear()  # as its retention does
    await waiting.append([exchange("a", 4), exchange("b", 1)])
    async with projecting(migrated_url, waiting):
        await caught_up(emptied, waiting)
        assert _exchanges(emptied) == ["a0", "b0", "b1"]
        found = [(letter.id.offset, letter.reason) for letter in await queues.letters(waiting)]
        assert found == [(1, Reason.UNDECODABLE), *((offset, Reason.PARKED) for offset in (2, 4, 5))]
        await rule(waiting, True)
        await toys.until(queues.closed(waiting))
    assert _exchanges(emptied) == ["a0", "a2", "a3", "a4", "b0", "b1"]


async def test_a_letter_whose_record_the_log_has_lost_is_discarded_and_what_waited_behind_it_is_used(
    emptied: Engine, migrated_url: str, waiting: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def replay(
        log: MemoryLog, ranges: Mapping[Place, tuple[int, int]], *, key: bytes | None = None, digest: bool = True
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        async for records in really(log, ranges, key=key, digest=digest):
            yield [record for record in records if record.offset > 1]

    really = MemoryLog.replay
    monkeypatch.setattr(MemoryLog, "replay", replay)
    async with projecting(migrated_url, waiting):
        await queues.rule(waiting, Fate.REPLAY)
        await toys.until(queues.closed(waiting))
    assert _exchanges(emptied) == ["a0", "a2", "a3", "b0"]
    assert fates(emptied) == {1: "discarded"}
    assert (await queues.letters(waiting))[0].because == EXPIRED


async def test_what_waits_on_one_topic_is_used_once_its_first_is_ruled_about_whatever_waits_on_another(
    emptied: Engine, migrated_url: str, waiting: MemoryLog
) -> None:
    votes = [replace(event, session_id="a") for event in story.STORY if isinstance(event, VoteCast)]
    async with projecting(migrated_url, waiting):
        await append_bytes(waiting, VOTES, b"a", b"nonsense", [])
        await waiting.append(votes[:2])
        await caught_up(emptied, waiting)
        head = LetterId(GROUP, VOTES, 0, 0)
        await waiting.mark([Mark(id=head, key=b"a", attempt=1, fate=Fate.DISCARD)])
        await toys.until(_closed_on(VOTES, waiting))
        await waiting.append(votes[2:])
        await caught_up(emptied, waiting)
        assert {letter.id.topic for letter in await queues.letters(waiting) if letter.waits} == {EXCHANGES}
    assert len(contents(emptied)["votes"]) == len(votes)
    assert _exchanges(emptied) == ["a0", "b0"]


def _closed_on(topic: str, log: MemoryLog) -> Callable[[], Awaitable[bool]]:
    async def closed() -> bool:
        return not any(letter.waits for letter in await queues.letters(log) if letter.id.topic == topic)

    return closed


async def test_what_was_released_and_is_set_aside_in_tables_of_a_backup_is_released_again(
    emptied: Engine, migrated_url: str, waiting: MemoryLog
) -> None:
    with emptied.begin() as connection:
        backup = [dict(one) for one in connection.execute(set_aside.select()).mappings()]
    await ruled_and_closed(migrated_url, waiting.broker, True)
    assert _exchanges(emptied) == ["a0", "a2", "a3", "b0"]
    with emptied.begin() as connection:
        connection.execute(text("DELETE FROM exchanges WHERE source_offset > 1 AND session_id = 'a'"))
        connection.execute(set_aside.delete())
        connection.execute(set_aside.insert(), backup)
    async with projecting(migrated_url, waiting):
        while len(_exchanges(emptied)) < 4:
            await asyncio.sleep(0.01)
    assert _exchanges(emptied) == ["a0", "a2", "a3", "b0"]
