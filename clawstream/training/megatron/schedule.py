"""Runs the pieces of a batch through the stages of a model, by Megatron's own schedules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor


def run(
    stage: Any, groups: Sequence[Sequence[int]], step: Callable[[Sequence[int]], Tensor], *, forward_only: bool
) -> None:
    """Take each group through all stages; every process of every stage calls this.

    `step` computes this stage's part: what the next one goes on with, or on the last one the sum to go backward from.
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
