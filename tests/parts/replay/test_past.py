"""Which requests are asked again, and what was learned in between: it goes by what a version is made of."""

from collections.abc import Iterator, Sequence

import pytest

from clawstream.events import BatchPlanned, Event, StepRejected
from clawstream.monitoring.policy import ancestors, versions
from clawstream.projections import database
from clawstream.replay.past_requests import learned, past
from tests import servers
from tests.parts.projections.reading import write_all
from tests.parts.replay.past import POLICY, conversation, made, planned, published, sample
from tests.unit.projections.logs import example, records

# Version 3 is made of 1 and 0, as 2 was rejected; 4 goes back to 1, and 5 goes on from there; 6 goes back to 0.
HISTORY: Sequence[Event] = (
    *[event for name in ("one", "two", "three", "five", "new") for event in conversation(name)],
    published(0, None),
    *made(1, 0, "one"),
    *planned(2, 1, "two"),
    example(StepRejected, policy_id=POLICY, policy_version=2),
    *made(3, 1, "three"),
    *made(4, 1, rollback=1),
    *made(5, 4, "five"),
    *made(6, 0, rollback=2),
    sample("new"),
    example(
        BatchPlanned, policy_id="another", policy_version=6, parent_version=3, sample_ids=(sample("new").sample_id,)
    ),
)


@pytest.fixture(scope="module")
def url(postgres_url: str) -> Iterator[str]:
    """A database that was told the history."""
    with servers.database(postgres_url, "test_past") as fresh:
        database.upgrade(fresh)
        engine = database.connect(fresh)
        write_all(engine, records(HISTORY))
        engine.dispose()
        yield fresh


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        (0, 1, {"two", "three", "five", "new"}),
        (0, 3, {"two", "five", "new"}),
        (0, 5, {"two", "three", "new"}),
        (0, 6, {"one", "two", "three", "five", "new"}),
        (3, 5, {"two", "new"}),
    ],
)
def test_what_either_version_was_trained_on_is_not_asked_and_all_else_is(
    url: str, before: int, after: int, asked: set[str]
) -> None:
    found = past(url, POLICY, before=before, after=after, count=9, seed=0)
    assert {one.turn_id for one in found} == asked


def test_requests_are_drawn_and_equal_seeds_draw_alike(url: str) -> None:
    def drawn(seed: int) -> list[str]:
        return [one.turn_id for one in past(url, POLICY, before=0, after=6, count=2, seed=seed)]

    assert len(drawn(0)) == 2
    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("before", "after", "lessons"),
    [
        (0, 3, [(1, "one"), (3, "three")]),
        (1, 3, [(3, "three")]),
        (0, 4, [(1, "one")]),
        (1, 4, []),
        (0, 5, [(1, "one"), (5, "five")]),
        (3, 5, [(5, "five")]),
        (0, 6, []),
        (5, 6, []),
    ],
)
def test_lessons_are_those_that_the_newer_version_had_and_the_older_did_not(
    url: str, before: int, after: int, lessons: list[tuple[int, str]]
) -> None:
    found = learned(url, POLICY, before=before, after=after)

    assert [(one.policy_version, one.turn_id) for one in found] == lessons
    assert [one.next_state for one in found] == [f"user: no {name}" for _, name in lessons]
    assert [(one.hint, one.reward) for one in found] == [(f"hint {name}", -1.0) for _, name in lessons]


def test_a_version_learned_from_what_policy_show_says_that_it_is_made_of(url: str) -> None:
    known = versions(HISTORY, POLICY)
    for version in (1, 3, 4, 5, 6):
        line = {version, *ancestors(known, version)}
        told = {number for number in line if (plan := known[number].plan) is not None and plan.sample_ids}
        assert {one.policy_version for one in learned(url, POLICY, before=0, after=version)} == told
