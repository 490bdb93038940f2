"""Back to an earlier version: its weights under a new number, and training goes on from them, however often killed."""

import shutil
from pathlib import Path

import pytest

from clawstream.events import (
    BatchPlanned,
    Event,
    PolicyPublished,
    RollbackAsked,
    StepRejected,
    StepTaken,
    VersionPinned,
)
from clawstream.training.checkpoints import read
from clawstream.training.step import carried
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.step.test_rejected_steps import of
from tests.parts.training.test_loop import names, settings, trained_until

SAMPLES = [tiny.sample(f"s{i}", reward=1 if i % 2 else -1, hinted=i % 3 == 0) for i in range(12)]


def asked(number: int, to_version: int) -> RollbackAsked:
    return RollbackAsked(policy_id="policy", number=number, to_version=to_version, asked_at_ms=0)


async def trained(base: Path, tmp_path: Path) -> tuple[MemoryLog, list[Event]]:
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES[:9])
    return log, await trained_until(log, settings(base, tmp_path), 3)


def files(path: str) -> dict[str, bytes]:
    """The weights, and the state of the trainer."""
    root = Path(path)
    return {
        found.relative_to(root).as_posix(): found.read_bytes()
        for found in root.rglob("*")
        if found.is_file() and found.name != "manifest.json"
    }


async def test_the_next_version_is_the_earlier_one_again_and_training_goes_on_from_it(
    base: Path, tmp_path: Path
) -> None:
    log, before = await trained(base, tmp_path)
    await log.append([asked(1, 1)])
    back = await trained_until(log, settings(base, tmp_path), 4)
    await log.append(SAMPLES[9:])
    events = await trained_until(log, settings(base, tmp_path), 5)

    assert [type(event) for event in back[len(before) :]] == [BatchPlanned, StepTaken, PolicyPublished]
    plans, published = of(events, BatchPlanned), of(events, PolicyPublished)
    assert (plans[3].parent_version, plans[3].rollback, plans[3].sample_ids) == (1, 1, ())
    assert (plans[4].parent_version, plans[4].rollback) == (4, None)
    assert set(plans[4].sample_ids) == names(SAMPLES[9:])
    assert [event.policy_version for event in published] == [0, 1, 2, 3, 4, 5]
    assert published[4].parent_version == 1
    assert files(published[4].path) == files(published[1].path)


async def test_the_learning_rate_goes_back_too(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "CONSTANT_UPDATES", 1)
    log, falling = MemoryLog(MemoryBroker()), settings(base, tmp_path)
    for samples, version in ((SAMPLES[:9], 3), ([asked(1, 1)], 4), (SAMPLES[9:], 5)):
        await log.append(samples)
        events = await trained_until(log, falling, version)

    rates = [step.learning_rate for step in of(events, StepTaken)]
    assert rates[4] == rates[1]
    assert rates[2] < rates[1]


async def test_back_to_the_base_is_back_to_its_weights(base: Path, tmp_path: Path) -> None:
    log, _ = await trained(base, tmp_path)
    await log.append([asked(1, 0)])
    events = await trained_until(log, settings(base, tmp_path), 4)
    weights = Path(of(events, PolicyPublished)[-1].path) / "model.safetensors"
    assert weights.read_bytes() == (base / "model.safetensors").read_bytes()


async def test_a_rollback_is_carried_out_once_however_often_the_trainer_starts(base: Path, tmp_path: Path) -> None:
    log, _ = await trained(base, tmp_path)
    await log.append([asked(1, 1)])
    before = await trained_until(log, settings(base, tmp_path), 4)
    await log.append(SAMPLES[9:])
    after = await trained_until(log, settings(base, tmp_path), 5)
    assert after[: len(before)] == before
    assert [plan.rollback for plan in of(after, BatchPlanned)] == [None, None, None, 1, None]


async def test_a_rollback_that_was_planned_and_killed_is_carried_out_after_the_restart(
    base: Path, tmp_path: Path
) -> None:
    log, _ = await trained(base, tmp_path)
    await log.append([asked(1, 1)])
    whole = await trained_until(log, settings(base, tmp_path), 4)
    shutil.rmtree(settings(base, tmp_path).checkpoints_dir / "v000004")

    await log.append(SAMPLES[9:])
    again = await trained_until(log, settings(base, tmp_path), 5)

    assert again[: len(whole)] == whole
    last = of(whole, PolicyPublished)[-1]
    assert read(Path(last.path)).manifest_sha256 == last.manifest_sha256


async def test_of_two_rollbacks_the_newest_counts(base: Path, tmp_path: Path) -> None:
    log, _ = await trained(base, tmp_path)
    await log.append([asked(1, 1), asked(2, 2)])
    events = await trained_until(log, settings(base, tmp_path), 4)
    assert [(p.parent_version, p.rollback) for p in of(events, BatchPlanned)[3:]] == [(2, 2)]


@pytest.mark.slow
async def test_a_version_that_is_not_on_disk_any_more_is_not_gone_back_to_also_when_it_is_there_again(
    base: Path, tmp_path: Path
) -> None:
    log, _ = await trained(base, tmp_path)
    gone = settings(base, tmp_path).checkpoints_dir / "v000001"
    gone.rename(tmp_path / "backup")
    await log.append([asked(1, 1), *SAMPLES[9:]])
    events = await trained_until(log, settings(base, tmp_path), 5)
    (tmp_path / "backup").rename(gone)
    await log.append([tiny.sample(f"later{i}", reward=1 if i % 2 else -1) for i in range(3)])
    events = await trained_until(log, settings(base, tmp_path), 6)

    plans, [rejected] = of(events, BatchPlanned), of(events, StepRejected)
    assert [(p.parent_version, p.rollback) for p in plans[3:]] == [(1, 1), (3, None), (5, None)]
    assert (rejected.policy_version, rejected.num_samples) == (4, 0)
    assert rejected.reason.startswith("rollback 1 can't be carried out: ")
    assert str(gone) in rejected.reason


@pytest.mark.slow
async def test_a_version_that_is_asked_for_is_kept_until_it_is_gone_back_to(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES)
    whole = await trained_until(log, settings(base, tmp_path), 4)
    again = MemoryLog(MemoryBroker())  # on which the plan of version 4 is written, and its step still to be taken
    await again.append(SAMPLES)
    await again.append(
        [e for e in whole if not (isinstance(e, (StepTaken, PolicyPublished)) and e.policy_version == 4)]
    )
    shutil.rmtree(settings(base, tmp_path).checkpoints_dir / "v000004")
    await again.append([asked(1, 1)])

    events = await trained_until(again, settings(base, tmp_path, keep_checkpoints=2), 5)

    assert [event.policy_version for event in of(events, PolicyPublished)] == [0, 1, 2, 3, 4, 5]
    published = Path(of(events, PolicyPublished)[-1].path)
    assert of(events, BatchPlanned)[-1].rollback == 1
    left = sorted(path.name for path in published.parent.glob("v*"))
    assert left == ["v000004", "v000005"]  # it is let go of once it was gone back to


async def test_a_rollback_is_none_of_the_updates_that_were_asked_for(base: Path, tmp_path: Path) -> None:
    log, _ = await trained(base, tmp_path)
    await log.append([asked(1, 1), *SAMPLES[9:]])
    events = await trained_until(log, settings(base, tmp_path, max_updates=4), 5)
    assert [len(plan.sample_ids) for plan in of(events, BatchPlanned)] == [3, 3, 3, 0, 3]


def pin(number: int, version: int, *, is_kept: bool = True) -> VersionPinned:
    return VersionPinned(policy_id="policy", number=number, policy_version=version, pinned=is_kept, asked_at_ms=0)


async def test_a_pinned_version_is_kept_and_gone_back_to_and_an_unpinned_one_goes_with_the_others(
    base: Path, tmp_path: Path
) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, keep_checkpoints=1)
    await log.append([*SAMPLES[:3], pin(1, 1)])
    await trained_until(log, chosen, 1)
    await log.append(SAMPLES[3:9])
    await trained_until(log, chosen, 3)
    assert sorted(folder.name for folder in chosen.checkpoints_dir.glob("v*")) == ["v000001", "v000003"]

    await log.append([asked(1, 1)])
    events = await trained_until(log, chosen, 4)
    assert of(events, BatchPlanned)[-1].parent_version == 1

    await log.append([pin(2, 1, is_kept=False), *SAMPLES[9:]])
    await trained_until(log, chosen, 5)
    assert sorted(folder.name for folder in chosen.checkpoints_dir.glob("v*")) == ["v000005"]
