"""The divergence from a teacher's whole distribution, against exact sums over a small vocabulary."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from clawstream.training.step.losses import LogProbs, LossSums, Objective, distillation_loss, divergence, pull

Direction = Literal["reverse", "forward"]
STUDENT = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.4], dtype=torch.float64)
TEACHER = torch.tensor([1.0, 0.5, -0.5, 0.2, -2.0], dtype=torch.float64)
LIKELIEST = torch.tensor([0, 1, 3])  # the teacher's three; the other two are one event
LEASHLESS = Objective(kl=0.0)


def merged(logits: Tensor) -> Tensor:
    """The probabilities of the three, and of the others together."""
    p = logits.softmax(0)
    return torch.cat([p[LIKELIEST], 1 - p[LIKELIEST].sum().reshape(1)])


def top(logits: Tensor) -> Tensor:
    return logits.log_softmax(0)[LIKELIEST].reshape(1, 1, 3)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_value_and_gradient_are_those_of_the_exact_sum_with_the_others_as_one(direction: Direction) -> None:
    def exact(x: Tensor) -> Tensor:
        p, q = merged(x), merged(TEACHER)
        first, second = (p, q) if direction == "reverse" else (q, p)
        return (first * (first / second).log()).sum()

    def ours(x: Tensor) -> Tensor:
        return divergence(top(x), top(TEACHER), direction=direction).sum()

    assert float(ours(STUDENT)) == pytest.approx(float(exact(STUDENT)), rel=1e-9)
    grads = [torch.autograd.functional.jacobian(f, STUDENT) for f in (exact, ours)]  # type: ignore[no-untyped-call]
    torch.testing.assert_close(grads[1], grads[0])


def test_two_tokens_worked_out_by_hand() -> None:
    """p = (1/2, 1/4, rest 1/4), q = (1/4, 1/2, rest 1/4): the sum is 1/2 ln 2 - 1/4 ln 2."""
    p, q = (torch.tensor([[values]]).log() for values in ([0.5, 0.25], [0.25, 0.5]))
    for direction in ("reverse", "forward"):
        assert float(divergence(p, q, direction=direction)) == pytest.approx(0.25 * 0.6931472)


def test_what_leaves_the_likeliest_tokens_is_not_unseen() -> None:
    """Both agree in proportion on the three; the student has moved half of its mass to the others."""
    half = top(TEACHER) - 0.6931472
    assert float(divergence(half, top(TEACHER), direction="reverse")) > 0.1


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_where_nothing_is_left_for_the_others_all_numbers_stay_finite(direction: Direction) -> None:
    sure = torch.tensor([[[0.0, -200.0]]], requires_grad=True)
    value = divergence(sure, torch.tensor([[[-200.0, 0.0]]]), direction=direction)
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert bool(value.isfinite().all())
    assert sure.grad is not None
    assert bool(sure.grad.isfinite().all())


def loss(
    top_new: Tensor, top_teacher: Tensor, trained: Tensor, *, objective: Objective = LEASHLESS, weight: float = 1.0
) -> tuple[Tensor, LossSums]:
    logp = torch.full(trained.shape, -1.0, dtype=torch.float64)
    known = LogProbs(logp, logp, logp)
    return distillation_loss(logp, top_new, top_teacher, known, trained, objective=objective, weight=weight)


def test_the_loss_is_the_weighted_mean_over_the_tokens_that_are_trained() -> None:
    student, teacher = top(STUDENT).repeat(1, 3, 1), top(TEACHER).repeat(1, 3, 1)
    total, tally = loss(student, teacher, torch.tensor([[True, False, True]]), weight=0.5)
    one = divergence(top(STUDENT), top(TEACHER), direction="reverse")
    assert float(total) == pytest.approx(0.5 * float(one))
    assert (tally.num_tokens, tally.num_tokens_dropped, tally.num_moved) == (2, 0, 0)


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_token_whose_distribution_is_not_known_is_dropped_counted_and_without_gradient(
    side: str, value: float
) -> None:
    numbers = {"student": top(STUDENT).repeat(1, 2, 1), "teacher": top(TEACHER).repeat(1, 2, 1)}
    numbers[side][0, 0, 1] = value
    leaf = numbers["student"].requires_grad_()
    total, tally = loss(leaf, numbers["teacher"], torch.ones(1, 2) == 1)
    total.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert not bool(leaf.grad[0, 0].any())
    assert bool(leaf.grad[0, 1].isfinite().all())
    assert bool(leaf.grad[0, 1].any())
    assert (tally.num_tokens, tally.num_tokens_dropped) == (1, 1)


def test_what_a_policy_is_sure_of_moves_by_the_forward_divergence_and_hardly_by_gaps_of_what_it_says() -> None:
    """It is sure of the first token, the teacher of the second; each gradient is exact, over all that may be said."""
    sure, other = torch.tensor([8.0, 0.0, 0.0]), torch.tensor([0.0, 8.0, 0.0]).log_softmax(0)
    logits = sure.requires_grad_()
    logp = logits.log_softmax(0)
    gaps = (other - logp).detach()
    by_gaps = -(logp.detach().exp() * gaps * logp).sum()
    by_divergence = divergence(logp[None, None, :2], other[None, None, :2], direction="forward").sum()
    moved = [float(torch.autograd.grad(loss, logits, retain_graph=True)[0][1]) for loss in (by_gaps, by_divergence)]
    assert moved[1] == pytest.approx(-1, abs=0.01)
    assert abs(moved[0]) < 0.01


@pytest.mark.parametrize(
    ("plain", "told", "expected"),
    [
        ({0: 0.9, 1: 0.1}, {0: 0.9, 1: 0.1}, 0.0),
        ({0: 0.9, 1: 0.1}, {1: 0.1, 0: 0.9}, 0.0),  # in whatever order
        ({0: 0.9, 1: 0.1}, {0: 0.5, 1: 0.5}, 0.0),  # .4 of the probability is moved
        ({0: 0.9, 1: 0.1}, {0: 0.1, 1: 0.9}, 0.6),  # .8
        ({0: 0.8, 1: 0.2}, {2: 0.7, 3: 0.3}, 1.0),
        ({0: 0.8, 1: 0.2}, {2: 0.7, 1: 0.3}, 0.6),
        ({0: 0.2, 1: 0.1}, {0: 0.2, 1: 0.1}, 0.0),  # the rest is one more token
        ({0: 0.2, 1: 0.1}, {2: 0.6, 3: 0.3}, 0.8),
    ],
)
def test_a_teacher_pulls_as_far_as_the_hint_moves_more_than_half_of_the_base_s_probability(
    plain: dict[int, float], told: dict[int, float], expected: float
) -> None:
    rows = [torch.tensor([[*values]]) for values in (plain.keys(), plain.values(), told.keys(), told.values())]
    found = pull(rows[0], rows[1].log(), rows[2], rows[3].log())
    assert found.tolist() == pytest.approx([expected], abs=1e-6)
