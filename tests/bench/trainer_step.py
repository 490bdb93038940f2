"""How long a step of the trainer takes and what memory it needs on a GPU, part by part, with the gate."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from clawstream.config import TrainingSettings
from clawstream.errors import StepRefused
from clawstream.events import SampleAssembled, float32
from clawstream.training.gating import WRITES_EVERY, Gate
from clawstream.training.model import Model
from clawstream.training.step.trainer import Trainer
from tests.parts.training import tiny

# The parts of a step, in their order; the gate's are `looks_ahead` and `lets_out`.
PARTS = {
    "scores": (Trainer, "_score"),
    "passes": (Trainer, "_accumulate"),
    "looks_ahead": (Gate, "look_ahead"),
    "optimizer": (Trainer, "_step"),
    "lets_out": (Gate, "let_out"),
}


def step(folder: Path, model: Model, settings: TrainingSettings, samples: Sequence[SampleAssembled]) -> dict[str, Any]:
    """Return seconds and, on a GPU, memory of a step of this model: of the second, when moments are there."""
    trainer = Trainer(folder, settings, model=model)
    trainer.update(samples, version=1, seed=1)
    held_gb = _gb(model, torch.cuda.memory_allocated)
    parts: dict[str, dict[str, float | None]] = {}
    began_s = time.perf_counter()
    refused = None  # what random answers teach may be, and then the gate writes no answers
    with _noting(model, parts):
        try:
            trainer.update(samples, version=WRITES_EVERY, seed=2, gated=True)  # such a version's gate writes answers
        except StepRefused as why:
            refused = str(why)
    seconds = round(time.perf_counter() - began_s, 2)
    reserved_gb = _gb(model, torch.cuda.max_memory_reserved)
    return {
        "seconds": seconds, "held_gb": held_gb, "reserved_gb": reserved_gb, "refused": refused, "parts": parts,
    }  # fmt: skip


def answered(count: int, *, prompt_tokens: int, response_tokens: int, logp_nats: float) -> list[SampleAssembled]:
    """Return answers, some with a reward and some with a hint, given by a model that found each token so likely."""
    samples = [
        tiny.sample(
            f"s{n}", reward=(1, -1, None)[n % 3], hinted=n % 3 == 2 or n % 2 == 0,
            prompt_tokens=prompt_tokens, response_tokens=response_tokens,
        )
        for n in range(count)
    ]  # fmt: skip
    return [replace(sample, response_logprobs=float32([logp_nats] * response_tokens)) for sample in samples]


@contextmanager
def _noting(model: Model, found: dict[str, dict[str, float | None]]) -> Iterator[None]:
    """Note of each part of a step that is taken in the block its seconds, and the most memory that tensors had."""

    def noted(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def measured(*args: Any, **options: Any) -> Any:
            if model.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began_s = time.perf_counter()
            try:
                return work(*args, **options)
            finally:
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds = round(time.perf_counter() - began_s, 3)
                found[part] = {"seconds": seconds, "peak_gb": _gb(model, torch.cuda.max_memory_allocated)}

        return measured

    with pytest.MonkeyPatch.context() as patch:
        for part, (owner, name) in PARTS.items():
            patch.setattr(owner, name, noted(part, getattr(owner, name)))
        yield


def _gb(model: Model, count: Callable[[], int]) -> float | None:
    return round(count() / 1e9, 2) if model.device.type == "cuda" else None
