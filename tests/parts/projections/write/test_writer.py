"""The tables are what the log says, however it was cut, repeated and interrupted."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from clawstream.events import Event, SessionDone, TurnOrphaned, TurnPaired
from clawstream.events.exchanges import OrphanReason
from clawstream.projections.write.chain import ChainBlock
from clawstream.projections.write.rows import TABLE_OF, UnusableRecords
from clawstream.projections.write.writer import _LINKED, PartitionClaim, TableWriter, _linked
from clawstream.stream.log import PartitionId
from clawstream.stream.topics import EXCHANGES
from tests.chaos.reading import marked_twice
from tests.examples import examples
from tests.parts.projections.reading import contents, empty, partition_rows, rest, write_all
from tests.unit.projections import logs


def _of_one_key(facts: list[Event]) -> list[Event]:
    """Without facts that another key has told already: the ids of two sessions differ, and so do their exchanges'."""
    keys: dict[str, str] = {}
    return [fact for fact in facts if keys.setdefault(fact.event_id, fact.key) == fact.key]


_facts = (
    st.lists(logs.events(), max_size=12)
    .map(_of_one_key)
    .flatmap(lambda facts: st.permutations([*facts, *facts[::3]]))  # some facts stand on the log twice
)


@examples(0.12)
@given(_facts, st.data())
def test_any_cut_into_batches_any_crash_and_any_redelivery_give_the_rows_of_one_pass(
    migrated: Engine, facts: list[Event], data: st.DataObject
) -> None:
    placed = logs.records(facts)
    empty(migrated)
    write_all(migrated, placed)
    expected = contents(migrated)

    empty(migrated)
    while True:
        writer = TableWriter(migrated)  # a new owner, after a crash
        claims = writer.claim(placed)
        left = {place: some for place in placed if (some := rest(placed[place], claims[place]))}
        if not left:
            break
        chosen = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        sizes = {place: data.draw(st.integers(1, len(left[place]))) for place in chosen}
        batch = [partition_rows(place, claims[place], left[place][: sizes[place]]) for place in chosen]
        assert writer.write(batch) == frozenset()
        assert writer.write(batch) == frozenset()  # its answer was lost
    assert contents(migrated) == expected


@examples(0.12)
@given(_facts)
def test_every_fact_is_one_row_and_of_its_records_the_first(migrated: Engine, facts: list[Event]) -> None:
    placed = logs.records(facts)
    empty(migrated)
    write_all(migrated, placed)
    first: dict[str, tuple[str, int]] = {}
    for records in placed.values():
        for record in records:
            first.setdefault(record.event.event_id, (TABLE_OF[type(record.event)][0].name, record.offset))
    with migrated.connect() as connection:
        found = {
            str(event_id): (table.name, offset)
            for table in {table for table, _ in TABLE_OF.values()}
            for event_id, offset in connection.execute(text(f"SELECT event_id, source_offset FROM {table.name}"))
        }
    assert found == first


def test_the_first_record_of_a_fact_stays_whatever_a_later_one_says(emptied: Engine) -> None:
    paired = TurnPaired(session_id="s", turn_id="t", next_exchange_id="first", next_state=(1,))
    later = dataclasses.replace(paired, next_exchange_id="second")
    placed = logs.records([paired, later])
    [(place, records)] = placed.items()
    for n in (1, 2):
        write_all(emptied, {place: records[:n]})
    with emptied.connect() as connection:
        assert connection.execute(text("SELECT next_exchange_id, source_offset FROM turns")).all() == [("first", 0)]


def test_a_second_writer_fences_the_first_and_nothing_of_the_first_is_written(emptied: Engine) -> None:
    facts = [SessionDone(session_id="s", after_exchange_id="x")]
    [(place, records)] = logs.records(facts).items()
    old, new = TableWriter(emptied), TableWriter(emptied)
    old_claim = old.claim([place])[place]
    new_claim = new.claim([place])[place]
    assert new_claim.epoch > old_claim.epoch
    assert old.write([partition_rows(place, old_claim, records)]) == {place}
    assert contents(emptied)["session_ends"] == []
    assert new.write([partition_rows(place, new_claim, records)]) == frozenset()
    assert len(contents(emptied)["session_ends"]) == 1


def test_a_batch_with_one_lost_partition_writes_none_of_the_others(emptied: Engine) -> None:
    done = [SessionDone(session_id=name, after_exchange_id=None) for name in "abcdef"]
    placed = logs.records(done)
    assert len(placed) > 1
    old = TableWriter(emptied)
    claims = old.claim(placed)
    taken = min(placed)
    TableWriter(emptied).claim([taken])
    batch = [partition_rows(place, claims[place], placed[place]) for place in placed]
    assert old.write(batch) == {taken}
    assert contents(emptied)["session_ends"] == []
    assert old.write([part for part in batch if part.place != taken]) == frozenset()
    assert len(contents(emptied)["session_ends"]) == len(done) - len(placed[taken])


def test_rows_and_offset_stand_or_fall_together(emptied: Engine) -> None:
    orphan = TurnOrphaned(session_id="s", turn_id="t", next_exchange_id="n", reason=OrphanReason.RESET)
    [(place, records)] = logs.records([orphan]).items()
    writer = TableWriter(emptied)
    claim = writer.claim([place])[place]
    part = partition_rows(place, claim, records)
    broken = part.rows[0]._replace(cells=("not a uuid", *part.rows[0].cells[1:]))
    with pytest.raises(UnusableRecords, match="InvalidTextRepresentation"):
        writer.write([dataclasses.replace(part, rows=[part.rows[0], broken])])
    assert writer.claim([place])[place] == PartitionClaim(next_offset=0, epoch=claim.epoch + 1)
    assert contents(emptied)["turns"] == []


def test_what_was_written_twice_is_marked_twice_in_the_books_as_the_chaos_rig_reads_them(migrated: Engine) -> None:
    empty(migrated)
    marks = [bytes((at, *b"mark")) for at in (0, 1, 127)]
    found = []
    for added in (marks, marks[1:]):
        block = ChainBlock(number=2, next_offset=384, chain=b"chain", marks=b"".join(added))
        with migrated.begin() as connection:
            connection.connection.cursor().execute(_LINKED, _linked(PartitionId(EXCHANGES, 3), block))
        found.append(marked_twice(migrated.url.render_as_string(hide_password=False)))
    empty(migrated)

    assert found == [(), (f"{EXCHANGES}-3 offset 257", f"{EXCHANGES}-3 offset 383")]
