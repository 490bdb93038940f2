"""Attention over a pack: a token sees its own segment up to itself, and the segments above that one.

It is registered with transformers, so every family that looks its attention up there uses it. Torch's own attention is
called for each block of the row, with a mask of that block or none: no mask grows with the square of the row, and
segments that see nothing of each other are not multiplied. The keys and values that a masked block sees are gathered
again for the backward pass: to keep them would copy, for each block, all that stands before it. Q tokens of a block, S
tokens they may see, L of the row.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from clawstream.training.step.packing import Pack

NAME = "clawstream_tree"
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # causal, within a window or not, and nothing besides
LARGE_TOKENS = 1024  # of a block that needs a mask
SMALL_TOKENS = 256  # subtrees side by side are one block up to here: to mask costs less than another call


class AttentionBlock(NamedTuple):
    """Tokens that attend at once, to blocks before them and to themselves."""

    start: int  # in the row
    end: int
    seen: tuple[int, ...]  # of the blocks before it, by number
    mask_QS: Tensor | None  # None: it sees itself alone, causally


def small_tokens(device: torch.device) -> int:
    """Return how many tokens subtrees side by side may have to be one block: calls cost a GPU more than masks."""
    return SMALL_TOKENS if device.type == "cpu" else LARGE_TOKENS


class Tree:
    """The blocks of a pack, made once for all layers of a pass."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self._segments = pack.segments
        self._positions = pack.positions
        self._position_L = torch.tensor(pack.positions, device=device)
        ends = torch.tensor([s.subtree_end for s in pack.segments])
        self._seen_until_L = ends.repeat_interleave(torch.tensor([s.end - s.start for s in pack.segments])).to(device)
        self._small_tokens = small_tokens(device)
        self._blocks: dict[int | None, list[AttentionBlock]] = {}

    def blocks(self, window_tokens: int | None) -> list[AttentionBlock]:
        """Return the blocks in the order of the row; in a window a token sees so many, itself included."""
        if window_tokens not in self._blocks:
            self._blocks[window_tokens] = self._cut(window_tokens)
        return self._blocks[window_tokens]

    def _cut(self, window_tokens: int | None) -> list[AttentionBlock]:
        blocks: list[AttentionBlock] = []
        seen_below: dict[int | None, tuple[int, ...]] = {None: ()}  # by segment
        for number, after, end in self._groups():
            segment = self._segments[number]
            start, seen = segment.start, seen_below[segment.parent]
            alone = after == number + 1
            if alone and not seen and (window_tokens is None or end - start <= window_tokens):
                blocks.append(AttentionBlock(start, end, (), None))
                seen += (len(blocks) - 1,)
            else:
                for piece in pairwise((*range(start, end, LARGE_TOKENS), end)):
                    blocks.append(self._masked(blocks, *piece, seen, window_tokens))
                    seen += (len(blocks) - 1,)
            seen_below[number] = seen
        return blocks

    def _groups(self) -> Iterator[tuple[int, int, int]]:
        """Yield segments [from, to) and the row's place behind them: small subtrees side by side, or one segment."""
        segments, number = self._segments, 0
        while number < len(segments):
            first, after = segments[number], number + 1
            end = first.end
            if first.subtree_end - first.start <= self._small_tokens:
                end = first.subtree_end
                while after < len(segments):
                    segment = segments[after]
                    if segment.start >= end:
                        beside = segment.parent == first.parent
                        if not beside or segment.subtree_end - first.start > self._small_tokens:
                            break
                        end = segment.subtree_end
                    after += 1
            yield number, after, end
            number = after

    def _masked(
        self, blocks: list[AttentionBlock], start: int, end: int, seen: tuple[int, ...], window_tokens: int | None
    ) -> AttentionBlock:
        if window_tokens is not None:
            oldest = min(self._positions[start:end]) - window_tokens
            seen = tuple(number for number in seen if self._positions[blocks[number].end - 1] > oldest)
        device = self._position_L.device
        query_Q = torch.arange(start, end, device=device)
        before = (torch.arange(blocks[number].start, blocks[number].end, device=device) for number in seen)
        key_S, query_Q1 = torch.cat([*before, query_Q]), query_Q.unsqueeze(1)
        mask_QS = (key_S <= query_Q1) & (query_Q1 < self._seen_until_L[key_S])
        if window_tokens is not None:
            mask_QS &= self._position_L[query_Q1] - self._position_L[key_S] < window_tokens
        return AttentionBlock(start, end, seen, mask_QS)


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    tree: Tree, scaling: float | None = None, sliding_window: int | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return what transformers' attention functions do: for each query what it saw [1, L, heads, width]; no weights."""
    assert attention_mask is None, "who sees whom is the tree's to say"
    blocks = tree.blocks(sliding_window)
    sizes = [block.end - block.start for block in blocks]
    # Split once: a slice for each block would give each a gradient of the whole row's size.
    queries, keys, values = (torch.split(part.to(value.dtype), sizes, 2) for part in (query, key, value))
    outputs = []
    for number, block in enumerate(blocks):
        attend = partial(_attended, module, queries[number], keys, values, (*block.seen, number), scaling)
        if block.mask_QS is None:
            outputs.append(attend(None))
        else:
            outputs.append(checkpoint(attend, block.mask_QS[None, None], use_reentrant=False, preserve_rng_state=False))
    return _joined(outputs, range(len(outputs)), dim=1), None


def _attended(
    module: nn.Module, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], seen: Sequence[int],
    scaling: float | None, mask_11QS: Tensor | None,
) -> Tensor:  # fmt: skip
    key, value = _joined(keys, seen), _joined(values, seen)
    output: Tensor
    output, _weights = sdpa_attention_forward(module, query, key, value, mask_11QS, scaling=scaling)
    return output


def _joined(parts: Sequence[Tensor], numbers: Sequence[int], dim: int = 2) -> Tensor:
    return parts[numbers[0]] if len(numbers) == 1 else torch.cat([parts[number] for number in numbers], dim)


AttentionInterface.register(NAME, tree_attention)
