"""Cuts every tensor into equal parts over the copies of a model, each of which keeps one part for all of them.

So AdamW's moments are held once over all copies; AdamW moves each number by itself, so it may be given any part of a
tensor. A part is flat, and a view of the whole; the last parts may be shorter, or empty.
"""

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional


def part(whole: Tensor, copies: dist.ProcessGroup) -> Tensor:
    """Return the part [n] of a contiguous tensor that this copy keeps, as a view."""
    size = _size(whole.numel(), copies)
    return whole.view(-1)[copies.rank() * size : (copies.rank() + 1) * size]


def spread(whole: Tensor, copies: dist.ProcessGroup) -> None:
    """Fill every copy's tensor with the parts that the other copies keep."""
    if copies.size() == 1:
        return
    mine = _padded(part(whole, copies), whole.numel(), copies)
    everyone = mine.new_empty(mine.numel() * copies.size())
    dist.all_gather_into_tensor(everyone, mine, group=copies)
    whole.copy_(everyone[: whole.numel()].view_as(whole))


def together(mine: Tensor, shape: torch.Size, copies: dist.ProcessGroup, rank: int) -> Tensor | None:
    """Return the whole tensor of this shape on the named copy, from all copies' parts; None on the others."""
    padded = _padded(mine, shape.numel(), copies)
    parts = [torch.empty_like(padded) for _ in range(copies.size())] if copies.rank() == rank else None
    dist.gather(padded, parts, dst=dist.get_global_rank(copies, rank), group=copies)
    return None if parts is None else torch.cat(parts)[: shape.numel()].view(shape)


def _size(numbers: int, copies: dist.ProcessGroup) -> int:
    return -(-numbers // copies.size())


def _padded(mine: Tensor, numbers: int, copies: dist.ProcessGroup) -> Tensor:
    return functional.pad(mine, (0, _size(numbers, copies) - mine.numel()))
