"""The loss of one update: a policy gradient or a distillation, and a leash to the reference. Pure.

A sample has a reward, a hint, or both. Masks say which, so that an absent reward is never a reward of 0 and the number
in its place is never read. The functions return sums and what to divide them by, not means, so that a batch computed in
pieces gives the gradient of the whole. A token takes part only if it is trained and every number it needs is finite. Of
any other token no number is read, NaN included, and its gradient is exactly 0.

Suffixes name the axes: B answers, T response tokens of the longest one, N response tokens of all answers, K likeliest
tokens of the teacher, L input tokens of a row, R rows (one where they are packed). Log-probs are in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isnan, log, nan
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from clawstream.events.exchanges import GREEDY_BELOW
from clawstream.training.step.packing import Pack, Tokens

GAP_MASK_NATS = -0.1  # below this the teacher finds a token clearly less likely than the student does
GAP_CLIP_NATS = 5.0  # a token's gap is clipped to this, in both directions: unclipped it may be 20
SUPPORT_CLIP_NATS = 1.0  # the same for each of the policy's likeliest tokens, where a hint is learned on these
MAX_KL_DIFFERENCE_NATS = 10.0
LEAST_TAIL = 1e-7  # the least probability of the other tokens together: the K tokens' float32 sum may reach 1
MAX_LOG_RATIO_NATS = 20.0  # keeps exp() finite in float32; no ratio that large is of use


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The weights of the two signals, and the bounds of gaps; a weight of 0 means that its signal does not exist."""

    w_binary: float = 1.0
    w_opd: float = 1.0
    gap_clip_nats: float = GAP_CLIP_NATS
    gap_mask_nats: float = GAP_MASK_NATS  # a hinted answer's negative reward counts only where the gap is below this


@torch.no_grad()
def token_advantages(
    reward_B: Tensor, rewarded_B: Tensor, gap_BT: Tensor, hinted_B: Tensor, *, signals: Signals
) -> Tensor:
    """Return the advantage of each token [B, T]; NaN where it depends on a gap that is not finite.

    reward_B    [B] float, -1 to 1; read only where rewarded_B
    rewarded_B  [B] bool
    gap_BT      [B, T] float, nats: teacher (which saw the hint) less student; read only where hinted_B
    hinted_B    [B] bool

    A hinted sample's negative reward counts only for tokens that the teacher finds clearly less likely than the student
    does: tokens against which the hint says nothing are not punished.
    """
    rewarded_B1 = (rewarded_B & (signals.w_binary > 0)).unsqueeze(1)
    hinted_B1 = (hinted_B & (signals.w_opd > 0)).unsqueeze(1)
    reward_B1 = reward_B.unsqueeze(1)
    zero, unknown = gap_BT.new_zeros(()), gap_BT.new_full((), torch.nan)

    gap_BT = torch.where(gap_BT.isfinite(), gap_BT, unknown)
    spared_BT = hinted_B1 & (reward_B1 < 0) & ~(gap_BT < signals.gap_mask_nats)
    binary_BT = torch.where(rewarded_B1 & ~spared_BT, reward_B1, zero)
    opd_BT = torch.where(hinted_B1, gap_BT.clamp(-signals.gap_clip_nats, signals.gap_clip_nats), zero)
    return signals.w_binary * binary_BT + signals.w_opd * opd_BT


def has_signal(rewarded_B: Tensor, hinted_B: Tensor, *, signals: Signals) -> Tensor:
    """Return [B] bool: which samples have a signal under these weights; the others enter no mean."""
    return (rewarded_B & (signals.w_binary > 0)) | (hinted_B & (signals.w_opd > 0))


class Suffix(NamedTuple):
    """An answer to score, and the prompt that it follows."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    temperature: float  # below GREEDY_BELOW it is scored as at 1, since engines report it so

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def read_ids(self) -> Tokens:
        """The tokens that a model reads to score the answer: all but the last response token."""
        return (*self.prompt_ids, *self.response_ids[:-1])

    @property
    def scale(self) -> float:
        """The number that its logits are divided by."""
        return 1.0 if self.temperature < GREEDY_BELOW else self.temperature


def padded(sequences: Sequence[Tokens]) -> tuple[list[list[int]], list[Sequence[int]]]:
    """Return rows of equal length, one per sequence, and the places of each sequence's tokens in the joined rows."""
    width = max(map(len, sequences))
    rows = [[*sequence, *([0] * (width - len(sequence)))] for sequence in sequences]
    return rows, [range(n * width, n * width + len(s)) for n, s in enumerate(sequences)]


class Answers:
    """The response tokens of some suffixes."""

    def __init__(self, suffixes: Sequence[Suffix], device: torch.device, packed: Pack | None) -> None:
        assert all(s.prompt_ids and s.response_ids for s in suffixes), "a suffix needs tokens before it and in it"
        self._lengths = [len(s.response_ids) for s in suffixes]
        rows, places = padded([s.read_ids for s in suffixes]) if packed is None else ([packed.ids], packed.places)
        self.ids_RL = torch.tensor(rows, device=device)
        row_N = [row for row, length in enumerate(self._lengths) for _ in range(length)]
        token_N = [t for length in self._lengths for t in range(length)]
        place_N = [p for s, of_s in zip(suffixes, places, strict=True) for p in of_s[len(s.prompt_ids) - 1 :]]
        self._row_N = torch.tensor(row_N, device=device)
        self._token_N = torch.tensor(token_N, device=device)
        self._place_N = torch.tensor(place_N, device=device)
        self.target_N = torch.tensor([i for s in suffixes for i in s.response_ids], device=device)
        self.scale_N = torch.tensor([suffixes[row].scale for row in row_N], device=device)

    def before(self, hidden_RLH: Tensor) -> Tensor:
        """Return the states [N, H] from which each response token is predicted."""
        # Not by indexing: its backward pass sums the gradients of answers that follow one place in no fixed order.
        return nn.functional.embedding(self._place_N, hidden_RLH.flatten(0, 1))

    def rows(self, values_N: Tensor) -> Tensor:
        """Return values [N, ...] as [B, T, ...], NaN past each row's end."""
        shape = (len(self._lengths), max(self._lengths), *values_N.shape[1:])
        return values_N.new_full(shape, torch.nan).index_put((self._row_N, self._token_N), values_N)

    def each(self, values_N: Tensor) -> list[Tensor]:
        """Return values [N, ...] as one [T, ...] for each row."""
        return list(torch.split(values_N, self._lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The choice of loss and its parameters.

    `loss` is PPO's clipped objective (arXiv:1707.06347), plain importance sampling, or CISPO, which clips the ratio and
    leaves every token its gradient (arXiv:2506.13585).

    The clip bounds how far the policy moves from the weights just before the step; the importance weight corrects for
    the difference between these and the weights that sampled.
    """

    loss: Literal["ppo", "importance_sampling", "cispo"] = "ppo"
    clip_low: float = 0.2  # how far below 1 a token's ratio of policies still counts
    clip_high: float = 0.28  # how far above 1: more, so that an unlikely token can rise (arXiv:2503.14476)
    importance_cap: float | None = 2.0  # bounds the importance weight of a token; None: the weight is 1
    kl: float = 0.02  # 0: no leash, and no reference is needed
    divergence: Literal["reverse", "forward"] = "reverse"  # where the teacher's whole distribution is known

    @property
    def clips(self) -> bool:
        """Whether the loss clips the ratio."""
        return self.loss != "importance_sampling"


class LogProbs(NamedTuple):
    """Log-probs [B, T] of the same tokens by different weights, all at the temperature of sampling; no gradients."""

    old: Tensor  # the weights just before the step
    sampled: Tensor  # as the engine reported them; NaN: it reported none
    reference: Tensor | None  # None only without a leash
    entropy: Tensor | None = None  # of the weights being trained, at each place; only for the figures

    def zero_unless(self, kept_BT: Tensor) -> "LogProbs":
        """Return the same with 0 for all tokens that are not kept."""
        return LogProbs._make(None if values is None else _zero_unless(kept_BT, values) for values in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """What one piece of a batch adds to the figures of the whole; the pieces are added up."""

    num_sequences: int = 0  # with at least one token kept
    num_tokens: int = 0  # kept
    num_tokens_dropped: int = 0  # tokens to be trained for which a number was missing or not finite
    num_clipped: int = 0
    num_moved: int = 0  # tokens whose ratio is not 1; 0 where the loss does not clip it
    loss_sum: float = 0.0  # of the sequences' means
    kl_sum: float = 0.0  # of tokens
    behaviour_kl_sum: float = 0.0  # of tokens
    entropy_sum: float = 0.0  # of tokens; NaN: not known
    moved_sum: float = 0.0  # of tokens: the divergence of the policy before the update from the one now (k3), nats

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFigures:
    """The figures of a whole batch; None where there is nothing to average."""

    num_tokens: int
    num_tokens_dropped: int
    loss_nats: float | None
    kl_reference_nats: float | None  # None also without a leash
    clipped_share: float | None  # None also where nothing can be clipped: the ratio is 1 throughout, or has no bounds
    behaviour_kl_nats: float | None  # sampled - old, per token
    entropy_nats: float | None  # per token, of the policy in the first epoch


def figures(steps: Sequence[LossSums], objective: Objective) -> LossFigures:
    """Return the means over all steps of an update, given the sums of each step.

    Tokens and entropy are of the first step alone: later ones see answers that were already learned from.
    """
    whole, first = sum(steps, LossSums()), sum(steps[:1], LossSums())
    some = whole.num_tokens > 0
    return LossFigures(
        num_tokens=first.num_tokens,
        num_tokens_dropped=first.num_tokens_dropped,
        loss_nats=whole.loss_sum / whole.num_sequences if some else None,
        kl_reference_nats=whole.kl_sum / whole.num_tokens if some and objective.kl > 0 else None,
        clipped_share=whole.num_clipped / whole.num_tokens if whole.num_moved else None,
        behaviour_kl_nats=whole.behaviour_kl_sum / whole.num_tokens if some else None,
        entropy_nats=None if isnan(first.entropy_sum) or not first.num_tokens else first.entropy_sum / first.num_tokens,
    )


def policy_loss(
    logp_new_BT: Tensor, known: LogProbs, advantage_BT: Tensor, trained_BT: Tensor, *, objective: Objective,
    beside_BT: Tensor | None = None,
) -> tuple[Tensor, LossSums]:  # fmt: skip
    """Return the scalar to call backward on, and its tally; divide the gradients by the whole batch's `num_sequences`.

    logp_new_BT   [B, T] float, of the weights being trained; carries the gradient
    advantage_BT  [B, T] float; NaN: not known
    trained_BT    [B, T] bool
    beside_BT     [B, T] float; another loss, with its own gradient, that is added to that of the advantages
    """
    kept_BT = _finite(logp_new_BT, known, objective) & advantage_BT.isfinite() & trained_BT
    new_BT, known = _zero_unless(kept_BT, logp_new_BT), known.zero_unless(kept_BT)
    ratio_BT = _ratio(new_BT, known.old)
    loss_BT, clipped_BT = _surrogate(new_BT, ratio_BT, _zero_unless(kept_BT, advantage_BT), objective)
    loss_BT = loss_BT * _importance(known, objective)
    if beside_BT is not None:
        loss_BT = loss_BT + beside_BT
    kl_BT = _leash(new_BT, ratio_BT, known, objective)
    return _summed(loss_BT, kl_BT, ratio_BT, known, kept_BT, trained_BT, objective, clipped_BT=clipped_BT)


@torch.no_grad()
def support_advantages(old_TK: Tensor, gap_TK: Tensor) -> Tensor:
    """Return the advantage [T, K] of each of the policy's likeliest tokens: its clipped gap, times its share of their
    probability, so that a token counts as often as the policy would sample it among them.
    """
    return old_TK.softmax(1) * gap_TK.clamp(-SUPPORT_CLIP_NATS, SUPPORT_CLIP_NATS)


def support_loss(new_BTK: Tensor, old_BTK: Tensor, advantage_BTK: Tensor, *, objective: Objective) -> Tensor:
    """Return [B, T], the sum of the K tokens' losses; 0 without a gradient where any of their numbers is not finite.

    Nobody sampled these tokens, so there is no importance weight.
    """
    rows = (new_BTK, old_BTK, advantage_BTK)
    known_BT1 = torch.stack([row.isfinite().all(2) for row in rows]).all(0).unsqueeze(2)
    new_BTK, old_BTK, advantage_BTK = (_zero_unless(known_BT1, row) for row in rows)
    loss_BTK, _ = _surrogate(new_BTK, _ratio(new_BTK, old_BTK), advantage_BTK, objective)
    return loss_BTK.sum(2)


def distillation_loss(
    logp_new_BT: Tensor, top_new_BTK: Tensor, top_teacher_BTK: Tensor, known: LogProbs, trained_BT: Tensor, *,
    objective: Objective, weight: float | Tensor = 1.0,
) -> tuple[Tensor, LossSums]:  # fmt: skip
    """Return what `policy_loss` returns, for a loss of `weight` ([B, T], or one number) times the divergence of policy
    and teacher by place.

    Both are given as log-probs [B, T, K] of the same K tokens, the teacher's likeliest. All other tokens count as one
    more event, so that all probability is in the sum.
    """
    known_BT = top_new_BTK.isfinite().all(2) & top_teacher_BTK.isfinite().all(2)
    kept_BT = _finite(logp_new_BT, known, objective) & known_BT & trained_BT
    new_BT, known = _zero_unless(kept_BT, logp_new_BT), known.zero_unless(kept_BT)
    loss_BT = weight * divergence_where(kept_BT, top_new_BTK, top_teacher_BTK, direction=objective.divergence)
    ratio_BT = _ratio(new_BT, known.old)
    kl_BT = _leash(new_BT, ratio_BT, known, objective)
    return _summed(loss_BT, kl_BT, ratio_BT, known, kept_BT, trained_BT, objective)


def divergence_where(
    known_BT: Tensor, top_new_BTK: Tensor, top_teacher_BTK: Tensor, *, direction: Literal["reverse", "forward"]
) -> Tensor:
    """Return `divergence` where both are known, and 0 without a gradient elsewhere."""
    # Values that are not read are replaced by a finite one, the same on both sides.
    stand_in = top_new_BTK.new_full((), -log(2 * top_new_BTK.shape[2]))
    known_BT1 = known_BT.unsqueeze(2)
    return divergence(
        torch.where(known_BT1, top_new_BTK, stand_in),
        torch.where(known_BT1, top_teacher_BTK, stand_in),
        direction=direction,
    )


def divergence(top_new_BTK: Tensor, top_teacher_BTK: Tensor, *, direction: Literal["reverse", "forward"]) -> Tensor:
    """Return [B, T]: KL(policy || teacher) for "reverse", KL(teacher || policy) for "forward".

    The sum is over the K tokens, and all others as one more.
    """
    new_BTE, teacher_BTE = _with_tail(top_new_BTK), _with_tail(top_teacher_BTK)
    p_BTE, q_BTE = (new_BTE, teacher_BTE) if direction == "reverse" else (teacher_BTE, new_BTE)
    return (p_BTE.exp() * (p_BTE - q_BTE)).sum(2)


@torch.no_grad()
def pull(plain_ids_TK: Tensor, plain_TK: Tensor, told_ids_TK: Tensor, told_TK: Tensor) -> Tensor:
    """Return how much the divergence from the teacher counts at each place [T], 0 to 1: not at all where the hint moves
    less than half of the base's probability, fully where it moves all. Given are the base's likeliest tokens without
    the hint and with it, and their log-probs; all others are one more.
    """
    same_TKK = told_ids_TK.unsqueeze(2) == plain_ids_TK.unsqueeze(1)
    shared_TKK = torch.minimum(told_TK.unsqueeze(2), plain_TK.unsqueeze(1)).exp()
    others_T = (1 - torch.maximum(told_TK.exp().sum(1), plain_TK.exp().sum(1))).clamp(min=0)
    return (1 - 2 * ((shared_TKK * same_TKK).sum((1, 2)) + others_T)).clamp(min=0)


def _with_tail(logp_BTK: Tensor) -> Tensor:
    """Return the log-probs followed by that of all other tokens together, whose probability is never quite 0."""
    head_BT1 = logp_BTK.logsumexp(2, keepdim=True).clamp(max=-LEAST_TAIL)
    return torch.cat([logp_BTK, torch.log(-torch.expm1(head_BT1))], 2)


def _ratio(new_BT: Tensor, before_BT: Tensor) -> Tensor:
    return (new_BT - before_BT).clamp(max=MAX_LOG_RATIO_NATS).exp()


def _surrogate(new_BT: Tensor, ratio_BT: Tensor, advantage_BT: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and which tokens' loss the clip changes."""
    bounded_BT = ratio_BT.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    free_BT = -ratio_BT * advantage_BT
    if objective.loss == "importance_sampling":
        return free_BT, torch.zeros_like(ratio_BT, dtype=torch.bool)
    if objective.loss == "cispo":
        return -bounded_BT.detach() * advantage_BT * new_BT, (bounded_BT != ratio_BT) & (advantage_BT != 0)
    clipped_BT = -bounded_BT * advantage_BT
    return torch.maximum(free_BT, clipped_BT), clipped_BT > free_BT


def _zero_unless(kept_BT: Tensor, values_BT: Tensor) -> Tensor:
    return torch.where(kept_BT, values_BT, values_BT.new_zeros(()))


def _importance(known: LogProbs, objective: Objective) -> Tensor:
    """Return how much likelier each token was just before the step than when it was sampled, capped."""
    if objective.importance_cap is None:
        return torch.ones_like(known.old)
    return (known.old - known.sampled).clamp(max=log(objective.importance_cap)).exp()


def _leash(new_BT: Tensor, ratio_BT: Tensor, known: LogProbs, objective: Objective) -> Tensor:
    """Return an estimate of KL(new || reference) at each token, from tokens that older weights sampled.

    d is new less reference, clamped. The value is the ratio times k3 = exp(-d) - 1 + d, which is never negative. The
    gradient is that of the ratio times d, with d held fixed. Where d is not clamped, this is the value's own gradient.
    Where d is clamped, the value's own gradient would be off by up to e^10. The importance weight is small for a token
    that the policy has unlearned since it was sampled; without it such a token would count e^10 times.
    """
    if objective.kl == 0 or known.reference is None:
        return torch.zeros_like(ratio_BT)
    bound = MAX_KL_DIFFERENCE_NATS
    difference_BT = (new_BT - known.reference).detach().clamp(-bound, bound)
    k3_BT = torch.expm1(-difference_BT) + difference_BT
    slope_BT = (ratio_BT - ratio_BT.detach()) * difference_BT  # 0, and carries the gradient
    return (ratio_BT.detach() * k3_BT + slope_BT) * _importance(known, objective)


def _summed(
    loss_BT: Tensor, kl_BT: Tensor, ratio_BT: Tensor, known: LogProbs, kept_BT: Tensor, trained_BT: Tensor,
    objective: Objective, *, clipped_BT: Tensor | None = None,
) -> tuple[Tensor, LossSums]:  # fmt: skip
    """Return the sum of loss and leash over the tokens kept, and the tally."""
    total = _sum(_zero_unless(kept_BT, loss_BT + objective.kl * kl_BT), kept_BT)
    moved_BT = ratio_BT.detach()
    k3_BT = moved_BT - 1 - moved_BT.clamp(min=1e-30).log()
    return total, LossSums(
        num_sequences=int(kept_BT.any(1).sum()),
        num_tokens=int(kept_BT.sum()),
        num_tokens_dropped=int((trained_BT & ~kept_BT).sum()),
        num_clipped=0 if clipped_BT is None else int((kept_BT & clipped_BT).sum()),
        num_moved=int((kept_BT & (ratio_BT != 1)).sum()) if clipped_BT is not None and objective.clips else 0,
        loss_sum=float(total.detach()),
        kl_sum=float(_zero_unless(kept_BT, kl_BT.detach()).sum()),
        behaviour_kl_sum=float((known.sampled - known.old).sum()),
        entropy_sum=nan if known.entropy is None else float(known.entropy.sum()),
        moved_sum=float(_zero_unless(kept_BT, k3_BT).sum()),
    )


def _finite(logp_new_BT: Tensor, known: LogProbs, objective: Objective) -> Tensor:
    finite_BT = logp_new_BT.isfinite() & known.old.isfinite() & known.sampled.isfinite()
    if objective.kl > 0:
        assert known.reference is not None, "a leash needs the reference's log-probs"
        finite_BT &= known.reference.isfinite()
    return finite_BT


def _sum(loss_BT: Tensor, kept_BT: Tensor) -> Tensor:
    """Return the sum of the means by sequence, so that short answers count as much as long ones."""
    return (loss_BT.sum(1) / kept_BT.sum(1).clamp(min=1)).sum()
