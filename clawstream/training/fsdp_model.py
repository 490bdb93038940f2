"""A causal model whose weights, gradients and moments are cut evenly over processes by FSDP2.

Each layer is put together just before it computes, in all processes at once. So all of them must compute equally many
pieces of a batch, and some compute pieces without use. Tensors of processes are cut along their first axis.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from clawstream.errors import ConfigError, UnusableCheckpoint
from clawstream.inference.model_folder import tensor_headers, weight_files
from clawstream.training import processes
from clawstream.training.models.base_folder import STEM, copy_words, saved_name, unread
from clawstream.training.models.model import Look, Read, T, Weights, key, stored, tensors_of
from clawstream.training.models.torch_model import TorchModel
from clawstream.training.processes import write_parts
from clawstream.training.step.losses import Suffix
from clawstream.training.step.packing import shares

_NOTHING = Suffix([0], [0], 1.0)  # a process without pieces computes this while others still have some


class FsdpModel(TorchModel):
    """The model of a Hugging Face folder, or an adapter on it, this process' part of each tensor."""

    def __init__(self, folder: Path, core: Any, adapter: Any | None) -> None:
        self._root = _Root(core)
        self._within = False
        on_gpus = dist.get_backend() == dist.Backend.NCCL
        mesh = init_device_mesh("cuda" if on_gpus else "cpu", (dist.get_world_size(),))
        for layer in core.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._root, mesh=mesh, reshard_after_forward=True)  # weights may be others the next time
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                # Sums: what they are divided by is known after the batch.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        super().__init__(folder, core, adapter)
        if _named_as_in_files(folder, core):
            self._read()

    @classmethod
    def loaded(cls, folder: Path, device: str) -> Any:
        """Return the model of transformers, whose weights are read once they are cut.

        Where its files name them otherwise transformers reads them, in each process the whole.
        """
        del device  # a layer goes there once it is cut
        core = unread(folder)
        return core if _named_as_in_files(folder, core) else super().loaded(folder, "cpu")

    @property
    def leads(self) -> bool:
        """Whether this process writes the files that are written once."""
        return dist.get_rank() == 0

    def published(self) -> dict[str, Tensor]:
        """Return the trained weights that this process holds, as exact as `save` writes them, in main memory."""
        return {name: _here(p).to("cpu", self.published_dtype, copy=True) for name, p in self.trained.items()}

    @contextmanager
    def holding(self, weights: Weights | None) -> Iterator[None]:
        """Compute with these weights instead of the current ones, which come back unchanged; None: the current ones."""
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
        """Return log-probs [B, T] of the responses, NaN past each one's end; all processes ask at once."""
        return self._computing(partial(super().logprobs, suffixes))

    def look(self, suffixes: Sequence[Suffix], among: Sequence[Tensor] | None = None) -> Look:
        """Return a `Look` at each place; `among` [T, K] names tokens to score beside those of each row."""
        return self._computing(partial(super().look, suffixes, among))

    @contextmanager
    def reading(self, mask_BL: Tensor) -> Iterator[Read]:
        """Read rows piece by piece, no token twice; the first piece has the mask's shape, and 0 marks padding."""
        with super().reading(mask_BL) as read:
            yield lambda ids_BL: self._computing(partial(read, ids_BL))

    def share(self, lengths_tokens: Sequence[int]) -> list[int]:
        """Return which samples this process computes."""
        return shares(lengths_tokens, dist.get_world_size())[dist.get_rank()]

    def together(self, found: Mapping[int, T]) -> dict[int, T]:
        """Return the results of all processes for the samples that `share` dealt out."""
        return processes.together(found)

    def agreed(self, values: Tensor) -> Tensor:
        """Return the leading process' values in every process, so that all act alike."""
        return processes.agreed(values)

    def accumulate(
        self, groups: Sequence[Sequence[int]], suffixes: Sequence[Suffix], total_of: Callable[[Sequence[int]], Tensor]
    ) -> None:
        """Sum the gradients of `total_of` over the groups, and over all processes."""
        idle = self._idle(len(groups))
        super().accumulate(groups, suffixes, total_of)
        for _ in range(idle):
            (self.look([_NOTHING]).logp_BT.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all samples, whichever process computes them."""
        return self._totals(values)

    def _totals(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes."""
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to the norm where it is larger; return its norm before."""
        norm = nn.utils.clip_grad_norm_(list(self.trained.values()), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def save(self, folder: Path) -> None:
        """Write what an engine loads: the model as exact as its base, in a file of each process, or the adapter."""
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

    @torch.no_grad()
    def restore(self, folder: Path, masters: Path | None = None) -> None:
        """Take over the weights that `save` wrote, or the more exact ones that they were written from."""
        if masters is not None:
            readers: dict[str, Callable[[], Tensor | None]] = dict(stored(masters.parent, masters.stem))
        elif self._adapter is not None:
            saved = load_file(folder / f"{STEM}.safetensors")
            readers = {name: partial(saved.get, saved_name(name)) for name in self.trained}
        else:
            readers = dict(tensors_of(weight_files(folder)))
        for name, parameter in self.trained.items():
            value = readers[name]() if name in readers else None
            if value is None or value.shape != parameter.shape:
                raise UnusableCheckpoint(
                    f"{folder}: {name} is {'missing' if value is None else tuple(value.shape)}, expected "
                    f"{tuple(parameter.shape)} as in {self.folder}. Nothing is trained. Name the base model, and the "
                    "LoRA rank, that this policy was started with."
                )
            parameter.copy_(_cut(value, parameter))

    def save_state(self, folder: Path, stem: str, state: Mapping[str, Weights]) -> None:
        """Write kinds of tensors, each like the trained weights; each process puts some of them together."""
        mine: dict[str, Tensor] = {}
        tensors = {key(kind, name): value for kind, values in state.items() for name, value in values.items()}
        # By name: which file a tensor comes to does not depend on whether this trainer went on or was started again.
        for number, (name, value) in enumerate(sorted(tensors.items())):
            whole = _whole(value.detach())
            if number % dist.get_world_size() == dist.get_rank():
                mine[name] = whole.cpu()
        write_parts(folder, stem, mine)

    def load_state(self, folder: Path, stem: str) -> dict[str, dict[str, Tensor]] | None:
        """Return this process' part of what any trainer's `save_state` wrote; None: there is nothing."""
        state: dict[str, dict[str, Tensor]] = {}
        for one, read in stored(folder, stem):
            kind, _, name = one.rpartition("/")
            value = read()
            state.setdefault(kind, {})[name] = value if value.ndim == 0 else _cut(value, self.trained[name])
        return state or None

    def _check_head(self) -> None:
        self._computing(super()._check_head)

    @torch.no_grad()
    def _read(self) -> None:
        """Take over the base's weights, each whole in this process only while it is cut."""
        readers = dict(tensors_of(weight_files(self.folder)))
        for name, held in chain(self._core.named_parameters(), self._core.named_buffers()):
            read = readers.get(name.replace(".base_layer.", "."))  # as an adapter calls what it is on
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
        """Return, of tensors shaped like the trained weights, the numbers that only this process counts."""
        return ((name, _here(value)) for name, value in tensors.items())

    def _computing(self, compute: Callable[[], T]) -> T:
        """Compute with the weights outside of layers put together."""
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
        self, suffixes: Sequence[Suffix], scored: Callable[[list[Suffix]], Sequence[T]], budget_tokens: int
    ) -> list[T]:
        """Return the results of `scored` for each suffix, in order, in as many passes as the process with the most."""
        groups = self.groups(suffixes, budget_tokens=budget_tokens)
        idle = self._idle(len(groups))
        found: dict[int, T] = {}
        for group in groups:
            found |= zip(group, self._computing(partial(scored, [suffixes[i] for i in group])), strict=True)
        for _ in range(idle):
            self._computing(partial(scored, [_NOTHING]))
        return [found[i] for i in range(len(suffixes))]


def refuse_what_is_not_cut(folder: Path, *, adapter: bool) -> None:
    """Raise ConfigError for a model whose layers are not at `layers`, or whose names differ from its files'.

    Raises UnusableCheckpoint where there is none.
    """
    with torch.device("meta"):  # names without numbers
        core = unread(folder)
    instead = 'Nothing is trained. Take training.trainer = "torch", or a model of another family.'
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
    """Whether a model's files hold what it needs under its own names, and nothing under a name that it ties to another.

    Adapters' weights are ignored. Where tied weights differ in the files, transformers decides what becomes of them.
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
