"""How much each token of an answer is to be encouraged: reward and hint, folded into one number. Pure.

A sample has a reward, a hint, or both. A mask says which, so that an absent reward is never a reward of 0 and the
number in its place is never read. B samples, T response tokens; suffixes name the axes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GAP_MASK_NATS = -0.1  # below this the teacher likes a token clearly less than the student does
GAP_CLIP_NATS = 5.0  # a token's gap between teacher and policy is clipped to this, both ways: one may be 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The weights of the two signals; a weight of 0 means that its signal does not exist at all."""

    w_binary: float = 1.0
    w_opd: float = 1.0


@torch.no_grad()
def token_advantages(
    reward_B: Tensor, rewarded_B: Tensor, gap_BT: Tensor, hinted_B: Tensor, *, signals: Signals
) -> Tensor:
    """Return the advantage of each token [B, T]; NaN where it depends on a gap that is not finite.

    reward_B    [B] float, -1 to 1; read only where rewarded_B
    rewarded_B  [B] bool
    gap_BT      [B, T] float, nats: teacher (which saw the hint) less student; read only where hinted_B
    hinted_B    [B] bool

    A hinted sample's negative reward falls only on tokens that the teacher likes clearly less than the student does:
    tokens that the hint does not object to are not punished with the rest.
    """
    rewarded_B1 = (rewarded_B & (signals.w_binary > 0)).unsqueeze(1)
    hinted_B1 = (hinted_B & (signals.w_opd > 0)).unsqueeze(1)
    reward_B1 = reward_B.unsqueeze(1)
    zero, unknown = gap_BT.new_zeros(()), gap_BT.new_full((), torch.nan)

    gap_BT = torch.where(gap_BT.isfinite(), gap_BT, unknown)
    spared_BT = hinted_B1 & (reward_B1 < 0) & ~(gap_BT < GAP_MASK_NATS)
    binary_BT = torch.where(rewarded_B1 & ~spared_BT, reward_B1, zero)
    opd_BT = torch.where(hinted_B1, gap_BT.clamp(-GAP_CLIP_NATS, GAP_CLIP_NATS), zero)
    return signals.w_binary * binary_BT + signals.w_opd * opd_BT


def has_signal(rewarded_B: Tensor, hinted_B: Tensor, *, signals: Signals) -> Tensor:
    """Return [B] bool: which samples have a signal under these weights; the others enter no mean."""
    return (rewarded_B & (signals.w_binary > 0)) | (hinted_B & (signals.w_opd > 0))
