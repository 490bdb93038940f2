"""A tiny Qwen3-shaped model with random weights and a character tokenizer that has the family's special tokens."""

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CHARACTERS = tuple(dict.fromkeys(string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", "")))


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, byte-level, so that any text goes there and back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    fast.save_pretrained(folder)
    return fast


def make_model(
    folder: Path,
    *,
    seed: int = 0,
    width: int = 32,
    layers: int = 2,
    context_length_tokens: int = 2048,
    feed_forward: int = 64,
    tied: bool = True,
) -> Path:
    """A model folder that transformers, the CPU engine and SGLang load, and vLLM with a head of 32.

    Equal seeds give equal weights.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    config = make_config(
        folder,
        width=width,
        layers=layers,
        context_length_tokens=context_length_tokens,
        feed_forward=feed_forward,
        tied=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def make_config(
    folder: Path,
    *,
    width: int = 32,
    layers: int = 2,
    context_length_tokens: int = 2048,
    feed_forward: int = 64,
    tied: bool = True,
) -> Qwen3Config:
    """A model folder without weights, for whoever only renders prompts; torch is not asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=context_length_tokens,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    config.save_pretrained(folder)
    return config
