"""A plan gives each GPU one entry, keeps to what the settings say, and comes near to what was measured on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.config import TrainingSettings
from clawstream.errors import ConfigError
from clawstream.local.servers.gpu_plan import ROOM, Gpus, plan_for, what_fits
from clawstream.training.footprint import Decoder, decoder_of, trainer_bytes
from tests.bench.trainer_mfu import SIZES, Size

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "trainer_gpu.json"
LARGE = {
    "qwen3-8b": Size(4096, 12_288, 36, 32, 8),
    "qwen3-32b": Size(5120, 25_600, 64, 64, 8),
}
NUMBERS = {"qwen3-0.6b": 0.596e9, "qwen3-4b": 4.022e9, "qwen3-8b": 8.191e9, "qwen3-32b": 32.76e9}  # their model cards


def config(size: Size, *, tied: bool = True) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary, "hidden_size": size.width, "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads, "head_dim": 128, "tie_word_embeddings": tied,
        "dtype": "bfloat16", "max_position_embeddings": 40_960,
    }  # fmt: skip


def decoder(name: str) -> Decoder:
    large = LARGE.get(name)
    return decoder_of(Path(name), config(large or SIZES[name], tied=large is None))


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_counted_as_the_models_have_them(name: str) -> None:
    assert decoder(name).numbers == pytest.approx(NUMBERS[name], rel=1e-3)


ROWS = [row for row in json.loads(MEASURED.read_text())["rows"] if row["trainer"] == "torch"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['shape']}-{row['lora_rank']}")
def test_a_trainer_s_peak_is_within_15_percent_of_what_a_gpu_measured(row: dict[str, Any]) -> None:
    training = TrainingSettings(lora_rank=row["lora_rank"], dtype="bfloat16", gradient_checkpointing=True)
    told = sum(trainer_bytes(decoder(row["shape"]), training).values())
    assert told / 1e9 == pytest.approx(max(part["peak_gb"] for part in row["step"]["parts"].values()), rel=0.15)
    assert ROOM * told / 1e9 > row["step"]["reserved_gb"], "what torch reserved besides has room"


@given(
    name=st.sampled_from([*SIZES, *LARGE]),
    count=st.sampled_from([1, 2, 3, 4, 8]),
    size_gb=st.sampled_from([24, 48, 80, 141]),
    said=st.sampled_from([{}, {"lora_rank": 32}, {"micro_batch_tokens": 2048}, {"gate": False}]),
)
def test_each_gpu_has_one_entry_and_the_settings_are_kept_to(
    name: str, count: int, size_gb: int, said: dict[str, Any]
) -> None:
    model, gpus, training = decoder(name), Gpus(count=count, size_bytes=size_gb * 1e9), TrainingSettings(**said)
    found = plan_for(model, model, gpus, training, context_tokens=8192)
    assert [use.number for use in found.uses] == list(range(count))
    assert {field: getattr(found.training, field) for field in said} == said
    assert found.training.processes == sum("actor" in use.role for use in found.uses)
    assert all(use.peak_bytes >= sum(use.bytes_by_use.values()) > 0 for use in found.uses)
    assert found.fits is all(use.peak_bytes <= gpus.size_bytes for use in found.uses)
    larger = plan_for(model, model, Gpus(count=count, size_bytes=3 * size_gb * 1e9), training, context_tokens=8192)
    assert larger.fits or not found.fits, "what fits, fits on larger GPUs"
    assert not found.fits or found.cache_tokens >= 8192


def test_all_weights_are_trained_where_they_fit_and_an_adapter_where_they_do_not() -> None:
    model, training = decoder("qwen3-4b"), TrainingSettings()
    ranks = {
        size: plan_for(model, model, Gpus(count=4, size_bytes=size * 1e9), training, context_tokens=8192)
        for size in (24, 80)
    }
    assert (ranks[80].fits, ranks[80].training.lora_rank) == (True, None)
    assert (ranks[24].fits, ranks[24].training.lora_rank) == (True, 16)


def test_what_does_not_fit_is_told_how_many_would_do() -> None:
    model, gpus = decoder("qwen3-4b"), Gpus(count=1, size_bytes=24e9)
    assert not plan_for(model, model, gpus, TrainingSettings(), context_tokens=8192).fits
    would = what_fits(model, model, gpus, TrainingSettings(), context_tokens=8192)
    assert would is not None
    assert plan_for(model, model, would, TrainingSettings(), context_tokens=8192).fits
    huge = decoder("qwen3-32b")
    assert what_fits(huge, huge, Gpus(count=1, size_bytes=1e9), TrainingSettings(), context_tokens=8192) is None


@given(st.integers(1, 64), st.integers(1, 200))
def test_gpus_are_read_as_they_are_written(count: int, size_gb: int) -> None:
    gpus = Gpus.of(f"{count}x{size_gb}GB")
    assert gpus == Gpus(count=count, size_bytes=size_gb * 1e9)
    assert Gpus.of(str(gpus)) == gpus


@pytest.mark.parametrize("text", ["", "24GB", "x", "4x", "x24GB", "0x24GB", "-1x24GB", "4x0GB", "4xinfGB", "4xnanGB"])
def test_what_names_no_gpus_is_none(text: str) -> None:
    assert Gpus.of(text) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [({"num_experts": 128}, "num_experts = 128"), ({"hidden_size": None}, "no hidden_size")],
)
def test_a_model_that_is_counted_otherwise_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decoder_of(Path("x"), config(SIZES["qwen3-0.6b"]) | change)
