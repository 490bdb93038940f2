"""Cutting a batch into pieces by a budget of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from clawstream.training.step.packing import micro_batches


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
