"""A plan gives each GPU one entry, keeps to what the settings say, and comes near to what was measured on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.config import Settings, TrainingSettings
from clawstream.errors import ConfigError
from clawstream.local.servers.gpu_plan import ROOM, STATIC_SHARE, GpuPlan, Gpus, plan_as_set, plan_for, what_fits
from clawstream.local.servers.sglang_servers import FLAGS, GpuCounts
from clawstream.training.footprint import FLOAT32, Decoder, decoder_of, trainer_bytes
from tests.bench.qwen3_sizes import LARGE, SIZES, config

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "trainer_gpu.json"
TRAINED = {"weights", "gradients", "moments", "reference", "gate", "gathered", "activations"}


def decoder(name: str) -> Decoder:
    return decoder_of(Path(name), config(name))


def test_more_processes_than_the_actor_has_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.processes is 3, and of 4x80GB the actor gets 2"):
        planned("qwen3-0.6b", "4x80GB", processes=3)


def test_gpus_of_the_actor_without_a_process_are_idle() -> None:
    found = planned("qwen3-0.6b", "8x80GB", processes=2)
    assert found.idle == (2, 3)
    assert [use.number for use in found.uses] == [0, 1, 4, 5, 6, 7]


ROWS = [row for row in json.loads(MEASURED.read_text())["rows"] if row["trainer"] == "torch"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['shape']}-{row['lora_rank']}")
def test_a_trainer_s_peak_is_within_15_percent_of_what_a_gpu_measured(row: dict[str, Any]) -> None:
    training = TrainingSettings(lora_rank=row["lora_rank"], dtype="bfloat16", gradient_checkpointing=True)
    model = decoder(row["shape"])
    told = sum(trainer_bytes(model, training).values())
    if training.lora_rank is not None:  # measured when matrices under an adapter were float32
        told += (FLOAT32 - 2) * model.num_layers * model.layer
    assert told / 1e9 == pytest.approx(max(part["peak_gb"] for part in row["step"]["parts"].values()), rel=0.15)
    assert ROOM * told / 1e9 > row["step"]["reserved_gb"], "what torch reserved besides has room"


@given(
    name=st.sampled_from([*SIZES, *LARGE]),
    count=st.sampled_from([1, 2, 3, 4, 8]),
    size_gb=st.sampled_from([24, 48, 80, 141]),
    said=st.sampled_from([{}, {"lora_rank": 32}, {"micro_batch_tokens": 2048}, {"processes": 1}]),
)
def test_each_gpu_has_one_entry_and_the_settings_are_kept_to(
    name: str, count: int, size_gb: int, said: dict[str, Any]
) -> None:
    model, gpus = decoder(name), Gpus(count=count, size_bytes=size_gb * 1e9)
    settings = with_training(**said)
    found = plan_for(model, model, gpus, settings, context_tokens=8192)
    assert sorted([*(use.number for use in found.uses), *found.idle]) == list(range(count))
    assert {field: getattr(found.training, field) for field in said} == said
    assert found.training.processes == sum("actor" in use.role for use in found.uses)
    assert all(use.peak_bytes >= sum(use.bytes_by_use.values()) > 0 for use in found.uses)
    assert found.fits is all(use.peak_bytes <= gpus.size_bytes for use in found.uses)
    larger = plan_for(model, model, Gpus(count=count, size_bytes=3 * size_gb * 1e9), settings, context_tokens=8192)
    assert larger.fits or not found.fits, "what fits, fits on larger GPUs"
    assert not found.fits or found.cache_tokens >= 8192


def with_training(**said: Any) -> Settings:
    return Settings(environment=False, training=said)


def planned(name: str, gpus: str, *, judge: str | None = None, context_tokens: int = 8192, **said: Any) -> GpuPlan:
    machine = Gpus.of(gpus)
    assert machine is not None
    return plan_for(
        decoder(name), decoder(judge or name), machine, with_training(**said), context_tokens=context_tokens
    )


def test_all_weights_are_trained_where_they_fit_and_an_adapter_where_they_do_not() -> None:
    ranks = {gpus: planned("qwen3-4b", gpus) for gpus in ("4x24GB", "4x80GB", "1x80GB", "1x141GB")}
    assert {gpus: (found.fits, found.training.lora_rank) for gpus, found in ranks.items()} == {
        "4x24GB": (True, 16), "4x80GB": (True, None), "1x80GB": (True, 16), "1x141GB": (True, None),
    }  # fmt: skip
    assert planned("qwen3-0.6b", "1x48GB").training.lora_rank is None, "also beside an engine"


def test_a_pass_is_as_long_as_the_longest_conversation() -> None:
    short, long = (planned("qwen3-4b", "4x24GB", context_tokens=tokens, lora_rank=16) for tokens in (4096, 32_768))
    assert (short.fits, long.fits) == (True, False)
    peaks = [one.uses[0].bytes_by_use["activations"] for one in (short, long)]
    assert peaks[1] > 1.8 * peaks[0]
    least = planned("qwen3-4b", "4x24GB", context_tokens=32_768, lora_rank=16, micro_batch_tokens=2048)
    assert least.uses == long.uses, "a shorter budget makes no sample shorter"


def test_an_engine_that_one_gpu_can_not_hold_is_cut_and_its_cache_with_it() -> None:
    found = planned("qwen3-32b", "8x141GB", lora_rank=16)
    cut = planned("qwen3-32b", "8x80GB", lora_rank=16)
    assert (found.tensor_parallel, cut.tensor_parallel, cut.judge_tensor_parallel) == (1, 2, 1)
    whole, half = (next(use for use in one.uses if use.role == "rollout").bytes_by_use for one in (found, cut))
    assert half == {name: pytest.approx(value / 2) for name, value in whole.items()}
    assert whole["cache of one conversation"] == pytest.approx(2 * 64 * 1024 * 2 * 8192)  # keys, values; bfloat16
    assert planned("qwen3-32b", "12x48GB").tensor_parallel == 1, "three GPUs are not shared out to engines of two"


def test_a_judge_of_its_own_is_counted_on_its_gpus() -> None:
    found = planned("qwen3-0.6b", "4x24GB", judge="qwen3-8b")
    held = {use.role: use.bytes_by_use["engine weights"] for use in found.uses if use.role != "actor"}
    assert held["judge"] == pytest.approx(2 * decoder("qwen3-8b").numbers)
    assert held["rollout"] == pytest.approx(2 * decoder("qwen3-0.6b").numbers)


def test_on_one_gpu_an_engine_gets_what_the_trainer_leaves_it() -> None:
    found = planned("qwen3-0.6b", "1x24GB", lora_rank=16)
    (use,) = found.uses
    trained = ROOM * sum(value for name, value in use.bytes_by_use.items() if name in TRAINED)
    assert found.static_share * 24e9 == pytest.approx(STATIC_SHARE * (24e9 - trained))
    held = use.bytes_by_use["engine weights"]
    assert found.cache_tokens == int((found.static_share * 24e9 - held) / decoder("qwen3-0.6b").cached_bytes())
    assert "--enable-lora" in found.engine_flags
    assert set(FLAGS) <= set(found.engine_flags)


@pytest.mark.parametrize(("rank", "version", "state"), [(None, 2, 12), (16, 4, 8)])
def test_a_version_is_written_as_engines_read_it_and_its_state_exactly(
    rank: int | None, version: int, state: int
) -> None:
    found, model = planned("qwen3-0.6b", "8x80GB", lora_rank=rank), decoder("qwen3-0.6b")
    numbers = model.numbers if rank is None else model.adapter(rank)
    assert (found.version_bytes, found.state_bytes) == (version * numbers, state * numbers)


@pytest.mark.parametrize(("rank", "operations"), [(None, 6), (16, 4)])
def test_no_gradient_of_a_frozen_number_is_counted(rank: int | None, operations: int) -> None:
    found = planned("qwen3-0.6b", "8x80GB", lora_rank=rank)
    assert found.step_operations == operations * 24 * 1024 * decoder("qwen3-0.6b").numbers


def test_what_does_not_fit_is_told_the_fewest_that_would_do() -> None:
    model, gpus, settings = decoder("qwen3-4b"), Gpus(count=1, size_bytes=24e9), Settings(environment=False)
    would = what_fits(model, model, gpus, settings, context_tokens=8192)
    assert would is not None
    fits = [planned("qwen3-4b", f"{count}x24GB").fits for count in range(1, would.count + 1)]
    assert fits == [False] * (would.count - 1) + [True]
    huge = decoder("qwen3-32b")
    assert what_fits(huge, huge, Gpus(count=1, size_bytes=1e9), settings, context_tokens=8192) is None


def test_megatron_s_memory_is_not_told() -> None:
    with pytest.raises(ConfigError, match="Nothing was planned"):
        planned("qwen3-0.6b", "8x80GB", trainer="megatron")


@given(st.integers(1, 64), st.integers(1, 200))
def test_gpus_are_read_as_they_are_written(count: int, size_gb: int) -> None:
    gpus = Gpus.of(f"{count}x{size_gb}GB")
    assert gpus == Gpus(count=count, size_bytes=size_gb * 1e9)
    assert Gpus.of(str(gpus)) == gpus


@pytest.mark.parametrize(
    "text", ["", "24GB", "x", "4x", "x24GB", "0x24GB", "-1x24GB", "4x0GB", "4xinfGB", "4xnanGB", "65x1GB"]
)
def test_what_names_no_gpus_is_none(text: str) -> None:
    assert Gpus.of(text) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "jamba"}, "found model_type = 'jamba', expected one of llama"),
        ({"quantization_config": {"quant_method": "awq"}}, "found quantization_config"),
        ({"dtype": "float8_e4m3fn"}, "found dtype = 'float8_e4m3fn'"),
        ({"hidden_size": None}, "found hidden_size = None, expected a number above 0"),
        ({"hidden_size": True}, "found hidden_size = True"),
        ({"vocab_size": "151936"}, "found vocab_size = '151936'"),
        ({"num_attention_heads": 0}, "found num_attention_heads = 0"),
        ({"num_hidden_layers": -3}, "found num_hidden_layers = -3"),
        ({"head_dim": "128"}, "found head_dim = '128'"),
        ({"num_key_value_heads": 3}, "found num_key_value_heads = 3, expected a divisor of num_attention_heads = 16"),
    ],
    ids=str,
)
def test_a_model_that_is_counted_otherwise_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decoder_of(Path("x"), config("qwen3-0.6b") | change)
    assert said in str(refused.value)
    assert "Nothing was planned" in str(refused.value)


def test_what_is_set_is_weighed_as_it_is() -> None:
    model, counts = decoder("qwen3-4b"), GpuCounts(machine=8, actor=3, rollout=4, judge=1)
    gpus, settings = Gpus(count=8, size_bytes=80e9), with_training(dtype="float32", processes=3)
    one, two = (
        plan_as_set(model, model, gpus, settings, counts, tp=tp, judge_tp=1, context_tokens=8192) for tp in (1, 2)
    )
    assert [use.role for use in one.uses] == ["actor"] * 3 + ["rollout"] * 4 + ["judge"]
    assert (one.training.dtype, one.training.lora_rank) == ("float32", None)
    weights = [plan.uses[3].bytes_by_use["engine weights"] for plan in (one, two)]
    assert weights == [pytest.approx(2 * model.numbers), pytest.approx(model.numbers)]
