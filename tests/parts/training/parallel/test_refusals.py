"""What a trainer can't do is refused before it starts: settings, a missing device, a model that it can't cut, machines
that differ.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is documented there
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config

from clawstream.errors import ConfigError
from clawstream.inference.model_folder import base_in
from clawstream.training.processes import Ranks, Start, ranks_of
from clawstream.training.stepping import device_of, refuse_what_cannot_be, unlike
from tests.parts.training.parallel import families
from tests.parts.training.parallel.test_trainers import ADAPTER, FSDP, TENSOR, settings_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "train", "TORCHELASTIC_USE_AGENT_STORE": "False", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"processes": 2, "tensor_parallel": 2}, "tensor_parallel and pipeline_parallel"),
        ({"trainer": "megatron", "processes": 3, "tensor_parallel": 2}, "processes = 3 is no multiple"),
    ],
)
def test_settings_that_no_trainer_can_follow_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        settings_of(changes)


@pytest.mark.slow  # it needs the extra `megatron`, which CI alone installs
def test_a_trainer_that_cannot_compute_here_is_refused_before_it_starts(base: Path) -> None:
    with pytest.raises(ConfigError, match="needs a GPU for each of its processes"):
        refuse_what_cannot_be(base, settings_of(TENSOR))
    refuse_what_cannot_be(base, settings_of(FSDP))


def test_a_model_that_a_trainer_can_not_cut_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretched = Qwen3Config(
        **families.COMMON, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    )
    stretched.save_pretrained(tmp_path / "yarn")
    monkeypatch.setattr("clawstream.training.stepping.device_of", lambda *_: "cuda")  # there is none here
    with pytest.raises(ConfigError, match="rope_type = 'yarn', where the Megatron trainer needs one of"):
        refuse_what_cannot_be(tmp_path / "yarn", settings_of(TENSOR))

    other = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    GPT2LMHeadModel(other).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has no decoder\.layers"):
        refuse_what_cannot_be(tmp_path / "gpt2", settings_of(FSDP))

    families.build(tmp_path / "renamed", "qwen3")
    file = tmp_path / "renamed" / "model.safetensors"
    save_file({f"language.{name}": value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"its files have no tensor model\.embed_tokens\.weight"):
        refuse_what_cannot_be(tmp_path / "renamed", settings_of(FSDP))


@pytest.mark.parametrize("changes", [{}, FSDP | ADAPTER, TENSOR], ids=["torch", "fsdp", "megatron"])
def test_a_base_whose_files_hold_quantized_weights_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """In eight bits with scales beside them, as Qwen3-8B-FP8 is."""
    monkeypatch.setattr("clawstream.training.stepping.device_of", lambda *_: "cpu")
    base = families.build(tmp_path, "qwen3")
    refuse_what_cannot_be(base, settings_of(changes))

    whole = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    eight_bits = {name: whole[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(whole | eight_bits, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} is stored as F8_E4M3, expected"):
        refuse_what_cannot_be(base, settings_of(changes))

    save_file(whole, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"config\.json has a quantization_config, quant_method = 'fp8'"):
        refuse_what_cannot_be(base, settings_of(changes))


@pytest.mark.parametrize(
    ("environment", "gpus", "named"),
    [
        ({"WORLD_SIZE": "4"}, 0, "torchrun started 4 processes .* training.processes = 2. Nothing is trained. Set it"),
        ({"LOCAL_WORLD_SIZE": "2"}, 1, "torchrun started 2 processes on this machine, and torch sees 1 GPUs here"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, 0, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_a_start_by_torchrun_that_can_not_train_is_refused_before_anybody_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], gpus: int, named: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    for name, value in (TORCHRUN | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named):
        ranks_of(settings_of({"processes": 2}))


def test_a_trainer_that_torchrun_did_not_start_or_started_alone_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_of(settings_of({})) is None
    for name, value in (TORCHRUN | {"WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    assert ranks_of(settings_of({})) is None


def test_the_gpus_that_count_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    eight = settings_of({"processes": 8})
    with pytest.raises(ConfigError, match=r"training.processes = 8, and torch sees 4 GPUs"):
        device_of(eight, "cuda")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert device_of(eight, "cuda") == "cuda", "of torchrun's processes, ranks_of looks"


def test_a_process_that_sees_no_gpu_among_others_that_do_is_refused_before_they_wait_for_it() -> None:
    store: Any = HashStore()
    with_gpu, without = (object.__new__(Ranks) for _ in range(2))
    with_gpu.rank, with_gpu._store, with_gpu._start = 0, store, Start(backend="nccl")
    without.rank, without._store, without._start = 1, store, Start(backend="gloo")
    with_gpu._refuse_other_backend()
    with pytest.raises(ConfigError, match="would talk by gloo, and the first one by nccl"):
        without._refuse_other_backend()


def test_a_machine_with_another_base_or_without_one_is_told_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    base, other, mark = families.build(tmp_path / "a", "qwen3"), families.build(tmp_path / "b", "llama"), tmp_path / "m"
    mark.write_text("text")
    expected = ("text", base_in(base, tmp_path).model_sha256)
    assert unlike({}, base, mark, tmp_path, expected) is None
    assert f"has another model in {other} than the trainer's first machine" in (
        unlike({}, other, mark, tmp_path, expected) or ""
    )
    assert "can't be read" in (unlike({}, tmp_path / "none", mark, tmp_path, expected) or "")
    mark.write_text("an older run's")
    assert "mount one folder on all" in (unlike({}, base, mark, tmp_path, expected) or "")
