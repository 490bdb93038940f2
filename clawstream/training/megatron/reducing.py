"""What the processes of one model compute together: passes over pieces, sums of gradients, and log-probs; and which
part of a tensor each copy of a model keeps.

No process sees another's logits: only maxima, sums and a few candidates are exchanged. N places, E tokens asked about
at each of them, V the rows of this process that stand for a token, K the likeliest.

Copies of a model divide AdamW's moments: AdamW moves each number by itself, so it may be given any part of a tensor. A
part is a flat view of the whole tensor; the last parts may be shorter, or empty.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from clawstream.training.megatron.shape import Shape, Sizes


def reduce_gradients(stage: Any, shape: Shape, sizes: Sizes) -> None:
    """Sum all gradients over copies of the model; sum those of shared weights also over the processes that share them.

    Processes that share a weight use it for different tokens, heads or stages. They share norms and whole factors of
    adapters where rows are cut by token, the norms of heads where heads are cut, and an embedding whose weights are the
    head's on another stage. A process that computed nothing adds 0.
    """
    data, tensor = parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    for name, parameter in stage.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _sum(parameter.grad, data)
        by_token = sizes.by_sequence and getattr(parameter, "sequence_parallel", False)
        by_head = shape.head_norms and ("q_layernorm" in name or "k_layernorm" in name)
        if by_token or by_head:
            _sum(parameter.grad, tensor)
    ends = parallel_state.get_embedding_group(check_initialized=False)
    if shape.tied and sizes.pipeline > 1 and (stage.pre_process or stage.post_process):
        shared = stage.shared_embedding_or_output_weight()
        if shared.requires_grad:
            _sum(shared.grad, ends)


def clip(parameters: Sequence[tuple[nn.Parameter, bool]], max_norm: float, group: dist.ProcessGroup) -> float:
    """Scale the gradient down to `max_norm` if its norm is larger; return the norm before.

    Each parameter comes with whether this process is the one that counts it.
    """
    squares = [p.grad.square().sum() for p, counts in parameters if counts and p.grad is not None]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    total = total.to(parameters[0][0].device)
    _sum(total, group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter, _ in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return float(norm)


def _sum(values: Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(values, group=group)


def run(
    stage: Any, groups: Sequence[Sequence[int]], step: Callable[[Sequence[int]], Tensor], *, forward_only: bool
) -> None:
    """Take each group through all stages; every process of every stage calls this.

    `step` computes this stage's part: the next stage's input or, on the last stage, the sum to call backward on.
    """
    if not groups:
        return

    def forward(remaining: Iterator[Sequence[int]], _stage: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return step(next(remaining)), lambda total: (total, torch.zeros((), dtype=torch.int), {})

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(groups),
        model=stage,
        num_microbatches=len(groups),
        seq_length=1,  # not read: each piece has a length of its own
        micro_batch_size=1,
        forward_only=forward_only,
    )
    stage.set_input_tensor(None)


class VocabularyRows(NamedTuple):
    """Which tokens' logits a process holds, and with whom it shares the vocabulary."""

    first: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocabulary: int) -> "VocabularyRows":
        """Return this process' rows of a vocabulary that is padded to equal parts, without the padding."""
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
    """Return the logits of all processes' tokens, given those of this process with their padding."""
    parts = [torch.empty_like(logits_BV) for _ in range(rows.group.size())]
    dist.all_gather(parts, logits_BV.contiguous(), group=rows.group)
    return torch.cat(parts, 1)[:, :vocabulary]


def _normaliser(logits_NV: Tensor, rows: VocabularyRows) -> Tensor:
    """Return the log-sum-exp [N] of the logits of all processes."""
    largest_N = logits_NV.detach().amax(1)
    dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=rows.group)
    total_N = _summed((logits_NV - largest_N.unsqueeze(1)).exp().sum(1), rows)
    return total_N.log() + largest_N


def _summed(values: Tensor, rows: VocabularyRows) -> Tensor:
    """Sum over processes; what comes out is the same in all of them, and so is its gradient."""
    summed: Tensor = reduce_from_tensor_model_parallel_region(values.contiguous(), group=rows.group)
    return summed


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


def gathered(mine: Tensor, shape: torch.Size, copies: dist.ProcessGroup, rank: int) -> Tensor | None:
    """Return the whole tensor of this shape on the named copy, from all copies' parts; None on the others."""
    padded = _padded(mine, shape.numel(), copies)
    parts = [torch.empty_like(padded) for _ in range(copies.size())] if copies.rank() == rank else None
    dist.gather(padded, parts, dst=dist.get_global_rank(copies, rank), group=copies)
    return None if parts is None else torch.cat(parts)[: shape.numel()].view(shape)


def _size(numbers: int, copies: dist.ProcessGroup) -> int:
    return -(-numbers // copies.size())


def _padded(mine: Tensor, numbers: int, copies: dist.ProcessGroup) -> Tensor:
    return functional.pad(mine, (0, _size(numbers, copies) - mine.numel()))
