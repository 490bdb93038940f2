"""LoRA adapters beside the base weights: each request of a batch may use another one.

An adapter is a peft folder. Its products are added to the outputs of the linear layers it names, for the packed tokens
of its requests only, so loading and unloading never touch the base weights.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from clawstream.errors import UnusableCheckpoint

_PREFIX = "base_model.model."


class _Pair(NamedTuple):
    """Rank R factors of one linear layer from I inputs to O outputs, the scale in the second."""

    down_RI: Tensor
    up_OR: Tensor


class Adapters:
    """The loaded adapters, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._pairs: dict[str, dict[str, _Pair]] = {}
        self._active: list[tuple[dict[str, _Pair], Tensor]] = []
        self._hooked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._pairs

    def add(self, name: str, pairs: Mapping[str, _Pair]) -> None:
        """Add the adapter, so that requests may name it."""
        self._pairs[name] = dict(pairs)
        for layer in pairs.keys() - self._hooked:
            self._linear[layer].register_forward_hook(self._hook(layer))
            self._hooked.add(layer)

    def remove(self, name: str) -> None:
        """Remove the adapter, which no job may still use."""
        del self._pairs[name]

    @contextmanager
    def using(self, names: Sequence[str | None], counts: Sequence[int]) -> Iterator[None]:
        """For the length of the block, `counts[i]` consecutive packed tokens belong to the adapter names[i]."""
        if self._pairs:
            owner = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(counts))
            for name in {name for name in names if name is not None}:
                mine = torch.tensor([one == name for one in names])
                self._active.append((self._pairs[name], mine[owner].nonzero().squeeze(1)))
        try:
            yield
        finally:
            self._active.clear()

    def _hook(self, layer: str) -> Any:
        def add_products(_module: nn.Module, inputs: tuple[Tensor, ...], output_1NO: Tensor) -> Tensor:
            for pairs, index_T in self._active:
                pair = pairs.get(layer)
                if pair is not None:
                    input_TI = inputs[0][0].index_select(0, index_T)
                    output_1NO[0].index_add_(0, index_T, (input_TI @ pair.down_RI.T) @ pair.up_OR.T)
            return output_1NO

        return add_products

    def read(self, path: str) -> dict[str, _Pair]:
        """The factors in a peft folder; raises UnusableCheckpoint where they do not fit the model served."""
        folder = Path(path)
        try:
            config = json.loads((folder / "adapter_config.json").read_text())
            with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise UnusableCheckpoint(
                f"adapter {path} can't be read ({error}); "
                "give a folder with adapter_config.json and adapter_model.safetensors"
            ) from error
        if config.get("use_dora") or config.get("bias", "none") != "none" or config.get("alpha_pattern"):
            raise UnusableCheckpoint(
                f"adapter {path} uses DoRA, biases or alpha_pattern; this engine has plain LoRA only"
            )
        return {layer: self._pair(path, layer, tensors, config) for layer in self._layers(path, tensors)}

    def _layers(self, path: str, tensors: Mapping[str, Tensor]) -> set[str]:
        layers = set()
        for name in tensors:
            layer, _, factor = name.removeprefix(_PREFIX).rpartition(".lora_")
            # The output layer sees only the tokens whose logits are wanted, not all packed ones.
            if factor not in ("A.weight", "B.weight") or layer not in self._linear or layer == "lm_head":
                raise UnusableCheckpoint(f"adapter {path}: {name} names no inner linear layer of the model served")
            layers.add(layer)
        return layers

    def _pair(self, path: str, layer: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> _Pair:
        base = self._linear[layer]
        down, up = (tensors.get(f"{_PREFIX}{layer}.lora_{factor}.weight") for factor in "AB")
        if down is None or up is None or (down.shape[1], up.shape[0]) != (base.in_features, base.out_features):
            raise UnusableCheckpoint(
                f"adapter {path}: {layer} needs both factors, "
                f"for {base.in_features} inputs and {base.out_features} outputs"
            )
        rank = down.shape[0]
        scale = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        dtype = base.weight.dtype
        return _Pair(down.to(dtype), (up.float() * scale).to(dtype))
