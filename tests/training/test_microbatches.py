"""Cutting a batch into pieces by a budget of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from clawstream.training.step.microbatches import micro_batches, optimizer_steps


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_every_row_is_in_exactly_one_piece(lengths: list[int], budget: int) -> None:
    pieces = micro_batches(lengths, budget_tokens=budget)

    assert sorted(i for piece in pieces for i in piece) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_a_padded_piece_fits_the_budget_unless_it_is_a_single_row(lengths: list[int], budget: int) -> None:
    pieces = micro_batches(lengths, budget_tokens=budget)

    assert all(len(p) == 1 or len(p) * max(lengths[i] for i in p) <= budget for p in pieces)


def test_rows_of_like_length_go_together_longest_first() -> None:
    assert micro_batches([3, 10, 4, 9], budget_tokens=20) == [[1, 3], [2, 0]]


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**31))
def test_every_sample_is_in_one_step_of_each_epoch_and_steps_are_alike_in_size(
    num_samples: int, epochs: int, minibatches: int, seed: int
) -> None:
    steps = optimizer_steps(num_samples, epochs=epochs, minibatches=minibatches, seed=seed)

    in_epoch = len(steps) // epochs
    assert len(steps) == epochs * in_epoch
    assert in_epoch == min(minibatches, num_samples)
    for epoch in range(epochs):
        dealt = steps[epoch * in_epoch : (epoch + 1) * in_epoch]
        assert sorted(i for step in dealt for i in step) == list(range(num_samples))
    assert max(map(len, steps)) - min(map(len, steps)) <= 1
    assert steps == optimizer_steps(num_samples, epochs=epochs, minibatches=minibatches, seed=seed)


def test_each_epoch_deals_the_samples_anew() -> None:
    first, second = optimizer_steps(20, epochs=2, minibatches=1, seed=0)
    assert first == second == list(range(20))  # one step takes all: their order is the plan's
    steps = optimizer_steps(20, epochs=2, minibatches=2, seed=0)
    assert steps[:2] != steps[2:]
    assert steps != optimizer_steps(20, epochs=2, minibatches=2, seed=1)
