"""Of a turn and its judge one revision at most is ever trained: cut off anywhere, whatever comes late."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import NOBODY, BatchPlanned, SampleAssembled
from clawstream.training.batches.choosing import Arrival, BatchRules
from clawstream.training.batches.planning import Batch, Batcher, DropReason, turn_of
from clawstream.training.batches.progress import resume_offsets
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.test_loop import settings, trained_until

RULES = BatchRules(policy_id="policy", batch_samples=2, max_wait_ms=1000)


def arrival(sample: SampleAssembled, offset: int = 0, timestamp_ms: int = 0) -> Arrival:
    return Arrival(topic="samples", partition=0, offset=offset, timestamp_ms=timestamp_ms, sample=sample)


def plan_of(batch: Batch, version: int) -> BatchPlanned:
    return BatchPlanned(
        policy_id="policy",
        policy_version=version,
        parent_version=version - 1,
        sample_ids=tuple(s.sample_id for s in batch.samples),
        offsets=batch.offsets,
        seed=version,
        settings=b"{}",
        planned_at_ms=0,
        turns=tuple(map(turn_of, batch.samples)),
    )


class Trainer:
    """A trainer that can be killed: plans, what was trained on and the executed version outlive it."""

    def __init__(self, log: Sequence[Arrival]) -> None:
        self.log = log
        self.plans: list[BatchPlanned] = []
        self.trained: list[SampleAssembled] = []
        self.version = 0

    def live(self, until: int, *, poll: int = 1, dies_before_its_step: bool = False) -> None:
        """Start, read the log up to an offset, `poll` records at a time, and stop."""
        batcher = Batcher(RULES, self.plans, executed_version=self.version)
        start = resume_offsets(self.plans, self.version).get(("samples", 0), 0)
        unread = list(self.log[start:until])
        while unread:
            for record in unread[:poll]:
                batcher.receive(record)
            del unread[:poll]
            self._step(batcher)
            while (batch := batcher.due(parent_version=self.version, now_ms=0)) is not None:
                self.plans.append(plan_of(batch, self.version + 1))
                batcher.plan(self.plans[-1])
                if dies_before_its_step:
                    return
                self._step(batcher)

    def _step(self, batcher: Batcher) -> None:
        pending = batcher.pending()
        if pending is not None and pending[1] is not None:
            self.trained += pending[1]
            self.version = pending[0].policy_version
            batcher.executed(pending[0])


WRITTEN = st.lists(
    st.tuples(
        st.integers(0, 5),  # the turn
        st.sampled_from(["judge", NOBODY]),
        st.integers(0, 1),
        st.sampled_from([None, 1, 2, 3]),
        st.sampled_from([1, -1, None]),
    ),
    max_size=24,
    unique_by=lambda said: said[:4],  # an id is of one content
)


@given(WRITTEN, st.lists(st.tuples(st.integers(0, 24), st.integers(1, 9), st.booleans()), max_size=6), st.randoms())
def test_cut_anywhere_one_revision_of_a_turn_is_trained_at_most(
    written: list[tuple[int, str, int, int | None, int | None]],
    lives: list[tuple[int, int, bool]],
    rng: random.Random,
) -> None:
    samples = [
        tiny.sample(f"t{turn}", judge=judge, revision=revision, num_feedback=heard, reward=reward)
        for turn, judge, revision, heard, reward in written
    ]
    samples += rng.sample(samples, len(samples) // 2)  # written again, in any order
    trainer = Trainer([arrival(sample, offset) for offset, sample in enumerate(samples)])

    reach = 0
    for until, poll, dies in lives:
        reach = max(reach, until)
        trainer.live(reach, poll=poll, dies_before_its_step=dies)
    trainer.live(len(samples))

    turns = [sample.turn_id for sample in trainer.trained]
    assert len(turns) == len(set(turns))
    assert all(sample.total_reward for sample in trainer.trained)


def test_the_newest_revision_takes_the_place_of_one_that_waits_and_waits_as_long() -> None:
    batcher = Batcher(RULES)
    old, new = tiny.sample("t", reward=-1), tiny.sample("t", reward=1, num_feedback=1)
    batcher.receive(arrival(old, 0, timestamp_ms=100))

    assert batcher.receive(arrival(new, 1, timestamp_ms=900)) is None
    assert batcher.dropped == {DropReason.SUPERSEDED: 1}
    batch = batcher.due(parent_version=0, now_ms=1100)
    assert batch is not None
    assert batch.samples == (new,)
    assert [offset.next_offset for offset in batch.offsets] == [2]


def test_two_revisions_in_one_window_are_one_sample_of_the_batch() -> None:
    batcher = Batcher(RULES)
    revisions = [tiny.sample("t", num_feedback=heard) for heard in (None, 1, 2)]
    for offset, sample in enumerate([*revisions, tiny.sample("other")]):
        batcher.receive(arrival(sample, offset))

    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    assert batch.samples == (revisions[-1], tiny.sample("other"))


@pytest.mark.parametrize("reward", [1, None])  # a newer opinion; the older one taken back
def test_what_is_read_while_the_plan_is_on_its_way_to_the_log_is_late(reward: int | None) -> None:
    batcher = Batcher(RULES)
    planned = [tiny.sample(name, reward=-1) for name in "ab"]
    for offset, sample in enumerate(planned):
        batcher.receive(arrival(sample, offset))
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None

    batcher.receive(arrival(tiny.sample("a", reward=reward, num_feedback=1), 2))
    plan = plan_of(batch, 1)
    batcher.plan(plan)

    assert batcher.pending() == (plan, tuple(planned))
    assert batcher.num_waiting == 0
    batcher.executed(plan)
    assert batcher.due(parent_version=1, now_ms=10**9) is None


def test_a_newer_revision_is_planned_where_the_plan_on_its_way_did_not_get_to_the_log() -> None:
    batcher = Batcher(RULES)
    for offset, name in enumerate("ab"):
        batcher.receive(arrival(tiny.sample(name, reward=-1), offset))
    assert batcher.due(parent_version=0, now_ms=0) is not None
    newer = tiny.sample("a", reward=1, num_feedback=1)
    batcher.receive(arrival(newer, 2))

    batch = batcher.due(parent_version=0, now_ms=0)

    assert batch is not None
    assert newer in batch.samples


@pytest.mark.parametrize("restarted", [True, False])
def test_a_revision_of_a_turn_that_is_planned_is_late_also_after_a_restart(*, restarted: bool) -> None:
    batcher = Batcher(RULES)
    for offset, name in enumerate("ab"):
        batcher.receive(arrival(tiny.sample(name), offset))
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    plan = plan_of(batch, 1)
    batcher.plan(plan)
    if restarted:
        batcher = Batcher(RULES, [plan], executed_version=1)

    assert batcher.receive(arrival(tiny.sample("a", reward=-1, num_feedback=1), 2)) is DropReason.LATE
    assert (batcher.num_waiting, batcher.dropped) == (0, {DropReason.LATE: 1})


def test_an_older_revision_that_is_written_after_a_newer_one_is_superseded() -> None:
    batcher = Batcher(RULES)
    batcher.receive(arrival(tiny.sample("t", num_feedback=2), 0))

    assert batcher.receive(arrival(tiny.sample("t", num_feedback=1), 1)) is DropReason.SUPERSEDED
    assert batcher.receive(arrival(tiny.sample("t"), 2)) is DropReason.SUPERSEDED
    assert batcher.num_waiting == 1


def test_what_feedback_took_back_waits_no_more_and_does_not_come_back() -> None:
    batcher = Batcher(RULES)
    batcher.receive(arrival(tiny.sample("t", num_feedback=1), 0))

    assert batcher.receive(arrival(tiny.sample("t", reward=None, num_feedback=2), 1)) is DropReason.NO_SIGNAL
    assert batcher.num_waiting == 0
    assert batcher.receive(arrival(tiny.sample("t", num_feedback=1), 2)) is DropReason.SUPERSEDED


def test_a_sample_of_feedback_alone_gives_way_to_one_that_a_judge_saw_and_never_follows_it() -> None:
    alone, judged = tiny.sample("t", judge=NOBODY, num_feedback=1), tiny.sample("t", num_feedback=1)
    batcher = Batcher(RULES)
    batcher.receive(arrival(alone, 0))
    assert batcher.receive(arrival(judged, 1)) is None
    assert batcher.num_waiting == 1
    assert batcher.receive(arrival(tiny.sample("t", judge=NOBODY, num_feedback=2), 2)) is DropReason.SUPERSEDED

    planned = plan_of(Batch(samples=(judged,), offsets=()), 1)
    again = Batcher(RULES, [planned], executed_version=1)
    assert again.receive(arrival(alone, 0)) is DropReason.LATE
    planned = plan_of(Batch(samples=(alone,), offsets=()), 1)
    assert Batcher(RULES, [planned], executed_version=1).receive(arrival(judged, 0)) is DropReason.LATE


def test_another_judges_sample_of_a_turn_is_another_sample() -> None:
    batcher = Batcher(RULES)
    batcher.receive(arrival(tiny.sample("t"), 0))

    assert batcher.receive(arrival(tiny.sample("t", judge="another"), 1)) is None
    assert batcher.num_waiting == 2


def test_parts_that_outweigh_each_other_are_not_trained_on_without_a_hint() -> None:
    batcher = Batcher(RULES)
    plain, hinted = (replace(tiny.sample(n, hinted=n == "h", num_feedback=1), total_reward=0.0) for n in "ph")
    assert batcher.receive(arrival(plain, 0)) is DropReason.NO_SIGNAL
    assert batcher.receive(arrival(hinted, 1)) is None


async def test_late_feedback_is_never_trained_and_early_feedback_takes_the_first_revisions_place(
    base: Path, tmp_path: Path
) -> None:
    log = MemoryLog(MemoryBroker())
    trained = [tiny.sample(name, reward=reward) for name, reward in (("a", 1), ("b", -1), ("c", 1))]
    thumbed = tiny.sample("a", reward=-1, num_feedback=1)
    await log.append(trained)
    chosen = settings(base, tmp_path)
    await trained_until(log, chosen, 1)
    waiting = [tiny.sample(name, reward=-1) for name in "de"]
    revised = tiny.sample("d", reward=1, num_feedback=1)
    await log.append([thumbed, *waiting, revised, tiny.sample("b", num_feedback=2), tiny.sample("f")])
    events = await trained_until(log, chosen, 2)

    plans = [event for event in events if isinstance(event, BatchPlanned)]
    named = [name for plan in plans for name in plan.sample_ids]
    assert len(named) == len(set(named)) == 6
    assert set(plans[1].sample_ids) == {one.sample_id for one in (waiting[1], revised, tiny.sample("f"))}
    assert sorted(turn.turn_id for turn in plans[1].turns) == ["d", "e", "f"]
