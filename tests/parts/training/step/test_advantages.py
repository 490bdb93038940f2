"""Reward and hint as one number per token, against numbers worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clawstream.training.step.losses import Signals, has_signal, token_advantages

NAN = float("nan")
GAP_BT = torch.tensor([[-2.0, 0.5, -0.05, 9.0]])


def advantages(reward: float = NAN, gap_BT: Tensor | None = None, *, signals: Signals | None = None) -> list[float]:
    rewarded_B = torch.tensor([reward == reward])
    hinted_B = torch.tensor([gap_BT is not None])
    gap_BT = torch.full((1, 4), NAN) if gap_BT is None else gap_BT
    reward_B = torch.tensor([reward])
    out_BT = token_advantages(reward_B, rewarded_B, gap_BT, hinted_B, signals=signals or Signals())
    return [float(value) for value in out_BT[0]]


def test_a_reward_alone_goes_to_every_token() -> None:
    assert advantages(-1.0) == [-1.0, -1.0, -1.0, -1.0]


def test_a_hint_alone_gives_the_clipped_gap() -> None:
    assert advantages(gap_BT=GAP_BT) == pytest.approx([-2.0, 0.5, -0.05, 5.0])


def test_a_positive_reward_and_a_hint_are_added() -> None:
    assert advantages(1.0, GAP_BT) == pytest.approx([-1.0, 1.5, 0.95, 6.0])


def test_a_negative_reward_spares_tokens_that_the_teacher_does_not_clearly_dislike() -> None:
    assert advantages(-1.0, GAP_BT) == pytest.approx([-3.0, 0.5, -0.05, 5.0])


def test_both_weights_scale_their_own_signal() -> None:
    signals = Signals(w_binary=2.0, w_opd=0.5)

    assert advantages(1.0, GAP_BT, signals=signals) == pytest.approx([1.0, 2.25, 1.975, 4.5])


def test_without_a_weight_for_hints_a_negative_reward_goes_to_every_token() -> None:
    assert advantages(-1.0, GAP_BT, signals=Signals(w_opd=0.0)) == [-1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("gap", [NAN, float("inf"), -float("inf")])
def test_a_gap_that_is_not_finite_makes_the_advantage_unknown(gap: float) -> None:
    first, second, *_ = advantages(1.0, torch.tensor([[gap, 1.0, 1.0, 1.0]]))

    assert first != first
    assert second == 2.0


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_what_stands_in_place_of_an_absent_signal_is_never_read(reward: float, gap: float) -> None:
    nothing_B = torch.tensor([False])
    something_B = torch.tensor([True])
    gap_BT = torch.full((1, 1), gap)
    signals = Signals()

    hint_only = token_advantages(torch.tensor([reward]), nothing_B, torch.ones(1, 1), something_B, signals=signals)
    reward_only = token_advantages(torch.ones(1), something_B, gap_BT, nothing_B, signals=signals)

    assert float(hint_only) == 1.0
    assert float(reward_only) == 1.0


def test_a_sample_says_something_only_through_a_signal_that_has_weight() -> None:
    rewarded_B = torch.tensor([True, False, True, False])
    hinted_B = torch.tensor([False, True, True, False])

    def spoken(signals: Signals) -> list[bool]:
        return [bool(b) for b in has_signal(rewarded_B, hinted_B, signals=signals)]

    assert spoken(Signals()) == [True, True, True, False]
    assert spoken(Signals(w_opd=0.0)) == [True, False, True, False]
    assert spoken(Signals(w_binary=0.0)) == [False, True, True, False]
