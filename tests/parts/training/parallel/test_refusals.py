"""What a trainer can't do is refused before it starts: settings, a missing device, a model that it can't cut."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config

from clawstream.errors import ConfigError
from clawstream.training.stepping import refuse_what_cannot_be
from tests.parts.training.parallel import families
from tests.parts.training.parallel.test_trainers import ADAPTER, FSDP, TENSOR, settings_of


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
