"""How much each token of an answer is to be encouraged: reward and hint, folded into one number. Pure.

A sample has a reward, a hint, or both; which of them is a mask of its own, so that an absent reward is never a reward
of 0 and what stands in its place is never read. B samples, T response tokens; suffixes name the axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GAP_MASK_NATS = -0.1  # below this the teacher likes a token clearly less than the student does
BASELINE_REWARDS = 256  # the running mean follows the policy instead of remembering how it began


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """How the two signals are weighed; a weight of 0 means that its signal is not there at all."""

    w_binary: float = 1.0
    w_opd: float = 1.0
    gap_clip_nats: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A running mean of rewards, over about the last `BASELINE_REWARDS`; 0 until there is one."""

    mean: float = 0.0
    num_rewards: int = 0

    def after(self, rewards: Sequence[float]) -> "Baseline":
        """Return the baseline once these rewards are counted, in any order they came."""
        if not rewards:
            return self
        old = min(self.num_rewards, max(BASELINE_REWARDS - len(rewards), 0))
        mean = (self.mean * old + sum(rewards)) / (old + len(rewards))
        return Baseline(mean=mean, num_rewards=self.num_rewards + len(rewards))


@torch.no_grad()
def token_advantages(
    reward_B: Tensor, rewarded_B: Tensor, gap_BT: Tensor, hinted_B: Tensor, *, signals: Signals, baseline: float = 0.0
) -> Tensor:
    """Return the advantage of each token [B, T]; NaN where it depends on a gap that is not finite.

    reward_B    [B] float, -1 to 1; read only where rewarded_B
    rewarded_B  [B] bool
    gap_BT      [B, T] float, nats: teacher (which saw the hint) less student; read only where hinted_B
    hinted_B    [B] bool

    A hinted sample's reward that is below the baseline falls only on tokens that the teacher likes clearly less than
    the student does: what the hint does not object to is not punished with the rest.
    """
    rewarded_B1 = (rewarded_B & (signals.w_binary > 0)).unsqueeze(1)
    hinted_B1 = (hinted_B & (signals.w_opd > 0)).unsqueeze(1)
    reward_B1 = reward_B.unsqueeze(1)
    zero, unknown = gap_BT.new_zeros(()), gap_BT.new_full((), torch.nan)

    gap_BT = torch.where(gap_BT.isfinite(), gap_BT, unknown)
    over_B1 = reward_B1 - baseline
    spared_BT = hinted_B1 & (over_B1 < 0) & ~(gap_BT < GAP_MASK_NATS)
    binary_BT = torch.where(rewarded_B1 & ~spared_BT, over_B1, zero)
    clip = signals.gap_clip_nats
    opd_BT = torch.where(hinted_B1, gap_BT.clamp(-clip, clip), zero)
    return signals.w_binary * binary_BT + signals.w_opd * opd_BT


def has_signal(rewarded_B: Tensor, hinted_B: Tensor, *, signals: Signals) -> Tensor:
    """Return [B] bool: which samples say anything under these weights; the others belong to no mean."""
    return (rewarded_B & (signals.w_binary > 0)) | (hinted_B & (signals.w_opd > 0))
