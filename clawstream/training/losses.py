"""The loss of one update: a clipped policy gradient and a leash to the reference. Tensors in, tensors out.

Sums, not means, come out, with what they are to be divided by, so that a batch in pieces gives the gradient of the
whole. A token takes part only if it is trained and every number it needs is finite; elsewhere nothing is read, NaN
included, and the gradient is exactly 0. B samples, T response tokens; suffixes name the axes; log-probs in nats.
"""

from dataclasses import dataclass
from math import log
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_KL_DIFFERENCE_NATS = 10.0
MAX_LOG_RATIO_NATS = 20.0  # keeps exp() finite in float32; the clipped objective is flat or hopeless long before


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which loss.

    `ratio_to` names the log-probs against which the policy may move by the clip: those of the weights just before the
    step, whose staleness the importance weight then corrects, or those recorded when the token was sampled, which are
    that correction themselves.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    kl: float = 0.02  # 0: no leash, and no reference is needed
    average: Literal["sequence", "token"] = "sequence"
    ratio_to: Literal["old", "sampled"] = "old"


class LogProbs(NamedTuple):
    """Log-probs [B, T] of the same tokens by different weights, all at the temperature of sampling; no gradients."""

    old: Tensor  # the weights just before the step
    sampled: Tensor  # as the engine reported them; NaN: it reported none
    reference: Tensor | None  # None only without a leash


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a part of a batch adds to the figures of the whole; parts are added up."""

    num_sequences: int = 0  # with at least one token kept
    num_tokens: int = 0  # kept
    num_tokens_dropped: int = 0  # to be trained, but a number was missing or not finite
    num_clipped: int = 0
    ratio_moved: bool = False
    loss_sum: float = 0.0  # of means by sequence, or of tokens, as the objective says
    kl_sum: float = 0.0  # of tokens

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            num_sequences=self.num_sequences + other.num_sequences,
            num_tokens=self.num_tokens + other.num_tokens,
            num_tokens_dropped=self.num_tokens_dropped + other.num_tokens_dropped,
            num_clipped=self.num_clipped + other.num_clipped,
            ratio_moved=self.ratio_moved or other.ratio_moved,
            loss_sum=self.loss_sum + other.loss_sum,
            kl_sum=self.kl_sum + other.kl_sum,
        )

    def divisor(self, objective: Objective) -> int:
        """Return what the loss and its gradient are to be divided by once all parts are added up."""
        return self.num_sequences if objective.average == "sequence" else self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFigures:
    """The figures of a whole batch; None where there is nothing to average."""

    num_tokens: int
    num_tokens_dropped: int
    loss_nats: float | None
    kl_reference_nats: float | None  # None also without a leash
    clipped_share: float | None  # None also where the ratio is 1 throughout, so that nothing can be clipped


def figures(tally: Tally, objective: Objective) -> LossFigures:
    """Return the means of a batch whose parts are added up."""
    some = tally.num_tokens > 0
    return LossFigures(
        num_tokens=tally.num_tokens,
        num_tokens_dropped=tally.num_tokens_dropped,
        loss_nats=tally.loss_sum / tally.divisor(objective) if some else None,
        kl_reference_nats=tally.kl_sum / tally.num_tokens if some and objective.kl > 0 else None,
        clipped_share=tally.num_clipped / tally.num_tokens if some and tally.ratio_moved else None,
    )


def policy_loss(
    logp_new_BT: Tensor, known: LogProbs, advantage_BT: Tensor, trained_BT: Tensor, *, objective: Objective
) -> tuple[Tensor, Tally]:
    """Return the sum to call backward on [], and its tally; divide the gradients by the whole batch's `divisor`.

    logp_new_BT   [B, T] float, of the weights being trained; carries the gradient
    advantage_BT  [B, T] float; NaN: not known
    trained_BT    [B, T] bool
    """
    kept_BT = _finite(logp_new_BT, known, advantage_BT, objective) & trained_BT
    zero = logp_new_BT.new_zeros(())
    new_BT = torch.where(kept_BT, logp_new_BT, zero)
    old_BT = torch.where(kept_BT, known.old, zero)
    sampled_BT = torch.where(kept_BT, known.sampled, zero)
    advantage_BT = torch.where(kept_BT, advantage_BT, zero)

    before_BT = old_BT if objective.ratio_to == "old" else sampled_BT
    ratio_BT = (new_BT - before_BT).clamp(max=MAX_LOG_RATIO_NATS).exp()
    bounded_BT = ratio_BT.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    free_BT, clipped_BT = -ratio_BT * advantage_BT, -bounded_BT * advantage_BT
    loss_BT = torch.maximum(free_BT, clipped_BT)
    if objective.ratio_to == "old":
        loss_BT = loss_BT * (old_BT - sampled_BT).clamp(max=log(objective.importance_cap)).exp()
    kl_BT = torch.zeros_like(ratio_BT)
    if objective.kl > 0 and known.reference is not None:
        kl_BT = ratio_BT * _k3(new_BT - torch.where(kept_BT, known.reference, zero))
        loss_BT = loss_BT + objective.kl * kl_BT

    total = _sum(torch.where(kept_BT, loss_BT, zero), kept_BT, objective)
    tally = Tally(
        num_sequences=int(kept_BT.any(1).sum()),
        num_tokens=int(kept_BT.sum()),
        num_tokens_dropped=int((trained_BT & ~kept_BT).sum()),
        num_clipped=int((kept_BT & (clipped_BT > free_BT)).sum()),
        ratio_moved=bool((kept_BT & (ratio_BT != 1)).any()),
        loss_sum=float(total.detach()),
        kl_sum=float(torch.where(kept_BT, kl_BT.detach(), zero).sum()),
    )
    return total, tally


def _finite(logp_new_BT: Tensor, known: LogProbs, advantage_BT: Tensor, objective: Objective) -> Tensor:
    finite_BT = logp_new_BT.isfinite() & known.old.isfinite() & known.sampled.isfinite() & advantage_BT.isfinite()
    if objective.kl > 0:
        assert known.reference is not None, "a leash needs the reference's log-probs"
        finite_BT &= known.reference.isfinite()
    return finite_BT


def _k3(difference_BT: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, never negative; times the ratio its gradient is that of KL(new || reference).

    Alone it would have the gradient of KL(reference || new): measured against the exact sums in the tests.
    """
    bounded_BT = difference_BT.clamp(-MAX_KL_DIFFERENCE_NATS, MAX_KL_DIFFERENCE_NATS)
    return torch.expm1(-bounded_BT) + bounded_BT


def _sum(loss_BT: Tensor, kept_BT: Tensor, objective: Objective) -> Tensor:
    if objective.average == "token":
        return loss_BT.sum()
    return (loss_BT.sum(1) / kept_BT.sum(1).clamp(min=1)).sum()
