"""A policy goes on with the base that it began with, and with no other."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clawstream.cli.process import Context
from clawstream.config import (
    EngineSettings,
    GatewaySettings,
    KafkaSettings,
    MonitorSettings,
    PolicySettings,
    PostgresSettings,
    Settings,
    dump,
)
from clawstream.errors import OtherBase
from clawstream.events import BaseNamed, Event
from clawstream.inference.model_folder import base_in, fingerprint
from clawstream.local.installation import installation, name_base
from clawstream.local.running import policy_of, read_parts, settings_file
from clawstream.stream import topics
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record
from tests.fakes.memory_log import MemoryLog
from tests.unit.monitoring.said import sample


def folder(path: Path, weights: str = "mine", tokenizer: str | None = "letters") -> Path:
    """A model folder as far as its base is known by it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "model.safetensors").write_text(weights)
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(tokenizer)
    return path


def settings(data: Path, base: Path) -> Settings:
    return Settings(
        data_dir=data, cache_dir=data / "cache", engine=EngineSettings(model_path=base), environment=False,
        policy=PolicySettings(id="policy"),
    )  # fmt: skip


async def said(log: MemoryLog | KafkaLog) -> list[Event]:
    return [
        record.event
        async for records in log.follow([topics.POLICY], "earliest", until_end=True)
        for record in records
        if isinstance(record, Record)
    ]


async def test_a_base_is_named_once_and_known_wherever_it_lies(tmp_path: Path) -> None:
    log = MemoryLog()
    for base in (folder(tmp_path / "here"), folder(tmp_path / "moved")):
        await name_base(log, settings(tmp_path, base))
    [named] = await said(log)
    assert isinstance(named, BaseNamed)
    assert (named.path, named.model_sha256) == (str(tmp_path / "here"), fingerprint(tmp_path / "moved"))


@pytest.mark.parametrize(
    ("other", "words"),
    [({"weights": "another's"}, "its model has sha256"), ({"tokenizer": "words"}, "its tokenizer has sha256")],
)
async def test_another_base_is_refused_by_name_with_what_to_do(
    tmp_path: Path, other: dict[str, str], words: str
) -> None:
    log = MemoryLog()
    await name_base(log, settings(tmp_path, folder(tmp_path / "mine")))
    another = folder(tmp_path / "another", **other)
    with pytest.raises(OtherBase, match=words) as refused:
        await name_base(log, settings(tmp_path, another))
    for named in ("policy.id policy", str(tmp_path / "mine"), str(another), "a policy.id of its own"):
        assert named in str(refused.value)
    assert len(await said(log)) == 1
    await name_base(log, settings(tmp_path, another).model_copy(update={"policy": PolicySettings(id="its-own")}))


async def test_a_part_without_weights_names_the_tokenizer_and_the_trainer_the_rest(tmp_path: Path) -> None:
    log = MemoryLog()
    without = folder(tmp_path / "tokenizer")
    (without / "model.safetensors").unlink()
    await name_base(log, settings(tmp_path, without))
    await name_base(log, settings(tmp_path, folder(tmp_path / "mine")))
    await name_base(log, settings(tmp_path, without))
    models = [event.model_sha256 for event in await said(log) if isinstance(event, BaseNamed)]
    assert models == [None, fingerprint(tmp_path / "mine")]
    with pytest.raises(OtherBase, match="model"):
        await name_base(log, settings(tmp_path, folder(tmp_path / "another", "another's")))


async def ended(config: Path, part: str) -> tuple[int | None, str]:
    argv = (sys.executable, "-m", "clawstream", "-c", str(config), part)
    process = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.PIPE)
    _, words = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, words.decode()


class _AnotherWasQuicker(MemoryLog):
    """Another part names its base at the moment at which this one does."""

    other: Event

    async def append(
        self, events: Sequence[Event], traceparent: str | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Append the other's event first."""
        await super().append([self.other, *events], traceparent, timeout_s=timeout_s)


async def test_of_two_bases_that_are_named_at_once_the_first_on_the_log_is_the_policys(tmp_path: Path) -> None:
    first = MemoryLog()
    await name_base(first, settings(tmp_path, folder(tmp_path / "another", "another's")))
    log = _AnotherWasQuicker()
    [log.other] = await said(first)
    with pytest.raises(OtherBase, match="model"):
        await name_base(log, settings(tmp_path, folder(tmp_path / "mine")))


def test_a_file_is_hashed_again_only_where_its_size_or_its_time_differs(tmp_path: Path) -> None:
    base, cache = folder(tmp_path / "base", "a" * 9), tmp_path / "cache"
    weights = base / "model.safetensors"
    first, before = base_in(base, cache), weights.stat()
    with weights.open("r+") as file:
        file.write("b" * 9)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert base_in(base, cache) == first
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert base_in(base, cache).model_sha256 == fingerprint(base) != first.model_sha256


def test_commands_that_look_mean_the_policy_that_was_last_up_unless_one_is_named(tmp_path: Path) -> None:
    config = tmp_path / "clawstream.toml"
    config.write_text(f'environment = false\ndata_dir = "{tmp_path}"\n')
    assert Context(config=config).settings_of_what_ran().policy.id == "policy"
    last = Settings(data_dir=tmp_path, policy=PolicySettings(id="tiny-1"), environment=False)
    settings_file(tmp_path).write_text(dump(last))
    assert policy_of(tmp_path) == "tiny-1"
    assert Context(config=config).settings_of_what_ran().policy.id == "tiny-1"
    config.write_text(f'{config.read_text()}[engine]\nmodel_path = "{tmp_path}"\n')
    assert Context(config=config).settings_of_what_ran().policy.id == "policy"


@pytest.mark.slow
async def test_no_part_of_an_installation_is_started_with_another_base(
    tmp_path: Path, kafka_bootstrap: str, topic_prefix: str, fresh_database_url: str
) -> None:
    own = settings(tmp_path, folder(tmp_path / "another", "another's")).model_copy(
        update={
            "kafka": KafkaSettings(bootstrap=kafka_bootstrap, prefix=topic_prefix),
            "postgres": PostgresSettings.model_validate({"url": fresh_database_url}),
            "gateway": GatewaySettings(port=0),
            "monitor": MonitorSettings(port=0),
            "engine": EngineSettings(port=0),
        }
    )
    await admin.apply(kafka_bootstrap, topic_prefix)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        await name_base(log, settings(tmp_path, folder(tmp_path / "mine")))
        await log.append([sample("said to mine")])

        with pytest.raises(OtherBase, match=str(tmp_path / "another")):
            async with installation(own, model_path=tmp_path / "another", say=lambda _: None):
                pass

        assert read_parts(tmp_path) == ()
        config = tmp_path / "settings.json"
        config.write_text(dump(own.model_copy(update={"engine": EngineSettings(model_path=tmp_path / "another")})))
        for status, words in await asyncio.gather(ended(config, "train"), ended(config, "gateway")):
            assert (status, "began with another base" in words) == (OtherBase.exit_status, True), words
        assert [type(event) for event in await said(log)] == [BaseNamed]


async def test_a_log_that_was_emptied_refuses_a_base_that_the_policy_s_checkpoints_were_not_made_of(
    tmp_path: Path,
) -> None:
    mine, another = folder(tmp_path / "mine"), folder(tmp_path / "another", "another's")
    state = settings(tmp_path, mine).checkpoints_dir / "v000003" / "trainer"
    state.mkdir(parents=True)
    (state / "state.json").write_text(f'{{"base_sha256": "{fingerprint(mine)}"}}')
    log = MemoryLog()
    with pytest.raises(OtherBase, match=r"v000003/trainer/state\.json"):
        await name_base(log, settings(tmp_path, another))
    assert await said(log) == []
    await name_base(log, settings(tmp_path, mine))
    assert isinstance((await said(log))[-1], BaseNamed)
