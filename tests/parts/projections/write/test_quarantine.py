"""Records that no row can be made of hold up their session until somebody has ruled, and then leave no trace."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from clawstream.stream.dead_letters import Reason
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.quarantine import dead_letters
from tests.examples import examples
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.projections.reading import contents, empty
from tests.parts.projections.rebuild.test_audit import audited
from tests.parts.projections.rebuild.test_rebuild import rebuilt, url_of
from tests.parts.projections.write.quarantined import (
    CUTS,
    NONSENSE,
    TOLD,
    Told,
    begun_again,
    breaking_on,
    exchange,
    exchanges,
    expected,
    fates,
    heads,
    rows,
    rule,
    ruled_and_closed,
    survive,
)
from tests.parts.projections.write.test_stage import caught_up, projecting
from tests.parts.stream.test_dead_letters import command
from tests.unit.stream import queues, toys

pytestmark = pytest.mark.slow


@examples(0.15)
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
            await begun_again(migrated, migrated_url, broker)
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
        await begun_again(migrated, migrated_url, broker)
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
        assert exchanges(live) == ["a0", "a1", "b0", "b1", "b2", "b3", "b4"]
        found = await audited(url_of(live), log)
        assert (found.ok, found.rows_differ, found.records_set_aside, found.records_unread) == (True, 0, 3, 0)
        before = contents(live)
        made = await rebuilt(live, log)
        assert (made.records, made.records_set_aside, made.records_unread) == (10, 3, 0)
        assert contents(live) == before
        assert (await audited(url_of(live), log)).ok

        head, *parked = await dead_letters(log)
        assert (head.key, head.reason) == (b"a", Reason.UNUSABLE)
        assert head.error == "UnusableEvent: Postgres refuses its row: CheckViolation (no_a2)"
        assert [dead_letter.reason for dead_letter in parked] == [Reason.PARKED] * 2
        code, _, said = await command(config, "replay", "/".join(map(str, head.id)))
        assert (code, "1 to replay: project" in said) == (0, True), said
        await toys.until(queues.closed(log))
        await log.append([exchange("a", 5)])
        await caught_up(live, log)
        assert exchanges(live) == [f"a{n}" for n in range(6)] + [f"b{n}" for n in range(5)]
        found = await audited(url_of(live), log)
        assert (found.ok, found.rows_differ, found.records_set_aside) == (True, 0, 0)
