"""A step that is rejected: its samples are used up, the policy is as it was, and no restart takes the step again."""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file

from clawstream.config import Settings
from clawstream.events import BatchPlanned, Event, PolicyPublished, SampleAssembled, StepRejected, StepTaken
from clawstream.training.checkpoints import read
from clawstream.training.loop import train
from clawstream.training.step import carried
from clawstream.training.step.trainer import Trainer
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.keeping import keep
from tests.parts.training import tiny
from tests.parts.training.test_loop import names, said, settings, trained_until, trained_until_idle

E = TypeVar("E", bound=Event)

BATCH = 16


def batch(name: str, rewards: Sequence[int]) -> list[SampleAssembled]:
    """Samples of one session: they are read in their order."""
    samples = [tiny.sample(f"{name}{i}", reward=rewards[i % len(rewards)]) for i in range(BATCH)]
    return [replace(sample, session_id="session") for sample in samples]


# A judge that hardly ever says yes, then says it of everything, then is as it was.
EARLIER, ONE_SIDED, LATER = batch("a", [-1]), batch("b", [1]), batch("c", [-1, 1])


def chosen(base: Path, data: Path, **training: object) -> Settings:
    return settings(base, data, **({"batch_samples": BATCH} | training))


async def log_of(*batches: list[SampleAssembled]) -> MemoryLog:
    log = MemoryLog(MemoryBroker())
    for samples in batches:
        await log.append(samples)
    return log


async def decided_until(log: MemoryLog, chosen: Settings, version: int) -> list[Event]:
    """Run the loop until `version` is published or rejected; return all that the policy topic says then."""
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    async with asyncio.timeout(60):
        while not running.done() and version not in {
            event.policy_version for event in await said(log) if isinstance(event, (PolicyPublished, StepRejected))
        }:
            await asyncio.sleep(0.01)
    stop.set()
    await running
    return await said(log)


def of(events: Sequence[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


async def test_a_rejected_step_uses_up_its_samples_and_training_goes_on_from_the_version_before(
    base: Path, tmp_path: Path
) -> None:
    log = await log_of(EARLIER, ONE_SIDED, LATER)

    events = await trained_until(log, chosen(base, tmp_path), 3)

    plans, [rejected] = of(events, BatchPlanned), of(events, StepRejected)
    assert [(plan.policy_version, plan.parent_version) for plan in plans] == [(1, 0), (2, 1), (3, 1)]
    assert [set(plan.sample_ids) for plan in plans] == [names(EARLIER), names(ONE_SIDED), names(LATER)]
    assert (rejected.policy_version, rejected.num_samples) == (2, BATCH)
    assert "judge says yes to everything" in rejected.reason
    assert [event.policy_version for event in of(events, StepTaken)] == [1, 3]
    assert [event.policy_version for event in of(events, PolicyPublished)] == [0, 1, 3]


async def test_by_a_rejected_step_the_learning_rate_does_not_fall(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carried, "CONSTANT_UPDATES", 1)
    log = await log_of(EARLIER, ONE_SIDED, LATER)

    first, second = of(await trained_until(log, chosen(base, tmp_path), 3), StepTaken)

    assert second.learning_rate == pytest.approx(first.learning_rate / 2**0.5)


async def test_weights_optimizer_and_all_that_goes_with_them_are_as_if_the_rejected_step_had_not_been(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step moves the weights, and one of them to what is no number."""
    own = Trainer._step

    def spoiling(self: Trainer, version: int, divisor: int, rate: float) -> float | None:
        norm = own(self, version, divisor, rate)
        if version == 2:
            next(iter(self._model.trained.values())).data.view(-1)[0] = torch.nan
        return norm

    monkeypatch.setattr(Trainer, "_step", spoiling)
    log = await log_of(EARLIER, batch("b", [1, -1]), LATER)
    events = await trained_until(log, chosen(base, tmp_path), 3)
    first, _, third = of(events, BatchPlanned)
    assert "not finite" in of(events, StepRejected)[0].reason

    trainer = Trainer(base, chosen(base, tmp_path).training)
    trainer.update(EARLIER, version=1, seed=first.seed)
    trainer.update(LATER, version=3, seed=third.seed)
    keep(trainer, tmp_path / "without")

    published = Path(of(events, PolicyPublished)[-1].path)
    for file in ("model.safetensors", "trainer/optimizer.safetensors"):
        found, expected = load_file(published / file), load_file(tmp_path / "without" / file)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in found), file
    assert (published / "trainer/state.json").read_bytes() == (tmp_path / "without/trainer/state.json").read_bytes()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
async def test_a_trainer_whose_step_was_rejected_is_put_back_to_the_start_and_used_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gradient_checkpointing: bool
) -> None:
    own, made = Trainer._step, []

    def spoiling(self: Trainer, version: int, divisor: int, rate: float) -> float | None:
        norm = own(self, version, divisor, rate)
        made.append(self)
        if version == 1:
            next(iter(self._model.trained.values())).data.view(-1)[0] = torch.nan
        return norm

    monkeypatch.setattr(Trainer, "_step", spoiling)
    training = {"gradient_checkpointing": gradient_checkpointing}
    log = await log_of(batch("b", [1, -1]), LATER)
    events = await trained_until(log, chosen(base, tmp_path, **training), 2)
    assert [event.policy_version for event in of(events, StepRejected)] == [1]
    assert made[0] is made[1]

    trainer = Trainer(base, chosen(base, tmp_path, **training).training)
    trainer.update(LATER, version=2, seed=of(events, BatchPlanned)[-1].seed)
    keep(trainer, tmp_path / "without")
    published = Path(of(events, PolicyPublished)[-1].path)
    for file in ("model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"):
        assert (published / file).read_bytes() == (tmp_path / "without" / file).read_bytes(), file


@pytest.mark.slow
async def test_a_step_that_is_taken_with_other_settings_than_it_was_planned_with_says_so(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = await log_of(LATER)
    whole = await trained_until(log, chosen(base, tmp_path / "first"), 1)
    planned = await log_of(LATER)
    await planned.append(of(whole, BatchPlanned))

    with caplog.at_level(logging.WARNING):
        await trained_until(planned, chosen(base, tmp_path / "second", micro_batch_tokens=64), 1)
    [words] = [r.getMessage() for r in caplog.records if "planned_with" in r.getMessage()]
    assert "version=1 planned_with={'micro_batch_tokens': 16384} taken_with={'micro_batch_tokens': 64}" in words


async def test_a_step_that_goes_much_too_far_is_rejected_after_the_weights_have_moved(
    base: Path, tmp_path: Path
) -> None:
    log = await log_of(LATER, EARLIER)

    wild = await decided_until(log, chosen(base, tmp_path, learning_rate=1.0), 2)
    await log.append(batch("d", [-1, 1]))
    events = await trained_until(log, chosen(base, tmp_path), 3)

    assert [event.policy_version for event in of(wild, StepRejected)] == [1, 2]
    assert "nats" in of(wild, StepRejected)[0].reason
    assert of(events, BatchPlanned)[-1].parent_version == 0
    assert [event.policy_version for event in of(events, PolicyPublished)] == [0, 3]


async def test_a_rejected_plan_is_not_executed_again_after_a_restart(base: Path, tmp_path: Path) -> None:
    log = await log_of(EARLIER, ONE_SIDED)
    before = await decided_until(log, chosen(base, tmp_path), 2)
    assert [event.policy_version for event in of(before, StepRejected)] == [2]

    await log.append(LATER)
    after = await decided_until(log, chosen(base, tmp_path), 3)

    assert after[: len(before)] == before
    assert [type(event) for event in after[len(before) :]] == [BatchPlanned, StepTaken, PolicyPublished]


async def test_a_step_that_was_killed_before_it_was_rejected_is_rejected_after_the_restart(
    base: Path, tmp_path: Path
) -> None:
    log = await log_of(EARLIER, ONE_SIDED)
    events = await decided_until(log, chosen(base, tmp_path), 2)
    cut = await log_of(EARLIER, ONE_SIDED)
    await cut.append([event for event in events if not isinstance(event, StepRejected)])

    again = await decided_until(cut, chosen(base, tmp_path), 2)

    [first], [second] = of(events, StepRejected), of(again, StepRejected)
    assert replace(second, step_ms=0, rejected_at_ms=0) == replace(first, step_ms=0, rejected_at_ms=0)
    assert second.event_id == first.event_id


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 3])
async def test_a_lost_version_is_made_again_as_it_was_and_a_rejected_one_before_or_after_it_is_not(
    base: Path, tmp_path: Path, lost: int
) -> None:
    log = await log_of(EARLIER, ONE_SIDED, LATER)
    events = await trained_until(log, chosen(base, tmp_path), 3)
    for version in range(lost, 4):
        shutil.rmtree(chosen(base, tmp_path).checkpoints_dir / f"v{version:06d}", ignore_errors=True)

    await log.append(batch("d", [-1, 1]))
    again = await trained_until(log, chosen(base, tmp_path), 4)

    assert again[: len(events)] == events
    assert [(p.policy_version, p.parent_version) for p in of(again, BatchPlanned)[3:]] == [(4, 3)]
    published = of(again, PolicyPublished)
    assert [event.policy_version for event in published] == [0, 1, 3, 4]
    for event in published[1:]:
        assert read(Path(event.path)).manifest_sha256 == event.manifest_sha256


async def test_a_rejected_step_is_none_of_the_updates_that_were_asked_for(base: Path, tmp_path: Path) -> None:
    log = await log_of(EARLIER, ONE_SIDED, LATER, batch("d", [1, -1]))

    await decided_until(log, chosen(base, tmp_path, max_updates=2), 3)
    events = await trained_until_idle(log, chosen(base, tmp_path, max_updates=2))

    assert [event.policy_version for event in of(events, PolicyPublished)] == [0, 1, 3]
    assert len(of(events, BatchPlanned)) == 3


async def test_by_a_rejected_step_no_sample_becomes_older(base: Path, tmp_path: Path) -> None:
    answers = [
        replace(tiny.sample(f"d{i}", reward=(-1, 1)[i % 2], version=1), session_id="session") for i in range(BATCH)
    ]
    log = await log_of(EARLIER, ONE_SIDED, LATER, answers)

    steps = of(await trained_until(log, chosen(base, tmp_path, max_versions_behind=1), 4), StepTaken)

    assert [(step.policy_version, step.max_versions_behind) for step in steps] == [(1, 0), (3, 1), (4, 1)]
    assert [step.mean_versions_behind for step in steps] == [0.0, 1.0, 1.0]


async def test_without_a_gate_nothing_is_rejected(base: Path, tmp_path: Path) -> None:
    log = await log_of(EARLIER, ONE_SIDED)

    events = await trained_until(log, chosen(base, tmp_path, gate=False), 2)

    assert of(events, StepRejected) == []
