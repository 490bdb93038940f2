"""What tests ask of processes that compute nothing; runs in each of them.

`torchrun ... -m tests.parts.training.processes.waiting FUNCTION` asks the processes that torchrun started.
"""

import os
import sys
import time
from typing import Any

import torch
from torch import distributed as dist

from clawstream.errors import PartUnavailable
from clawstream.training.processes import Ranks, Start


def nothing(_state: dict[str, Any]) -> None:
    """Be there."""


def sleep(_state: dict[str, Any], for_s: float) -> None:
    """Hear nobody for so long."""
    time.sleep(for_s)


def interfaces(_state: dict[str, Any]) -> list[str | None]:
    """Return on which interfaces this process is found by the others."""
    return [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]


def fail_in_the_first(_state: dict[str, Any]) -> None:
    """Run out of memory in the first process, for which the others wait."""
    if dist.get_rank() == 0:
        raise MemoryError("2 GB were wanted")
    dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    try:
        with Ranks(Start(backend="gloo", patience_s=60)) as ranks:
            if ranks.rank > 0:
                ranks.serve()
            else:
                ranks.ask(f"tests.parts.training.processes.waiting:{sys.argv[1]}")
    except PartUnavailable as error:
        sys.exit(f"waiting: {error}")
