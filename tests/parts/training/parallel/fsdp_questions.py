"""What the tests ask of processes that FSDP cuts a model over; runs in each of them."""

import ctypes
import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from clawstream.training.fsdp_model import FsdpModel
from clawstream.training.step.losses import Suffix
from tests.parts.training.step import head_memory


def load(state: dict[str, Any], folder: Path, lora_rank: int | None = None) -> int:
    """Have the model of the folder; return by how many bytes this process' memory grew until it first computed.

    From there on the C library keeps much of what is let go of.
    """
    state.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what it kept of another model is used again, and nothing seems to grow
    peaks_bytes: list[int] = []
    check = FsdpModel._check_head

    def checked(model: FsdpModel) -> None:
        peaks_bytes.append(_status_bytes("VmHWM"))
        check(model)

    before_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    with patch.object(FsdpModel, "_check_head", checked):
        state["model"] = FsdpModel.load(folder, lora_rank=lora_rank)
    return peaks_bytes[0] - before_bytes


def score(state: dict[str, Any], suffixes: list[Suffix]) -> list[torch.Tensor]:
    """Return the log-probs of the answers."""
    scores: list[torch.Tensor] = state["model"].score(suffixes, weights=None, budget_tokens=64)
    return scores


def head_bytes(state: dict[str, Any], suffixes: list[Suffix], limit_bytes: int) -> tuple[int, int]:
    """Return what `head_memory.held` finds in this process under a limit."""
    with patch("clawstream.training.model.HEAD_BYTES", limit_bytes):
        return head_memory.held(state["model"], suffixes, head_memory.VOCABULARY)


def save(state: dict[str, Any], folder: Path) -> None:
    """Write the weights."""
    state["model"].save(folder)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
