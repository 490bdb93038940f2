"""Gradients of one model in many processes: summed over all processes, then measured and clipped as one."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch import distributed as dist

from clawstream.training.megatron.shape import Shape, Sizes


def reduce_gradients(stage: Any, shape: Shape, sizes: Sizes) -> None:
    """Sum the gradients over copies of the model, and of weights that several processes hold for different work.

    Such weights are norms and whole factors of adapters where tokens are cut by sequence, norms of heads where heads
    are cut, and an embedding that shares the weights of the head on another stage. A process that computed nothing adds
    0.
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
    """Scale gradients down to the norm where it is larger; return the norm before.

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
