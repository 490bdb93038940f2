"""On GPUs, in half precision, every trainer takes the step that one process takes by it on a CPU.

Run with `pytest -m gpu`; all other tests see no GPU. It was never run on one yet, only with `DEVICE` as "cpu".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from clawstream.training.processes import Processes, Start, Team
from clawstream.training.step.trainer import Trainer
from tests.parts.training.parallel.cuda_on_cpu import cuda_on_cpu
from tests.parts.training.parallel.test_precision import AGAIN, HALF, PARAMETRISATIONS, moved
from tests.parts.training.parallel.test_trainers import CUTS, METHODS, MIXED, settings_of, step, values

DEVICE = "cuda"
ONE = {"trainer": "megatron", "processes": 1}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU is here"),
]


@contextmanager
def trained_by(base: Path, changes: dict[str, object]) -> Iterator[Trainer | Team]:
    """One process' trainer, or a team with a GPU for each of its processes."""
    settings = settings_of(changes)
    if settings.is_alone:
        yield Trainer(base, settings, device=DEVICE)
        return
    if DEVICE == "cuda" and torch.cuda.device_count() < settings.processes:
        pytest.skip(f"{settings.processes} processes need a GPU each, and {torch.cuda.device_count()} are here")
    start = Start(backend="nccl" if DEVICE == "cuda" else "gloo", around=cuda_on_cpu)
    processes = Processes(settings.processes, start)
    try:
        yield Team(base, settings, device=DEVICE, processes=processes)
    finally:
        processes.close()


@PARAMETRISATIONS
@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
@pytest.mark.parametrize("cut", [pytest.param({}, id="torch"), pytest.param(ONE, id="one"), *CUTS])
def test_a_step_on_gpus_is_that_of_a_cpu(
    base: Path, tmp_path: Path, cut: dict[str, object], method: dict[str, object], trained: dict[str, object]
) -> None:
    start, alone = (Trainer(base, settings_of(method | trained | more)) for more in ({}, HALF))
    name = method["method"]
    step(start, tmp_path / "start", MIXED, 1, method=name)  # before it half of an adapter has no gradient
    alone.restore(tmp_path / "start")
    expected = step(alone, tmp_path / "alone", MIXED, 2, method=name)

    with trained_by(base, method | trained | HALF | AGAIN | cut) as gpus:
        gpus.restore(tmp_path / "start")
        found = step(gpus, tmp_path / "gpus", MIXED, 2, method=name)

    assert [value is None for value in values(found)] == [value is None for value in values(expected)]
    figures = [torch.tensor([v for v in values(one) if v is not None]) for one in (found, expected)]
    torch.testing.assert_close(figures[0], figures[1], rtol=0.05, atol=5e-3)
    moves = [moved(tmp_path / "start", tmp_path / one) for one in ("gpus", "alone")]
    assert functional.cosine_similarity(moves[0], moves[1], dim=0) > 0.99
