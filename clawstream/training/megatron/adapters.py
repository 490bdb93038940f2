"""LoRA adapters on matrices that are cut over processes: peft's numbers under peft's names.

A matrix here may be several of Hugging Face's, joined by row; each of those has its own adapter, and their factors are
joined too. If a matrix is cut by row, each of its processes has the whole factor `down`, and `up` is cut alike; if it
is cut by column, `up` is whole. O rows of this process, C its columns, P matrices that are joined, R the rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from peft import PeftModel
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from clawstream.training.megatron.names import ParameterSource
from clawstream.training.models.adapters import with_adapter
from clawstream.training.models.unread import unread


class Adapter(nn.Module):
    """The addition to a matrix's output; only the few numbers between the two factors are exchanged for it."""

    def __init__(
        self, weight_OC: Tensor, place: ParameterSource, group: dist.ProcessGroup, *, rank: int, scale: float,
        by_sequence: bool, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        count = len(place.names)
        self.down = nn.Parameter(torch.zeros(count * rank, weight_OC.shape[1]))
        self.up = nn.Parameter(torch.zeros(weight_OC.shape[0], rank))
        self._by_row, self._by_sequence, self._group, self._scale = place.axis == 0, by_sequence, group, scale
        self._dtype = dtype  # the precision of its products
        whole = self.down if self._by_row else self.up
        whole.sequence_parallel = by_sequence  # type: ignore[attr-defined]  # then each process sees other tokens
        if self._by_row:
            self.register_buffer("_of_OP1", _matrices(place, group.rank()).unsqueeze(2), persistent=False)

    def forward(self, arrived: Tensor) -> Tensor:
        """Return the addition, cut as the matrix' own output is."""
        exchange = {
            (True, False): copy_to_tensor_model_parallel_region,
            (True, True): gather_from_sequence_parallel_region,
            (False, False): reduce_from_tensor_model_parallel_region,
            (False, True): reduce_scatter_to_sequence_parallel_region,
        }[self._by_row, self._by_sequence]
        dtype = self._dtype
        few = exchange(functional.linear(arrived.to(dtype), self.down.to(dtype)).float(), group=self._group)
        return functional.linear((few * self._scale).to(dtype), self._up().to(dtype))

    def _up(self) -> Tensor:
        """Return [O, P * R]: each row's factor where its matrix' part of `down` is, 0 elsewhere."""
        if not self._by_row:
            return self.up
        of_OP1 = self._of_OP1
        assert isinstance(of_OP1, Tensor)
        return (self.up.unsqueeze(1) * of_OP1).flatten(1)


def adapt(
    stage: nn.Module, places: Mapping[str, ParameterSource], group: dist.ProcessGroup, *, rank: int, scale: float,
    by_sequence: bool, dtype: torch.dtype,
) -> dict[str, ParameterSource]:  # fmt: skip
    """Freeze the stage and put adapters on its layers' matrices; return the place of each adapter parameter."""
    stage.requires_grad_(False)
    found: dict[str, ParameterSource] = {}
    for name, place in places.items():
        if not name.startswith("decoder.layers.") or place.axis is None:
            continue
        linear = stage.get_submodule(name.removesuffix(".weight"))
        weight_OC = stage.get_parameter(name)
        adapter = Adapter(weight_OC, place, group, rank=rank, scale=scale, by_sequence=by_sequence, dtype=dtype)
        linear.add_module("adapter", adapter.to(weight_OC.device))
        linear.register_forward_hook(_add)
        at = name.removesuffix("weight")
        found |= {f"{at}adapter.{factor}": one for factor, one in _factors(place, rank).items()}
    return found


def as_begun(folder: Path, rank: int, seed: int) -> PeftModel:
    """Return the adapter that TorchModel begins with, made on a model of the folder's shapes with arbitrary weights."""
    return with_adapter(unread(folder), rank, seed)  # peft draws random numbers where the weights lie: in main memory


def _factors(place: ParameterSource, rank: int) -> dict[str, ParameterSource]:
    def named(letter: str) -> tuple[str, ...]:
        return tuple(name.replace(".weight", f".lora_{letter}.default.weight") for name in place.names)

    down = replace(place, names=named("A"), rows=(rank,) * len(place.names))
    up = replace(place, names=named("B"))
    if place.axis == 0:
        return {"down": replace(down, axis=None, indices=()), "up": up}
    return {"down": down, "up": replace(up, axis=None, indices=())}


def _matrices(place: ParameterSource, rank: int) -> Tensor:
    """Return [O, P] of which matrix, cut by row, each row of this process is: 1, of the others 0."""
    ends_P = torch.tensor(place.rows).cumsum(0)
    return functional.one_hot(torch.searchsorted(ends_P, place.indices[rank], right=True), len(ends_P)).float()


def _add(linear: nn.Module, arrived: tuple[Tensor, ...], given: tuple[Tensor, None]) -> tuple[Tensor, None]:
    value, bias = given
    adapter: nn.Module = linear.get_submodule("adapter")
    return value + adapter(arrived[0]), bias
