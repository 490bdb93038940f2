"""How much memory a model takes where it is trained and where it is served, by arithmetic from its config.json.

Counted are the tensors of torch's trainers as they hold them (one process, or FSDP over P), and an engine's weights and
keys and values. The trainer's numbers are float32, of 4 bytes, but for matrices under an adapter, which have the type
that they are multiplied in. An engine's have 2 bytes, as it rounds float32. What torch's allocator, CUDA and an
engine's own buffers take besides is the caller's to leave room for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawstream.config import TrainingSettings
from clawstream.errors import ConfigError

FLOAT32 = 4
# Of logits at once; what is computed from them takes thrice that. More are cut into pieces, which the backward pass
# computes again.
HEAD_BYTES = 2**29
HEAD_PIECES = 4  # logits and their log-softmax, and the gradients of both
LAYERS_AT_ONCE = 2  # that FSDP has put together: the one that computes, and the next
SERVED_BYTES = 2  # of a number in an engine, which rounds float32
# Causal, within a window or not, and nothing besides.
DENSE_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes of a dense decoder: gated feed-forward layers, and heads that share keys and values in groups."""

    vocabulary: int
    width: int
    inner_width: int
    num_layers: int
    heads_width: int  # of all query heads
    groups_width: int  # of all key heads, and of all value heads
    num_groups: int  # of heads that share keys and values
    tied: bool  # the head's weights are the embedding's
    context_tokens: int
    stored_bytes: int  # of a number in the base's files

    @property
    def embedding(self) -> int:
        """Numbers."""
        return self.vocabulary * self.width

    @property
    def layer(self) -> int:
        """Numbers, those of norms and biases left out."""
        return self.width * (2 * self.heads_width + 2 * self.groups_width + 3 * self.inner_width)

    @property
    def numbers(self) -> int:
        """Of all weights."""
        return self.outside + self.num_layers * self.layer

    @property
    def outside(self) -> int:
        """Numbers that are in no layer."""
        return self.embedding * (1 if self.tied else 2)

    def adapter(self, rank: int) -> int:
        """Return the numbers of a LoRA adapter on all of the layers' matrices."""
        width, heads, groups, inner = self.width, self.heads_width, self.groups_width, self.inner_width
        return self.num_layers * rank * (2 * (width + heads) + 2 * (width + groups) + 3 * (width + inner))

    def cached_bytes(self, tensor_parallel: int = 1) -> float:
        """Return what a token's keys and values take on each GPU of an engine."""
        return 2 * self.num_layers * self.groups_width * SERVED_BYTES / tensor_parallel


def decoder_of(folder: Path, config: Mapping[str, Any]) -> Decoder:
    """Return the sizes by a folder's config.json; raises ConfigError for a model that is counted otherwise."""
    if (family := config.get("model_type")) not in DENSE_FAMILIES:
        raise _uncounted(folder, f"model_type = {family!r}", f"one of {', '.join(sorted(DENSE_FAMILIES))}")
    if config.get("quantization_config"):
        raise _uncounted(folder, "quantization_config", "the same model without it: quantized weights can't be trained")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(stored, str) or stored not in _STORED_BYTES:
        raise _uncounted(folder, f"dtype = {stored!r}", f"one of {', '.join(_STORED_BYTES)}")
    width, heads = _size(folder, config, "hidden_size"), _size(folder, config, "num_attention_heads")
    groups = _size(folder, config, "num_key_value_heads", heads)
    if heads % groups:
        raise _uncounted(folder, f"num_key_value_heads = {groups}", f"a divisor of num_attention_heads = {heads}")
    head_width = _size(folder, config, "head_dim", width // heads or None)
    return Decoder(
        vocabulary=_size(folder, config, "vocab_size"),
        width=width,
        inner_width=_size(folder, config, "intermediate_size"),
        num_layers=_size(folder, config, "num_hidden_layers"),
        heads_width=heads * head_width,
        groups_width=groups * head_width,
        num_groups=groups,
        tied=config.get("tie_word_embeddings") is True,
        context_tokens=_size(folder, config, "max_position_embeddings"),
        stored_bytes=_STORED_BYTES[stored],
    )


def _size(folder: Path, config: Mapping[str, Any], name: str, usual: int | None = None) -> int:
    found = config.get(name)
    if found is None and usual is not None:
        return usual
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise _uncounted(folder, f"{name} = {found!r}", "a number above 0")
    return found


def _uncounted(folder: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{folder / 'config.json'}: found {found}, expected {expected}: only then can its memory be told by "
        "arithmetic. Nothing was planned. Name another folder, or start it without a plan and watch its memory"
    )


def trainer_bytes(model: Decoder, training: TrainingSettings, *, sample_tokens: int = 1) -> dict[str, float]:
    """Return the bytes by use of each of the trainer's processes at its peak, with samples of so many tokens.

    The peak is where the gate looks where the gradient leads, with a copy of the weights moved so far; or within a
    pass, where a backward pass begins with all that it needs again, or ends with all gradients. `activations` is what
    the peak has beside the copies.
    """
    processes, rank = training.processes, training.lora_rank
    trained = model.numbers if rank is None else model.adapter(rank)
    share = FLOAT32 * trained / processes
    held = {
        "weights": share if rank is None else share + _frozen_bytes(model, training),
        "gradients": share,
        "moments": 2 * share,
        "reference": share,
    }
    gate = share if training.gate else 0.0
    put_together = _put_together(model, training) if processes > 1 else 0.0
    tokens = max(training.micro_batch_tokens, sample_tokens)  # a longer sample is a pass of its own
    kept, inner = _kept_bytes(model, training, tokens)
    logits = min(HEAD_BYTES, FLOAT32 * tokens * model.vocabulary)
    head = HEAD_PIECES * logits
    begins = kept + max(inner, head)  # of a later pass: the gradients of those before it are there
    ends = inner + (2 * FLOAT32 * model.embedding if rank is None else 0.0)
    looks = gate + max(inner, 2 * logits) if training.gate else 0.0
    beside = max(begins, ends, looks)
    return held | {"gate": gate, "gathered": put_together, "activations": beside - gate}


def _frozen_bytes(model: Decoder, training: TrainingSettings) -> float:
    """Return what each process holds of a base under an adapter."""
    matrices = _product_bytes(training) * model.num_layers * model.layer
    return (FLOAT32 * model.outside + matrices) / training.processes


def _product_bytes(training: TrainingSettings) -> int:
    return 2 if training.dtype == "bfloat16" else FLOAT32


def _put_together(model: Decoder, training: TrainingSettings) -> float:
    """Return what FSDP has whole in each process: what is in no layer, and some layers; gradients too, if trained."""
    if training.lora_rank is not None:
        return FLOAT32 * model.outside + _product_bytes(training) * LAYERS_AT_ONCE * model.layer
    return 2 * FLOAT32 * (model.outside + LAYERS_AT_ONCE * model.layer)


def _kept_bytes(model: Decoder, training: TrainingSettings, tokens: int) -> tuple[float, float]:
    """Return what a pass keeps of all layers for its backward pass, and what is inside a layer while it computes."""
    attention = model.heads_width + 2 * model.groups_width
    inner = tokens * _product_bytes(training) * (5 * model.inner_width + 6 * model.width + 3 * attention)
    if training.gradient_checkpointing:
        return FLOAT32 * tokens * model.width * model.num_layers, inner
    return float(inner * model.num_layers), inner


def engine_bytes(model: Decoder, *, tensor_parallel: int, adapter_rank: int | None, num_adapters: int) -> float:
    """Return what the weights take on each GPU of an engine, loaded adapters included."""
    adapters = 0 if adapter_rank is None else num_adapters * model.adapter(adapter_rank)
    return SERVED_BYTES * (model.numbers + adapters) / tensor_parallel


def pass_operations(model: Decoder, tokens: int, *, adapter: bool) -> float:
    """Return the floating-point operations of a forward and backward pass over so many tokens, attention left out.

    Of a frozen matrix no gradient is computed, so a number takes 4 for each token in place of 6. Layers that are
    computed again are not counted twice.
    """
    return (4 if adapter else 6) * tokens * float(model.numbers)
