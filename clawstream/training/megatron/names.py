"""Which part of which Hugging Face tensors a process holds as which of Megatron's parameters. Pure.

Every parameter joins some Hugging Face tensors along their first axis. An index lists the rows that a process holds of
them (or the columns, of a matrix that is multiplied from the other side). The same index takes a weight, or anything of
its shape, apart and puts it together again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clawstream.training.megatron.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """Where a parameter of this stage comes from."""

    names: tuple[str, ...]  # Hugging Face's, joined along the first axis
    rows: tuple[int, ...]  # of each of them
    axis: int | None  # along which processes hold different parts; None: all hold the whole
    indices: tuple[Tensor, ...]  # what each process holds along the axis of what is joined; -1: nothing, padding
    copied: bool = False  # another stage holds the same, and writes it

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
        """Return the Hugging Face tensors of the parts of all processes."""
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


def places(shape: Shape, layers: range, *, first: bool, last: bool, tensor: int) -> dict[str, ParameterSource]:
    """Return the place of each parameter of a stage that holds these layers."""
    found: dict[str, ParameterSource] = {}
    vocabulary = _vocabulary(shape, tensor)
    if first:
        found["embedding.word_embeddings.weight"] = _of("model.embed_tokens.weight", shape.vocabulary, 0, vocabulary)
    for here, layer in enumerate(layers):
        found |= {f"decoder.layers.{here}.{name}": place for name, place in _layer(shape, layer, tensor)}
    if last:
        found["decoder.final_layernorm.weight"] = _of("model.norm.weight", shape.width, None, ())
        if not shape.tied:
            found["output_layer.weight"] = _of("lm_head.weight", shape.vocabulary, 0, vocabulary)
        elif not first:
            found["output_layer.weight"] = _of(
                "model.embed_tokens.weight", shape.vocabulary, 0, vocabulary, copied=True
            )
    return found


def hugging_face_names(places_: Mapping[str, ParameterSource]) -> set[str]:
    """Return the Hugging Face tensors that a stage needs."""
    return {name for place in places_.values() for name in place.names}


def _layer(shape: Shape, layer: int, tensor: int) -> Iterator[tuple[str, ParameterSource]]:
    at = f"model.layers.{layer}."
    heads, groups = shape.num_heads * shape.head_width, shape.num_groups * shape.head_width
    yield "input_layernorm.weight", _of(f"{at}input_layernorm.weight", shape.width, None, ())
    yield "pre_mlp_layernorm.weight", _of(f"{at}post_attention_layernorm.weight", shape.width, None, ())
    yield (
        "self_attention.linear_qkv.weight",
        ParameterSource(
            names=tuple(f"{at}self_attn.{name}_proj.weight" for name in "qkv"),
            rows=(heads, groups, groups),
            axis=0,
            indices=_even(_by_group(shape), tensor),
        ),
    )
    if shape.head_norms:
        for name in "qk":
            yield (
                f"self_attention.{name}_layernorm.weight",
                _of(f"{at}self_attn.{name}_norm.weight", shape.head_width, None, ()),
            )
    yield (
        "self_attention.linear_proj.weight",
        _of(f"{at}self_attn.o_proj.weight", shape.width, 1, _even(torch.arange(heads), tensor)),
    )
    gates = _even(torch.arange(shape.inner_width), tensor)
    yield (
        "mlp.linear_fc1.weight",
        ParameterSource(
            names=(f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"),
            rows=(shape.inner_width,) * 2,
            axis=0,
            indices=tuple(torch.cat([gate, gate + shape.inner_width]) for gate in gates),
        ),
    )
    yield "mlp.linear_fc2.weight", _of(f"{at}mlp.down_proj.weight", shape.width, 1, gates)


def _by_group(shape: Shape) -> Tensor:
    """Return the rows of queries, keys and values as Megatron has them: a group's queries, its key, its value."""
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
