"""Models with random weights that sample some of their tokens and never the others.

Two of one architecture that never sample a token of each other's: a token proves its weights.
"""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.parts.engine.tiny_model import make_tokenizer

_CONSTANT = 3.0
_BIAS = 60.0


def make_disjoint_models(folder: Path) -> tuple[Path, Path]:
    """Folders of a model that samples even ids only, and of one that samples odd ids only."""
    return _make_model(folder / "even", parity=0), _make_model(folder / "odd", parity=1)


def _make_model(folder: Path, *, parity: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    save_model_that_says(folder, tokenizer, torch.arange(len(tokenizer)) % 2 == parity, seed=parity)
    return folder


def save_model_that_says(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    said: torch.Tensor,
    *,
    seed: int = 0,
    context_length_tokens: int = 2048,
) -> None:
    """Save a model that samples those ids only whose place in `said` is true.

    Qwen3 has no bias: hidden dimension 0 is kept constant instead, and the output head reads one from it. No layer
    writes to that dimension, so whatever the keys and values in the cache are, and whoever computed them, it reaches
    the head positive, and every other id is more than 100 nats away.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context_length_tokens,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        model.model.embed_tokens.weight[:, 0] = _CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = torch.where(said, _BIAS, -_BIAS)
    model.save_pretrained(folder)
