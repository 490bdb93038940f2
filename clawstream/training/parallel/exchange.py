"""Values that all processes exchange: all of them call these functions, in the same order."""

from collections.abc import Mapping

from torch import Tensor
from torch import distributed as dist

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
