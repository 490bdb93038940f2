"""What a Hugging Face configuration says of a model, as far as Megatron-Core can compute it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from clawstream.config import TrainingSettings
from clawstream.errors import ConfigError

_FAMILIES = frozenset({"llama", "mistral", "qwen3"})
_ROPES = frozenset({"default", "linear", "llama3"})  # others scale attention, or change with the length


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Over how many processes a model is cut; `processes` is a multiple of `tensor` times `pipeline`."""

    processes: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def data(self) -> int:
        """How many copies of the model there are."""
        return self.processes // (self.tensor * self.pipeline)

    @property
    def by_sequence(self) -> bool:
        """Whether norms, and the states between layers, are cut by token over the `tensor` processes."""
        return self.tensor > 1


def sizes_of(training: TrainingSettings) -> Sizes:
    """Return the sizes that the settings ask for."""
    return Sizes(processes=training.processes, tensor=training.tensor_parallel, pipeline=training.pipeline_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Llama, Mistral or Qwen3 model."""

    vocabulary: int
    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    num_groups: int  # of heads that share keys and values
    head_width: int
    norm_epsilon: float
    head_norms: bool  # queries and keys are normalised, each head by itself
    tied: bool  # the head's weights are the embedding's
    windows: tuple[int | None, ...]  # of tokens that each layer's attention reaches back; None: all
    context: int

    def padded_vocabulary(self, tensor: int) -> int:
        """Return the rows of embedding and head, padded so that every process holds equally many."""
        return -(-self.vocabulary // tensor) * tensor


def shape_of(folder: Path, config: Any) -> Shape:
    """Return the shape; raises ConfigError for a model that Megatron would not compute as transformers does."""
    if config.model_type not in _FAMILIES:
        raise _refused(folder, f"model_type = {config.model_type!r}", f"one of {', '.join(sorted(_FAMILIES))}")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise _refused(folder, f"{name} = true", "no biases")
    if config.hidden_act != "silu":
        raise _refused(folder, f"hidden_act = {config.hidden_act!r}", "silu")
    return Shape(
        vocabulary=config.vocab_size,
        width=config.hidden_size,
        inner_width=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_groups=config.num_key_value_heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_epsilon=config.rms_norm_eps,
        head_norms=config.model_type == "qwen3",
        tied=config.tie_word_embeddings,
        windows=_windows(config),
        context=config.max_position_embeddings,
    )


def refuse_uneven(folder: Path, shape: Shape, sizes: Sizes) -> None:
    """Raise ConfigError where the model can't be cut into pieces of these sizes."""
    tensor, pipeline = sizes.tensor, sizes.pipeline
    for name, found, parts in (
        ("num_attention_heads", shape.num_heads, tensor),
        ("intermediate_size", shape.inner_width, tensor),
        ("num_hidden_layers", shape.num_layers, pipeline),
    ):
        if found % parts:
            raise _refused(folder, f"{name} = {found}", f"a multiple of {parts}, the parts that it is cut into")
    if max(shape.num_groups, tensor) % min(shape.num_groups, tensor):
        raise _refused(folder, f"num_key_value_heads = {shape.num_groups}", f"a divisor or a multiple of {tensor}")
    rows = shape.padded_vocabulary(tensor) // tensor
    if rows * (tensor - 1) >= shape.vocabulary:
        raise _refused(folder, f"vocab_size = {shape.vocabulary}", f"a row for each of {tensor} processes")


def frequencies(folder: Path, config: Any) -> Tensor:
    """Return the rotary embedding's angles per token [head width / 2], float32; raises ConfigError."""
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROPES:
        raise _refused(folder, f"rope_type = {kind!r}", f"one of {', '.join(sorted(_ROPES))}")
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(folder, "partial_rotary_factor", "rotation of the whole head")
    if kind != "default":
        scaled, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        assert factor == 1.0, "none of these scales attention"
        return torch.as_tensor(scaled)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    return torch.as_tensor(1.0 / (config.rope_parameters["rope_theta"] ** exponents))


def configuration(folder: Path) -> Any:
    """Return the Hugging Face configuration of a folder."""
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Mistral: all layers, or none
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _refused(folder: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{folder}: {found}, where the Megatron trainer needs {expected}. Nothing is trained. Take another size or "
        'model, or training.trainer = "torch".'
    )
