"""Where keys and values live: one row per running request, in tensors that all rows share.

A row's entry at position p is the key and value of its p-th token. Axes: S rows, C capacity in tokens, H key-value
heads, D head width. Capacity doubles when a row needs more, so that memory follows the longest request seen, not the
limit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FIRST_CAPACITY_TOKENS = 1024


class LayerKv(NamedTuple):
    """Keys and values of one layer, each [S, C, H, D]."""

    key_SCHD: Tensor
    value_SCHD: Tensor


class KvRows:
    """The cache of all rows; a layer's tensors are made at its first use, when its shape is known."""

    def __init__(self, *, num_rows: int, context_length_tokens: int) -> None:
        self.num_rows = num_rows
        self._limit = context_length_tokens
        self.capacity_tokens = min(FIRST_CAPACITY_TOKENS, context_length_tokens)
        self._layers: dict[int, LayerKv] = {}

    def layer(self, index: int, key_1HND: Tensor, value_1HND: Tensor) -> LayerKv:
        """The layer's tensors, shaped and typed as the keys and values about to be written."""
        found = self._layers.get(index)
        if found is None:
            found = LayerKv(self._empty(key_1HND), self._empty(value_1HND))
            self._layers[index] = found
        return found

    def _empty(self, like_1HND: Tensor) -> Tensor:
        _, heads, _, width = like_1HND.shape
        # Zeros, because a masked entry that holds NaN still spoils a weighted sum.
        return torch.zeros(self.num_rows, self.capacity_tokens, heads, width, dtype=like_1HND.dtype)

    @torch.inference_mode()
    def reserve(self, num_tokens: int, used_tokens: Sequence[int]) -> None:
        """Make room for `num_tokens` tokens in every row; row r keeps its first used_tokens[r] entries."""
        if num_tokens <= self.capacity_tokens:
            return
        capacity = self.capacity_tokens
        while capacity < num_tokens:
            capacity *= 2
        self.capacity_tokens = max(num_tokens, min(capacity, self._limit))
        for index, layer in self._layers.items():
            grown = []
            for old_SCHD in layer:
                rows, _, heads, width = old_SCHD.shape
                new_SCHD = torch.zeros(rows, self.capacity_tokens, heads, width, dtype=old_SCHD.dtype)
                for row, used in enumerate(used_tokens):
                    new_SCHD[row, :used] = old_SCHD[row, :used]
                grown.append(new_SCHD)
            self._layers[index] = LayerKv(*grown)

    @torch.inference_mode()
    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` entries of row `source` to row `target`."""
        for layer in self._layers.values():
            for tensor_SCHD in layer:
                tensor_SCHD[target, :num_tokens] = tensor_SCHD[source, :num_tokens]

    @torch.inference_mode()
    def swap(self, one: int, one_tokens: int, other: int, other_tokens: int) -> None:
        """Swap the rows' first entries."""
        for layer in self._layers.values():
            for tensor_SCHD in layer:
                kept = tensor_SCHD[one, :one_tokens].clone()
                tensor_SCHD[one, :other_tokens] = tensor_SCHD[other, :other_tokens]
                tensor_SCHD[other, :one_tokens] = kept
