"""The folder of a base: its limits, whether it can be trained, and its model as transformers loads it; and the tensors
in files, the base's and those that trainers write.
"""

import json
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from clawstream.errors import ConfigError, UnusableCheckpoint
from clawstream.inference.model_folder import INDEX, TensorHeader, tensor_headers, text_config
from clawstream.training.batches.trainable import ModelLimits

_ONE_THREAD_BYTES = 80_000_000  # of weights: 20 million parameters, the embedded engine's limit too
_NOT_COPIED = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".md"})  # weights, readme
_READ_AS_THEY_ARE = frozenset({"F64", "F32", "F16", "BF16"})
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


def limits_of(folder: Path) -> ModelLimits:
    """Return the limits of the folder's model, by its configuration; raises UnusableCheckpoint."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise unloadable(folder, error) from error
    positions = getattr(config, "max_position_embeddings", None)
    return ModelLimits(vocabulary_tokens=config.vocab_size, context_tokens=_stretched(config, positions))


def copy_words(base: Path, folder: Path) -> None:
    """Copy a base's files other than weights: configuration, tokenizer, chat template."""
    for file in sorted(base.iterdir()):
        if file.is_file() and file.suffix not in _NOT_COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the type in which all of the base's weights are stored; float32 where types differ, or can't be read."""
    stored = {header.dtype for header in (tensor_headers(folder) or {}).values()}
    return _HALVES.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32


def refuse_quantized(folder: Path) -> None:
    """Raise ConfigError where a folder's files hold no weights, but numbers from which weights are computed.

    Incomplete files are refused when they are loaded.
    """
    found = None
    headers: Mapping[str, TensorHeader] = {}
    with suppress(UnusableCheckpoint):
        headers = tensor_headers(folder) or {}
    if quantization := (text_config(folder) or {}).get("quantization_config"):
        found = f"config.json has a quantization_config, quant_method = {quantization.get('quant_method')!r}"
    for name, header in headers.items():
        if name.endswith(".weight") and header.dtype not in _READ_AS_THEY_ARE:
            found = f"{name} is stored as {header.dtype}"
            break
    if found is not None:
        raise ConfigError(
            f"{folder}: {found}, expected {', '.join(sorted(_READ_AS_THEY_ARE))}: weights are trained and published "
            "as they are stored, without scales. Nothing is trained. Name a folder of the same model that is not "
            "quantized."
        )


def unloadable(folder: Path, error: Exception) -> UnusableCheckpoint:
    """Return the error for a folder from which transformers can load no model."""
    return UnusableCheckpoint(
        f"{folder}: no causal model that transformers can load: {error}. Nothing is trained. Name a Hugging Face "
        "folder with config.json and safetensors."
    )


def loaded_core(folder: Path) -> Any:
    """Return the folder's causal model in float32, to evaluate; raises UnusableCheckpoint if none loads whole."""
    transformers_logging.disable_progress_bar()
    try:
        core, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise unloadable(folder, error) from error
    if info["missing_keys"]:
        raise UnusableCheckpoint(
            f"{folder}: {len(info['missing_keys'])} weights are missing, among them {min(info['missing_keys'])}. "
            "Nothing is trained. Fetch the folder again."
        )
    return core.eval()


def checkpoint_layers(core: Any) -> None:
    """Keep only each layer's input for the backward pass; transformers' own switch does so in training mode alone."""
    layers = [layer for layer in core.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"training.gradient_checkpointing: {type(core).__name__} has no layers that can be computed again. Nothing "
            "is trained. Leave the setting out, or take a model of another family."
        )
    compute_again(layers)


def compute_again(layers: Iterable[Any]) -> None:
    """Have the backward pass compute each layer again, from what goes into it, instead of keeping what is inside."""
    for layer in layers:
        # Weak: a strong reference would keep a discarded model in memory.
        layer.forward = partial(_computed_again, weakref.ref(layer))


def changes_with_length(config: Any) -> bool:
    """Whether rotary embeddings depend on a pass' longest sequence, so that answers' scores depend on each other."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    return not kinds.isdisjoint({"dynamic", "longrope"})


def _computed_again(layer_of: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    layer = layer_of()
    if not torch.is_grad_enabled():  # checkpoint() then does all that it does, for nothing
        return type(layer).forward(layer, *args, **kwargs)
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)


def _stretched(config: Any, positions: int | None) -> int | None:
    """Return the context in tokens as engines count it: with stretched rotary embeddings, the stretched length."""
    scaling = getattr(config, "rope_scaling", None) or {}
    if positions is None or "original_max_position_embeddings" in scaling:
        return positions
    return int(positions * (scaling.get("factor") or 1))


def threads_for(base: Path) -> int | None:
    """Return torch's number of threads: 1 for a model whose operations are too short to divide; None: its choice."""
    num_bytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    return 1 if num_bytes < _ONE_THREAD_BYTES else None


def unread(folder: Path) -> Any:
    """Return the folder's model without its weights: a weight takes memory only once it is written.

    Raises UnusableCheckpoint where the folder names no model.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            core = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise unloadable(folder, error) from error
    core.tie_weights()
    core.name_or_path = str(folder)
    return core.eval()


STEM = "adapter_model"  # of the file with an adapter's weights


def with_adapter(core: Any, rank: int, seed: int) -> PeftModel:
    """Put an adapter into the model; the adapter's numbers, and so its files' bytes, follow from the seed."""
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    adapter: PeftModel = get_peft_model(core, config)
    found = adapter.peft_config["default"]
    assert isinstance(found, LoraConfig)
    found.target_modules = sorted(found.target_modules or ())  # peft made it a set, whose order differs by process
    return adapter


class FrozenLinear(nn.Linear):
    """A matrix that is not trained, kept in the type that it is multiplied in; products in a wider type stay exact."""

    @classmethod
    def of(cls, linear: nn.Linear, dtype: torch.dtype, *, unread: bool) -> "FrozenLinear":
        """Return one with the numbers of `linear`, rounded to `dtype`; if they are `unread`, without them."""

        def parameter(value: Tensor) -> nn.Parameter:
            empty = torch.empty_like(value, dtype=dtype)  # takes no memory before something is written
            return nn.Parameter(empty if unread else empty.copy_(value.detach()), requires_grad=False)

        frozen = cls(linear.in_features, linear.out_features, device="meta", bias=linear.bias is not None)
        frozen.weight = parameter(linear.weight)
        if linear.bias is not None:
            frozen.bias = parameter(linear.bias)
        return frozen

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name for it
        """Return the product, in the type that autocast asks for, or else in the input's."""
        if torch.is_autocast_enabled(input.device.type) or input.dtype == self.weight.dtype:
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)


def freeze_in(adapter: PeftModel | None, dtype: torch.dtype, *, unread: bool = False) -> None:
    """Keep the matrices under an adapter in `dtype`, in which they are multiplied."""
    if adapter is None or dtype == torch.float32:
        return
    for layer in adapter.modules():
        if isinstance(layer, LoraLayer) and type(base := layer.get_base_layer()) is nn.Linear:
            layer.base_layer = FrozenLinear.of(base, dtype, unread=unread)


def saved_name(name: str) -> str:
    """Return the name that an adapter's weight has in its file."""
    return "base_model.model." + name.replace(".default.", ".")


def stored(folder: Path, stem: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Return the tensors in STEM.safetensors, or in its numbered parts, by name; each is read when it is called for."""
    return tensors_of(sorted(folder.glob(f"{stem}*.safetensors")))


def tensors_of(files: Sequence[Path]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Return the tensors in these files by name; each is read when it is called for."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
        for name in names:
            yield name, partial(_tensor, file, name)


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        value: Tensor = tensors.get_tensor(name)
        return value


def key(kind: str, name: str) -> str:
    """Return the name that a tensor of this kind has in a file; of the kind "" it is the tensor's own."""
    return f"{kind}/{name}" if kind else name


def write_parts(folder: Path, stem: str, mine: Mapping[str, Tensor]) -> None:
    """Write this process' tensors, which are in main memory, to a numbered file; all processes call this together.

    If `stem` is "model", the first process also writes the index by which engines find each tensor.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    file = f"{stem}-{rank + 1:05d}-of-{count:05d}.safetensors"
    if mine:
        save_file({name: value.contiguous() for name, value in mine.items()}, folder / file, metadata={"format": "pt"})
    listed: list[list[str]] = [[] for _ in range(count)]
    dist.all_gather_object(listed, [file, *mine])
    if rank == 0 and stem == "model":
        file_of = {name: names[0] for names in listed for name in names[1:]}
        size = sum((folder / part).stat().st_size for part in set(file_of.values()))
        body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(body, indent=1))
    dist.barrier()
