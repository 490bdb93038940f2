"""What all processes of a team exchange, and the files that several of them write."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from clawstream.inference.model_folder import INDEX
from clawstream.training.models.model import T


def together(found: Mapping[int, T]) -> dict[int, T]:
    """Return the results of all processes; where several have the same key, all take one process' value."""
    parts: list[Mapping[int, T]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, dict(found))
    return {number: value for part in parts for number, value in part.items()}


def agreed(values: Tensor) -> Tensor:
    """Return the first process' values."""
    values = values.contiguous()
    dist.broadcast(values, 0)
    return values


def write_parts(folder: Path, stem: str, mine: Mapping[str, Tensor]) -> None:
    """Write this process' tensors, in main memory, to a numbered file; all processes call this, and wait for all.

    Of a model's weights, `stem` being "model", the first process writes the index by which engines find each tensor.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    file = f"{stem}-{rank + 1:05d}-of-{count:05d}.safetensors"
    if mine:
        save_file({name: value.contiguous() for name, value in mine.items()}, folder / file, metadata={"format": "pt"})
    listed: list[list[str]] = [[] for _ in range(count)]
    dist.all_gather_object(listed, [file, *mine])
    if rank == 0 and stem == "model":
        file_of = {name: names[0] for names in listed for name in names[1:]}
        size = sum((folder / part).stat().st_size for part in set(file_of.values()))
        body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(body, indent=1))
    dist.barrier()
