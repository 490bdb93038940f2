"""Weights and adapters between Hugging Face files and the processes that hold parts of them.

A parameter here is one or more Hugging Face tensors, joined along their first axis. An index lists the rows (of some
matrices the columns) that a process holds. With it a weight, or a tensor of the same shape, is cut into parts and put
together again. The processes that hold parts of a stage's tensors share the work of gathering and writing. The kind of
a tensor is a prefix of its name, as in `exp_avg/model.norm.weight`. Each joined tensor has an adapter of its own, and
the adapters' factors are joined too. A matrix cut by row has `up` cut likewise and `down` whole; one cut by column has
`down` cut and `up` whole. O rows of this process, C its columns, P joined matrices, R the rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from clawstream.errors import UnusableCheckpoint
from clawstream.inference.model_folder import weight_files
from clawstream.training.base_folder import key, tensors_of
from clawstream.training.megatron.reducing import gathered
from clawstream.training.megatron.shape import Shape, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """The Hugging Face tensors that a parameter of this stage is made of."""

    names: tuple[str, ...]  # Hugging Face's, joined along the first axis
    rows: tuple[int, ...]  # of each of them
    axis: int | None  # along which processes hold different parts; None: all hold the whole
    indices: tuple[Tensor, ...]  # by process, its indices along the joined tensor's `axis`; -1: padding
    copied: bool = False  # another stage holds the same parameter, and writes it

    def part(self, joined: Tensor, rank: int) -> Tensor:
        """Return what the process holds of the joined tensors; padding is 0."""
        if self.axis is None:
            return joined
        index = self.indices[rank].to(joined.device)
        held = joined.index_select(self.axis, index.clamp(min=0))
        if bool((index < 0).any()):
            held[index < 0] = 0  # only embedding and head are padded, and those by row
        return held

    def shapes(self, part: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shape of each name's tensor, where a process holds a part of this shape."""
        rest = part[1:] if self.axis != 1 else (sum(map(len, self.indices)), *part[2:])
        return [(rows, *rest) for rows in self.rows]

    def whole(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the Hugging Face tensors, given the parts of all processes."""
        if self.axis is None:
            return dict(zip(self.names, torch.split(parts[0], list(self.rows)), strict=True))
        shape = list(parts[0].shape)
        shape[self.axis] = sum(self.rows) if self.axis == 0 else sum(map(len, self.indices))
        joined = parts[0].new_empty(shape)
        for part, index in zip(parts, self.indices, strict=True):
            kept = index.to(part.device) >= 0
            held = part if bool(kept.all()) else part[kept]
            joined.index_copy_(self.axis, index.to(part.device)[kept], held)
        return dict(zip(self.names, torch.split(joined, list(self.rows)), strict=True))


def sources(shape: Shape, sizes: Sizes, stage: int) -> dict[str, ParameterSource]:
    """Return where each parameter of a pipeline's stage comes from."""
    found: dict[str, ParameterSource] = {}
    tensor, count = sizes.tensor, shape.num_layers // sizes.pipeline
    first, last = stage == 0, stage == sizes.pipeline - 1
    vocabulary = _vocabulary(shape, tensor)
    if first:
        found["embedding.word_embeddings.weight"] = _of("model.embed_tokens.weight", shape.vocabulary, 0, vocabulary)
    for here, layer in enumerate(range(stage * count, (stage + 1) * count)):
        found |= {f"decoder.layers.{here}.{name}": place for name, place in _layer(shape, layer, tensor).items()}
    if last:
        found["decoder.final_layernorm.weight"] = _of("model.norm.weight", shape.width, None, ())
        if not shape.tied:
            found["output_layer.weight"] = _of("lm_head.weight", shape.vocabulary, 0, vocabulary)
        elif not first:
            found["output_layer.weight"] = _of(
                "model.embed_tokens.weight", shape.vocabulary, 0, vocabulary, copied=True
            )
    return found


def _layer(shape: Shape, layer: int, tensor: int) -> dict[str, ParameterSource]:
    at = f"model.layers.{layer}."
    heads, groups = shape.num_heads * shape.head_width, shape.num_groups * shape.head_width
    gates = _even(torch.arange(shape.inner_width), tensor)
    head_norms = {
        f"self_attention.{name}_layernorm.weight": _of(f"{at}self_attn.{name}_norm.weight", shape.head_width, None, ())
        for name in ("qk" if shape.head_norms else "")
    }
    return head_norms | {
        "input_layernorm.weight": _of(f"{at}input_layernorm.weight", shape.width, None, ()),
        "pre_mlp_layernorm.weight": _of(f"{at}post_attention_layernorm.weight", shape.width, None, ()),
        "self_attention.linear_qkv.weight": ParameterSource(
            names=tuple(f"{at}self_attn.{name}_proj.weight" for name in "qkv"),
            rows=(heads, groups, groups),
            axis=0,
            indices=_even(_by_group(shape), tensor),
        ),
        "self_attention.linear_proj.weight": _of(
            f"{at}self_attn.o_proj.weight", shape.width, 1, _even(torch.arange(heads), tensor)
        ),
        "mlp.linear_fc1.weight": ParameterSource(
            names=(f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"),
            rows=(shape.inner_width,) * 2,
            axis=0,
            indices=tuple(torch.cat([gate, gate + shape.inner_width]) for gate in gates),
        ),
        "mlp.linear_fc2.weight": _of(f"{at}mlp.down_proj.weight", shape.width, 1, gates),
    }


def _by_group(shape: Shape) -> Tensor:
    """Return the rows of queries, keys and values in Megatron's order: group by group, queries, key, value."""
    queries = torch.arange(shape.num_heads * shape.head_width).view(shape.num_groups, -1)
    keys = torch.arange(shape.num_groups * shape.head_width).view(shape.num_groups, -1) + queries.numel()
    return torch.cat([queries, keys, keys + keys.numel()], 1).flatten()


def _vocabulary(shape: Shape, tensor: int) -> tuple[Tensor, ...]:
    rows = torch.arange(shape.padded_vocabulary(tensor))
    return _even(rows.masked_fill(rows >= shape.vocabulary, -1), tensor)


def _even(index: Tensor, tensor: int) -> tuple[Tensor, ...]:
    return tuple(index.chunk(tensor))


def _of(
    name: str, rows: int, axis: int | None, indices: tuple[Tensor, ...], *, copied: bool = False
) -> ParameterSource:
    return ParameterSource(names=(name,), rows=(rows,), axis=axis, indices=indices, copied=copied)


class Folder:
    """Tensors of a Hugging Face folder by name, each read from its file when it is asked for."""

    def __init__(self, folder: Path, instead: Iterable[tuple[str, Callable[[], Tensor]]] | None = None) -> None:
        self.folder = folder
        self._reader = dict(tensors_of(weight_files(folder)) if instead is None else instead)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor as it is stored; raises UnusableCheckpoint where there is none of this shape."""
        if name not in self._reader:
            raise UnusableCheckpoint(
                f"{self.folder}: {name} is missing. Nothing is trained. Fetch the folder again, or write the "
                "checkpoint again."
            )
        value = self._reader[name]()
        if value.shape != shape:
            raise UnusableCheckpoint(
                f"{self.folder}: {name} has shape {tuple(value.shape)}, expected {shape}. Nothing is trained. Name the "
                "base model, and the LoRA rank, that this policy was started with."
            )
        return value


def held(place: ParameterSource, rank: int, part: Sequence[int], folder: Folder) -> Tensor:
    """Return the part that a process holds of the folder's tensors; `part` is its shape."""
    values = [folder.read(name, shape) for name, shape in zip(place.names, place.shapes(part), strict=True)]
    return place.part(values[0] if len(values) == 1 else torch.cat(values), rank)


def collected(
    state: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, ParameterSource], group: dist.ProcessGroup,
    copies: dist.ProcessGroup, *, shapes: Mapping[str, torch.Size] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return those Hugging Face tensors of every kind that this process of `group` is to write, in main memory.

    With `shapes`, the shapes of whole tensors by name, every copy holds a part of each; without, all of it.
    """
    mine: dict[str, Tensor] = {}
    tensors = [(kind, name, value) for kind, values in state.items() for name, value in values.items()]
    # Sorted, so that a tensor goes to the same file whether or not this trainer was restarted.
    for number, (kind, name, value) in enumerate(sorted(tensors, key=lambda one: one[:2])):
        place = places[name]
        if place.copied:
            continue
        owner, copy = divmod(number % (group.size() * copies.size()), copies.size())
        of_copy: Tensor | None = value.detach()
        if shapes is not None and value.ndim:
            of_copy = gathered(value, shapes[name], copies, copy)
        if of_copy is None or copies.rank() != copy:
            continue
        for found, whole in _together(of_copy, place, owner, group).items():
            mine[key(kind, found)] = whole.cpu().contiguous()
    return mine


def _together(value: Tensor, place: ParameterSource, owner: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the Hugging Face tensors on the process `owner`; nothing on the others."""
    here = group.rank() == owner
    if value.ndim == 0 or place.axis is None:
        if not here:
            return {}
        return {name: value.clone() for name in place.names} if value.ndim == 0 else place.whole([value])
    parts = [torch.empty_like(value) for _ in range(group.size())] if here else None
    dist.gather(value.contiguous(), parts, dst=dist.get_global_rank(group, owner), group=group)
    return {} if parts is None else place.whole(parts)


class Adapter(nn.Module):
    """An adapter's addition to a matrix's output; processes exchange only the few numbers between its two factors."""

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


def _factors(place: ParameterSource, rank: int) -> dict[str, ParameterSource]:
    def named(letter: str) -> tuple[str, ...]:
        return tuple(name.replace(".weight", f".lora_{letter}.default.weight") for name in place.names)

    down = replace(place, names=named("A"), rows=(rank,) * len(place.names))
    up = replace(place, names=named("B"))
    if place.axis == 0:
        return {"down": replace(down, axis=None, indices=()), "up": up}
    return {"down": down, "up": replace(up, axis=None, indices=())}


def _matrices(place: ParameterSource, rank: int) -> Tensor:
    """Return [O, P] for matrices cut by row: 1 where a row of this process is of the matrix, 0 elsewhere."""
    ends_P = torch.tensor(place.rows).cumsum(0)
    return functional.one_hot(torch.searchsorted(ends_P, place.indices[rank], right=True), len(ends_P)).float()


def _add(linear: nn.Module, arrived: tuple[Tensor, ...], given: tuple[Tensor, None]) -> tuple[Tensor, None]:
    value, bias = given
    adapter: nn.Module = linear.get_submodule("adapter")
    return value + adapter(arrived[0]), bias
