"""What training goes on from: a trainer ends before the state of a version is written, or the state can't be used."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from clawstream.config import TrainingSettings
from clawstream.errors import UnusableCheckpoint
from clawstream.events import BatchPlanned, Event, PolicyPublished, RollbackAsked, StepRejected, StepTaken
from clawstream.inference.model_folder import STATE_FOLDER, version_name
from clawstream.training import stepping
from clawstream.training.batches.following import retraining
from clawstream.training.checkpoints import read, resumable, write_state
from clawstream.training.loop import train
from clawstream.training.publishing import REJECTED_IN_A_ROW, GateMemory, JudgedReward
from clawstream.training.step.carried import Carried
from clawstream.training.step.trainer import Trainer
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.keeping import keep
from tests.parts.training import tiny
from tests.parts.training.test_loop import SAMPLES, said, settings, trained_until

VERSION = 2  # whose state is not written


async def cut_short(base: Path, data: Path) -> MemoryLog:
    """Train until `VERSION`'s state is half written; return the log."""
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES)

    def failing(version: Path, save: Callable[[Path], None]) -> None:
        def half(folder: Path) -> None:
            save(folder)
            raise OSError("disk full")

        write_state(version, half if version.name == version_name(VERSION) else save)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepping, "write_state", failing)
        with pytest.raises(OSError, match="disk full"):
            await train(settings(base, data), log, stop=asyncio.Event())
    return log


def about(events: list[Event]) -> list[Event]:
    return [e for e in events if isinstance(e, StepTaken | PolicyPublished) and e.policy_version == VERSION]


async def test_it_is_served_as_it_was_and_the_next_steps_come_to_the_same_numbers(base: Path, tmp_path: Path) -> None:
    unbroken = MemoryLog(MemoryBroker())
    await unbroken.append(SAMPLES)
    await trained_until(unbroken, settings(base, tmp_path / "whole"), 3)
    log = await cut_short(base, tmp_path / "cut")
    before = await said(log)
    folders = [settings(base, tmp_path / name).checkpoints_dir for name in ("cut", "whole")]
    served = folders[0] / version_name(VERSION) / "model.safetensors"
    inode, weights = served.stat().st_ino, served.read_bytes()
    assert not (served.parent / STATE_FOLDER).exists()
    assert len(about(before)) == 2

    events = await trained_until(log, settings(base, tmp_path / "cut"), 3)

    assert events[: len(before)] == before
    assert [type(event) for event in events[len(before) :]] == [BatchPlanned, StepTaken, PolicyPublished]
    assert (served.stat().st_ino, served.read_bytes()) == (inode, weights)
    for number in (1, 2, 3):
        mine, other = (resumable(folder / version_name(number)) for folder in folders)
        assert [f.sha256 for f in mine.files] == [f.sha256 for f in other.files]
        states = ((each.path / STATE_FOLDER).iterdir() for each in (mine, other))
        found, expected = ({path.name: path.read_bytes() for path in each} for each in states)
        assert found == expected
    assert not list(served.parent.glob(".*"))


@pytest.mark.parametrize("stored", ["base", "bfloat16_base"])
async def test_where_its_step_comes_to_other_bytes_the_next_begins_with_those_that_are_served(
    stored: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may add the same numbers in another order."""
    base: Path = request.getfixturevalue(stored)
    log, versions = await cut_short(base, tmp_path), settings(base, tmp_path).checkpoints_dir
    step = Trainer._step

    def differently(self: Trainer, version: int, divisor: int, rate: float) -> float | None:
        norm = step(self, version, divisor, rate)
        if version == VERSION:
            next(iter(self._model.trained.values())).data.view(-1)[0] += 1.0
        return norm

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", differently)
        events = await trained_until(log, settings(base, tmp_path), 3)
    shutil.copytree(versions / version_name(VERSION), tmp_path / "parent")
    plan = [event for event in events if isinstance(event, BatchPlanned)][-1]

    trainer = Trainer(base, settings(base, tmp_path).training)
    trainer.restore(tmp_path / "parent")
    by_id = {sample.sample_id: sample for sample in SAMPLES}
    trainer.update([by_id[name] for name in plan.sample_ids], version=3, seed=plan.seed)
    trainer.save(tmp_path / "again")

    served, published = (read(versions / version_name(number)).path for number in (VERSION, 3))
    one, other = (load_file(folder / "model.safetensors") for folder in (served, published))
    assert max(float((one[name].float() - other[name].float()).abs().max()) for name in one) < 0.1
    assert (published / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()


async def test_a_version_by_another_plan_than_the_log_s_is_not_given_its_state(base: Path, tmp_path: Path) -> None:
    """The log was lost and begun again."""
    before = await said(await cut_short(base, tmp_path))
    log = MemoryLog(MemoryBroker())
    plans = [event for event in before if isinstance(event, BatchPlanned)]
    other = replace(plans[-1], sample_ids=plans[-1].sample_ids[:1], turns=plans[-1].turns[:1])
    await log.append(
        [*SAMPLES, *(event for event in before if event != plans[-1] and event not in about(before)), other]
    )

    with pytest.raises(UnusableCheckpoint, match="its step was on 3 samples by another plan"):
        await train(settings(base, tmp_path), log, stop=asyncio.Event())


async def test_training_can_not_go_back_to_a_version_whose_state_is_gone_and_says_so(
    base: Path, tmp_path: Path
) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES[:6])
    await trained_until(log, settings(base, tmp_path), 2)
    versions = settings(base, tmp_path).checkpoints_dir
    shutil.rmtree(versions / version_name(1) / STATE_FOLDER)
    await log.append([RollbackAsked(policy_id="policy", number=1, to_version=1, asked_at_ms=1)])

    stop = asyncio.Event()
    running = asyncio.create_task(train(settings(base, tmp_path), log, stop=stop))
    async with asyncio.timeout(60):
        while not (rejected := [event for event in await said(log) if isinstance(event, StepRejected)]):
            await asyncio.sleep(0.05)
    stop.set()
    await running
    assert "in trainer/ found no state" in rejected[0].reason
    with pytest.raises(UnusableCheckpoint, match="in trainer/ found no state"):
        retraining(settings(base, tmp_path), replay="again", from_version=1)


async def test_where_it_was_never_announced_it_is_published_before_any_step(base: Path, tmp_path: Path) -> None:
    before = await said(await cut_short(base, tmp_path))
    log = MemoryLog(MemoryBroker())
    await log.append([*SAMPLES, *(event for event in before if event not in about(before))])

    stop = asyncio.Event()
    stop.set()
    await train(settings(base, tmp_path), log, stop=stop)

    (taken, published), (again, republished) = about(before), about(await said(log))
    assert taken == again
    assert isinstance(published, PolicyPublished)
    assert isinstance(republished, PolicyPublished)
    assert republished.manifest_sha256 == published.manifest_sha256


def test_a_step_that_stands_on_the_log_leaves_the_same_memory_as_it_did_when_its_gate_let_it_pass(base: Path) -> None:
    """Its state was not written, and it is taken again without the gate."""
    samples = [tiny.sample(f"s{i}", reward=1) for i in range(16)]
    memories = []
    for gated in (True, False):
        trainer = Trainer(base, TrainingSettings())
        trainer._carried = Carried(gate=GateMemory(verdicts=(JudgedReward(good=False, hinted=False),) * 32))
        trainer.update(samples, version=9, seed=0, gated=gated, num_rejected=REJECTED_IN_A_ROW)
        memories.append(trainer._carried.gate)
    assert memories[0].as_it_is
    assert memories[0] == memories[1]


def test_a_checkpoint_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    trainer = Trainer(base, TrainingSettings())
    keep(trainer, tmp_path / "v1")
    other = Trainer(tiny.build(tmp_path / "other", seed=1), TrainingSettings())

    with pytest.raises(UnusableCheckpoint, match=r"engine\.model_path"):
        other.restore(tmp_path / "v1")


@pytest.mark.parametrize("lacking", ["base_sha256", "schedule", "gate"])
def test_a_checkpoint_whose_state_lacks_a_part_is_refused(base: Path, tmp_path: Path, lacking: str) -> None:
    trainer = Trainer(base, TrainingSettings())
    keep(trainer, tmp_path)
    file = tmp_path / STATE_FOLDER / "state.json"
    facts = json.loads(file.read_text())
    del facts[lacking]
    file.write_text(json.dumps(facts))

    with pytest.raises(UnusableCheckpoint, match=rf"state\.json: found .*, expected {lacking} too.*Remove"):
        trainer.restore(tmp_path)
