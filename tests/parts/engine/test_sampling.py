"""Drawing tokens: the distribution, its filters, and that a seed decides alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clawstream.inference.engine import SamplingParams
from clawstream.local.engine.sampling import draw, uniforms

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def shares(sampling: SamplingParams, logits: torch.Tensor = LOGITS, num_draws: int = 20_000) -> list[float]:
    """How often each token is drawn over the seeds 0, 1, 2, ..."""
    drawn = draw(logits.expand(num_draws, -1), [sampling] * num_draws, range(num_draws), [0] * num_draws, 0)
    return [drawn.token_ids.count(token) / num_draws for token in range(len(logits))]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(max_new_tokens=1), [0.5, 0.3, 0.15, 0.05]),
        (SamplingParams(max_new_tokens=1, temperature=0.0), [1, 0, 0, 0]),
        (SamplingParams(max_new_tokens=1, top_k=2), [0.625, 0.375, 0, 0]),
        (SamplingParams(max_new_tokens=1, top_p=0.7), [0.625, 0.375, 0, 0]),
        (SamplingParams(max_new_tokens=1, top_p=0.01), [1, 0, 0, 0]),
        (SamplingParams(max_new_tokens=1, temperature=0.5), [0.6849, 0.2466, 0.0616, 0.0068]),
    ],
)
def test_tokens_come_in_the_shares_that_the_parameters_ask_for(sampling: SamplingParams, expected: list[float]) -> None:
    assert shares(sampling) == pytest.approx(expected, abs=0.012)


def test_reported_logprob_is_at_the_temperature_and_before_the_filters() -> None:
    drawn = draw(LOGITS.unsqueeze(0), [SamplingParams(max_new_tokens=1, temperature=0.5, top_k=1)], [1], [0], 2)
    total = 0.5**2 + 0.3**2 + 0.15**2 + 0.05**2
    assert drawn.logprobs_nats == pytest.approx([math.log(0.25 / total)], abs=1e-5)
    value, token = drawn.top[0][1]
    assert token == 1
    assert value == pytest.approx(math.log(0.09 / total), abs=1e-5)


def test_greedy_logprob_is_that_of_temperature_one() -> None:
    drawn = draw(LOGITS.unsqueeze(0), [SamplingParams(max_new_tokens=1, temperature=0.0)], [1], [0], 0)
    assert drawn.logprobs_nats == pytest.approx([math.log(0.5)], abs=1e-5)


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10_000)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_draw_of_a_row_does_not_depend_on_the_other_rows(rows: list[tuple[int, int]], random: object) -> None:
    del random
    sampling = SamplingParams(max_new_tokens=1, temperature=0.9, top_p=0.95)
    seeds, indices = [seed for seed, _ in rows], [index for _, index in rows]
    together = draw(LOGITS.expand(len(rows), -1), [sampling] * len(rows), seeds, indices, 0)
    alone = [draw(LOGITS.unsqueeze(0), [sampling], [seed], [index], 0).token_ids[0] for seed, index in rows]
    assert together.token_ids == alone


def test_uniforms_are_spread_evenly_over_seeds_and_over_positions() -> None:
    for numbers in (uniforms(range(20_000), [0] * 20_000), uniforms([7] * 20_000, range(20_000))):
        assert numbers.mean() == pytest.approx(0.5, abs=0.01)
        assert numbers.std() == pytest.approx(12**-0.5, abs=0.01)
        assert 0 < numbers.min() < numbers.max() < 1
