"""Each sample in exactly one batch, whatever is delivered twice and wherever reading is cut off."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import BatchPlanned, SampleAssembled
from clawstream.training.batches.choosing import Arrival, BatchRules
from clawstream.training.batches.planning import Batch, Batcher, DropReason, turn_of
from clawstream.training.batches.progress import resume_offsets, versions_behind
from tests.parts.training import tiny

RULES = BatchRules(policy_id="policy", batch_samples=3, max_wait_ms=1000)
sample = functools.cache(tiny.sample)


def arrival(name: str, partition: int = 0, offset: int = 0, timestamp_ms: int = 0) -> Arrival:
    return Arrival(topic="samples", partition=partition, offset=offset, timestamp_ms=timestamp_ms, sample=sample(name))


def of(kept: SampleAssembled, offset: int = 0) -> Arrival:
    return Arrival(topic="samples", partition=0, offset=offset, timestamp_ms=0, sample=kept)


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
    """A trainer that can be killed: the log of plans and what was trained on are all that outlives it."""

    def __init__(self, log: list[Arrival]) -> None:
        self.log = log
        self.plans: list[BatchPlanned] = []
        self.trained: list[str] = []
        self.version = 0

    def run(self, records: int, *, poll: int = 1, die_before_step: bool = False) -> None:
        """Start, read this many records from where the checkpoint says, `poll` at a time, and stop."""
        batcher = Batcher(RULES, self.plans, executed_version=self.version)
        start = resume_offsets(self.plans, self.version)
        unread = [a for a in self.log if a.offset >= start.get((a.topic, a.partition), 0)]
        for first in range(0, min(records, len(unread)), poll):
            for record in unread[first : min(first + poll, records)]:
                batcher.receive(record)
            self._step(batcher)
            while (batch := batcher.due(parent_version=self.version, now_ms=0)) is not None:
                self.plans.append(plan_of(batch, self.version + 1))
                batcher.plan(self.plans[-1])
                if die_before_step:
                    return
                self._step(batcher)

    def _step(self, batcher: Batcher) -> None:
        pending = batcher.pending()
        if pending is not None and pending[1] is not None:
            self.trained += [s.sample_id for s in pending[1]]
            self.version = pending[0].policy_version
            batcher.executed(pending[0])


def log_of(layout: list[int], copies: list[int]) -> list[Arrival]:
    """A log in which sample i stands in partition layout[i], written copies[i] times in a row."""
    ends: dict[int, int] = {}
    log = []
    for index, (partition, count) in enumerate(zip(layout, copies, strict=False)):
        for _ in range(count):
            log.append(arrival(f"s{index}", partition, ends.get(partition, 0)))
            ends[partition] = ends.get(partition, 0) + 1
    return log


LAYOUT = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@given(LAYOUT, st.data())
def test_every_sample_is_trained_on_once_however_often_it_was_written(layout: list[int], data: st.DataObject) -> None:
    copies = data.draw(st.lists(st.integers(1, 3), min_size=len(layout), max_size=len(layout)))
    trainer = Trainer(log_of(layout, copies))

    trainer.run(1000)

    names = [sample(f"s{i}").sample_id for i in range(len(layout))]
    assert trainer.trained == names[: len(names) // 3 * 3]


@given(LAYOUT, st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=8), st.integers(1, 9))
def test_cut_anywhere_every_sample_is_in_exactly_one_step(
    layout: list[int], cuts: list[tuple[int, bool]], poll: int
) -> None:
    trainer = Trainer(log_of(layout, [1] * len(layout)))

    for records, die_before_step in cuts:
        trainer.run(records, poll=poll, die_before_step=die_before_step)
    trainer.run(1000)

    assert len(trainer.trained) == len(set(trainer.trained)) == len(layout) // 3 * 3
    assert trainer.trained == [name for plan in trainer.plans for name in plan.sample_ids]


@given(LAYOUT, st.integers(1, 9))
def test_what_waits_stands_at_or_after_the_planned_offsets(layout: list[int], poll: int) -> None:
    log = log_of(layout, [1] * len(layout))
    trainer = Trainer(log)
    trainer.run(poll, poll=poll, die_before_step=True)
    trainer.version = len(trainer.plans)
    trainer.trained = [name for plan in trainer.plans for name in plan.sample_ids]

    start = resume_offsets(trainer.plans, trainer.version)
    unread = [a.sample.sample_id for a in log if a.offset >= start.get((a.topic, a.partition), 0)]

    left = {a.sample.sample_id for a in log} - set(trainer.trained)
    assert left <= set(unread)


def test_a_batch_waits_for_enough_samples_or_for_the_oldest_to_be_old() -> None:
    batcher = Batcher(RULES)
    batcher.receive(arrival("a", offset=0, timestamp_ms=500))
    batcher.receive(arrival("b", offset=1, timestamp_ms=900))

    assert batcher.due(parent_version=0, now_ms=1499) is None
    late = batcher.due(parent_version=0, now_ms=1500)
    assert late is not None
    assert len(late.samples) == 2


def test_nothing_is_due_when_nothing_waits_or_a_plan_is_pending() -> None:
    batcher = Batcher(RULES)
    assert batcher.due(parent_version=0, now_ms=10**12) is None

    for index in range(6):
        batcher.receive(arrival(f"s{index}", offset=index))
    first = batcher.due(parent_version=0, now_ms=0)
    assert first is not None
    batcher.plan(plan_of(first, 1))

    assert batcher.due(parent_version=0, now_ms=10**12) is None


def test_a_plan_that_was_not_executed_is_executed_as_written() -> None:
    names = ["c", "a", "b"]
    plan = plan_of(Batch(samples=tuple(sample(n) for n in names), offsets=()), 1)
    batcher = Batcher(RULES, [plan], executed_version=0)

    for offset, name in enumerate(["a", "b"]):
        assert batcher.receive(arrival(name, offset=offset)) is DropReason.REPEATED
    assert batcher.pending() == (plan, None)
    batcher.receive(arrival("c", offset=2))

    assert batcher.pending() == (plan, tuple(sample(n) for n in names))


def test_of_two_plans_for_one_version_the_first_counts() -> None:
    first = plan_of(Batch(samples=(sample("a"),), offsets=()), 1)
    second = plan_of(Batch(samples=(sample("b"),), offsets=()), 1)
    batcher = Batcher(RULES, [first, second])

    assert batcher.receive(arrival("b")) is None
    pending = batcher.pending()
    assert pending is not None
    assert pending[0] == first


def test_where_a_sample_stands_that_is_used_after_all_moves_no_offset() -> None:
    batcher = Batcher(RULES)
    for offset, name in enumerate(["a", "b", "c"], start=5):
        batcher.receive(arrival(name, offset=offset))
    for name, offset in (("before", 2), ("behind", 50)):
        batcher.receive(replace(arrival(name, offset=offset), again=True))

    batch = batcher.due(parent_version=0, now_ms=0)

    assert batch is not None
    assert [offset.next_offset for offset in batch.offsets] == [8]


def test_what_can_not_be_trained_on_is_dropped_unless_a_pending_plan_names_it() -> None:
    bad = replace(sample("a"), trained=())
    fresh = Batcher(RULES)
    assert fresh.receive(of(bad)) is DropReason.UNTRAINABLE
    assert fresh.receive(of(sample("a"), 1)) is None

    planned = plan_of(Batch(samples=(bad,), offsets=()), 1)
    resumed = Batcher(RULES, [planned])
    resumed.receive(of(bad))
    assert resumed.pending() == (planned, (bad,))
    assert "trained has 0 values" in (resumed.flaw(bad) or "")


def test_a_stale_sample_is_dropped_counted_and_does_not_come_back() -> None:
    rules = BatchRules(policy_id="policy", batch_samples=1, max_versions_behind=2)
    batcher = Batcher(rules)
    old = of(tiny.sample("old", version=3))
    batcher.receive(old)

    assert batcher.due(parent_version=6, now_ms=0) is None
    assert batcher.receive(old) is DropReason.REPEATED
    assert batcher.dropped[DropReason.STALE] == 1


def test_a_sample_as_old_as_allowed_is_kept() -> None:
    batcher = Batcher(BatchRules(policy_id="policy", batch_samples=1, max_versions_behind=2))
    batcher.receive(of(tiny.sample("old", version=3)))

    assert batcher.due(parent_version=5, now_ms=0) is not None


ONE_BEHIND = BatchRules(policy_id="policy", batch_samples=1, max_versions_behind=1)


def test_steps_rejected_before_the_start_make_no_sample_older() -> None:
    batcher = Batcher(ONE_BEHIND, rejected=[6, 7])
    batcher.receive(of(tiny.sample("old", version=5)))

    assert batcher.due(parent_version=8, now_ms=0) is not None


def test_a_step_rejected_meanwhile_makes_no_sample_older() -> None:
    batcher = Batcher(ONE_BEHIND)
    batcher.receive(of(tiny.sample("doomed", version=1)))
    batch = batcher.due(parent_version=1, now_ms=0)
    assert batch is not None
    batcher.plan(plan_of(batch, 2))
    batcher.executed(plan_of(batch, 2), rejected=True)
    batcher.receive(of(tiny.sample("old", version=1), 1))

    assert batcher.due(parent_version=3, now_ms=0) is not None


@pytest.mark.parametrize(("rejected", "expected"), [([], 3), ([6, 7], 1), ([8], 2), ([5, 9], 3)], ids=str)
def test_a_sample_is_as_many_versions_behind_as_were_published_after_its_own_up_to_the_parent(
    rejected: list[int], expected: int
) -> None:
    assert versions_behind(tiny.sample("s", version=5), 8, rejected) == expected


@pytest.mark.parametrize(
    ("rules", "kept", "reason"),
    [
        (BatchRules(policy_id="policy", hints_count=False), {"reward": None, "hinted": True}, DropReason.NO_SIGNAL),
        (BatchRules(policy_id="policy", rewards_count=False), {"reward": 1}, DropReason.NO_SIGNAL),
        (BatchRules(policy_id="policy"), {"reward": 1, "policy_id": "another"}, DropReason.OTHER_POLICY),
        (BatchRules(policy_id="policy"), {"reward": None, "hinted": True}, None),
        (BatchRules(policy_id="policy"), {"reward": -1}, None),
    ],
)
def test_only_what_this_policy_and_method_learn_from_waits(
    rules: BatchRules, kept: dict[str, object], reason: DropReason | None
) -> None:
    batcher = Batcher(rules)

    assert batcher.receive(of(tiny.sample("s", **kept))) is reason  # type: ignore[arg-type]
    assert batcher.num_waiting == (reason is None)
