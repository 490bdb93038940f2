"""Copies of a model that share a batch also share its moments and the writing, over any sizes; four processes."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import distributed as dist

from clawstream.config import TrainingSettings
from clawstream.inference.model_folder import STATE_FOLDER
from clawstream.training.base_folder import tensors_of
from clawstream.training.processes import Processes
from clawstream.training.step.trainer import Trainer
from clawstream.training.stepping import Team
from tests.parts.training.parallel.conftest import QUESTIONS, forked_processes
from tests.parts.training.parallel.test_trainers import MIXED, same, settings_of, state, step, weights

pytestmark = pytest.mark.timeout(300)  # the processes' first imports take half a minute on a busy machine

FOUR = {"trainer": "megatron", "processes": 4, "gate": False}
CUTS: list[dict[str, object]] = [
    FOUR,
    FOUR | {"tensor_parallel": 2},
    FOUR | {"pipeline_parallel": 2},
]


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    """Four processes that know each other."""
    processes = forked_processes(4)
    yield processes
    processes.close()


def decaying(changes: dict[str, object]) -> TrainingSettings:
    """Matrices alone are pulled towards 0, whatever shape the optimizer is given them in."""
    return settings_of(changes).model_copy(update={"learning_rate": 5e-3})


@pytest.mark.slow  # CI alone installs the extra `megatron`
def test_a_weight_that_would_not_move_with_its_part_is_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns of what is not installed
        from clawstream.training.megatron.reducing import part

    copies = cast("dist.ProcessGroup", SimpleNamespace(size=lambda: 2, rank=lambda: 1))
    weight = torch.zeros(3, 4)
    part(weight, copies).fill_(1.0)
    assert weight.sum() == 6
    with pytest.raises(RuntimeError, match="view"):
        part(weight.t(), copies)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4], ids=["all weights", "adapter"])
def test_each_copy_keeps_its_part_of_the_moments_whoever_wrote_them(
    base: Path, four: Processes, tmp_path: Path, lora_rank: int | None
) -> None:
    """The policy goes through the hands of trainers of all sizes, and one that is whole."""
    settings: dict[str, object] = {"lora_rank": lora_rank, "method": "stepwise"}
    alone = Trainer(base, decaying(settings))
    step(alone, tmp_path / "0", MIXED, 1, method="stepwise")
    for number, cut in enumerate(CUTS):
        team = Team(base, decaying(settings | cut), device="cpu", processes=four)
        team.restore(tmp_path / str(number))
        assert_shared(four)
        for said in four.ask(f"{QUESTIONS}:refused_step", MIXED, number + 2):
            assert "the norm of the gradient is nan" in said

        expected = step(alone, tmp_path / f"alone{number}", MIXED, number + 2, method="stepwise")
        same(step(team, tmp_path / str(number + 1), MIXED, number + 2, method="stepwise"), expected)

        assert_shared(four)
        assert_each_wrote_a_part(tmp_path / str(number + 1))
        assert_same_files(tmp_path / str(number + 1), tmp_path / f"alone{number}")
    again = Trainer(base, decaying(settings))
    again.restore(tmp_path / "3")
    same(
        step(again, tmp_path / "4", MIXED, 5, method="stepwise"),
        step(alone, tmp_path / "alone4", MIXED, 5, method="stepwise"),
    )
    assert_same_files(tmp_path / "4", tmp_path / "alone4")


def assert_shared(processes: Processes) -> None:
    """Assert that copies hold all moments of their weights once, and each as many as another."""
    answers = processes.ask(f"{QUESTIONS}:moments_bytes")
    for copies, moments_bytes, whole_bytes in answers:
        assert len(copies) > 1
        assert sum(answers[rank][1] for rank in copies) == whole_bytes
        assert moments_bytes <= 1.2 * whole_bytes / len(copies)


def assert_each_wrote_a_part(folder: Path) -> None:
    """Assert that each moment is in one file, and no file has most of them."""
    files = sorted((folder / STATE_FOLDER).glob("optimizer*"))
    assert len(files) == 4
    names = [name for name, _ in tensors_of(files)]
    assert len(names) == len(set(names))
    assert max(file.stat().st_size for file in files) < 0.6 * sum(file.stat().st_size for file in files)


def assert_same_files(found: Path, expected: Path) -> None:
    """Assert that both have the same weights and moments."""
    for mine, its in ((weights(found), weights(expected)), (state(found), state(expected))):
        assert mine.keys() == its.keys()
        for name, value in its.items():
            # Squared gradients are tiny.
            atol = 1e-3 * float(value.abs().max()) if name.startswith("optimizer/") else 1e-4
            torch.testing.assert_close(mine[name], value, atol=atol, rtol=0)
