"""One arm of `python -m tests.bench trainer`, in a process of its own: forward and backward over all answers.

    python -m tests.bench.trainer_arm ARM LOAD LENGTHS_DIVIDED_BY WIDTH_DIVIDED_BY MODEL_FOLDER GRADIENT_FILE

writes the gradient, and beside it {"cpu_s", "wall_s", "peak_bytes", "passes", "num_computed_tokens"}. What is not ours
runs without this package's dependencies: the arm `trl` in an environment of TRL's own.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tests.bench.trainer_shapes import (
    Answer,
    Shape,
    answers,
    conversations,
    left_padded,
    loss,
    response_masked,
    sampled_gradient,
)

STEPS_CPU_S = 2.0  # quick steps are taken again until they took so long together; the least counts

Passes = Callable[[Sequence[Answer]], Iterator[tuple[Tensor, Sequence[Answer], int]]]  # log-probs, whose, tokens


class Work(NamedTuple):
    """What an arm does with a list of answers."""

    parameters: dict[str, nn.Parameter]
    passes: Passes


def main(arm: str, load: str, shape: Shape, folder: Path, gradient_file: Path) -> None:
    """Write the gradient of the load's loss by one arm, and beside it what it took."""
    torch.set_num_threads(1)
    budget_tokens = shape.budget_tokens
    work = _ours(arm, folder, budget_tokens) if arm.startswith("ours") else _theirs(arm, folder, budget_tokens)
    some = answers(load, shape)
    _backward(work, [Answer((1, 2, 3), (4, 5), 1.0)])  # what is made at first use is made
    steps: list[tuple[float, float]] = []  # CPU and wall seconds
    while sum(cpu_s for cpu_s, _ in steps) < STEPS_CPU_S:
        for parameter in work.parameters.values():
            parameter.grad = None
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        passes, num_tokens = _backward(work, some)
        steps.append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    cpu_s, wall_s = min(steps)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.save(sampled_gradient(work.parameters), gradient_file)
    said = {"cpu_s": cpu_s, "wall_s": wall_s, "peak_bytes": peak_bytes}
    said |= {"passes": passes, "num_computed_tokens": num_tokens}
    gradient_file.with_suffix(".json").write_text(json.dumps(said))


def _backward(work: Work, some: Sequence[Answer]) -> tuple[int, int]:
    passes = num_tokens = 0
    for logp_BT, whose, tokens in work.passes(some):
        loss(logp_BT, torch.tensor([a.advantage for a in whose])).backward()  # type: ignore[no-untyped-call]
        passes, num_tokens = passes + 1, num_tokens + tokens
    return passes, num_tokens


def _ours(arm: str, folder: Path, budget_tokens: int) -> Work:
    from clawstream.training import torch_model
    from clawstream.training.step import packing
    from clawstream.training.step.losses import Suffix
    from clawstream.training.torch_model import TorchModel

    if arm == "ours_head":
        torch_model.FAMILIES = frozenset()
    elif arm == "ours_packed":
        packing.num_shared = lambda one, other: 0  # noqa: ARG005  of the same names as what it stands for
    model = TorchModel.load(folder, recompute_layers=arm == "ours_recomputed")

    def passes(some: Sequence[Answer]) -> Iterator[tuple[Tensor, Sequence[Answer], int]]:
        suffixes = [Suffix(a.prompt_ids, a.response_ids, 1.0) for a in some]
        for group in model.groups(suffixes, budget_tokens=budget_tokens):
            chosen = [suffixes[i] for i in group]
            read = [s.read_ids for s in chosen]
            tokens = len(packing.pack(read).ids) if model.packs else len(read) * max(map(len, read))
            logp_BT = model.logprobs(chosen) if arm == "ours_logprobs" else model.token_scores(chosen).logp_BT
            yield logp_BT, [some[i] for i in group], tokens

    return Work(model.trained, passes)


def _theirs(arm: str, folder: Path, budget_tokens: int) -> Work:
    core: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if arm.startswith("one_row"):
        passes = _of_conversations(core, budget_tokens, entropies=arm == "one_row_entropies")
    else:
        passes = _of_turns({"padded": _padded, "logits_to_keep": _kept, "trl": _trl}[arm](core), budget_tokens)
    return Work(dict(core.named_parameters()), passes)


def _of_conversations(core: Any, budget_tokens: int, *, entropies: bool) -> Passes:
    from clawstream.training.step.packing import micro_batches

    def passes(some: Sequence[Answer]) -> Iterator[tuple[Tensor, Sequence[Answer], int]]:
        rows = conversations(some)
        for group in micro_batches([len(row.ids) for row in rows], budget_tokens=budget_tokens):
            chosen = [rows[i] for i in group]
            whose = [some[i] for row in chosen for i in row.answers]
            ids_BL, mask_BL = response_masked(chosen, some)
            # Padding stands to the right of all that is scored, where a causal model can't see it.
            hidden_BLH = core.model(input_ids=ids_BL, use_cache=False).last_hidden_state
            logp_NV = core.lm_head(hidden_BLH[:, :-1][mask_BL[:, 1:]]).log_softmax(-1)
            if entropies:
                with torch.no_grad():
                    -(logp_NV.exp() * logp_NV).sum(-1)
            logp_N = logp_NV.gather(-1, ids_BL[mask_BL].unsqueeze(-1)).squeeze(-1)
            of_each = torch.split(logp_N, [len(a.response_ids) for a in whose])
            yield pad_sequence(list(of_each), batch_first=True, padding_value=torch.nan), whose, ids_BL.numel()

    return passes


OfRows = Callable[[Tensor, Tensor, int], Tensor]


def _of_turns(of_rows: OfRows, budget_tokens: int) -> Passes:
    def passes(some: Sequence[Answer]) -> Iterator[tuple[Tensor, Sequence[Answer], int]]:
        prompt_tokens = max(len(a.prompt_ids) for a in some)  # of the whole batch, as TRL's trainer fills up
        rows = max(1, budget_tokens // (prompt_tokens + max(len(a.response_ids) for a in some)))
        for start in range(0, len(some), rows):
            chosen = some[start : start + rows]
            ids_BL, mask_BL = left_padded(chosen, prompt_tokens)
            logp_BT = of_rows(ids_BL, mask_BL, ids_BL.shape[1] - prompt_tokens)
            yield logp_BT.masked_fill(mask_BL[:, prompt_tokens:] == 0, torch.nan), chosen, ids_BL.numel()

    return passes


def _padded(core: Any) -> OfRows:
    def of_rows(ids_BL: Tensor, mask_BL: Tensor, num_kept: int) -> Tensor:
        logits = core(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits[:, -num_kept - 1 : -1]
        return _chosen(logits, ids_BL[:, -num_kept:])

    return of_rows


def _kept(core: Any) -> OfRows:
    def of_rows(ids_BL: Tensor, mask_BL: Tensor, num_kept: int) -> Tensor:
        output = core(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False, logits_to_keep=num_kept + 1)
        return _chosen(output.logits[:, :-1], ids_BL[:, -num_kept:])

    return of_rows


def _chosen(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    return logits_BTV.log_softmax(-1).gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)


def _trl(core: Any) -> OfRows:
    from accelerate import Accelerator
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    # As the trainer's __init__ does; the method itself reads nothing else of the trainer.
    add_fused_lm_head(core, temperature=1.0, outputs=("log_probs", "entropy"))
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True))

    def of_rows(ids_BL: Tensor, mask_BL: Tensor, num_kept: int) -> Tensor:
        logp_BT: Tensor
        logp_BT, *_ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, core, ids_BL, mask_BL, num_kept, compute_entropy=True
        )
        return logp_BT

    return of_rows


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Shape(*map(int, sys.argv[3:5])), Path(sys.argv[5]), Path(sys.argv[6]))
