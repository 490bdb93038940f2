"""What tests ask of processes that compute nothing; runs in each of them."""

import os
import time
from typing import Any


def nothing(_state: dict[str, Any]) -> None:
    """Be there."""


def sleep(_state: dict[str, Any], for_s: float) -> None:
    """Hear nobody for so long."""
    time.sleep(for_s)


def interfaces(_state: dict[str, Any]) -> list[str | None]:
    """Return on which interfaces this process is found by the others."""
    return [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]
