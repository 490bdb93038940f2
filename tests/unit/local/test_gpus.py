"""One machine's GPUs, shared out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from clawstream.config import Settings
from clawstream.errors import ConfigError
from clawstream.local.servers.sglang_servers import (
    FLAGS,
    Assignment,
    GpuCounts,
    Launch,
    adapter_flags,
    assign,
    servers,
    settings_for,
    share_out,
)

COUNTS = st.integers(0, 6)


@given(
    actor=st.integers(1, 6), engines=st.integers(1, 4), tp=st.integers(1, 4), judges=COUNTS, judge_tp=st.integers(1, 4)
)
def test_no_gpu_has_two_roles_and_each_server_has_its_share(
    actor: int, engines: int, tp: int, judges: int, judge_tp: int
) -> None:
    rollout, judge = engines * tp, judges * judge_tp
    counts = GpuCounts(machine=actor + rollout + judge, actor=actor, rollout=rollout, judge=judge)
    given_out = assign(counts, rollout_tp=tp, judge_tp=judge_tp)
    everyone = [*given_out.actor, *(gpu for gpus in given_out.rollout for gpu in gpus), *given_out.judge]
    assert everyone == list(range(counts.machine))
    assert [len(gpus) for gpus in given_out.rollout] == [tp] * engines


def test_eight_gpus_are_shared_out_as_the_scripts_of_openclaw_rl_do() -> None:
    assert share_out(8, None, None, None) == GpuCounts(machine=8, actor=4, rollout=2, judge=2)
    assert share_out(4, None, None, None) == GpuCounts(machine=4, actor=2, rollout=1, judge=1)
    assert share_out(3, None, None, None) == GpuCounts(machine=3, actor=1, rollout=1, judge=1)
    assert share_out(8, None, None, 0) == GpuCounts(machine=8, actor=4, rollout=2, judge=0)


def test_without_a_word_on_judges_they_get_what_is_left_and_at_most_a_quarter() -> None:
    assert share_out(2, None, None, None) == GpuCounts(machine=2, actor=1, rollout=1, judge=0)
    assert share_out(8, 4, 3, None) == GpuCounts(machine=8, actor=4, rollout=3, judge=1)
    assert share_out(8, 6, 2, None) == GpuCounts(machine=8, actor=6, rollout=2, judge=0)


def test_one_gpu_trains_and_serves_side_by_side_and_takes_neither_a_judge_nor_a_second_role() -> None:
    alone = GpuCounts(machine=1, actor=1, rollout=1, judge=0)
    assert share_out(1, None, None, None) == share_out(1, 1, 1, 0) == alone
    assert assign(alone, rollout_tp=1, judge_tp=1) == Assignment(actor=(0,), rollout=((0,),), judge=())
    for asked in ((1, 1, 1), (2, None, None), (None, 2, None)):
        with pytest.raises(ConfigError, match=r"NUM_GPUS is 1\. Lower one"):
            share_out(1, *asked)
    with pytest.raises(ConfigError, match="TP that divides it"):
        assign(alone, rollout_tp=2, judge_tp=1)


@pytest.mark.parametrize(("share", "said"), [(0.4567, "0.45"), (0.3, "0.30"), (0.999, "0.99"), (None, None)])
def test_the_engine_beside_a_trainer_takes_no_more_than_its_share(
    tmp_path: Path, share: float | None, said: str | None
) -> None:
    launch = replace(launched(tmp_path, judge=(4, 5)), memory_share=share)
    for server in servers(launch, 30010):
        has = "--mem-fraction-static" in server.command
        assert has is (said is not None and server.name != "judge")
        assert not has or server.command[server.command.index("--mem-fraction-static") + 1] == said


def test_more_than_there_are_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"4 \+ 4 \+ 1 = 9; NUM_GPUS is 8.*PRM_GPUS=0"):
        share_out(8, 4, 4, 1)


@pytest.mark.parametrize(("rollout_tp", "judge_tp", "dial"), [(2, 1, "TP"), (1, 3, "PRM_TP")])
def test_a_tensor_parallel_size_that_does_not_divide_its_share_is_refused(
    rollout_tp: int, judge_tp: int, dial: str
) -> None:
    counts = GpuCounts(machine=8, actor=1, rollout=3, judge=4)
    with pytest.raises(ConfigError, match=rf"\b{dial} that divides it"):
        assign(counts, rollout_tp=rollout_tp, judge_tp=judge_tp)


def launched(tmp_path: Path, judge: tuple[int, ...]) -> Launch:
    return Launch(
        assignment=Assignment(actor=(0, 1), rollout=((2,), (3,)), judge=judge), sglang=("sglang",),
        model_path=tmp_path / "policy", judge_path=tmp_path / "judge-8b", rollout_tp=1, judge_tp=2,
        save_dir=tmp_path / "saved", api_key="secret", port=31000,
    )  # fmt: skip


def test_each_server_sees_its_own_gpus_alone_and_the_settings_name_them_all(tmp_path: Path) -> None:
    launch = launched(tmp_path, judge=(4, 5, 6, 7))
    seen = {server.name: server.command[1] for server in servers(launch, 30010)}
    assert seen == {
        "engine-0": "CUDA_VISIBLE_DEVICES=2",
        "engine-1": "CUDA_VISIBLE_DEVICES=3",
        "judge": "CUDA_VISIBLE_DEVICES=4,5,6,7",
    }
    one, other, judge = (server.command for server in servers(launch, 30010))
    assert set(FLAGS) <= set(one) & set(other)
    assert judge[judge.index("--dp-size") + 1] == "2"
    settings = settings_for(launch, Settings(environment=False))
    assert settings.engine.model_path == tmp_path / "policy"
    assert settings.engine.urls == ("http://127.0.0.1:30010", "http://127.0.0.1:30011")
    assert (settings.judge.url, settings.judge.model) == ("http://127.0.0.1:30001/v1", "judge-8b")
    assert (settings.gateway.port, settings.gateway.api_key) == (31000, SecretStr("secret"))
    assert settings.checkpoints_dir == tmp_path / "saved" / "policy"


def test_without_gpus_for_a_judge_the_settings_keep_theirs(tmp_path: Path) -> None:
    settings = Settings(environment=False, judge={"url": "http://elsewhere/v1"})
    assert settings_for(launched(tmp_path, judge=()), settings).judge == settings.judge


@pytest.mark.parametrize(("said", "processes"), [({}, 2), ({"processes": 1}, 1), ({"processes": 4}, 4)])
def test_each_gpu_of_the_actor_has_a_process_unless_the_settings_say_how_many(
    tmp_path: Path, said: dict[str, int], processes: int
) -> None:
    settings = Settings(environment=False, training=said)
    assert settings_for(launched(tmp_path, judge=()), settings).training.processes == processes


@pytest.mark.parametrize(
    ("changes", "most"),
    [({}, None), ({"training": {"lora_rank": 8}}, "4"), ({"policy": {"adapters": "by_key"}}, "67")],
)
def test_engines_are_told_of_the_adapters_that_they_will_get(
    tmp_path: Path, changes: dict[str, Any], most: str | None
) -> None:
    settings = Settings(environment=False, **changes)
    launch = replace(launched(tmp_path, judge=(4, 5)), adapter_flags=adapter_flags(settings))
    one, other, judge = (server.command for server in servers(launch, 30010))
    assert "--enable-lora" not in judge
    for engine in (one, other):
        assert ("--enable-lora" in engine) is (most is not None)
        if most is not None:
            assert engine[engine.index("--max-lora-rank") + 1] == str(settings.training.lora_rank)
            assert engine[engine.index("--max-loaded-loras") + 1] == most
