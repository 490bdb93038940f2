"""How much memory a model takes where it is trained and where it is served, by arithmetic from its config.json.

Counted are the tensors of torch's trainers as they hold them (one process, or FSDP over P), and an engine's weights and
keys and values. All of the trainer's numbers are float32, of 4 bytes; an engine's have the type of the base's files.
What torch's allocator, CUDA and an engine's own buffers take besides is the caller's to leave room for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawstream.config import TrainingSettings
from clawstream.errors import ConfigError

FLOAT32 = 4
LOGITS_BYTES = 2**29  # of a piece of the head (model.HEAD_BYTES)
HEAD_PIECES = 4  # logits and their log-softmax, and the gradients of both
LAYERS_AT_ONCE = 2  # that FSDP has put together: the one that computes, and the next
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
    context_tokens: int | None
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
        return 2 * self.num_layers * self.groups_width * min(self.stored_bytes, 2) / tensor_parallel


def decoder_of(folder: Path, config: Mapping[str, Any]) -> Decoder:
    """Return the sizes by a folder's config.json; raises ConfigError for a model that is no dense decoder."""
    if lacking := [name for name in _NEEDED if not isinstance(config.get(name), int)]:
        raise _uncounted(folder, f"its config.json has no {', '.join(lacking)}")
    if experts := [name for name in _EXPERTS if config.get(name)]:
        raise _uncounted(folder, f"its config.json has {experts[0]} = {config[experts[0]]}: not each token takes all")
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head_width = config.get("head_dim") or config["hidden_size"] // heads
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return Decoder(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        inner_width=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        heads_width=heads * head_width,
        groups_width=groups * head_width,
        num_groups=groups,
        tied=bool(config.get("tie_word_embeddings", False)),
        context_tokens=config.get("max_position_embeddings"),
        stored_bytes=_STORED_BYTES.get(stored, 4),
    )


def _uncounted(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{folder}: {found}, so its memory can't be told by arithmetic: a dense decoder's can, as of Llama, Mistral, "
        "Qwen2 and Qwen3. Nothing was started. Start it without a plan, and watch its memory"
    )


def trainer_bytes(model: Decoder, training: TrainingSettings) -> dict[str, float]:
    """Return the bytes by use of each of the trainer's processes at its peak.

    The peak is where the gate looks where the gradient leads, with a copy of the weights moved so far; or within a
    pass, where a backward pass begins with all that it needs again, or ends with all gradients. `activations` is what
    the peak has beside the copies.
    """
    processes, rank = training.processes, training.lora_rank
    trained = model.numbers if rank is None else model.adapter(rank)
    share = FLOAT32 * trained / processes
    held = {
        "weights": share if rank is None else share + FLOAT32 * model.numbers / processes,
        "gradients": share,
        "moments": 2 * share,
        "reference": share,
    }
    gate = share if training.gate else 0.0
    put_together = _put_together(model, trained=rank is None) if processes > 1 else 0.0
    kept, inner = _kept_bytes(model, training)
    logits = min(LOGITS_BYTES, FLOAT32 * training.micro_batch_tokens * model.vocabulary)
    head = HEAD_PIECES * logits
    begins = kept + max(inner, head) - share  # no gradient is there yet
    ends = inner + (2 * FLOAT32 * model.embedding if rank is None else 0.0)
    looks = gate + max(inner, 2 * logits) if training.gate else 0.0
    beside = max(begins, ends, looks)
    return held | {"gate": gate, "gathered": put_together, "activations": beside - gate}


def _put_together(model: Decoder, *, trained: bool) -> float:
    """Return what FSDP has whole in each process: what is in no layer, and some layers; gradients too, if trained."""
    times = 2 if trained else 1
    return FLOAT32 * times * (model.outside + LAYERS_AT_ONCE * model.layer)


def _kept_bytes(model: Decoder, training: TrainingSettings) -> tuple[float, float]:
    """Return what a pass keeps of all layers for its backward pass, and what is inside a layer while it computes."""
    tokens = training.micro_batch_tokens
    product_bytes = 2 if training.dtype == "bfloat16" else FLOAT32
    attention = model.heads_width + 2 * model.groups_width
    inner = tokens * product_bytes * (5 * model.inner_width + 6 * model.width + 3 * attention)
    if training.gradient_checkpointing:
        return FLOAT32 * tokens * model.width * model.num_layers, inner
    return float(inner * model.num_layers), inner


def engine_bytes(model: Decoder, *, tensor_parallel: int, adapter_rank: int | None, num_adapters: int) -> float:
    """Return what the weights take on each GPU of an engine, loaded adapters included."""
    adapters = 0 if adapter_rank is None else num_adapters * model.adapter(adapter_rank)
    return model.stored_bytes * (model.numbers + adapters) / tensor_parallel


def pass_operations(model: Decoder, tokens: int, *, adapter: bool) -> float:
    """Return the floating-point operations of a forward and backward pass over so many tokens, attention left out.

    Of a frozen matrix no gradient is computed, so a number takes 4 for each token in place of 6. Layers that are
    computed again are not counted twice.
    """
    return (4 if adapter else 6) * tokens * float(model.numbers)
