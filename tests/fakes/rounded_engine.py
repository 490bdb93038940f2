"""The CPU engine with its matrices rounded to fewer bits, in memory: as an FP8 or an INT4 engine holds them.

It says so by SGLang's route, and refuses full weights. `python -m tests.fakes.rounded_engine FOLDER PORT fp8|int4`.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from clawstream.inference.service import CommandResult
from clawstream.local.engine import server
from clawstream.local.engine.backend import CpuBackend
from clawstream.local.engine.model import RowModel

FP8 = torch.float8_e4m3fn
GROUP, LARGEST = 32, 7  # of INT4: numbers that share a scale, and the largest multiple of it
BITS = sys.argv[3] if len(sys.argv) > 3 else "fp8"


def fp8(weight_OI: Tensor) -> Tensor:
    """Return the weights, each the nearest that FP8 (E4M3) has of its row's scale."""
    scale_O1 = (weight_OI.abs().amax(1, keepdim=True) / torch.finfo(FP8).max).clamp(min=1e-12)
    return (weight_OI / scale_O1).to(FP8).to(weight_OI.dtype).mul(scale_O1)


def int4(weight_OI: Tensor) -> Tensor:
    """Return the weights, each the nearest of 15 multiples of its group's scale."""
    groups_NG = weight_OI.reshape(-1, GROUP)
    scale_N1 = (groups_NG.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12)
    return (groups_NG / scale_N1).round().mul(scale_N1).reshape(weight_OI.shape)


class RoundedModel(RowModel):
    """A model whose layers' matrices are rounded; its head and its embeddings are not."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        for name, layer in self.module.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                with torch.no_grad():
                    layer.weight.copy_({"fp8": fp8, "int4": int4}[BITS](layer.weight))


class RoundedBackend(CpuBackend):
    """The backend of such a model."""

    def server_info(self) -> dict[str, object]:
        return super().server_info() | {"quantization": BITS}

    async def update_weights(self, path: str, version: str | None, *, abort_all: bool) -> CommandResult:
        del version, abort_all
        return CommandResult(success=False, message=f"{path}: the weights that are served are {BITS}")


if __name__ == "__main__":
    vars(server).update(RowModel=RoundedModel, CpuBackend=RoundedBackend)
    server.serve(sys.argv[1], port=int(sys.argv[2]))
