"""The trainer's arms, small: they compute one gradient; and the operations that a share of the peak is of."""

from pathlib import Path

import pytest
import torch

from clawstream.training import torch_model
from clawstream.training.step import packing
from tests.bench.qwen3_sizes import SIZES
from tests.bench.trainer import ARMS, _difference, _ratios
from tests.bench.trainer_arm import _backward, _ours, _theirs
from tests.bench.trainer_mfu import operations, utilization
from tests.bench.trainer_shapes import Shape, answers, build, conversations, sampled_gradient
from tests.bench.trainer_step import PARTS
from tests.parts.training.parallel.cuda_on_cpu import cuda_on_cpu

SMALL = Shape(lengths_divided_by=50, width_divided_by=8)
HERE = {arm for arms in ARMS.values() for arm in arms} - {"padded", "trl"}  # TRL has an environment of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build(folder, SMALL)
    return folder


def gradient(arm: str, load: str, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradient of a load by an arm, and how many tokens were computed."""
    make = _ours if arm.startswith("ours") else _theirs
    with pytest.MonkeyPatch.context() as patch:  # puts back what an arm that leaves an ingredient out has taken away
        patch.setattr(torch_model, "FAMILIES", torch_model.FAMILIES)
        patch.setattr(packing, "num_shared", packing.num_shared)
        work = make(arm, folder, SMALL.budget_tokens)
        _, num_tokens = _backward(work, answers(load, SMALL))
    return sampled_gradient(work.parameters), num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("load", ARMS)
def test_each_arm_computes_the_padded_arm_s_gradient(load: str, model: Path) -> None:
    expected, _ = gradient("padded", load, model)
    for arm in sorted(HERE & set(ARMS[load])):
        found, _ = gradient(arm, load, model)
        assert _difference(found, expected) < 1e-3, arm


@pytest.mark.slow
def test_an_arm_computes_as_many_tokens_as_its_ingredients_leave(model: Path) -> None:
    lengths = [60 + 8 * turn for turn in range(1, 11)]  # 3,000 and 200 + 200 by 50: what is there at a turn's end
    arms = ("padded", "one_row", "ours_packed", "ours_shared")
    assert {arm: gradient(arm, "sessions", model)[1] for arm in arms} == {
        "padded": 10 * 140,
        "one_row": 140,
        "ours_packed": sum(lengths) - 10,
        "ours_shared": 140 - 1,
    }


def test_a_row_holds_the_answers_of_one_conversation_and_each_branch_has_a_row() -> None:
    def held(load: str) -> list[tuple[int, ...]]:
        return [row.answers for row in conversations(answers(load, SMALL))]

    assert held("sessions") == [tuple(range(10))]
    assert held("several") == held("one_agent") == [(0, 1, 2), (3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14)]
    assert held("rendered_again") == [(number,) for number in range(10)]
    assert held("forks") == [(0,), (1, 2), (3, 4), (5,), (6,), (7, 8), (9,)]


def test_ratios_are_of_ours_to_theirs_at_equal_work() -> None:
    arms = {
        "padded": {"tokens_per_cpu_s": 2.0, "computed_tokens": 900, "gradient_differs_by": 0.0},
        "ours_packed": {"tokens_per_cpu_s": 4.0, "computed_tokens": 800, "gradient_differs_by": 3e-5},
        "one_row": {"tokens_per_cpu_s": 15.0, "computed_tokens": 101, "gradient_differs_by": 1e-6},
        "one_row_entropies": {"tokens_per_cpu_s": 10.0, "computed_tokens": 101, "gradient_differs_by": 1e-6},
        "ours_shared": {"tokens_per_cpu_s": 16.0, "computed_tokens": 100, "gradient_differs_by": 1e-5},
        "ours_logprobs": {"tokens_per_cpu_s": 18.0, "computed_tokens": 100, "gradient_differs_by": 1e-5},
    }
    assert _ratios(arms, "sessions") == {
        "largest_gradient_difference": 3e-5,
        "ratio_vs_padded": 9.0,
        "ratio_vs_one_row": 1.2,
        "ratio_vs_one_row_entropies": 1.6,
        "token_ratio": 8.0,
        "sharing_gives": 4.0,
        "sharing_gives_of_token_ratio": 0.5,
    }


def test_operations_are_those_of_each_product_in_the_model() -> None:
    size = SIZES["tiny"]
    layer = 64 * (2 * 256 + 2 * 128 + 3 * 96)
    head, length = 64 * 101, 29
    seen = 3 * length * (length + 1) / 2
    forward = 2 * (3 * length * 2 * layer + 30 * head) + 2 * 4 * 256 * seen
    assert operations(size, adapter=False) == 3 * forward
    assert operations(size, adapter=True) == 2 * forward + 2 * 4 * 256 * seen


@pytest.mark.slow
def test_a_shape_s_passes_and_step_are_measured_whole_and_by_an_adapter_and_by_megatron() -> None:
    *_, found = utilization("cpu", ["tiny"], around=cuda_on_cpu)
    rows = found["rows"]
    assert [(row["trainer"], row["lora_rank"]) for row in rows] == [("torch", None), ("torch", 16), ("megatron", None)]
    for row in rows:
        assert row["mfu"] is None
        assert row["tokens_per_s"] == pytest.approx(3 * row["loss_tokens_per_s"], rel=0.05)
        assert row["step"]["seconds"] > 0
        assert row["step"]["parts"].keys() == PARTS.keys()
