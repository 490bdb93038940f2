"""Tiny models of each family, as Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCABULARY = 97  # odd: two processes hold a padded half each

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, Any] = {
    "qwen3": lambda: Qwen3Config(**COMMON, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "mistral": lambda: MistralConfig(**COMMON, tie_word_embeddings=False, sliding_window=6),
    "one-group": lambda: Qwen3Config(**COMMON | {"num_key_value_heads": 1}, tie_word_embeddings=False),
}


def build(folder: Path, family: str, *, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY) -> Path:
    """Write a model folder with random weights, norms included; return it."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.vocab_size = vocabulary
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"stands for": "a tokenizer"}))
    return folder
