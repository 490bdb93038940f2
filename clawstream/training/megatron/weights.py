"""Weights between Hugging Face files and the processes that hold parts of them; no process holds a whole model.

The processes that share a stage's tensors, in all copies of the model, divide the work: each puts some of the tensors
together and writes them. A kind of tensor is a prefix of its name, as in `exp_avg/model.norm.weight`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from clawstream.errors import UnusableCheckpoint
from clawstream.inference.models.model_folder import weight_files
from clawstream.training.megatron.copies import together
from clawstream.training.megatron.names import ParameterSource
from clawstream.training.models.model import key, tensors_of


class Folder:
    """Tensors of a Hugging Face folder by name, each read from its file when it is asked for."""

    def __init__(self, folder: Path, instead: Iterable[tuple[str, Callable[[], Tensor]]] | None = None) -> None:
        self.folder = folder
        self._reader = dict(tensors_of(weight_files(folder)) if instead is None else instead)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor as it is stored; raises UnusableCheckpoint where there is none of this shape."""
        if name not in self._reader:
            raise UnusableCheckpoint(
                f"{self.folder}: {name} is missing. Nothing is trained. Fetch the folder again, or write the "
                "checkpoint again."
            )
        value = self._reader[name]()
        if value.shape != shape:
            raise UnusableCheckpoint(
                f"{self.folder}: {name} has shape {tuple(value.shape)}, expected {shape}. Nothing is trained. Name the "
                "base model, and the LoRA rank, that this policy was started with."
            )
        return value


def held(place: ParameterSource, rank: int, part: Sequence[int], folder: Folder) -> Tensor:
    """Return the part, of this shape, that a process holds of the folder's tensors."""
    values = [folder.read(name, shape) for name, shape in zip(place.names, place.shapes(part), strict=True)]
    return place.part(values[0] if len(values) == 1 else torch.cat(values), rank)


def collected(
    state: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, ParameterSource], group: dist.ProcessGroup,
    copies: dist.ProcessGroup, *, shapes: Mapping[str, torch.Size] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return those Hugging Face tensors of every kind that this process of `group` is to write, in main memory.

    With `shapes` each of the copies has a part of every tensor of such a shape, else the whole.
    """
    mine: dict[str, Tensor] = {}
    tensors = [(kind, name, value) for kind, values in state.items() for name, value in values.items()]
    # By name: which file a tensor comes to does not depend on whether this trainer went on or was started again.
    for number, (kind, name, value) in enumerate(sorted(tensors, key=lambda one: one[:2])):
        place = places[name]
        if place.copied:
            continue
        owner, copy = divmod(number % (group.size() * copies.size()), copies.size())
        of_copy: Tensor | None = value.detach()
        if shapes is not None and value.ndim:
            of_copy = together(value, shapes[name], copies, copy)
        if of_copy is None or copies.rank() != copy:
            continue
        for found, whole in _together(of_copy, place, owner, group).items():
            mine[key(kind, found)] = whole.cpu().contiguous()
    return mine


def _together(value: Tensor, place: ParameterSource, owner: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the Hugging Face tensors on the process that is to have them; nothing on the others."""
    here = group.rank() == owner
    if value.ndim == 0 or place.axis is None:
        if not here:
            return {}
        return {name: value.clone() for name in place.names} if value.ndim == 0 else place.whole([value])
    parts = [torch.empty_like(value) for _ in range(group.size())] if here else None
    dist.gather(value.contiguous(), parts, dst=dist.get_global_rank(group, owner), group=group)
    return {} if parts is None else place.whole(parts)
