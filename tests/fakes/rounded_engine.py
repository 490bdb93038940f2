"""The CPU engine with its matrices rounded to FP8 (E4M3, a scale for each row), as SGLang's `--quantization fp8` does.

It says so by SGLang's route, and refuses full weights. `python -m tests.fakes.rounded_engine FOLDER PORT`.
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


def rounded(weight_OI: Tensor) -> Tensor:
    """Return the weights, each the nearest that FP8 has of its row's scale."""
    scale_O1 = (weight_OI.abs().amax(1, keepdim=True) / torch.finfo(FP8).max).clamp(min=1e-12)
    return (weight_OI / scale_O1).to(FP8).to(weight_OI.dtype).mul(scale_O1)


class RoundedModel(RowModel):
    """A model whose layers' matrices are rounded; its head and its embeddings are not."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        head = self.module.get_output_embeddings()  # type: ignore[operator]
        for layer in self.module.modules():
            if isinstance(layer, nn.Linear) and layer is not head:
                with torch.no_grad():
                    layer.weight.copy_(rounded(layer.weight))


class RoundedBackend(CpuBackend):
    """The backend of such a model."""

    def server_info(self) -> dict[str, object]:
        return super().server_info() | {"quantization": "fp8"}

    async def update_weights(self, path: str, version: str | None, *, abort_all: bool) -> CommandResult:
        del version, abort_all
        return CommandResult(success=False, message=f"{path}: the weights that are served have 8 bits")


if __name__ == "__main__":
    vars(server).update(RowModel=RoundedModel, CpuBackend=RoundedBackend)
    server.serve(sys.argv[1], port=int(sys.argv[2]))
