"""States by key, and from where they could be rebuilt."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import UnusableEvent
from clawstream.stream.log import Arrived, Raw, undecodable
from clawstream.stream.runner.fold import CLOCK_SLACK_MS, Fold, Note, in_clock_order, read_note
from clawstream.stream.stage import Record, Stage, Step
from tests.unit.stream import toys

RETAIN_MS = 10_000
SILENCE_MS = RETAIN_MS + CLOCK_SLACK_MS + 1


def record(key: str, number: int, offset: int, timestamp_ms: int, topic: str = toys.EXCHANGES) -> Record:
    event = toys.done(key, number)
    return Record(topic=topic, partition=0, offset=offset, timestamp_ms=timestamp_ms, key=key, event=event)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2 * SILENCE_MS)), max_size=25), st.data())
def test_a_fold_that_begins_where_it_says_gives_what_the_whole_fold_gives(
    steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Cut anywhere: what was committed is folded again from `rebuild_from`, the rest goes on as if nothing happened."""
    now_ms = 0
    records = []
    for offset, (key, later_ms) in enumerate(steps):
        now_ms += later_ms
        records.append(record(key, offset, offset, now_ms))
    cut = data.draw(st.integers(0, len(records)))

    whole: Fold[int, None] = Fold(toys.pairs(RETAIN_MS))
    for one in records[:cut]:
        whole.apply(one)
    clock_ms = records[cut - 1].timestamp_ms if cut else 0
    whole.expire(clock_ms, {toys.EXCHANGES: cut})
    start = whole.rebuild_from(toys.EXCHANGES, cut)

    rebuilt: Fold[int, None] = Fold(toys.pairs(RETAIN_MS))
    for one in records[start:cut]:
        rebuilt.apply(one)
    rebuilt.expire(clock_ms, {toys.EXCHANGES: cut})

    assert [rebuilt.apply(one).events for one in records[cut:]] == [whole.apply(one).events for one in records[cut:]]


def test_a_key_that_was_silent_for_longer_than_it_is_retained_starts_afresh() -> None:
    fold: Fold[int, None] = Fold(toys.pairs(RETAIN_MS))
    fold.apply(record("a", 0, 0, 0))
    assert fold.apply(record("a", 1, 1, RETAIN_MS)).events == [toys.paired("a", 0)]
    assert fold.apply(record("a", 2, 2, 2 * RETAIN_MS + 1)).events == []


def test_a_silent_key_is_needed_no_more_once_its_records_are_committed() -> None:
    fold: Fold[int, None] = Fold(toys.pairs(RETAIN_MS))
    fold.apply(record("a", 0, 0, 0))
    fold.apply(record("b", 0, 1, SILENCE_MS))
    fold.expire(SILENCE_MS, {toys.EXCHANGES: 0})
    assert fold.rebuild_from(toys.EXCHANGES, 2) == 0
    fold.expire(SILENCE_MS, {toys.EXCHANGES: 1})
    assert fold.rebuild_from(toys.EXCHANGES, 2) == 1
    assert fold.num_open == 1


def test_a_key_whose_state_is_over_is_still_needed_until_it_is_silent() -> None:
    fold: Fold[int, None] = Fold(toys.pairs(RETAIN_MS, last=1))
    fold.apply(record("a", 0, 0, 0))
    fold.apply(record("a", 1, 1, 1))
    assert fold.num_open == 0
    assert fold.rebuild_from(toys.EXCHANGES, 2) == 0


def test_a_step_that_refuses_its_record_leaves_the_state() -> None:
    def step(before: int | None, one: Record) -> Step[int, None]:
        if toys.number_of(one.event) == 1:
            raise UnusableEvent("no good")
        return Step((before or 0) + 1, [toys.paired("a", before or 0)])

    fold: Fold[int, None] = Fold(Stage(name="s", reads=(toys.EXCHANGES,), step=step))
    fold.apply(record("a", 0, 0, 0))
    with pytest.raises(UnusableEvent):
        fold.apply(record("a", 1, 1, 1))
    assert fold.apply(record("a", 2, 2, 2)).events == [toys.paired("a", 1)]


def test_keys_that_are_over_are_not_asked() -> None:
    asked: list[int] = []

    def tick(state: int, _now_ms: int) -> Step[int, None]:
        asked.append(state)
        return Step(None)

    stage: Stage[int, None] = Stage(
        name="s", reads=(toys.EXCHANGES,), step=lambda _, one: Step(one.offset), tick=tick, retain_ms=RETAIN_MS
    )
    fold = Fold(stage)
    fold.apply(record("a", 0, 0, 0))
    fold.apply(record("b", 0, 1, RETAIN_MS))
    assert len(list(fold.tick(RETAIN_MS + 1))) == 1
    assert len(list(fold.tick(RETAIN_MS + 2))) == 0
    assert asked == [1]


@given(st.lists(st.lists(st.integers(0, 9), max_size=8).map(sorted), max_size=4), st.integers(1, 3))
def test_topics_are_merged_by_the_logs_clock_and_each_keeps_its_order(times: list[list[int]], size: int) -> None:
    topics = [
        [record("a", 0, offset, time, topic=str(number)) for offset, time in enumerate(line)]
        for number, line in enumerate(times)
    ]

    async def stream(line: Sequence[Record]) -> AsyncIterator[Sequence[Arrived]]:
        for at in range(0, len(line), size):
            yield line[at : at + size]

    async def merged() -> list[Record]:
        return [one async for records in in_clock_order([stream(line) for line in topics]) for one in records]

    found = asyncio.run(merged())
    # Of equal times the earlier topic's come first, in their order.
    assert found == sorted((one for line in topics for one in line), key=lambda one: (one.timestamp_ms, int(one.topic)))


def test_records_that_can_not_be_read_are_left_out_of_a_rebuild() -> None:
    raw = Raw(topic="t", partition=0, offset=0, timestamp_ms=0, key=None, value=None, headers=())

    async def stream() -> AsyncIterator[Sequence[Arrived]]:
        yield [undecodable(raw, "no value")]
        yield [record("a", 0, 1, 1)]

    async def merged() -> list[Sequence[Record]]:
        return [records async for records in in_clock_order([stream()])]

    assert asyncio.run(merged()) == [[record("a", 0, 1, 1)]]


@given(st.integers(0, 100), st.integers(0, 2**45))
def test_a_note_comes_back(start: int, clock_ms: int) -> None:
    assert read_note(Note(start, clock_ms).written(), 100) == Note(start, clock_ms)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"from": "x", "clock_ms": 1}', "by another tool"])
def test_a_commit_without_a_note_has_nothing_to_rebuild(text: str) -> None:
    assert read_note(text, 7) == Note(7, 0)
