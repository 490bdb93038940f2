"""An engine is never shown a checkpoint that is not of its model; what can be read from here decides."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.events import PolicyPublished, PolicyRejected
from clawstream.weights.stage import keep_current
from clawstream.weights.taking import unfit
from tests.parts.engine.tiny_model import make_model
from tests.unit.monitoring.said import published
from tests.unit.weights.engines import Engine, PolicyTopic, engine, keeping


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("wider") / "model", width=64)


def at(folder: Path, version: int) -> PolicyPublished:
    return published(version, str(folder))


def updates(backend: Engine) -> list[str]:
    return [told for told in backend.told if not told.startswith("resume")]


async def test_a_checkpoint_of_another_model_is_refused_unseen_and_the_next_good_one_is_taken(
    served: Path, wider: Path
) -> None:
    log, backend = PolicyTopic(at(wider, 1)), engine(model_path=str(served))
    async with keeping(log, backend):
        await log.until(lambda: log.said(PolicyRejected) != [])
        assert updates(backend) == []
        await log.append([at(served, 2)])
        await log.until(lambda: log.active() != [])
    [refusal] = log.said(PolicyRejected)
    assert isinstance(refusal, PolicyRejected)
    assert refusal.policy_version == 1
    assert "model.embed_tokens.weight: found F32 [265, 64], expected F32 [265, 32]" in refusal.reason
    assert str(wider) in refusal.reason
    assert str(served) in refusal.reason
    assert backend.version == "2"


async def test_an_engine_of_another_model_does_not_keep_the_others_from_the_version(served: Path, wider: Path) -> None:
    log = PolicyTopic(at(served, 1))
    other, ours = engine(model_path=str(wider)), engine(model_path=str(served))
    async with keeping(log, other, ours) as [_, client]:
        await log.until(lambda: log.active() != [] and log.said(PolicyRejected) != [])
    assert log.active() == [(client.url, 1)]
    assert updates(other) == []


async def test_a_version_is_judged_by_the_policy_s_folder_where_the_engine_s_can_t_be_seen(
    served: Path, wider: Path
) -> None:
    log, backend, stop = PolicyTopic(at(wider, 1)), engine(model_path="hub/name"), asyncio.Event()
    async with keeping(PolicyTopic(), backend) as clients, asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_current(clients, log, policy_id="policy", stop=stop, model_path=served))
        await log.until(lambda: log.said(PolicyRejected) != [])
        stop.set()
    assert updates(backend) == []


async def test_a_checkpoint_that_is_cut_short_is_refused_unseen(served: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(served, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    log, backend = PolicyTopic(at(broken, 1)), engine(model_path=str(served))
    async with keeping(log, backend):
        await log.until(lambda: log.said(PolicyRejected) != [])
        await log.append([replace(at(served, 1), published_at_ms=9)])
        await log.until(lambda: log.active() != [])
    [refusal] = log.said(PolicyRejected)
    assert isinstance(refusal, PolicyRejected)
    assert "model.safetensors" in refusal.reason


def test_nothing_is_said_of_what_can_not_be_seen_from_here(served: Path, wider: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert unfit(nowhere, [served]) is None
    assert unfit(wider, [nowhere]) is None
    assert unfit(wider, [nowhere, served]) is not None


def test_an_adapter_that_was_published_as_full_weights_is_refused_unseen(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    said = unfit(tmp_path, [])
    assert said is not None
    assert "is an adapter" in said
