"""Whole groups, each in one step, with the advantages that their settlements say, wherever the trainer is killed."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clawstream.config import JudgeSettings, Settings, TrainingSettings
from clawstream.events import (
    BatchPlanned,
    GroupSettled,
    SampleAssembled,
    StepAdvantage,
    StepDropped,
    StepDropReason,
    StepTaken,
)
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import HEARD_MS
from clawstream.training.batches.choosing import Arrival, BatchRules
from clawstream.training.batches.planning import Batch, Batcher, DropReason, turn_of
from clawstream.training.batches.progress import resume_offsets
from clawstream.training.batches.trainable import SettledGroups
from clawstream.training.step.trainer import Trainer
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.step.test_methods import gradient_of
from tests.parts.training.step.test_trainer import on_policy, with_settings
from tests.parts.training.test_loop import settings, trained_until

RULES = BatchRules(policy_id="policy", batch_samples=3, max_wait_ms=1000, hints_count=False, grouped=True)
sample = functools.cache(tiny.sample)


def step_of(group: int, number: int) -> SampleAssembled:
    return sample(f"g{group} s{number}", reward=None, group_id=f"g{group}")


def settled(group: int, num_steps: int, *, dropped: Sequence[StepDropped] = ()) -> GroupSettled:
    return GroupSettled(
        group_id=f"g{group}",
        trajectories=(f"g{group}",),
        complete=True,
        advantages=tuple(
            StepAdvantage(
                turn_id=step_of(group, n).turn_id,
                sample_id=step_of(group, n).sample_id,
                step_index=0,
                reward=float(n),
                advantage=n - 1.5,
            )
            for n in range(num_steps)
        ),
        dropped=tuple(dropped),
    )


def dropped(kept: SampleAssembled, reason: StepDropReason) -> StepDropped:
    return StepDropped(turn_id=kept.turn_id, sample_id=kept.sample_id, step_index=0, reason=reason)


def arrived(kept: SampleAssembled, offset: int = 0, timestamp_ms: int = 0) -> Arrival:
    return Arrival(topic="samples", partition=0, offset=offset, timestamp_ms=timestamp_ms, sample=kept)


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
        advantages=batch.advantages,
    )


Logged = Arrival | GroupSettled
LATE_MS = 10**9  # all that stands on the log is old


def run(
    log: Sequence[Logged],
    plans: list[BatchPlanned],
    stepped: list[int],
    records: int,
    *,
    now_ms: int,
    die_before_step: bool = False,
) -> None:
    """Start, read this many records in this order and stop: plans and steps are all that outlives it."""
    batcher = Batcher(RULES, plans, executed_version=len(stepped))
    start = resume_offsets(plans, len(stepped)).get(("samples", 0), 0)
    unread = [record for record in log if isinstance(record, GroupSettled) or record.offset >= start]
    for number, record in enumerate(unread[:records], 1):
        if isinstance(record, GroupSettled):
            batcher.learn(record, 0)
        else:
            batcher.receive(record)
        if number == len(unread):
            batcher.read_past(one.group_id for one in log if isinstance(one, GroupSettled))
        pending = batcher.pending()
        if pending is None and (batch := batcher.due(parent_version=len(stepped), now_ms=now_ms)) is not None:
            plans.append(plan_of(batch, len(plans) + 1))
            batcher.plan(plans[-1])
            if die_before_step:
                return
            pending = batcher.pending()
        if pending is not None and pending[1] is not None:
            stepped.append(pending[0].policy_version)
            batcher.executed(pending[0])


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=5),
    st.sampled_from([0, LATE_MS]),
    st.data(),
)
def test_cut_anywhere_each_group_is_whole_in_exactly_one_plan(
    sizes: list[int], cuts: list[tuple[int, bool]], now_ms: int, data: st.DataObject
) -> None:
    samples = data.draw(st.permutations([step_of(g, n) for g, size in enumerate(sizes) for n in range(size)]))
    arrivals: list[Logged] = [arrived(kept, offset) for offset, kept in enumerate(samples)]
    log = arrivals
    for group, size in enumerate(sizes):  # any settlement may be read before any sample
        where = data.draw(st.integers(0, len(log)))
        log = [*log[:where], settled(group, size), *log[where:]]
    plans: list[BatchPlanned] = []
    stepped: list[int] = []
    for records, die_before_step in cuts:
        run(log, plans, stepped, records, now_ms=now_ms, die_before_step=die_before_step)
    for _ in range(len(sizes) + 1):
        run(log, plans, stepped, len(log), now_ms=now_ms)

    taken = [name for plan in plans for name in plan.sample_ids]
    assert len(taken) == len(set(taken))
    assert stepped == [plan.policy_version for plan in plans]
    said = {step.sample_id: step.advantage for g, size in enumerate(sizes) for step in settled(g, size).advantages}
    for plan in plans:
        assert plan.advantages == tuple(said[name] for name in plan.sample_ids)
        assert (
            len(plan.sample_ids) <= RULES.batch_samples or len({name_of(name, sizes) for name in plan.sample_ids}) == 1
        )
    for group, size in enumerate(sizes):
        whole = {step_of(group, n).sample_id for n in range(size)}
        assert [len(whole & set(plan.sample_ids)) for plan in plans if whole & set(plan.sample_ids)] in ([], [size])
    waiting = sum(size for g, size in enumerate(sizes) if step_of(g, 0).sample_id not in taken)
    assert waiting < (RULES.batch_samples if now_ms == 0 else 1)


def name_of(sample_id: str, sizes: list[int]) -> int:
    [group] = [g for g, size in enumerate(sizes) for n in range(size) if step_of(g, n).sample_id == sample_id]
    return group


def batcher_of(*samples: SampleAssembled) -> Batcher:
    batcher = Batcher(RULES)
    for offset, kept in enumerate(samples):
        batcher.receive(arrived(kept, offset))
    return batcher


def test_a_group_larger_than_a_batch_makes_a_larger_batch() -> None:
    batcher = batcher_of(*[step_of(0, n) for n in range(5)])
    assert batcher.due(parent_version=0, now_ms=0) is None
    batcher.learn(settled(0, 5), 0)
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    assert batch.advantages == (-1.5, -0.5, 0.5, 1.5, 2.5)


def test_a_smaller_batch_is_due_once_its_group_was_settled_long_enough_ago() -> None:
    batcher = batcher_of(step_of(0, 0))
    assert batcher.due_ms is None
    batcher.learn(settled(0, 1), 500)
    assert batcher.due_ms == 500 + RULES.max_wait_ms
    assert batcher.due(parent_version=0, now_ms=1499) is None
    assert batcher.due(parent_version=0, now_ms=1500) is not None


def test_a_sample_that_is_missing_once_all_is_read_is_never_trained_on() -> None:
    batcher = batcher_of(step_of(0, 0), step_of(0, 1))
    batcher.learn(settled(0, 3), 0)
    assert batcher.due(parent_version=0, now_ms=LATE_MS) is None
    assert batcher.due_ms is None
    batcher.read_past(["g0"])
    batch = batcher.due(parent_version=0, now_ms=1000)
    assert batch is not None
    plan = plan_of(batch, 1)
    batcher.plan(plan)
    batcher.executed(plan)
    again = Batcher(RULES, [plan], executed_version=1)
    again.learn(settled(0, 3), 0)
    for one in (batcher, again):
        one.receive(arrived(step_of(0, 2), 2))
        assert one.due(parent_version=1, now_ms=10_000) is None
        assert one.num_waiting == 0


@pytest.mark.parametrize("why", [DropReason.UNTRAINABLE, DropReason.OTHER_POLICY])
def test_a_sample_that_is_not_to_be_had_is_not_waited_for(why: DropReason) -> None:
    gone = sample("gone", reward=None, response_tokens=0, group_id="g0")
    if why is DropReason.OTHER_POLICY:
        gone = replace(step_of(0, 9), policy_id="other")
    batcher = batcher_of(step_of(0, 0), step_of(0, 1), step_of(0, 2))
    assert batcher.receive(arrived(gone, 3)) is why
    known = settled(0, 3)
    extra = StepAdvantage(turn_id=gone.turn_id, sample_id=gone.sample_id, step_index=0, reward=0.0, advantage=0.0)
    batcher.learn(replace(known, advantages=(*known.advantages, extra)), 0)
    batcher.read_past(["g0"])
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    assert len(batch.samples) == 3


def test_what_is_of_no_group_or_not_named_by_its_settlement_waits_for_nothing_and_is_counted() -> None:
    """Of an attempt that never ended a settlement names no turn, and its samples hold up no later plan's offsets."""
    alone, constant, unended = sample("alone"), step_of(1, 0), step_of(1, 9)
    revised = sample("g1 s0", reward=None, group_id="g1", num_feedback=1)
    batcher = batcher_of(alone, constant, revised, unended)
    batcher.learn(settled(1, 0, dropped=[dropped(constant, StepDropReason.CONSTANT)]), 0)
    assert batcher.receive(arrived(step_of(1, 1), 4)) is DropReason.LEFT_OUT
    assert batcher.num_waiting == 0
    assert batcher.dropped == {DropReason.UNGROUPED: 1, DropReason.LEFT_OUT: 4}


def test_a_sample_whose_group_is_not_settled_for_too_long_is_let_go_once_all_is_read() -> None:
    batcher = Batcher(replace(RULES, max_unsettled_ms=5000))
    for group in (0, 1):
        batcher.receive(arrived(step_of(group, 0), group))
    batcher.learn(settled(0, 2), 0)
    assert batcher.due(parent_version=0, now_ms=LATE_MS) is None
    assert batcher.num_waiting == 2
    batcher.read_past([])
    assert batcher.due(parent_version=0, now_ms=5000) is None
    assert batcher.num_waiting == 2
    assert batcher.due(parent_version=0, now_ms=5001) is None
    assert (batcher.num_waiting, batcher.dropped) == (1, {DropReason.UNSETTLED: 1})


def test_settlements_that_name_nothing_that_can_be_had_cost_later_ones_nothing() -> None:
    groups = SettledGroups()
    for group in range(50):
        groups.learn(replace(settled(0, group % 2), group_id=f"gone {group}"), 0)
    groups.read_past([f"gone {group}" for group in range(50)])
    asked: list[object] = []

    class Waits(frozenset[str]):
        def __contains__(self, name: object) -> bool:
            asked.append(name)
            return False

    for num_asked in (25, 0):
        assert groups.choose(Waits(), at_most=3, settled_before_ms=0) is None
        assert len(asked) == num_asked
        asked.clear()


def test_a_step_s_gradient_is_that_of_its_advantage_in_place_of_a_reward(base: Path) -> None:
    """A binary step whose rewards are the advantages is the same step, by hand; one on the rewards is another."""
    samples = [tiny.sample("a", reward=1), tiny.sample("b", reward=-1)]
    gradients = []
    for method, given_samples, advantages in (
        ("stepwise", [tiny.sample("a", reward=None), tiny.sample("b", reward=1)], (1.0, -1.0)),
        ("binary", samples, None),
        ("stepwise", samples, (0.25, 1.5)),
    ):
        trainer = Trainer(base, with_settings(method=method, kl=0.0), max_grad_norm=1e9)
        trainer.update(on_policy(trainer, given_samples), version=1, seed=0, advantages=advantages)
        gradients.append(gradient_of(trainer))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-6)
    assert float(torch.nn.functional.cosine_similarity(gradients[1], gradients[2], dim=0)) < 0.99


def test_an_advantage_of_0_is_one(base: Path) -> None:
    trainer = Trainer(base, with_settings(method="stepwise", kl=0.1))
    update = trainer.update(on_policy(trainer, [tiny.sample("a", reward=None)]), version=1, seed=0, advantages=[0.0])
    assert update.loss.num_tokens == 7


def test_a_wait_that_ends_before_judges_or_after_attempts_are_forgotten_is_refused() -> None:
    def waiting(wait_s: float, max_tokens: int) -> Settings:
        judge = JudgeSettings(url="http://judge/v1", max_tokens=max_tokens)
        return Settings(judge=judge, training=TrainingSettings(method="stepwise", group_wait_s=wait_s))

    for wait_s, max_tokens in ((600, 1024), (HEARD_MS / 1000 + 1, 1024), (960, 8192)):
        with pytest.raises(ValueError, match="group_wait_s"):
            waiting(wait_s, max_tokens)
    unjudged = Settings(training=TrainingSettings(method="stepwise", group_wait_s=601))
    assert unjudged.training.group_wait_s == 601, "where no judge is set, none has to be waited for"
    for wait_s, max_tokens in ((601, 1024), (HEARD_MS / 1000, 1024), (961, 8192)):
        assert waiting(wait_s, max_tokens).training.group_wait_s == wait_s


GROUP = [tiny.sample(f"g0 s{n}", reward=None, group_id="g0") for n in range(3)]


async def test_two_attempts_of_a_group_train_one_step_by_their_advantages(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append([settled(0, 3), tiny.sample("alone"), *GROUP])
    chosen = settings(base, tmp_path, method="stepwise", batch_samples=2)

    events = await trained_until(log, chosen, 1)

    [plan] = [event for event in events if isinstance(event, BatchPlanned)]
    assert dict(zip(plan.sample_ids, plan.advantages or (), strict=True)) == {
        step.sample_id: step.advantage for step in settled(0, 3).advantages
    }
    [taken] = [event for event in events if isinstance(event, StepTaken)]
    assert (taken.num_samples, taken.num_tokens) == (3, 21)


class OneByOne(MemoryLog):
    """Settlements are read before samples, and those one at a time."""

    async def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        async for records in super().follow(topics, start, until_end=until_end):
            for record in sorted(records, key=lambda record: "groups" not in record.topic):
                yield [record]
                await asyncio.sleep(0.01)


async def test_a_trainer_that_starts_long_after_a_group_was_settled_trains_it_whole(base: Path, tmp_path: Path) -> None:
    log = OneByOne(MemoryBroker())
    named = settled(0, 3)
    lost = replace(named.advantages[0], turn_id="lost", sample_id="lost")  # it never comes
    await log.append([replace(named, advantages=(*named.advantages, lost)), *GROUP])
    await asyncio.sleep(0.02)

    events = await trained_until(log, settings(base, tmp_path, method="stepwise", max_wait_s=0.01), 1)

    assert [len(event.sample_ids) for event in events if isinstance(event, BatchPlanned)] == [3]


async def test_a_plan_without_its_step_is_executed_with_its_advantages_after_a_restart(
    base: Path, tmp_path: Path
) -> None:
    whole, cut = MemoryLog(MemoryBroker()), MemoryLog(MemoryBroker())
    for log in (whole, cut):
        await log.append([*GROUP, settled(0, 3)])
    events = await trained_until(whole, settings(base, tmp_path / "whole", method="stepwise"), 1)
    await cut.append(events[:2])

    resumed = await trained_until(cut, settings(base, tmp_path / "cut", method="stepwise"), 1)

    assert [event for event in resumed if isinstance(event, BatchPlanned)] == [events[1]]
    losses = [[e.loss_nats for e in found if isinstance(e, StepTaken)] for found in (events, resumed)]
    assert losses[0] == losses[1]


def test_of_two_settlements_of_a_group_the_first_counts() -> None:
    batcher = batcher_of(*[step_of(0, n) for n in range(3)])
    batcher.learn(settled(0, 3), 0)
    batcher.learn(settled(0, 1), 0)
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    assert len(batch.samples) == 3
