"""Shapes of Qwen3, as numbers alone: nothing is imported that computes with them."""

from typing import Any, NamedTuple


class Size(NamedTuple):
    """A shape, and how long the answers are."""

    width: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int = 151_936
    answers: int = 16
    prompt_tokens: int = 512
    response_tokens: int = 512


SIZES = {
    "qwen3-0.6b": Size(1024, 3072, 28, 16, 8),
    "qwen3-1.7b": Size(2048, 6144, 28, 16, 8),
    "qwen3-4b": Size(2560, 9728, 36, 32, 8),
    "tiny": Size(64, 96, 2, 2, 1, vocabulary=101, answers=3, prompt_tokens=20, response_tokens=10),
}
LARGE = {
    "qwen3-8b": Size(4096, 12_288, 36, 32, 8),
    "qwen3-32b": Size(5120, 25_600, 64, 64, 8),
}  # too large for one GPU that trains


def config(name: str) -> dict[str, Any]:
    """Return the config.json of the named shape."""
    size = (SIZES | LARGE)[name]
    return {
        "model_type": "qwen3", "vocab_size": size.vocabulary, "hidden_size": size.width,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads, "head_dim": 128, "tie_word_embeddings": name in SIZES,
        "dtype": "bfloat16", "max_position_embeddings": 40_960,
    }  # fmt: skip
