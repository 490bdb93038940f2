"""Attention over rows of different lengths, for any transformers model that takes its attention from outside.

A step packs the tokens of all requests into one sequence [1, N]: first one token for each decoding row 0..B-1, then one
segment of prompt for each row that is being filled. Linear layers see N tokens at once; only attention knows which
token belongs to which row. Axes: N packed tokens, B decoding rows, H key-value heads, G query heads per key-value head,
L keys, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from clawstream.local.engine.kv import KvRows

NAME = "clawstream_rows"
# The cost of one more attention call, as the number of keys that a batched call reads in the same time.
_CALL_COST_KEYS = 2048


class PromptSegment(NamedTuple):
    """Part of a prompt: packed tokens [first, last) of row `row`, which already holds `past` tokens."""

    row: int
    first: int
    last: int
    past: int
    mask_NL: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """Everything that attention needs to know about one forward pass."""

    kv: KvRows
    write_N: Tensor
    num_decoding: int
    short_keys: int
    short_mask_B11L: Tensor | None
    long_rows: tuple[tuple[int, int], ...]
    segments: tuple[PromptSegment, ...]


def plan_step(kv: KvRows, decode_lengths: Sequence[int], prefills: Sequence[tuple[int, int, int]]) -> ForwardPass:
    """Return the step: row r < B has decode_lengths[r] keys (the new one too), then (row, past, count) segments."""
    capacity = kv.capacity_tokens
    write = [row * capacity + length - 1 for row, length in enumerate(decode_lengths)]
    segments = []
    for row, past, count in prefills:
        first = len(write)
        write.extend(range(row * capacity + past, row * capacity + past + count))
        mask = torch.ones(count, past + count, dtype=torch.bool).tril_(past) if past and count > 1 else None
        segments.append(PromptSegment(row, first, first + count, past, mask))
    short_keys, long_rows = split_long_rows(decode_lengths)
    mask_B11L = None
    if decode_lengths and min(decode_lengths) < short_keys:
        lengths_B1 = torch.tensor(decode_lengths).unsqueeze(1)
        mask_B11L = (torch.arange(short_keys).unsqueeze(0) < lengths_B1).view(-1, 1, 1, short_keys)
    return ForwardPass(
        kv=kv,
        write_N=torch.tensor(write),
        num_decoding=len(decode_lengths),
        short_keys=short_keys,
        short_mask_B11L=mask_B11L,
        long_rows=tuple((row, decode_lengths[row]) for row in long_rows),
        segments=tuple(segments),
    )


def split_long_rows(lengths: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Keys that one batched call reads in every row, and the rows whose length asks for a call of their own.

    Of all cuts through the sorted lengths, this is the one that reads the fewest keys.
    """
    if not lengths:
        return 0, ()
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    best_cost, best_cut, alone = lengths[order[0]] * len(lengths), 0, 0
    for cut in range(1, len(order)):
        alone += lengths[order[cut - 1]] + _CALL_COST_KEYS
        cost = alone + lengths[order[cut]] * len(lengths)
        if cost < best_cost:
            best_cost, best_cut = cost, cut
    return lengths[order[best_cut]], tuple(order[:best_cut])


def attend_rows(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    step: ForwardPass,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values, and return [1, N, query heads, D]; registered with transformers under NAME."""
    del attention_mask
    index = module.layer_idx
    assert isinstance(index, int)
    key_SCHD, value_SCHD = step.kv.layer(index, key_1HND, value_1HND)
    key_SCHD.flatten(0, 1).index_copy_(0, step.write_N, key_1HND[0].transpose(0, 1))
    value_SCHD.flatten(0, 1).index_copy_(0, step.write_N, value_1HND[0].transpose(0, 1))
    parts = []
    if step.num_decoding:
        parts.append(_decode(query_1HND, key_SCHD, value_SCHD, step, scaling))
    for segment in step.segments:
        first, last = segment.first, segment.last
        if segment.past:
            key = key_SCHD[segment.row, : segment.past + last - first].transpose(0, 1).unsqueeze(0)
            value = value_SCHD[segment.row, : segment.past + last - first].transpose(0, 1).unsqueeze(0)
        else:
            key, value = key_1HND[:, :, first:last], value_1HND[:, :, first:last]
        out_1HND = scaled_dot_product_attention(
            query_1HND[:, :, first:last],
            key,
            value,
            attn_mask=segment.mask_NL,
            is_causal=not segment.past,
            scale=scaling,
            enable_gqa=True,
        )
        parts.append(out_1HND[0].transpose(0, 1))
    out_NHD = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out_NHD.unsqueeze(0), None


def _decode(
    query_1HND: Tensor, key_SCHD: Tensor, value_SCHD: Tensor, step: ForwardPass, scaling: float | None
) -> Tensor:
    """[B, query heads, D]. Query heads of one key-value head stand as query positions: same keys, no copies."""
    heads, width = key_SCHD.shape[2:]
    num_rows = step.num_decoding
    query_BHGD = query_1HND[0, :, :num_rows].transpose(0, 1).reshape(num_rows, heads, -1, width)
    out_BHGD = scaled_dot_product_attention(
        query_BHGD,
        key_SCHD[:num_rows, : step.short_keys].transpose(1, 2),
        value_SCHD[:num_rows, : step.short_keys].transpose(1, 2),
        attn_mask=step.short_mask_B11L,
        scale=scaling,
    )
    for row, length in step.long_rows:
        out_BHGD[row] = scaled_dot_product_attention(
            query_BHGD[row : row + 1],
            key_SCHD[row : row + 1, :length].transpose(1, 2),
            value_SCHD[row : row + 1, :length].transpose(1, 2),
            scale=scaling,
        )[0]
    return out_BHGD.flatten(1, 2)


AttentionInterface.register(NAME, attend_rows)
