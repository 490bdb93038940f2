"""What the tests ask of processes; runs in each of them."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from clawstream.errors import GradientNotFinite, UnusableCheckpoint
from clawstream.events import SampleAssembled
from clawstream.training.footprint import HEAD_BYTES
from clawstream.training.gating import write
from clawstream.training.megatron.model import MegatronModel, join
from clawstream.training.megatron.shape import Sizes
from clawstream.training.megatron.weights import collected
from clawstream.training.step.losses import Suffix
from tests.parts.training.step import head_memory


def load(
    state: dict[str, Any], folder: Path, sizes: Sizes, lora_rank: int | None = None, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Have the model of the folder, cut so."""
    join(sizes)
    state["model"] = MegatronModel.load(folder, sizes, lora_rank=lora_rank, seed=seed, dtype=dtype)


def groups_after_joining(state: dict[str, Any], cuts: list[Sizes]) -> list[int]:
    """Return how many process groups there are after each cut, each made in place of the one before."""
    state.clear()
    counts = []
    for sizes in cuts:
        join(sizes)
        counts.append(len(distributed_c10d._world.pg_map))  # torch counts them nowhere else
    return counts


def restore(state: dict[str, Any], folder: Path) -> None:
    """Take over what was saved."""
    state["model"].restore(folder)


def refusal(state: dict[str, Any], folder: Path) -> str:
    """Return why what lies there is not taken over."""
    try:
        state["model"].restore(folder)
    except UnusableCheckpoint as error:
        return str(error)
    return "nothing"


def score(state: dict[str, Any], suffixes: list[Suffix]) -> list[torch.Tensor]:
    """Return the log-probs of the answers."""
    scores: list[torch.Tensor] = state["model"].score(suffixes, weights=None, budget_tokens=64)
    return scores


def likeliest(state: dict[str, Any], suffixes: list[Suffix], count: int) -> Any:
    """Return the likeliest tokens."""
    return state["model"].likeliest(suffixes, num_tokens=count, weights=None, budget_tokens=64)


def written(state: dict[str, Any], suffixes: list[Suffix], limit_tokens: int, budget_tokens: int) -> Any:
    """Return answers to their prompts."""
    return write(state["model"], suffixes, limit_tokens=limit_tokens, seed=7, budget_tokens=budget_tokens)


def save(state: dict[str, Any], folder: Path) -> None:
    """Write the weights."""
    state["model"].save(folder)


def look_and_gradients(state: dict[str, Any], suffixes: list[Suffix], head_bytes: int = HEAD_BYTES) -> Any:
    """Return the entropies, and those gradients of the sum of all log-probs that this process puts together."""
    model: MegatronModel = state["model"]
    found: list[torch.Tensor] = []

    def total_of(group: Any) -> torch.Tensor:
        scores = model.token_scores([suffixes[i] for i in group])
        assert scores.entropy_BT is not None
        found.append(scores.entropy_BT)
        return scores.logp_BT.nansum()

    for parameter in model.trained.values():
        parameter.grad = None
    with patch("clawstream.training.model.HEAD_BYTES", head_bytes):
        model.accumulate([range(len(suffixes))], suffixes, total_of)
    gradients = {name: p.grad for name, p in model.trained.items() if p.grad is not None}
    return found[0] if found else None, collected({"": gradients}, model._places, model._tensor, model._data)


def head_bytes(state: dict[str, Any], suffixes: list[Suffix], limit_bytes: int) -> tuple[int, int, int]:
    """Return how many tokens' logits this process computes, and what `head_memory.held` finds under a limit."""
    model: MegatronModel = state["model"]
    with patch("clawstream.training.model.HEAD_BYTES", limit_bytes):
        return model._rows.size, *head_memory.held(model, suffixes, model._rows.size)


def moments_bytes(state: dict[str, Any]) -> tuple[list[int], int, int]:
    """Return which processes hold the same weights, what moments take here, and would take of all these weights."""
    model, optimizer = state["trainer"]._model, state["trainer"]._optimizer
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for values in optimizer.state.values()
        for value in values.values()
        if value.ndim
    }
    whole_bytes = sum(2 * 4 * p.numel() for p in model.trained.values())
    return dist.get_process_group_ranks(model._data), sum(storages.values()), whole_bytes


def refused_step(state: dict[str, Any], samples: list[SampleAssembled], version: int) -> str:
    """Return why no step was taken where a gradient is no number."""
    model = state["trainer"]._model
    accumulate = model.accumulate

    def poisoned(*args: Any) -> None:
        accumulate(*args)
        next(iter(model.trained.values())).grad.fill_(torch.nan)

    with patch.object(model, "accumulate", poisoned):
        try:
            state["trainer"].update(samples, version=version, seed=version, advantages=[1.0] * len(samples))
        except GradientNotFinite as error:
            return str(error)
    return "nothing"


def layers_of_a_step(state: dict[str, Any], samples: list[SampleAssembled]) -> int:
    """Return how many layers this process computes with gradients in a step."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += torch.is_grad_enabled()

    model = state["trainer"]._model
    layers = model._stage.decoder.layers if isinstance(model, MegatronModel) else model._core.get_decoder().layers
    hooks = [layer.mlp.register_forward_pre_hook(counted) for layer in layers]
    state["trainer"].update(samples, version=1, seed=1)
    for hook in hooks:
        hook.remove()
    return count


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the products of matrices: of which numbers, and how long their sides are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute it as it would be."""
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            left, right = args[-2:]
            self.found.add((str(left.dtype), (*left.shape[-2:], right.shape[-1])))
        return func(*args, **kwargs or {})


def products_of_a_step(state: dict[str, Any], samples: list[SampleAssembled]) -> set[tuple[str, tuple[int, ...]]]:
    """Return the products of matrices in a step: their numbers, and M, K and N of each."""
    products = _Products()
    with products:
        state["trainer"].update(samples, version=1, seed=1)
    return products.found
