"""The loss against numbers worked out by hand, finite differences and exact sums over a small vocabulary."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clawstream.training.step.losses import LogProbs, LossSums, Objective, figures, policy_loss
from tests.examples import examples

NAN = float("nan")
PLAIN = Objective(kl=0.0, importance_cap=1e9)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(
    new: Tensor, known: LogProbs, advantage: Tensor, trained: Tensor, objective: Objective
) -> tuple[Tensor, LossSums]:
    """The gradient of the mean, and the tally."""
    leaf = new.clone().requires_grad_()
    total, tally = policy_loss(leaf, known, advantage, trained, objective=objective)
    total.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad / max(tally.num_sequences, 1), tally


def on_policy(logp: Tensor) -> LogProbs:
    return LogProbs(logp, logp, logp)


def test_on_policy_the_gradient_is_minus_the_advantage_over_the_tokens_and_the_sequences() -> None:
    logp = rows([-1.0, -2.0, -1.0], [-1.0, -1.0, NAN])
    trained = torch.tensor([[True, True, True], [True, False, False]])
    advantage = rows([1.0, -1.0, 0.5], [2.0, NAN, NAN])

    grad, tally = gradient(logp, on_policy(logp), advantage, trained, Objective())

    torch.testing.assert_close(grad, rows([-1 / 6, 1 / 6, -0.5 / 6], [-2 / 2, 0.0, 0.0]))
    assert (tally.num_sequences, tally.num_tokens, tally.num_tokens_dropped) == (2, 4, 0)


def test_each_term_has_the_value_worked_out_by_hand() -> None:
    old, sampled, new, reference = -1.0, -1.5, -0.9, -1.2
    known = LogProbs(rows([old]), rows([sampled]), rows([reference]))

    total, _ = policy_loss(rows([new]), known, rows([-3.0]), torch.tensor([[True]]), objective=Objective())

    ratio, weight, d = math.exp(0.1), math.exp(0.5), 0.3
    expected = weight * (ratio * 3.0 + 0.02 * ratio * (math.exp(-d) - 1 + d))
    assert float(total) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (0.5, 1.0, True),
        (0.81, -1.0, True),
        (0.79, -1.0, False),
        (1.9, -1.0, True),
    ],
)
def test_the_clip_stops_only_what_went_too_far_already(ratio: float, advantage: float, moves: bool) -> None:
    old = rows([-1.0])
    new = old + math.log(ratio)

    grad, tally = gradient(new, LogProbs(old, old, None), rows([advantage]), torch.tensor([[True]]), PLAIN)

    assert float(grad) == pytest.approx(-ratio * advantage if moves else 0.0)
    assert figures([tally], PLAIN).clipped_share == (0.0 if moves else 1.0)


def test_the_clipped_share_is_absent_where_the_ratio_is_one_throughout() -> None:
    logp = rows([-1.0, -2.0])

    _, tally = gradient(logp, on_policy(logp), rows([1.0, 1.0]), torch.ones(1, 2, dtype=torch.bool), Objective())

    assert figures([tally], Objective()).clipped_share is None


def test_the_importance_weight_is_capped_and_carries_no_gradient() -> None:
    old = rows([-1.0, -1.0, -1.0])
    sampled = rows([-1.4, -3.0, -0.5])
    objective = replace(PLAIN, importance_cap=2.0)

    grad, _ = gradient(old, LogProbs(old, sampled, None), rows([1.0, 1.0, 1.0]), torch.ones(1, 3) == 1, objective)

    torch.testing.assert_close(grad, -rows([math.exp(0.4), 2.0, math.exp(-0.5)]) / 3)


@pytest.mark.parametrize("ratio", [0.5, 0.81, 1.27, 1.9])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_importance_sampling_bounds_nothing(ratio: float, advantage: float) -> None:
    old, objective = rows([-1.0]), replace(PLAIN, loss="importance_sampling")
    new = old + math.log(ratio)

    grad, tally = gradient(new, LogProbs(old, old, None), rows([advantage]), torch.tensor([[True]]), objective)

    assert float(grad) == pytest.approx(-ratio * advantage)
    assert tally.loss_sum == pytest.approx(-ratio * advantage)
    assert figures([tally], objective).clipped_share is None


@pytest.mark.parametrize(
    ("ratio", "bounded"), [(0.5, 0.8), (0.81, 0.81), (1.27, 1.27), (1.9, 1.28)], ids=["low", "in", "in high", "high"]
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_bounds_the_ratio_and_leaves_each_token_its_gradient(
    ratio: float, bounded: float, advantage: float
) -> None:
    old, sampled, objective = rows([-1.0]), rows([-1.5]), replace(PLAIN, loss="cispo")
    new = old + math.log(ratio)

    grad, tally = gradient(new, LogProbs(old, sampled, None), rows([advantage]), torch.tensor([[True]]), objective)

    weight = math.exp(0.5)
    assert float(grad) == pytest.approx(-weight * bounded * advantage)
    assert tally.loss_sum == pytest.approx(-weight * bounded * advantage * float(new))
    assert figures([tally], objective).clipped_share == float(bounded != ratio)


def test_on_policy_all_losses_have_one_gradient() -> None:
    logp, advantage = rows([-1.0, -2.0]), rows([1.0, -0.5])
    grads = []
    for name in ("ppo", "importance_sampling", "cispo"):
        objective = replace(PLAIN, loss=name)
        grad, tally = gradient(logp, on_policy(logp), advantage, torch.ones(1, 2) == 1, objective)
        grads.append(grad)
        assert figures([tally], objective).clipped_share is None
    torch.testing.assert_close(grads, [rows([-0.5, 0.25])] * 3)


def test_tokens_and_entropy_are_of_one_epoch_and_other_means_are_over_all() -> None:
    first = LossSums(num_sequences=1, num_tokens=4, num_tokens_dropped=1, loss_sum=1.0, entropy_sum=2.0)
    second = replace(first, loss_sum=3.0, num_clipped=2, num_moved=4, entropy_sum=0.4)

    found = figures([first, second], Objective())

    assert (found.num_tokens, found.num_tokens_dropped, found.entropy_nats) == (4, 1, 0.5)
    assert (found.loss_nats, found.clipped_share) == (2.0, 0.25)


@pytest.mark.parametrize("far", [200.0, -200.0])
def test_log_probs_far_apart_give_finite_numbers(far: float) -> None:
    here, there = rows([-1.0]).float(), rows([-1.0 - far]).float()
    grad, tally = gradient(
        here, LogProbs(here, there, there), rows([-1.0]).float(), torch.tensor([[True]]), Objective()
    )
    assert bool(grad.isfinite().all())
    assert math.isfinite(tally.loss_sum)


@pytest.mark.parametrize("missing", ["new", "old", "sampled", "reference", "advantage"])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_token_that_lacks_a_number_is_dropped_counted_and_without_gradient(missing: str, value: float) -> None:
    numbers = {name: rows([-1.0, -1.0]) for name in ("new", "old", "sampled", "reference", "advantage")}
    numbers[missing][0, 0] = value
    known = LogProbs(numbers["old"], numbers["sampled"], numbers["reference"])

    grad, tally = gradient(numbers["new"], known, numbers["advantage"], torch.ones(1, 2) == 1, Objective())

    torch.testing.assert_close(grad, rows([0.0, 1.0]))
    assert (tally.num_tokens, tally.num_tokens_dropped) == (1, 1)
    assert math.isfinite(tally.loss_sum)


def test_with_nothing_to_train_on_every_mean_is_absent() -> None:
    logp = rows([NAN, NAN])

    grad, tally = gradient(logp, on_policy(logp), logp, torch.ones(1, 2) == 1, Objective())

    assert not bool(grad.any())
    found = figures([tally], Objective())
    assert (found.loss_nats, found.kl_reference_nats, found.clipped_share) == (None, None, None)
    assert found.num_tokens_dropped == 2


SMALL = st.floats(-3.0, -0.1).map(lambda x: round(x, 3))


@examples(0.5)
@given(st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL, st.floats(-2, 2)), min_size=4, max_size=4))
def test_the_gradient_is_that_of_finite_differences(tokens: list[tuple[float, ...]]) -> None:
    new, old, sampled, reference, advantage = (rows(list(column)) for column in zip(*tokens, strict=True))
    objective = Objective(kl=0.5, clip_low=0.9, clip_high=50.0)
    known, trained = LogProbs(old, sampled, reference), torch.ones(1, 4) == 1

    grad, tally = gradient(new, known, advantage, trained, objective)

    step = 1e-6
    for token in range(4):
        shift = torch.zeros_like(new)
        shift[0, token] = step
        up, _ = policy_loss(new + shift, known, advantage, trained, objective=objective)
        down, _ = policy_loss(new - shift, known, advantage, trained, objective=objective)
        slope = float(up - down) / (2 * step) / tally.num_sequences
        assert float(grad[0, token]) == pytest.approx(slope, rel=1e-4, abs=1e-6)


@examples(0.3)
@given(st.lists(st.lists(st.tuples(SMALL, SMALL, st.floats(-2, 2)), min_size=3, max_size=3), min_size=2, max_size=6))
def test_a_batch_in_pieces_gives_the_gradient_of_the_whole(batch: list[list[tuple[float, ...]]]) -> None:
    new, old, advantage = (torch.tensor(batch, dtype=torch.float64)[..., i] for i in range(3))
    trained = torch.rand(new.shape, generator=torch.Generator().manual_seed(0)) > 0.3
    whole, tally = gradient(new, LogProbs(old, old, old), advantage, trained, Objective())

    leaf, sums = new.clone().requires_grad_(), LossSums()
    for row in range(len(batch)):
        part = slice(row, row + 1)
        total, one = policy_loss(
            leaf[part], LogProbs(old[part], old[part], old[part]), advantage[part], trained[part], objective=Objective()
        )
        total.backward()  # type: ignore[no-untyped-call]
        sums += one

    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad / max(sums.num_sequences, 1), whole)
    assert sums.loss_sum == pytest.approx(tally.loss_sum)


@pytest.mark.parametrize("behaviour", [[0.3, -1.0, 1.2, 0.0], [0.0, 0.4, 0.1, -0.3]], ids=["current", "older"])
def test_the_leash_has_the_gradient_of_the_divergence_from_the_reference(behaviour: list[float]) -> None:
    """Summed over a vocabulary with the sampling probabilities, also those of older weights.

    k3 alone would have that of the other divergence.
    """
    sampled = torch.tensor(behaviour, dtype=torch.float64).log_softmax(0).unsqueeze(1)
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0], dtype=torch.float64)
    reference = torch.tensor([1.0, 0.5, -0.5, 0.2], dtype=torch.float64).log_softmax(0)

    def exact(x: Tensor) -> Tensor:
        new = x.log_softmax(0)
        return (new.exp() * (new - reference)).sum()

    def estimated(x: Tensor) -> Tensor:
        new, old = x.log_softmax(0).unsqueeze(1), logits.log_softmax(0).unsqueeze(1)
        one = torch.ones(1, 1) == 1
        objective = Objective(kl=1.0, importance_cap=100.0)
        parts = []
        for token in range(4):
            at = slice(token, token + 1)
            known = LogProbs(old[at], sampled[at], reference[token].reshape(1, 1))
            part, _ = policy_loss(new[token : token + 1], known, torch.zeros(1, 1).double(), one, objective=objective)
            parts.append(sampled[token].exp() * part)
        return torch.stack(parts).sum()

    grads = [torch.autograd.functional.jacobian(f, logits) for f in (exact, estimated)]  # type: ignore[no-untyped-call]
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("d", [-30.0, -10.1, -9.9, -1.0, 0.0, 1.0, 9.9, 10.1, 30.0])
@pytest.mark.parametrize("moved", [0.0, 0.5], ids=["first pass", "later pass"])
def test_the_leash_pulls_by_the_difference_and_by_no_more_than_ten_nats(d: float, moved: float) -> None:
    """Of one token; beyond 10 nats the exact gradient, kl * ratio * d, would be longer."""
    new, old, reference = rows([-31.0]), rows([-31.0 - moved]), rows([-31.0 - d])
    known, one = LogProbs(old, old, reference), torch.tensor([[True]])

    grad, tally = gradient(new, known, rows([0.0]), one, Objective(kl=0.02))

    bounded = max(-10.0, min(10.0, d))
    assert float(grad) == pytest.approx(0.02 * math.exp(moved) * bounded, rel=1e-9)
    assert tally.kl_sum == pytest.approx(math.exp(moved) * (math.exp(-bounded) - 1 + bounded), rel=1e-9)


def test_summed_over_a_vocabulary_the_leash_is_exact_but_for_what_lies_beyond_ten_nats() -> None:
    """The likeliest token and the unlikeliest lie beyond it, on either side; by how much is what may be missing."""
    logits = torch.tensor([13.0, 0.0, -1.0, -12.0], dtype=torch.float64)
    new, reference = logits.log_softmax(0), torch.tensor([0.0, 1.0, 0.0, 2.0], dtype=torch.float64).log_softmax(0)
    d = new - reference
    assert d.abs().max() > 10
    scores = torch.eye(4, dtype=torch.float64) - new.exp()  # of each token's log-prob, by logit
    exact = (new.exp() * d) @ scores
    missing = float((new.exp() * (d.abs() - 10).clamp(min=0)) @ scores.abs().amax(1))

    estimated = torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        at = new[token].reshape(1, 1)
        known = LogProbs(at, at, reference[token].reshape(1, 1))
        grad, _ = gradient(at, known, rows([0.0]), torch.tensor([[True]]), Objective(kl=1.0))
        estimated += new[token].exp() * float(grad) * scores[token]

    assert missing < 1e-4
    torch.testing.assert_close(estimated, exact, rtol=0, atol=missing)


def test_a_token_of_older_weights_that_the_policy_has_unlearned_hardly_counts_in_the_leash() -> None:
    known = LogProbs(rows([-12.0]), rows([-0.5]), rows([-0.5]))
    total, tally = policy_loss(rows([-12.0]), known, rows([0.0]), torch.tensor([[True]]), objective=Objective(kl=1.0))
    assert 0 < float(total) < 1
    assert tally.kl_sum < 1
