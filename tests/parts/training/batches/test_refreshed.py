"""What came too late is answered again, and that answer is trained on beside its turn."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import NOBODY, BatchPlanned, RefreshAsked, SampleAssembled, Sampling
from clawstream.training.batches.choosing import Arrival
from clawstream.training.batches.planning import Batcher, DropReason
from clawstream.training.batches.progress import resume_offsets
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.batches.test_revisions import RULES, arrival, plan_of
from tests.parts.training.test_loop import settings, trained_until
from tests.sessions import ANSWERS
from tests.unit.stream import toys

REFRESHING = replace(RULES, refreshes=True)
SAMPLED = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_tokens=64, seed=None, stop=())


def sample(name: str, **said: Any) -> SampleAssembled:
    """A hinted sample that says how it was sampled."""
    return replace(tiny.sample(name, hinted=True, **said), sampling=SAMPLED)


def refreshed(of: SampleAssembled, name: str) -> SampleAssembled:
    """A sample of an answer given again."""
    return replace(of, reward=None, total_reward=None, num_feedback=None, refreshed_id=name)


async def asked(log: MemoryLog) -> list[RefreshAsked]:
    return [record.event for record in await toys.read(log, ANSWERS) if isinstance(record.event, RefreshAsked)]


def test_an_answer_given_again_is_trained_beside_its_turn_and_makes_it_neither_late_nor_superseded() -> None:
    batcher = Batcher(REFRESHING)
    own = sample("t")
    batcher.receive(arrival(refreshed(own, "one"), 0))
    assert batcher.receive(arrival(own, 1)) is None
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    assert batch.samples == (refreshed(own, "one"), own)

    planned = plan_of(batch, 1)
    assert [turn.turn_id for turn in planned.turns or ()] == ["one", "t"]
    again = Batcher(REFRESHING, [planned], executed_version=1)
    assert again.receive(arrival(refreshed(own, "one"), 2)) is DropReason.REPEATED
    assert again.receive(arrival(refreshed(own, "two"), 3)) is None
    assert again.receive(arrival(replace(own, num_feedback=1), 4)) is DropReason.LATE
    assert [late.sample.sample_id for late in again.to_refresh()] == [replace(own, num_feedback=1).sample_id]

    only_refreshed = Batcher(REFRESHING, [plan_of(replace(batch, samples=batch.samples[:1]), 1)], executed_version=1)
    assert only_refreshed.receive(arrival(own, 5)) is None


def test_a_revision_that_is_read_while_its_turns_plan_is_on_its_way_is_answered_again_and_read_again_until_then() -> (
    None
):
    batcher = Batcher(REFRESHING)
    for offset, name in enumerate("ab"):
        batcher.receive(arrival(sample(name), offset))
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    late = arrival(sample("a", num_feedback=1), 2, timestamp_ms=77)
    batcher.receive(late)
    plan = plan_of(batch, 1)
    batcher.plan(plan)

    [found] = batcher.to_refresh()
    assert (found.sample, found.timestamp_ms) == (late.sample, 77)
    batcher.executed(plan)
    for offset, name in enumerate("cd", 3):
        batcher.receive(arrival(sample(name), offset))
    unsaid = batcher.due(parent_version=1, now_ms=0)
    assert unsaid is not None
    assert [offset.next_offset for offset in unsaid.offsets] == [2]
    batcher.asked([found])
    said = batcher.due(parent_version=1, now_ms=0)
    assert said is not None
    assert [offset.next_offset for offset in said.offsets] == [5]


def test_what_was_superseded_before_the_plan_is_not_answered_again_by_who_starts_again() -> None:
    batcher = Batcher(REFRESHING)
    revisions = [sample("t", num_feedback=heard) for heard in (None, 1, 2)]
    alone = sample("t", judge=NOBODY, num_feedback=3)
    for offset, one in enumerate([*revisions, sample("other")]):
        batcher.receive(arrival(one, offset))
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None

    for executed in (0, 1):
        again = Batcher(REFRESHING, [plan_of(batch, 1)], executed_version=executed)
        for offset, one in enumerate([*revisions, alone]):
            again.receive(arrival(one, offset))
        assert again.to_refresh() == ()
        again.receive(arrival(sample("t", num_feedback=3), 9))
        assert len(again.to_refresh()) == 1


@pytest.mark.parametrize("restarted", [True, False])
def test_what_was_dropped_for_its_age_was_not_trained_on_so_no_revision_of_it_is_late(*, restarted: bool) -> None:
    rules = replace(REFRESHING, max_versions_behind=0)
    batcher = Batcher(rules)
    batcher.receive(arrival(sample("t"), 0))
    assert batcher.due(parent_version=1, now_ms=10**9) is None
    assert batcher.dropped == {DropReason.STALE: 1}
    assert batcher.receive(arrival(sample("t"), 1)) is DropReason.REPEATED
    if restarted:
        batcher = Batcher(rules)
        batcher.receive(arrival(sample("t"), 0))
    assert batcher.receive(arrival(sample("t", num_feedback=1), 2)) is None
    assert batcher.to_refresh() == ()
    assert batcher.due(parent_version=1, now_ms=10**9) is None


def test_one_turn_is_answered_again_once_whatever_else_comes_late() -> None:
    batcher = Batcher(REFRESHING)
    for offset, name in enumerate("ab"):
        batcher.receive(arrival(sample(name), offset))
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    again = Batcher(REFRESHING, [plan_of(batch, 1)], executed_version=1)
    for heard in (1, 2):
        assert again.receive(arrival(sample("a", num_feedback=heard), 2 + heard)) is DropReason.LATE
    assert len(again.to_refresh()) == 1
    again.asked(again.to_refresh())
    again.receive(arrival(sample("a", num_feedback=3), 6))
    assert again.to_refresh() == ()


@pytest.mark.parametrize(
    "late",
    [
        replace(sample("a", num_feedback=1), hint=None, hinted_prompt_ids=None),
        replace(sample("a", num_feedback=1), policy_id="other"),
    ],
)
def test_what_no_hint_could_score_or_another_policy_answered_is_recorded_alone(late: SampleAssembled) -> None:
    batcher = Batcher(REFRESHING, [plan_of_one(sample("a"))], executed_version=1)
    batcher.receive(arrival(late, 1))
    assert batcher.to_refresh() == ()


def test_where_late_samples_are_recorded_alone_nothing_is_answered_again() -> None:
    batcher = Batcher(RULES, [plan_of_one(sample("a"))], executed_version=1)
    assert batcher.receive(arrival(sample("a", num_feedback=1), 1)) is DropReason.LATE
    assert batcher.to_refresh() == ()


def test_a_late_revision_of_an_answer_given_again_is_not_answered_again_in_turn() -> None:
    batcher = Batcher(REFRESHING, [plan_of_one(refreshed(sample("a"), "one"))], executed_version=1)
    assert batcher.receive(arrival(replace(refreshed(sample("a"), "one"), num_feedback=1), 1)) is DropReason.LATE
    assert batcher.to_refresh() == ()


def plan_of_one(one: SampleAssembled) -> BatchPlanned:
    batcher = Batcher(replace(RULES, batch_samples=1))
    batcher.receive(arrival(one))
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    return plan_of(batch, 1)


class Trainer:
    """A trainer that can be killed anywhere: plans, steps and what it asked for outlive it."""

    def __init__(self, log: Sequence[Arrival], max_versions_behind: int | None) -> None:
        self.log = log
        self.rules = replace(REFRESHING, max_versions_behind=max_versions_behind)
        self.plans: list[BatchPlanned] = []
        self.version = 0
        self.asked: list[SampleAssembled] = []

    def live(self, until: int, rng: random.Random) -> None:
        """Start, read up to an offset, and be killed after some of what is done next."""
        batcher = Batcher(self.rules, self.plans, executed_version=self.version)
        for record in self.log[resume_offsets(self.plans, self.version).get(("samples", 0), 0) : until]:
            if rng.random() < 0.5 and (batch := batcher.due(parent_version=self.version, now_ms=0)) is not None:
                batcher.receive(record)
                self.plans.append(plan_of(batch, self.version + 1))
                batcher.plan(self.plans[-1])
            else:
                batcher.receive(record)
            pending = batcher.pending()
            if pending is not None and pending[1] is not None and rng.random() < 0.7:
                self.version = pending[0].policy_version
                batcher.executed(pending[0])
            if rng.random() < 0.1:
                return
            if rng.random() < 0.5:
                self.ask(batcher)
        if until == len(self.log):
            self.ask(batcher)

    def ask(self, batcher: Batcher) -> None:
        late = batcher.to_refresh()
        self.asked += [one.sample for one in late]
        batcher.asked(late)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, 1, 2, 3])), max_size=16, unique=True),
    st.lists(st.integers(0, 16), max_size=6),
    st.sampled_from([None, 0, 1]),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.randoms(),
)
def test_cut_anywhere_a_turn_is_answered_again_exactly_where_a_newer_revision_than_the_planned_one_came(
    written: list[tuple[int, int | None]],
    lives: list[int],
    max_versions_behind: int | None,
    sampled_by: list[int],
    rng: random.Random,
) -> None:
    order = sorted(written, key=lambda said: said[1] or 0)  # revisions of a turn come to be one after the other
    samples = [sample(f"t{turn}", num_feedback=heard, version=sampled_by[turn]) for turn, heard in order]
    trainer = Trainer([arrival(one, offset) for offset, one in enumerate(samples)], max_versions_behind)
    reach = 0
    for until in lives:
        reach = max(reach, min(until, len(samples)))
        trainer.live(reach, rng)
    calm = random.Random(1)
    calm.random = lambda: 0.3  # type: ignore[method-assign]
    trainer.live(len(samples), calm)

    planned = {turn.turn_id: turn.num_feedback or 0 for plan in trainer.plans for turn in plan.turns or ()}
    newest = {f"t{turn}": heard or 0 for turn, heard in order}
    expected = {turn for turn, heard in planned.items() if newest[turn] > heard}
    assert {one.turn_id for one in trainer.asked} == expected
    assert all((one.num_feedback or 0) > planned[one.turn_id] for one in trainer.asked)


@pytest.mark.parametrize("late", ["refresh", "record"])
async def test_a_late_sample_with_a_hint_is_asked_for_where_the_settings_say_so_also_by_who_starts_again(
    base: Path, tmp_path: Path, late: str
) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, late=late, batch_samples=1)
    await log.append([sample("a")])
    await trained_until(log, chosen, 1)
    revised = sample("a", reward=-1, num_feedback=1)
    await log.append([revised, sample("b")])
    await trained_until(log, chosen, 2)
    await log.append([sample("c")])
    await trained_until(log, chosen, 3)

    found = {one.event_id: one for one in await asked(log)}
    assert [one.sample_id for one in found.values()] == ([revised.sample_id] if late == "refresh" else [])
    for one in found.values():
        assert (one.turn_id, one.prompt_ids, one.sampling) == (revised.turn_id, revised.prompt_ids, SAMPLED)
        assert one.asked_at_ms in [
            record.timestamp_ms for record in await toys.read(log, "clawstream.samples.v1") if record.event == revised
        ]
