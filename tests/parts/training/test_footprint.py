"""What a trainer's process takes on the CPU is what the arithmetic says, within 15 %."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from clawstream.config import TrainingSettings
from clawstream.inference.model_folder import text_config
from clawstream.training.footprint import FLOAT32, decoder_of, trainer_bytes
from clawstream.training.processes import Processes, Start
from tests.bench.qwen3_sizes import LARGE, SIZES, config
from tests.parts.training import tiny

SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49_152,
}  # fmt: skip
SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 8192,
}  # fmt: skip


def build(folder: Path, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=2048, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"stands for": "a tokenizer"}))
    return folder


# Several passes a step, so that gradients of the first are there in the second. FSDP's gate would gather all layers
# for each token that it writes.
CASES = {
    "smollm2": (SMOLLM2, 2, {"gradient_checkpointing": True, "micro_batch_tokens": 128}),
    "small": (SMALL, 8, {"gradient_checkpointing": True, "micro_batch_tokens": 512}),
    "adapter": (
        SMALL,
        16,
        {"gradient_checkpointing": True, "micro_batch_tokens": 1024, "lora_rank": 16, "dtype": "bfloat16"},
    ),
    "fsdp-adapter": (
        SMALL,
        16,
        {
            "gradient_checkpointing": True,
            "micro_batch_tokens": 512,
            "lora_rank": 16,
            "dtype": "bfloat16",
            "processes": 2,
            "gate": False,
        },
    ),
    "fsdp": (SMALL, 8, {"gradient_checkpointing": True, "micro_batch_tokens": 256, "processes": 2, "gate": False}),
}
ALONE_BYTES = 2**18  # what is as large is given back when it is let go, so that the peak is that of tensors


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("sizes", "num_samples", "chosen"), CASES.values(), ids=CASES)
def test_a_process_takes_what_the_arithmetic_says(
    sizes: dict[str, int], num_samples: int, chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(ALONE_BYTES))
    dtype = getattr(
        torch, chosen.get("dtype", "float32")
    )  # as it is stored: a matrix that stays as it is is a file's page
    base, small = build(tmp_path / "base", sizes, dtype), tiny.build(tmp_path / "small")
    settings = TrainingSettings(**chosen)
    samples = [
        tiny.sample(f"s{n}", reward=(1, -1, None)[n % 3], hinted=n % 2 == 0, prompt_tokens=1, response_tokens=127)
        for n in range(num_samples)
    ]
    processes = Processes(settings.processes, Start(backend="gloo", threads=1, patience_s=300))
    try:
        found = processes.ask("tests.parts.training.peak:measure", small, base, settings, samples)
    finally:
        processes.close()
    model = decoder_of(base, text_config(base) or {})
    trained = model.numbers if settings.lora_rank is None else model.adapter(settings.lora_rank)
    published = FLOAT32 * trained / settings.processes  # what was published before stands in main memory, on GPUs too
    told = published + sum(trainer_bytes(model, settings).values())
    assert told == pytest.approx(max(found), rel=0.15), found


@pytest.mark.parametrize("name", [*SIZES, *LARGE])
def test_numbers_are_those_of_the_model_that_transformers_makes(name: str) -> None:
    with torch.device("meta"):
        core = Qwen3ForCausalLM(Qwen3Config(**config(name)))
    expected = pytest.approx(core.num_parameters(), rel=0.02 if name == "tiny" else 1e-3)
    assert decoder_of(Path(name), config(name)).numbers == expected
