"""Two models of one architecture that never sample a token of each other's, so that a token proves its weights."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.engine.tiny_model import make_tokenizer

_CONSTANT = 3.0
_BIAS = 60.0


def make_disjoint_models(folder: Path) -> tuple[Path, Path]:
    """Folders of a model that samples even ids only, and of one that samples odd ids only."""
    return _make_model(folder / "even", parity=0), _make_model(folder / "odd", parity=1)


def _make_model(folder: Path, *, parity: int) -> Path:
    """Qwen3 has no bias: hidden dimension 0 is kept constant instead, and the output head reads one from it.

    No layer writes to that dimension, so whatever the keys and values in the cache are, and whoever computed them, it
    reaches the head positive, and every id of the other parity is more than 100 nats away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(parity)
        model = Qwen3ForCausalLM(config)
        model.model.embed_tokens.weight[:, 0] = _CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        signs = torch.where(torch.arange(config.vocab_size) % 2 == parity, 1.0, -1.0)
        model.lm_head.weight[:, 0] = _BIAS * signs
    model.save_pretrained(folder)
    return folder
