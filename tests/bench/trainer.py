"""How many tokens that carry loss a trainer's step computes a second, and in how much memory, arm by arm.

Each arm runs in a process of its own on one core, forward and backward over the same answers with the same weights and
loss; arms take turns, and the least CPU time of all steps counts: what else runs on the machine only adds to it. No
arm computes what a whole step has besides: log-probs of a reference and a teacher, the optimizer, the gate.
Gradients are held against the padded arm's.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tests.bench.arms import installed
from tests.bench.report import report
from tests.bench.trainer_arm import main
from tests.bench.trainer_shapes import Shape, answers, build

TRL = "1.16.0"
EQUAL = {  # each of theirs, and the arm of ours that computes the same of each answer
    "padded": "ours_logprobs",
    "logits_to_keep": "ours_logprobs",
    "one_row": "ours_logprobs",
    "one_row_entropies": "ours_shared",
    "trl": "ours_shared",
}
OURS = ("ours_head", "ours_packed", "ours_logprobs", "ours_shared", "ours_recomputed")
ROWS = ("padded", "one_row", "one_row_entropies", "ours_packed", "ours_logprobs", "ours_shared")
ARMS = {
    "sessions": (*EQUAL, *OURS),
    "several": ROWS,
    "one_agent": ROWS,
    "forks": ROWS,
    "single": (*EQUAL, *OURS),
    "rendered_again": ROWS,
}
ROOT = Path(__file__).parents[2]
WITHIN_S = 900.0
FAR = 5.0  # times the quickest arm's CPU time: what else runs on the machine changes no such place
WORDS = {
    "padded": "transformers, a row for each turn, filled up to the longest of the batch, all logits; log-probs",
    "logits_to_keep": "the same, logits of the responses alone",
    "one_row": "transformers, a row for each conversation (a branch is one), right-padded to the longest of the pass, "
    "logits under the response mask alone; log-probs",
    "one_row_entropies": "the same, and entropies",
    "trl": f"TRL {TRL}, GRPOTrainer's log-probs and entropies under its fused head, which scores every place on a CPU",
    "ours_head": "padded rows, the head in pieces and on responses alone; log-probs and entropies",
    "ours_packed": "and in one row without padding, nothing shared",
    "ours_shared": "and what answers begin with alike once: as the trainer does it",
    "ours_logprobs": "the same without entropies",
    "ours_recomputed": "ours_shared with gradient_checkpointing",
}


def trainer(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    lengths_by: Annotated[int, typer.Option(min=1, help="All lengths, and a pass's budget, are divided by it.")] = 10,
    width_by: Annotated[
        int, typer.Option(min=1, help="So are width and vocabulary by this; 1: 1,024 and 151,936.")
    ] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, help="In each all arms take their turn, but those far from the quickest in the first.")
    ] = 3,
    loads: Annotated[str, typer.Option()] = ",".join(ARMS),
    arms: Annotated[str, typer.Option()] = ",".join((*EQUAL, *OURS)),
    device: Annotated[str, typer.Option(help="cuda: tokens/s, MFU and memory of --shapes instead.")] = "cpu",
    shapes: Annotated[str, typer.Option()] = "qwen3-0.6b,qwen3-1.7b,qwen3-4b",
) -> None:
    """Loss-carrying tokens a second and peak memory of a step, against rows of turns, rows of sessions, and TRL."""
    if device != "cpu" or "tiny" in shapes:
        from tests.bench.trainer_mfu import utilization
        from tests.parts.training.parallel.cuda_on_cpu import cuda_on_cpu

        figures: dict[str, Any] = {}
        for figures in utilization(device, shapes.split(","), around=cuda_on_cpu):
            if json_file is not None:  # what was measured is there, whatever becomes of the next
                json_file.write_text(json.dumps(figures))
        report(figures, json_file)
        return
    figures = {
        "command": "python -m tests.bench " + " ".join(sys.argv[1:]),
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"trl": TRL},
        "arms_are": {name: WORDS[name] for name in arms.split(",")},
    }
    shape = Shape(lengths_by, width_by)
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder) / "model", shape)
        figures["shape"] = {**built, **shape._asdict(), "pass_tokens": shape.budget_tokens, "threads": 1}
        for load in loads.split(","):
            measured = _measured(Path(folder), load, shape, rounds, [a for a in ARMS[load] if a in arms.split(",")])
            figures[load] = {"arms": measured} | _ratios(measured, load)
    report(figures, json_file)


def _measured(folder: Path, load: str, shape: Shape, rounds: int, arms: Sequence[str]) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for number in range(rounds):
        least = min((runs[0]["cpu_s"] for runs in found.values() if runs), default=0.0)
        for arm in [a for a in arms if number == 0 or found[a][0]["cpu_s"] < FAR * least]:
            found[arm].append(_run(folder, arm, load, shape))
            typer.echo(f"load={load} round={number} arm={arm} {found[arm][-1]}", err=True)
    num_tokens = sum(len(a.response_ids) for a in answers(load, shape))
    gradients = {arm: torch.load(folder / f"{arm}.pt") for arm in arms}
    return {
        arm: {
            "tokens_per_cpu_s": round(num_tokens / min(one["cpu_s"] for one in runs), 2),
            "tokens_per_s": [round(num_tokens / one["wall_s"], 2) for one in runs],
            "cpu_s": [round(one["cpu_s"], 2) for one in runs],
            "peak_gb": round(max(one["peak_bytes"] for one in runs) / 1e9, 2),
            "computed_tokens": runs[0]["num_computed_tokens"],
            "passes": runs[0]["passes"],
            "gradient_differs_by": _difference(gradients[arm], gradients[arms[0]]),
        }
        for arm, runs in found.items()
    }


def _run(folder: Path, arm: str, load: str, shape: Shape) -> dict[str, float]:
    gradient_file = folder / f"{arm}.pt"
    if arm == "trl":
        same = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers")]
        python = str(installed(f"trl-{TRL}", f"trl=={TRL}", *same) / "python")
        command = [python, "-m", "tests.bench.trainer_arm", arm, load, *map(str, shape)]
        command += [str(folder / "model"), str(gradient_file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1"}
        subprocess.run(command, check=True, timeout=WITHIN_S, stdout=sys.stderr, cwd=ROOT, env=environment)
    else:  # forked off a process that has imported all and done nothing
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["clawstream.training.torch_model", "tests.bench.trainer_arm"])
        process = processes.Process(target=main, args=(arm, load, shape, folder / "model", gradient_file))
        process.start()
        process.join(WITHIN_S)
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError(f"arm {arm}, load {load}: exit status {process.exitcode} within {WITHIN_S:.0f} s")
    said: dict[str, float] = json.loads(gradient_file.with_suffix(".json").read_text())
    return said


def _difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return how long the difference of two gradients is, as a share of one of them."""
    apart = sum(float((found[name] - value).double().square().sum()) for name, value in expected.items())
    return float((apart / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5)


def _ratios(arms: Mapping[str, Mapping[str, Any]], load: str) -> dict[str, Any]:
    """Return how ours compares with each of theirs at equal work, and what sharing gives of what it could."""
    rate = {arm: figures["tokens_per_cpu_s"] for arm, figures in arms.items()}
    found: dict[str, Any] = {"largest_gradient_difference": max(a["gradient_differs_by"] for a in arms.values())}
    both = [(arm, ours) for arm, ours in EQUAL.items() if arm in rate and ours in rate]
    found |= {f"ratio_vs_{arm}": round(rate[ours] / rate[arm], 2) for arm, ours in both}
    if "ours_packed" in rate and "ours_shared" in rate and load != "single":
        of_tokens = arms["ours_packed"]["computed_tokens"] / arms["ours_shared"]["computed_tokens"]
        found["token_ratio"] = round(of_tokens, 2)
        found["sharing_gives"] = round(rate["ours_shared"] / rate["ours_packed"], 2)
        found["sharing_gives_of_token_ratio"] = round(rate["ours_shared"] / rate["ours_packed"] / of_tokens, 2)
    return found
