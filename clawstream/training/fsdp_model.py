"""A causal model whose weights, gradients and moments are cut evenly over processes by FSDP2.

Each layer is put together just before it computes, in all processes at once. So all processes must compute equally many
pieces of a batch: one with fewer pieces computes dummies. Each tensor is cut along its first axis.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from clawstream.errors import ConfigError, UnusableCheckpoint
from clawstream.inference.model_folder import tensor_headers, weight_files
from clawstream.training.base_folder import copy_words, freeze_in, key, tensors_of, unread, write_parts
from clawstream.training.model import (
    AnswerTensors,
    Read,
    ScoreGroup,
    SharedModel,
    T,
    TokenScores,
    Weights,
)
from clawstream.training.step.losses import Suffix
from clawstream.training.step.packing import shares
from clawstream.training.torch_model import TorchModel

_NOTHING = Suffix([0], [0], 1.0)  # a process without pieces computes this while others still have some


class FsdpModel(SharedModel, TorchModel):
    """The model of a Hugging Face folder, or an adapter on it; this process holds a part of each tensor."""

    def __init__(self, folder: Path, core: Any, adapter: Any | None) -> None:
        self._root = _Root(core)
        self._within = False
        on_gpus = dist.get_backend() == dist.Backend.NCCL
        mesh = init_device_mesh("cuda" if on_gpus else "cpu", (dist.get_world_size(),))
        for layer in core.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._root, mesh=mesh, reshard_after_forward=True)  # weights may have changed by the next pass
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                # Gradients are summed: the number to divide them by is known only after the batch.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        super().__init__(folder, core, adapter)
        if _named_as_in_files(folder, core):
            self._read()

    @classmethod
    def loaded(cls, folder: Path) -> Any:
        """Return the model of transformers, whose weights are read once they are cut.

        Where the files name weights differently, transformers reads all of them in each process.
        """
        core = unread(folder)
        return core if _named_as_in_files(folder, core) else super().loaded(folder)

    @classmethod
    def place(cls, core: Any, adapter: PeftModel | None, dtype: torch.dtype, device: str) -> None:
        """Leave the model in main memory: a layer goes to the device once it is cut."""
        del device
        freeze_in(adapter, dtype, unread=_named_as_in_files(Path(core.name_or_path), core))

    @contextmanager
    def holding(self, weights: Weights | None) -> Iterator[None]:
        if weights is None:
            yield
            return
        current = self.copy()
        try:
            self.put(weights)
            yield
        finally:
            self.put(current)

    def logprobs(self, suffixes: Sequence[Suffix]) -> Tensor:
        return self._computing(partial(super().logprobs, suffixes))

    def token_scores(self, suffixes: Sequence[Suffix], among: Sequence[Tensor] | None = None) -> TokenScores:
        return self._computing(partial(super().token_scores, suffixes, among))

    @contextmanager
    def reading(self, mask_BL: Tensor) -> Iterator[Read]:
        with super().reading(mask_BL) as read:
            yield lambda ids_BL: self._computing(partial(read, ids_BL))

    def share(self, lengths_tokens: Sequence[int]) -> list[int]:
        return shares(lengths_tokens, dist.get_world_size())[dist.get_rank()]

    def accumulate(
        self, groups: Sequence[Sequence[int]], suffixes: Sequence[Suffix], total_of: Callable[[Sequence[int]], Tensor]
    ) -> None:
        idle = self._idle(len(groups))
        super().accumulate(groups, suffixes, total_of)
        for _ in range(idle):
            (self.token_scores([_NOTHING]).logp_BT.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float) -> float:
        norm = nn.utils.clip_grad_norm_(list(self.trained.values()), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def save(self, folder: Path) -> None:
        if self._adapter is None:
            rounded = {name: p.detach().to(self.published_dtype) for name, p in self.trained.items()}
            self.save_state(folder, "model", {"": rounded})
            if self.leads:
                copy_words(self.folder, folder)
            return
        whole = {f"base_model.model.{name}": _whole(p.detach()).cpu() for name, p in self.trained.items()}
        if self.leads:
            self._adapter.save_pretrained(folder, state_dict=whole)
        dist.barrier()

    def _readers(self, folder: Path) -> Mapping[str, Callable[[], Tensor]]:
        return dict(tensors_of(weight_files(folder)))

    def save_state(self, folder: Path, stem: str, state: Mapping[str, Weights]) -> None:
        mine: dict[str, Tensor] = {}
        tensors = {key(kind, name): value for kind, values in state.items() for name, value in values.items()}
        # Sorted, so that a tensor goes to the same file whether or not this trainer was restarted.
        for number, (name, value) in enumerate(sorted(tensors.items())):
            whole = _whole(value.detach())
            if number % dist.get_world_size() == dist.get_rank():
                mine[name] = whole.cpu()
        write_parts(folder, stem, mine)

    def _check_head(self) -> None:
        self._computing(super()._check_head)

    @torch.no_grad()
    def _read(self) -> None:
        """Read the base's weights; each is whole in this process only until it is cut."""
        readers = dict(tensors_of(weight_files(self.folder)))
        for name, held in chain(self._core.named_parameters(), self._core.named_buffers()):
            read = readers.get(name.replace(".base_layer.", "."))  # the adapter's name for a base weight
            if read is None:
                continue
            value = read()
            if value.shape != held.shape:
                raise UnusableCheckpoint(
                    f"{self.folder}: {name} has shape {tuple(value.shape)}, expected {tuple(held.shape)} by its "
                    "config.json. Nothing is trained. Fetch the folder again."
                )
            held.copy_(_cut(value, held) if isinstance(held, DTensor) else value)

    def _counted(self, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
        return ((name, _here(value)) for name, value in tensors.items())

    def _part(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        return _cut(whole, parameter)

    def _computing(self, compute: Callable[[], T]) -> T:
        """Compute while the weights outside of layers (embedding, last norm, head) are gathered."""
        if self._within:
            return compute()
        self._within = True
        try:
            return self._root(compute)  # type: ignore[no-any-return]
        finally:
            self._within = False

    def _idle(self, count: int) -> int:
        """Return by how many pieces this process has fewer than the process with the most."""
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most) - count

    def _in_groups(
        self, suffixes: Sequence[Suffix], scored: ScoreGroup, budget_tokens: int, *_: Any
    ) -> list[AnswerTensors]:
        # Every process makes as many passes as the process with the most groups.
        groups = self.groups(suffixes, budget_tokens=budget_tokens)
        idle = self._idle(len(groups))
        found: dict[int, AnswerTensors] = {}
        for group in groups:
            found |= zip(group, self._computing(partial(scored, [suffixes[i] for i in group])), strict=True)
        for _number in range(idle):
            self._computing(partial(scored, [_NOTHING]))
        return [found[i] for i in range(len(suffixes))]


def refuse_what_is_not_cut(folder: Path, *, adapter: bool) -> None:
    """Raise ConfigError for a model whose decoder has no `layers`, or whose weights have other names than in its files.

    Raises UnusableCheckpoint where the folder has no model.
    """
    with torch.device("meta"):  # names without numbers
        core = unread(folder)
    instead = "Nothing is trained. Take training.processes = 1, or a model of another family."
    if not hasattr(core.get_decoder(), "layers"):
        raise ConfigError(f"{folder}: {type(core).__name__} has no decoder.layers, by which FSDP cuts it. {instead}")
    names = {name for name, _ in core.named_parameters()}
    unknown = [] if adapter else sorted(names - (tensor_headers(folder) or {}).keys())
    if unknown:
        raise ConfigError(
            f"{folder}: its files have no tensor {unknown[0]}, so what is trained could not be written under its "
            f"names. {instead}"
        )


class _Root(nn.Module):
    """Wraps the whole model, because FSDP puts its weights together when this is called."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def _named_as_in_files(folder: Path, core: Any) -> bool:
    """Whether the files hold each of the model's weights under the model's name for it, and tied weights only once.

    Adapters' weights are ignored. Tied weights may stand in files twice, and differ: then transformers decides.
    """
    there = (tensor_headers(folder) or {}).keys()
    kept = core.state_dict().keys()
    own = {name for name, _ in core.named_parameters()}
    buffers = {name for name, _ in core.named_buffers()}
    needed = {name.replace(".base_layer.", ".") for name in own | kept & buffers if ".lora_" not in name}
    return needed <= there and there.isdisjoint(kept - own - buffers)


def _cut(whole: Tensor, like: Tensor) -> DTensor:
    """Return this process' part of `whole`; each process cuts its own, and nothing is sent."""
    data = like.detach()
    assert isinstance(data, DTensor)
    return distribute_tensor(whole.to(data.device, data.dtype), data.device_mesh, data.placements, src_data_rank=None)


def _here(value: Tensor) -> Tensor:
    """Return the numbers that this process holds, not a copy."""
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
