"""A version's folder is whole or it is not there, wherever a write, a copy or a removal was cut off."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import UnusableCheckpoint
from clawstream.events import BatchPlanned, PlannedTurn, StepTaken, TopicOffset
from clawstream.inference.model_folder import MANIFEST, STATE_FOLDER, fingerprint
from clawstream.training import checkpoints

CONTENT = {"model.safetensors": b"weights" * 9, "tokenizer.json": b"{}", "more/of.it": b"more"}
STATE = {"optimizer.safetensors": b"moments", "state.json": b"{}"}
ALL = [*CONTENT, MANIFEST, *(f"{STATE_FOLDER}/{name}" for name in (*STATE, MANIFEST))]


def plan(version: int) -> BatchPlanned:
    return BatchPlanned(
        policy_id="policy",
        policy_version=version,
        parent_version=version - 1,
        sample_ids=("one", "two"),
        offsets=(TopicOffset(topic="samples", partition=3, next_offset=17),),
        seed=5,
        settings=b'{"learning_rate": 0.1}',
        planned_at_ms=1,
        turns=(PlannedTurn(turn_id="t", judge="judge", prompt_version="1", revision=0),),
    )


def step(version: int) -> StepTaken:
    return StepTaken(
        policy_id="policy",
        policy_version=version,
        num_samples=2,
        num_hinted=1,
        num_rewarded=1,
        num_tokens=10,
        num_tokens_dropped=0,
        loss_nats=0.5,
        kl_reference_nats=0.0,
        mean_gap_nats=None,
        mean_reward=1.0,
        clipped_share=None,
        grad_norm=0.25,
        learning_rate=0.1,
        mean_versions_behind=0.0,
        max_versions_behind=0,
        step_ms=7,
        taken_at_ms=2,
    )


def fill(folder: Path, content: Mapping[str, bytes] = CONTENT) -> None:
    for name, part in content.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(part)


def fill_state(folder: Path) -> None:
    fill(folder, STATE)


def write(root: Path, *versions: int) -> None:
    for version in versions:
        checkpoint = checkpoints.write(root, plan(version), step(version), fill)
        checkpoints.write_state(checkpoint.path, fill_state)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, not to be changed."""
    root = tmp_path_factory.mktemp("policy")
    write(root, 1, 2)
    return root


def test_a_checkpoint_says_what_it_was_made_from_and_what_its_step_did(root: Path) -> None:
    found = checkpoints.latest(root)

    assert found is not None
    assert (found.version, found.plan, found.step) == (2, plan(2), step(2))
    assert found.path == root / "v000002"
    assert found.num_bytes == sum(map(len, CONTENT.values()))
    assert sorted(path.name for path in root.iterdir()) == ["v000001", "v000002"]


def refused(folder: Path, name: str, *, match: str) -> None:
    """The named file is not as it was written: training does not go on from there, and weights are not served."""
    match = f"in {STATE_FOLDER}/ found .* Its weights stay" if name.startswith(STATE_FOLDER) else match
    with pytest.raises(UnusableCheckpoint, match=match):
        checkpoints.resumable(folder / "v000002")
    found = checkpoints.latest(folder)
    assert found is not None
    assert found.version == 1
    standing, unfinished = checkpoints.standing(folder, 2), checkpoints.unfinished(folder, above=1)
    if name.startswith(STATE_FOLDER):
        assert checkpoints.read(folder / "v000002") == standing == unfinished
        assert standing is not None
    else:
        assert standing is unfinished is None
        with pytest.raises(UnusableCheckpoint, match=match):
            checkpoints.read(folder / "v000002")
    shutil.rmtree(folder)


@given(data=st.data())
def test_a_folder_cut_short_anywhere_is_refused_and_passed_over(
    root: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    copy = tmp_path_factory.mktemp("cut")
    shutil.copytree(root, copy, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(ALL))
    file = copy / "v000002" / name
    cut = data.draw(st.none() | st.integers(0, file.stat().st_size - 1))
    if cut is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:cut])
    refused(copy, name, match=Path(name).name if cut is not None else "found no")


def test_a_checkpoint_says_which_rollback_its_plan_carried_out(tmp_path: Path) -> None:
    back = replace(plan(3), rollback=4)
    assert checkpoints.write(tmp_path, back, step(3), fill).plan == back


def test_a_cut_file_is_found_without_reading_it(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "v000002", tmp_path / "v000002")
    (tmp_path / "v000002" / "model.safetensors").write_bytes(b"weights")

    with pytest.raises(UnusableCheckpoint, match="found 7 bytes, expected 63 bytes"):
        checkpoints.read(tmp_path / "v000002", contents=False)


@given(name=st.sampled_from([name for name in ALL if MANIFEST not in name]), data=st.data())
def test_a_changed_byte_is_found_and_its_version_passed_over(
    root: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    copy = tmp_path_factory.mktemp("changed")
    shutil.copytree(root, copy, dirs_exist_ok=True)
    file = copy / "v000002" / name
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1
    file.write_bytes(content)
    refused(copy, name, match="sha256")


def test_training_goes_on_from_a_version_whose_one_manifest_names_its_state_too(tmp_path: Path) -> None:
    """As earlier releases wrote it."""

    def both(folder: Path) -> None:
        fill(folder)
        fill(folder, {f"{STATE_FOLDER}/{name}": content for name, content in STATE.items()})

    checkpoints.write(tmp_path, plan(1), step(1), both)
    assert checkpoints.latest(tmp_path) == checkpoints.resumable(tmp_path / "v000001")
    (tmp_path / "v000001" / STATE_FOLDER / "state.json").unlink()
    assert checkpoints.latest(tmp_path) is None


def test_a_state_that_is_written_again_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = tmp_path / "v000001"
    (folder / f".writing-{STATE_FOLDER}").mkdir()
    (folder / f".writing-{STATE_FOLDER}" / "half").write_bytes(b"of it")

    checkpoints.write_state(folder, lambda place: fill(place, {"state.json": b"[]"}))

    assert (folder / STATE_FOLDER / "state.json").read_bytes() == b"[]"
    assert sorted(p.name for p in (folder / STATE_FOLDER).iterdir()) == [MANIFEST, "state.json"]
    assert not list(folder.glob(".*"))
    assert checkpoints.resumable(folder).version == 1


def test_a_folder_under_another_version_s_name_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "v000001", tmp_path / "v000009")

    with pytest.raises(UnusableCheckpoint, match="version 1"):
        checkpoints.read(tmp_path / "v000009")


def test_there_is_no_newest_where_there_is_no_folder(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path / "nowhere") is None


def test_a_write_that_fails_leaves_nothing_in_the_version_s_place(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise OSError("disk full")

    write(tmp_path, 1)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(tmp_path, plan(2), step(2), fail)

    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.version == 1
    write(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000002"]


def test_a_broken_folder_gives_way_to_the_same_version_written_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "v000001" / "model.safetensors").write_bytes(b"")

    write(tmp_path, 1)

    assert checkpoints.read(tmp_path / "v000001").version == 1


def test_the_newest_versions_and_the_active_one_are_kept(tmp_path: Path) -> None:
    write(tmp_path, *range(1, 8))
    (tmp_path / ".writing-v000008").mkdir()

    removed = checkpoints.prune(tmp_path, keep=3, needed={2})

    assert removed == (1, 3, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000002", "v000005", "v000006", "v000007"]
    assert checkpoints.prune(tmp_path, keep=3, needed={2}) == ()


def test_a_version_without_a_manifest_takes_no_place_among_those_kept(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / "v000002" / MANIFEST).unlink()

    assert checkpoints.prune(tmp_path, keep=1, needed=()) == ()
    assert checkpoints.latest(tmp_path) is not None


def test_a_base_is_known_by_its_weights_wherever_it_lies(tmp_path: Path) -> None:
    one, moved, other = tmp_path / "one", tmp_path / "moved", tmp_path / "other"
    for folder, weights in ((one, b"a"), (moved, b"a"), (other, b"b")):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
    (moved / "README.md").write_text("moved")

    assert fingerprint(one) == fingerprint(moved)
    assert fingerprint(one) != fingerprint(other)


def test_every_file_and_the_folder_are_on_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        assert not (tmp_path / "v000001").exists() or synced[-1] == tmp_path.name
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)

    checkpoint = checkpoints.write(tmp_path, plan(1), step(1), fill)

    assert {Path(file.name).name for file in checkpoint.files} | {MANIFEST, ".writing-v000001"} <= set(synced)
    assert synced[-1] == tmp_path.name
