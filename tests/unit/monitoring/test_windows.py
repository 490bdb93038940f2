"""An hour of one-minute windows: what is read again, in any order of topics, changes nothing."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import Event
from clawstream.monitoring.windows import KEPT_MINUTES, MINUTE_MS, NOTHING, Windows, total
from clawstream.stream.log import Raw, undecodable
from clawstream.stream.stage import Record
from clawstream.stream.topics import SAMPLES, VOTES
from tests.unit.monitoring.said import sample, vote

NOW_MS = 1_800_000_000_000 - 1_800_000_000_000 % MINUTE_MS + 12_345


def record(event: Event, offset: int, at_ms: int = NOW_MS, topic: str = VOTES) -> Record:
    return Record(topic=topic, partition=0, offset=offset, timestamp_ms=at_ms, key=event.key, event=event)


AGES_MS = st.lists(st.integers(0, 2 * KEPT_MINUTES * MINUTE_MS), max_size=30).map(
    lambda ages: sorted(ages, reverse=True)
)


@given(AGES_MS, st.data())
def test_records_read_again_from_anywhere_count_once(ages_ms: list[int], data: st.DataObject) -> None:
    log = [record(vote(offset), offset, NOW_MS - age) for offset, age in enumerate(ages_ms)]
    once, again = Windows(), Windows()
    for one in log:
        once.record(one)
    read_to = data.draw(st.integers(0, len(log)))
    for one in [*log[:read_to], *log[data.draw(st.integers(0, read_to)) :]]:
        again.record(one)
    assert once.last_hour(NOW_MS) == again.last_hour(NOW_MS)


@given(AGES_MS)
def test_reading_only_the_last_hour_gives_the_windows_that_reading_all_gives(ages_ms: list[int]) -> None:
    log = [record(vote(offset), offset, NOW_MS - age) for offset, age in enumerate(ages_ms)]
    all_of_it, last_hour = Windows(), Windows()
    for one in log:
        all_of_it.record(one)
        if one.timestamp_ms > NOW_MS - KEPT_MINUTES * MINUTE_MS:
            last_hour.record(one)
    assert all_of_it.last_hour(NOW_MS) == last_hour.last_hour(NOW_MS)


@given(AGES_MS)
def test_every_record_of_the_last_hour_is_in_exactly_one_window(ages_ms: list[int]) -> None:
    windows = Windows()
    for offset, age in enumerate(ages_ms):
        windows.record(record(vote(offset), offset, NOW_MS - age))
    oldest_ms = windows.last_hour(NOW_MS)[0].start_ms
    expected = sum(NOW_MS - age >= oldest_ms for age in ages_ms)
    assert sum(total(windows.last_hour(NOW_MS)).votes.values()) == expected


def test_topics_are_counted_in_whatever_order_they_are_read() -> None:
    votes = [record(vote(offset), offset, NOW_MS - 10 * MINUTE_MS) for offset in range(3)]
    samples = [record(sample(str(offset)), offset, NOW_MS, SAMPLES) for offset in range(2)]
    one, other = Windows(), Windows()
    for item in [*votes, *samples]:
        one.record(item)
    for item in [*samples, *votes]:
        other.record(item)
    assert one.last_hour(NOW_MS) == other.last_hour(NOW_MS)


def test_an_event_that_was_written_twice_counts_once() -> None:
    windows = Windows()
    assert windows.record(record(vote(0), 0, NOW_MS - 5 * MINUTE_MS))
    assert not windows.record(record(vote(0), 7))
    assert total(windows.last_hour(NOW_MS)).votes == {"readable": 1}


def test_a_minute_without_events_is_a_window_too() -> None:
    windows = Windows().last_hour(NOW_MS)
    assert len(windows) == KEPT_MINUTES
    assert [window.tally for window in windows] == [NOTHING] * KEPT_MINUTES
    assert windows[-1].start_ms == NOW_MS - 12_345
    assert {later.start_ms - earlier.start_ms for earlier, later in itertools.pairwise(windows)} == {MINUTE_MS}


def test_bytes_that_are_no_event_are_counted_once_each() -> None:
    windows = Windows()
    for offset in (0, 1, 1):
        raw = Raw(topic=VOTES, partition=0, offset=offset, timestamp_ms=NOW_MS, key=b"s", value=b"?", headers=())
        windows.record(undecodable(raw, "no fingerprint"))
    assert total(windows.last_hour(NOW_MS)).undecodable == 2


def test_what_is_older_than_an_hour_is_let_go() -> None:
    windows = Windows()
    for offset in range(3 * KEPT_MINUTES):
        windows.record(record(vote(offset), offset, NOW_MS + offset * MINUTE_MS))
    assert len(windows._tallies) == len(windows._ids) == KEPT_MINUTES
    windows.record(record(sample("late"), 0, NOW_MS, SAMPLES))
    assert NOW_MS - NOW_MS % MINUTE_MS not in windows._tallies
