"""Counts add up in any grouping, and an average over nothing is nothing."""

from dataclasses import asdict
from functools import reduce
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    EVENTS,
    AnswerRefreshed,
    Event,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    VoteStatus,
)
from clawstream.monitoring.windows import NOTHING, UNDECODABLE, EventCounts, tally
from tests import strategies
from tests.sessions import Session, user
from tests.unit.monitoring.said import activated, rejected, sample, verdict, vote
from tests.unit.projections import logs


def total(events: list[Event]) -> EventCounts:
    return reduce(add, map(tally, events), NOTHING)


@given(st.lists(strategies.events(), max_size=8), st.randoms(use_true_random=False), st.integers(0, 8))
def test_a_total_is_the_same_in_any_order_and_cut_anywhere(events: list[Event], chance: object, cut: int) -> None:
    shuffled = sorted(events, key=lambda _: chance.random())  # type: ignore[attr-defined]  # hypothesis's Random
    assert total(events) == total(shuffled[:cut]) + total(shuffled[cut:])


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_an_event_that_comes_twice_counts_twice_in_each_count(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(strategies.of(kind))
    once = asdict(tally(event))
    longest_ms = once.pop("pause_ms_max")
    twice = {
        name: {kind: 2 * number for kind, number in count.items()} if isinstance(count, dict) else 2 * count
        for name, count in once.items()
    }
    assert asdict(total([event, event])) == twice | {"pause_ms_max": longest_ms}


@given(st.sampled_from(EVENTS).flatmap(strategies.of))
def test_an_event_counts_at_most_once_in_each_count(event: Event) -> None:
    counted = tally(event)
    events = [*counted.exchanges.values(), *counted.votes.values(), *counted.refusals.values(), counted.verdicts]
    events += [counted.turns_paired, counted.turns_orphaned, counted.samples, counted.steps, counted.activations]
    events += [counted.rejections, *counted.refreshed.values()]
    assert sorted(events, reverse=True)[:2] in ([1, 0], [0, 0], [1])


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (logs.example(SampleAssembled, refreshed_id="a"), "sampled"),
        (logs.example(SampleRefused, refreshed_id="a", reason=RefusalReason.LOOPING), "looping"),
        (logs.example(AnswerRefreshed, error="too long"), "unanswered"),
    ],
)
def test_what_came_of_prompts_answered_again_is_counted_apart(event: Event, what: str) -> None:
    assert tally(event) == EventCounts(refreshed={what: 1})


def test_nothing_counted_has_no_averages() -> None:
    assert (NOTHING.mean_score, NOTHING.unreadable_share, NOTHING.failed_share) == (None, None, None)
    assert NOTHING.pause_ms_max is None


def test_a_verdict_below_the_quorum_lowers_no_mean() -> None:
    counted = total([verdict("a", 1), verdict("b", None), verdict("c", 0)])
    assert (counted.verdicts, counted.verdicts_scored, counted.mean_score) == (3, 2, 0.5)


def test_unreadable_votes_are_a_share_of_replies_and_failed_ones_of_all() -> None:
    readable = [vote(ballot) for ballot in range(3)]
    counted = total([*readable, vote(3, VoteStatus.UNREADABLE), vote(4, VoteStatus.FAILED)])
    assert (counted.unreadable_share, counted.failed_share) == (0.25, 0.2)


def test_exchanges_are_counted_by_what_came_of_them() -> None:
    session = Session()
    counted = total([session.ask([user("hi")], "hello"), session.fail([user("hi"), user("there")])])
    assert counted.exchanges == {"client_gone": 1, "completed": 1}
    assert counted.output_tokens == len("hello")


def test_the_longest_pause_stands() -> None:
    assert total([activated(1, pause_ms=3.0), activated(2, pause_ms=9.0), sample("t")]).pause_ms_max == 9.0


def test_a_rejected_step_is_no_step_taken() -> None:
    counted = total([rejected(1), rejected(2)])
    assert (counted.steps, counted.steps_rejected, counted.rejections) == (0, 2, 0)


def test_undecodable_records_are_counted() -> None:
    assert (UNDECODABLE + UNDECODABLE).undecodable == 2
