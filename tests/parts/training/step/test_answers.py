"""What is read of a model's output for the answers of a batch."""

import pytest
import torch

from clawstream.training.step.losses import Answers, Suffix
from clawstream.training.step.packing import pack


def test_a_place_that_many_answers_follow_gets_the_same_gradient_each_time() -> None:
    torch.set_num_threads(4)  # as many add to it at once; put back by the fixture of all tests of training
    prompt = tuple(range(40))
    suffixes = [Suffix(prompt, (n, *range(n, 60)), 1.0) for n in range(8)]
    row = pack([s.read_ids for s in suffixes])
    answers = Answers(suffixes, torch.device("cpu"), row)
    torch.manual_seed(0)
    hidden_1LH = torch.randn(1, len(row.ids), 256, requires_grad=True)
    weight_NH = torch.randn(len(answers.target_N), 256)

    def gradient() -> torch.Tensor:
        hidden_1LH.grad = None
        (answers.before(hidden_1LH) * weight_NH).sum().backward()  # type: ignore[no-untyped-call]
        assert hidden_1LH.grad is not None
        return hidden_1LH.grad

    first, *others = (gradient() for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("packed", [False, True])
def test_each_response_token_is_read_where_the_token_before_it_stands(packed: bool) -> None:
    suffixes = [Suffix((1, 2, 3), (4, 5), 1.0), Suffix((1, 2, 3), (6,), 1.0)]
    answers = Answers(suffixes, torch.device("cpu"), pack([s.read_ids for s in suffixes]) if packed else None)
    read = answers.before(answers.ids_RL.unsqueeze(-1).float()).squeeze(-1)
    assert read.tolist() == [3, 4, 3]
