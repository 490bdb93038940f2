"""What a demonstration measured: gaps are those that overlap a weight change, percentiles are real values."""

import math

from hypothesis import given
from hypothesis import strategies as st

from clawstream.simulation.runs.figures import Chat, longest_gap_during, percentiles


def chat(*gaps: tuple[float, float]) -> Chat:
    return Chat(finished_at_ms=9e9, ttft_ms=1.0, gaps=gaps, failed=False, first_answer=True, num_tokens=1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_values_that_were_measured_with_the_stated_share_at_or_below(values: list[float]) -> None:
    found = percentiles(values)

    assert {found.p50, found.p99} <= set(values)
    assert sum(value <= found.p50 for value in values) >= math.ceil(0.50 * len(values))
    assert sum(value <= found.p99 for value in values) >= math.ceil(0.99 * len(values))


def test_the_longest_gap_that_overlaps_a_weight_change_counts_and_a_longer_one_elsewhere_does_not() -> None:
    chats = [chat((1000.0, 900.0), (2020.0, 40.0)), chat((2005.0, 30.0))]

    assert longest_gap_during(chats, [(2000.0, 2010.0)]) == 40.0


def test_without_a_stream_during_a_weight_change_there_is_no_gap_rather_than_one_of_zero() -> None:
    assert longest_gap_during([chat((1000.0, 900.0))], [(2000.0, 2010.0)]) is None
    assert longest_gap_during([], [(0.0, 1.0)]) is None
