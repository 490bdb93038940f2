"""On GPUs every trainer takes the step that one process takes on a CPU, in half precision but for its rounding.

Run with `pytest -m gpu`; all other tests see no GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clawstream.config import TrainingSettings
from clawstream.training.processes import Processes, Start
from clawstream.training.step.trainer import StepSummary, Trainer
from clawstream.training.stepping import Team
from tests.parts.training.parallel.cuda_on_cpu import cuda_on_cpu
from tests.parts.training.parallel.test_precision import AGAIN, HALF, PARAMETRISATIONS, moved
from tests.parts.training.parallel.test_trainers import CUTS, METHODS, MIXED, same, settings_of, step, values

DEVICE = "cuda"
GAIN_NATS = 0.1  # of up to 9 tokens, each of whose log-probs half precision may move by 0.04; seen on an H100: 0.07
ONE = {"trainer": "megatron", "processes": 1}

CUT = pytest.mark.parametrize("cut", [pytest.param({}, id="torch"), pytest.param(ONE, id="one"), *CUTS])
METHOD = pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU is here"),
]


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int], Processes]]:
    """Start so many processes, each with a GPU of its own, or take those that a test before used."""
    found: dict[int, Processes] = {}

    def of(count: int) -> Processes:
        if count not in found or not found[count].pids:  # those of a test that failed have ended
            found[count] = Processes(count, Start(backend="nccl" if DEVICE == "cuda" else "gloo", around=cuda_on_cpu))
        return found[count]

    yield of
    for processes in found.values():
        processes.close()


def trained_by(base: Path, settings: TrainingSettings, started: Callable[[int], Processes]) -> Trainer | Team:
    """One process' trainer, or a team with a GPU for each of its processes."""
    if settings.is_alone:
        return Trainer(base, settings, device=DEVICE)
    if DEVICE == "cuda" and torch.cuda.device_count() < settings.processes:
        pytest.skip(f"{settings.processes} processes need a GPU each, and {torch.cuda.device_count()} are here")
    return Team(base, settings, device=DEVICE, processes=started(settings.processes))


def gained(update: StepSummary) -> torch.Tensor:
    return torch.tensor([one.gain_nats for one in update.followed])


def in_small(update: StepSummary) -> torch.Tensor:
    """The figures but for gains, which are sums over an answer's tokens."""
    return torch.tensor([v for v in values(replace(update, followed=())) if v is not None])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how long the difference of two moves is, as a share of the other."""
    return float((one - other).norm() / other.norm())


@PARAMETRISATIONS
@METHOD
@CUT
def test_a_step_on_gpus_is_that_of_a_cpu(
    base: Path, started: Callable[[int], Processes], tmp_path: Path, cut: dict[str, object],
    method: dict[str, object], trained: dict[str, object],
) -> None:  # fmt: skip
    gpus = trained_by(base, settings_of(method | trained | cut), started)
    alone = Trainer(base, settings_of(method | trained))
    name = method["method"]
    step(alone, tmp_path / "start", MIXED, 1, method=name)  # before it half of an adapter has no gradient
    gpus.restore(tmp_path / "start")

    same(*(step(who, tmp_path / to, MIXED, 2, method=name) for who, to in ((gpus, "gpus"), (alone, "alone"))))

    moves = [moved(tmp_path / "start", tmp_path / to) for to in ("gpus", "alone")]
    assert apart(*moves) < 1e-3


@PARAMETRISATIONS
@METHOD
@CUT
def test_a_step_in_half_precision_on_gpus_is_as_near_to_the_exact_one_as_that_of_a_cpu(
    base: Path, started: Callable[[int], Processes], tmp_path: Path, cut: dict[str, object],
    method: dict[str, object], trained: dict[str, object],
) -> None:  # fmt: skip
    """Not as near to that of a CPU: a number that has no moments yet moves by its gradient's sign, and the sign of a
    gradient near 0 is a matter of rounding. So both may be as far from each other as from the exact step.
    """
    gpus = trained_by(base, settings_of(method | trained | HALF | AGAIN | cut), started)
    exact, half = (Trainer(base, settings_of(method | trained | more)) for more in ({}, HALF))
    name = method["method"]
    step(exact, tmp_path / "start", MIXED, 1, method=name)
    for who in (gpus, half):
        who.restore(tmp_path / "start")

    whos: dict[str, Trainer | Team] = {"gpus": gpus, "half": half, "exact": exact}
    updates = {to: step(who, tmp_path / to, MIXED, 2, method=name) for to, who in whos.items()}

    assert [value is None for value in values(updates["gpus"])] == [value is None for value in values(updates["half"])]
    figures, gains = ([part(updates[to]) for to in ("gpus", "half")] for part in (in_small, gained))
    torch.testing.assert_close(*figures, rtol=0.05, atol=5e-3)
    torch.testing.assert_close(*gains, rtol=0, atol=GAIN_NATS)
    moves = {to: moved(tmp_path / "start", tmp_path / to) for to in whos}
    assert apart(moves["gpus"], moves["exact"]) < 1.5 * apart(moves["half"], moves["exact"])
