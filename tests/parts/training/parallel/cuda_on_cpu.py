"""Lets Megatron-Core run where there is no GPU: what it puts on `cuda` lands in main memory. For tests alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Have `cuda` mean the CPU, in this thread; nothing changes where there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    cpu = torch.device("cpu")
    with (
        patch("torch.cuda.current_device", lambda: cpu),
        patch("torch.cuda.synchronize", lambda: None),
        _OnCpu(),
    ):
        yield
