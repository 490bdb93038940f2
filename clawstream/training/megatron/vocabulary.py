"""Log-probs, entropies and the likeliest tokens of a vocabulary whose rows lie on several processes.

No process sees another's logits: only maxima, sums and a few candidates are exchanged. N places, E tokens asked about
at each of them, V the rows of this process that stand for a token, K the likeliest.
"""

from typing import NamedTuple

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch import distributed as dist


class VocabularyRows(NamedTuple):
    """Which tokens' logits a process holds, and with whom it shares the vocabulary."""

    first: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocabulary: int) -> "VocabularyRows":
        """Return this process' rows of a vocabulary that is padded to equal parts; padding is no token."""
        size = -(-vocabulary // group.size())
        first = size * group.rank()
        return cls(first, min(size, vocabulary - first), group)


def logprobs(logits_NV: Tensor, ids_NE: Tensor, rows: VocabularyRows) -> Tensor:
    """Return the log-probs [N, E] of the ids, with their gradient."""
    here_NE = (ids_NE >= rows.first) & (ids_NE < rows.first + rows.size)
    found_NE = logits_NV.gather(1, (ids_NE - rows.first).clamp(0, rows.size - 1))
    found_NE = _summed(torch.where(here_NE, found_NE, found_NE.new_zeros(())), rows)
    return found_NE - _normaliser(logits_NV, rows).unsqueeze(1)


@torch.no_grad()
def entropies(logits_NV: Tensor, rows: VocabularyRows) -> Tensor:
    """Return the entropy [N] at each place."""
    logp_NV = logits_NV - _normaliser(logits_NV, rows).unsqueeze(1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(1)
    dist.all_reduce(entropy_N, group=rows.group)
    return entropy_N


@torch.no_grad()
def likeliest(logits_NV: Tensor, num_tokens: int, rows: VocabularyRows) -> Tensor:
    """Return the ids [N, K] of the likeliest tokens of all processes."""
    mine = logits_NV.topk(min(num_tokens, rows.size))
    values_NK = logits_NV.new_full((len(logits_NV), num_tokens), -torch.inf)
    ids_NK = torch.zeros_like(values_NK, dtype=torch.long)
    values_NK[:, : mine.values.shape[1]] = mine.values
    ids_NK[:, : mine.values.shape[1]] = mine.indices + rows.first
    values = [torch.empty_like(values_NK) for _ in range(rows.group.size())]
    ids = [torch.empty_like(ids_NK) for _ in range(rows.group.size())]
    dist.all_gather(values, values_NK, group=rows.group)
    dist.all_gather(ids, ids_NK, group=rows.group)
    return torch.cat(ids, 1).gather(1, torch.cat(values, 1).topk(num_tokens).indices)


def whole(logits_BV: Tensor, rows: VocabularyRows, vocabulary: int) -> Tensor:
    """Return the logits of all processes' tokens, given those of the rows here with their padding."""
    parts = [torch.empty_like(logits_BV) for _ in range(rows.group.size())]
    dist.all_gather(parts, logits_BV.contiguous(), group=rows.group)
    return torch.cat(parts, 1)[:, :vocabulary]


def _normaliser(logits_NV: Tensor, rows: VocabularyRows) -> Tensor:
    """Return the log of the sum [N] of all processes' exponentials."""
    largest_N = logits_NV.detach().amax(1)
    dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=rows.group)
    total_N = _summed((logits_NV - largest_N.unsqueeze(1)).exp().sum(1), rows)
    return total_N.log() + largest_N


def _summed(values: Tensor, rows: VocabularyRows) -> Tensor:
    """Sum over processes; what comes out is the same in all of them, and so is its gradient."""
    summed: Tensor = reduce_from_tensor_model_parallel_region(values.contiguous(), group=rows.group)
    return summed
