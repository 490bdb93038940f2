"""Tokens a second, and which share of a GPU's peak a step uses, for the shapes of Qwen3 with random weights.

Trained by torch, whole and by an adapter, and whole by Megatron-Core in a process of its own, as its trainer does it.

Counted are the passes that carry loss: 6 operations for each number that a token is multiplied by (4 where it is frozen
under an adapter: no gradient of it is computed), the head for response tokens alone, and causal attention; neither
padding nor what is computed again. A pass is forward and backward of one pack. After the passes the same model takes
steps of the trainer, the optimizer's and the gate's part included: `trainer_step`.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from importlib.metadata import version
from math import log
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawstream.config import TrainingSettings
from clawstream.training.model import Model
from clawstream.training.processes import Processes, Start
from clawstream.training.step.losses import Suffix
from clawstream.training.torch_model import TorchModel
from tests.bench.qwen3_sizes import SIZES, Size
from tests.bench.trainer_shapes import loss
from tests.bench.trainer_step import answered, step

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12}  # bfloat16, dense, as NVIDIA's data sheets say
LORA_RANK = 16
PASSES = 5
WITHIN_S = 30.0  # of passes for each row, of which there are nine: 8 minutes are to hold all


def utilization(
    device: str, shapes: Sequence[str], *, around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[dict[str, Any]]:
    """Yield the rows so far after each, of a shape and a trainer; `around` is what Megatron's process does all in."""
    device_name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in device_name), None)
    rows: list[dict[str, Any]] = []

    def with_row(row: dict[str, Any]) -> dict[str, Any]:
        typer.echo(row, err=True)
        rows.append(row)
        versions = {name: version(name) for name in ("torch", "transformers")}
        return {"device": device_name, "peak_flops": peak, "versions": versions, "rows": rows}

    for shape in shapes:
        with tempfile.TemporaryDirectory() as name_of_folder:
            folder = Path(name_of_folder)
            _write(folder, SIZES[shape], device)
            for rank in (None, LORA_RANK):
                yield with_row(_row(folder, shape, "torch", rank, device, peak))
            _let_go(device)
            backend = "nccl" if device.startswith("cuda") else "gloo"
            with closing(Processes(1, Start(backend=backend, around=around))) as process:
                yield with_row(process.ask(f"{__name__}:megatron_row", folder, shape, device, peak)[0])


def megatron_row(_state: dict[str, Any], folder: Path, shape: str, device: str, peak: float | None) -> dict[str, Any]:
    """Return the row of all weights by Megatron-Core."""
    return _row(folder, shape, "megatron", None, device, peak)


def _row(
    folder: Path, shape: str, trainer: str, lora_rank: int | None, device: str, peak: float | None
) -> dict[str, Any]:
    _let_go(device)
    row: dict[str, Any] = {"shape": shape, "trainer": trainer, "lora_rank": lora_rank}
    size = SIZES[shape]
    try:
        model = _loader(trainer)(
            folder, lora_rank=lora_rank, device=device, dtype=torch.bfloat16, recompute_layers=True
        )
        row |= _passes(model, size, device, peak, adapter=lora_rank is not None)
        settings = TrainingSettings(
            trainer=trainer, lora_rank=lora_rank, dtype="bfloat16", gradient_checkpointing=True,
        )  # fmt: skip
        samples = answered(
            size.answers, prompt_tokens=size.prompt_tokens, response_tokens=size.response_tokens,
            logp_nats=-log(size.vocabulary),
        )  # fmt: skip
        row["step"] = step(folder, model, settings, samples)
    except torch.OutOfMemoryError as error:
        row["error"] = str(error)
    return row


def _passes(model: Model, size: Size, device: str, peak: float | None, *, adapter: bool) -> dict[str, Any]:
    suffixes = [
        Suffix(_ids(size, n, size.prompt_tokens), _ids(size, n + 1, size.response_tokens), 1.0)
        for n in range(size.answers)
    ]
    seconds = _seconds(model, suffixes, torch.ones(size.answers, device=device), device)
    return {
        "tokens_per_s": round(size.answers * (size.prompt_tokens + size.response_tokens) / seconds, 1),
        "loss_tokens_per_s": round(size.answers * size.response_tokens / seconds, 1),
        "mfu": None if peak is None else round(operations(size, adapter=adapter) / seconds / peak, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.startswith("cuda") else None,
    }


def _let_go(device: str) -> None:
    """Give back what the row before held; else this one's peak would count it."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # another process may need the room
        torch.cuda.reset_peak_memory_stats()


def operations(size: Size, *, adapter: bool) -> float:
    """Return the floating-point operations of a pass that carries loss, forward and backward."""
    num_tokens = size.answers * (size.prompt_tokens + size.response_tokens - 1)
    of_heads, of_key_values = 128 * size.heads, 128 * size.key_value_heads
    layer = size.width * (2 * of_heads + 2 * of_key_values + 3 * size.feed_forward)
    multiplied = num_tokens * layer * size.layers
    multiplied += size.answers * size.response_tokens * size.width * size.vocabulary
    length = size.prompt_tokens + size.response_tokens - 1
    pairs = size.answers * length * (length + 1) / 2
    return (4 if adapter else 6) * multiplied + 3 * 4 * of_heads * pairs * size.layers


def _loader(trainer: str) -> Callable[..., Model]:
    if trainer == "torch":
        return TorchModel.load
    from clawstream.training.megatron.model import MegatronModel, join
    from clawstream.training.megatron.shape import Sizes

    sizes = Sizes(processes=1)
    join(sizes)
    return partial(MegatronModel.load, sizes=sizes)


def _write(folder: Path, size: Size, device: str) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.key_value_heads,
        head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        core = Qwen3ForCausalLM(config)
    core.bfloat16().save_pretrained(folder)


def _ids(size: Size, seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(size.vocabulary, (count,), generator=generator)]


def _seconds(model: Model, suffixes: Sequence[Suffix], advantage_B: torch.Tensor, device: str) -> float:
    """Return how long a pass takes, the median of some after two that are not counted."""

    def total_of(_group: Sequence[int]) -> torch.Tensor:
        return loss(model.token_scores(suffixes).logp_BT, advantage_B)

    taken: list[float] = []
    until = time.perf_counter() + WITHIN_S
    while len(taken) < PASSES + 2 and (len(taken) < 3 or time.perf_counter() < until):
        began = time.perf_counter()
        for parameter in model.trained.values():
            parameter.grad = None
        model.accumulate([range(len(suffixes))], suffixes, total_of)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return sorted(taken[2:])[len(taken[2:]) // 2]
