"""The loss of a planned batch under the settings' method: the scores made beforehand, and each piece's sum.

Scores made before the optimizer's first step (the teacher's, the reference's, and those that the ratio starts from)
stay the same through all its steps. A gap is a token's log-prob by the teacher less that by the student. With the
trainer as teacher, the same code makes both scores, at the temperature of sampling; in a contrast the student is the
teacher without the hint, so a gap is what the hint changes. With an engine as teacher, both are engines' scores at
temperature 1, which came with the sample; the student's version is never older than the answer's. Ratios and leash
always use the trainer's scores. By support, the gaps of the policy's likeliest tokens at each place replace that of the
sampled token.

Before that, one of several offered hints is chosen. The rule "fall" takes the hint with which the teacher finds the
answer least likely: that hint lowers it most. The rule "overlap" takes the hint with which the teacher's likeliest
tokens are most often the policy's too, as OpenClaw-RL does since spring 2026. Of equals the longest is taken. B
samples, T response tokens, K likeliest tokens of the teacher, S of the policy, O offered hints.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from clawstream.config import TrainingSettings
from clawstream.events import SampleAssembled
from clawstream.training.batches.choosing import corrected_hint
from clawstream.training.batches.trainable import hint_counts, offers
from clawstream.training.model import Model, TokenScores, Top, Weights
from clawstream.training.step.carried import JudgeAccuracy
from clawstream.training.step.losses import (
    LogProbs,
    LossSums,
    Objective,
    Signals,
    Suffix,
    distillation_loss,
    divergence_where,
    has_signal,
    policy_loss,
    pull,
    support_advantages,
    support_loss,
    token_advantages,
)

TOPK_TOKENS = 50  # of the teacher, at each place; all other tokens count as one more
SUPPORT_TOKENS = 4  # of the policy, at each place, as OpenClaw-RL has it

_FULLY = torch.empty(0)
Gaps = dict[int, Tensor]  # of each hinted sample's trained tokens [N], by its index


class Support(NamedTuple):
    """The policy's likeliest tokens at each place of an answer, before the steps."""

    ids_TS: Tensor
    old_TS: Tensor  # log-probs
    advantage_TS: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The scores of a batch before its steps; one entry per sample."""

    samples: Sequence[SampleAssembled]
    plain: list[Suffix]
    hinted: Mapping[int, Tensor]  # the teacher's log-probs [T], by index, of samples whose hint counts
    students: Mapping[int, Tensor]  # the student's [T] for the gap; without an entry, the trainer's own before the step
    tops: Mapping[int, Top]  # the teacher's likeliest tokens, where its whole distribution counts
    supports: Mapping[int, Support] = field(default_factory=dict)  # of hinted answers, where these tokens are trained
    pulls: Mapping[int, Tensor] = field(default_factory=dict)  # in a contrast: how far the hint moves the base [T]
    old: list[Tensor] | None  # [T] each; None: only one step, so the weights being trained are the old ones
    reference: list[Tensor] | None  # [T] each; None only without a leash
    advantages: Sequence[float] | None = None  # one per sample; None: they follow from the rewards
    rewards_count: bool = True  # False: w_binary is 0, and no reward says anything
    tool_baseline: float = 0.0  # the usual reward of an answer that calls tools
    judges: JudgeAccuracy = field(default_factory=JudgeAccuracy)
    corrected: Collection[str] = ()  # the hints that were just said, where the step is to teach these at once

    def wanted(self, index: int) -> float | None:
        """How much likelier the answer is to become (below 0: less likely), hints aside; None: no signal."""
        if self.advantages is not None:
            return self.advantages[index]
        sample = self.samples[index]
        if sample.learned_reward is None or not self.rewards_count:
            return None
        # What is usual is subtracted before weighing: a doubted judge's praise may teach little, but not the opposite.
        unusual = sample.learned_reward - (self.tool_baseline if sample.calls_tools else 0.0)
        others = (sample.person_reward, sample.environment_reward, sample.heuristic_reward)
        is_verdict = sample.reward is not None and not sample.cut and all(score is None for score in others)
        return unusual * (self.judges.weight(sample) if is_verdict else 1.0) or None

    def pull(self, index: int) -> Tensor:
        """How much the divergence counts [T]; empty: fully, as in any answer that was scored or is to a new hint."""
        sample, pull_T = self.samples[index], self.pulls.get(index, _FULLY)
        is_new = sample.hint is not None and (sample.hint_id or corrected_hint(sample)) in self.corrected
        return _FULLY if is_new or self.wanted(index) is not None else pull_T

    def open_nats(self, index: int) -> float | None:
        """The mean over tokens of the sampling policy's log-prob less the teacher's.

        None: the hint does not count, or no token has both numbers.
        """
        teacher_T = self.hinted.get(index)
        if teacher_T is None:
            return None
        open_T = _floats(self.samples[index].response_logprobs) - teacher_T.cpu()
        open_T = open_T[open_T.isfinite()]
        return float(open_T.mean()) if len(open_T) else None

    def gain_nats(self, index: int) -> float | None:
        """How much likelier the hint makes the answer to the reference, if that is the teacher; None: unknown."""
        teacher_T, plain_T = self.hinted.get(index), self.students.get(index)
        if plain_T is None and self.reference is not None:
            plain_T = self.reference[index]
        return None if teacher_T is None or plain_T is None else float((teacher_T - plain_T).nansum())


class BatchLoss:
    """A method and its weights, on one model."""

    def __init__(self, model: Model, settings: TrainingSettings) -> None:
        self._model = model
        self._budget_tokens = settings.micro_batch_tokens
        self._by_engine = settings.by_engine
        self._contrasts = settings.taught_by == "contrast"
        self._top_tokens = TOPK_TOKENS if settings.asks_likeliest else None
        self._divergence_weight = settings.divergence_weight
        self._distils = settings.method == "topk"
        self._by_support = settings.by_support
        self._thinking_weight = settings.w_thinking
        w_binary, w_opd = settings.weights
        self._signals = Signals(w_binary=w_binary, w_opd=w_opd)
        self.objective = Objective(loss=settings.loss, kl=settings.kl)
        if settings.as_published:
            self._signals = replace(self._signals, gap_clip_nats=inf, gap_mask_nats=inf)
            self.objective = replace(self.objective, importance_cap=None)
        if self._by_support:
            self._signals = replace(self._signals, gap_clip_nats=0.0)  # the sampled token's gap has no part in it

    def score(
        self, samples: Sequence[SampleAssembled], *, reference: Weights, moves: bool,
        advantages: Sequence[float] | None = None, tool_baseline: float = 0.0,
        judges: JudgeAccuracy | None = None, corrected: Collection[str] = (),
    ) -> Scored:  # fmt: skip
        """Return the scores that the loss needs; `reference` is the teacher, too, unless an engine is.

        `moves` says that there are several optimizer's steps, so that the weights change between them.
        """
        model, budget = self._model, self._budget_tokens
        plain = [Suffix(s.prompt_ids, s.response_ids, s.temperature) for s in samples]
        chosen = [i for i, s in enumerate(samples) if hint_counts(s, by_engine=self._by_engine)]
        chosen = chosen if self._signals.w_opd > 0 else []
        questions = [plain[i]._replace(prompt_ids=samples[i].hinted_prompt_ids or ()) for i in chosen]
        leashed = plain if self.objective.kl > 0 else []
        hinted, students, pulls = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
        tops: dict[int, Top] = {}
        if self._by_engine:
            hinted = {i: _floats(samples[i].teacher_logprobs or ()) for i in chosen}
            students = {i: _floats(samples[i].student_logprobs or ()) for i in chosen}
            answers = model.score(leashed, weights=reference, budget_tokens=budget)
        else:
            own, tops_asked = self._taught([*questions, *leashed], reference)  # prompts share their beginning
            hinted = dict(zip(chosen, own, strict=False))
            tops = dict(zip(chosen, tops_asked, strict=False))
            answers = own[len(chosen) :]
            if self._contrasts:
                unhinted = [plain[i] for i in chosen]
                # Every process scores or none does, whether or not its share has hints.
                if self.objective.kl > 0:
                    scores, plain_tops = [answers[i] for i in chosen], tops_asked[len(chosen) :]
                    plain_tops = [plain_tops[i] for i in chosen] if plain_tops else []
                else:
                    scores, plain_tops = self._taught(unhinted, reference)
                students = dict(zip(chosen, scores, strict=True))
                pulls = {i: pull(*top[1:], *tops[i][1:]) for i, top in zip(chosen, plain_tops, strict=False)}
        return Scored(
            samples=samples,
            plain=plain,
            hinted=hinted,
            students=students,
            tops=tops,
            pulls=pulls,
            supports=self._supports(chosen, [plain[i] for i in chosen], questions, reference),
            old=model.score(plain, weights=None, budget_tokens=budget) if moves else None,
            reference=answers if self.objective.kl > 0 else None,
            advantages=advantages,
            rewards_count=self._signals.w_binary > 0,
            tool_baseline=tool_baseline,
            judges=judges or JudgeAccuracy(),
            corrected=corrected,
        )

    def _supports(
        self, chosen: Sequence[int], unhinted: list[Suffix], questions: list[Suffix], teacher: Weights
    ) -> dict[int, Support]:
        """Return the policy's likeliest tokens at each place of the chosen answers; empty unless these are trained."""
        if not self._by_support:
            return {}
        budget = self._budget_tokens
        own = self._model.likeliest(unhinted, num_tokens=SUPPORT_TOKENS, weights=None, budget_tokens=budget)
        ask = partial(self._model.among, num_tokens=SUPPORT_TOKENS, weights=teacher, budget_tokens=budget)
        ids, old = [top.ids_TK for top in own], [top.logp_TK for top in own]
        told = ask(questions, ids)
        students = ask(unhinted, ids) if self._contrasts else old
        return {
            i: Support(ids_TS, old_TS, support_advantages(old_TS, told_TS - student_TS))
            for i, ids_TS, old_TS, told_TS, student_TS in zip(chosen, ids, old, told, students, strict=True)
        }

    def _taught(self, suffixes: list[Suffix], teacher: Weights) -> tuple[list[Tensor], list[Top]]:
        """Return the teacher's log-probs [T] of each answer, and its likeliest tokens there, if they are needed."""
        model, num, budget = self._model, self._top_tokens, self._budget_tokens
        if num is None:
            return model.score(suffixes, weights=teacher, budget_tokens=budget), []
        tops = model.likeliest(suffixes, num_tokens=num, weights=teacher, budget_tokens=budget)
        return [top.own_T for top in tops], tops

    def of(self, scored: Scored, group: Sequence[int]) -> tuple[Tensor, LossSums, Gaps]:
        """Return the sum to call backward on, its tally, and the gaps of the hinted tokens that count."""
        return self._distilled(scored, group) if self._distils else self._advanced(scored, group)

    def _advanced(self, scored: Scored, group: Sequence[int]) -> tuple[Tensor, LossSums, Gaps]:
        scores, top_teacher_BTK, support_BTS = self._token_scores(scored, group)
        new_BT = scores.logp_BT
        known, trained_BT = self._known(scored, group, scores)
        wanted = [scored.wanted(i) for i in group]
        rewarded_B = torch.tensor([value is not None for value in wanted], device=new_BT.device)
        reward_B = new_BT.new_tensor([torch.nan if value is None else value for value in wanted])
        hinted_B = torch.tensor([i in scored.hinted for i in group], device=new_BT.device)
        gap_BT = _gap(scored, group, known.old)
        trained_BT &= has_signal(rewarded_B, hinted_B, signals=self._signals).unsqueeze(1)
        weight_BT = self._weight(scored, group, new_BT)
        advantage_BT = weight_BT * token_advantages(reward_B, rewarded_B, gap_BT, hinted_B, signals=self._signals)
        beside_BT = None
        if self._top_tokens is not None:
            both_BT = scores.among_BTK.isfinite().all(2) & top_teacher_BTK.isfinite().all(2)
            divergence_BT = divergence_where(both_BT, scores.among_BTK, top_teacher_BTK, direction="forward")
            pull_BT = _padded([scored.pull(i) for i in group], like_BT=new_BT).nan_to_num(1.0)
            beside_BT = self._divergence_weight * weight_BT * pull_BT * divergence_BT
        if support_BTS is not None:
            by_support_BT = self._signals.w_opd * weight_BT * self._support_loss(scored, group, support_BTS)
            beside_BT = by_support_BT if beside_BT is None else beside_BT + by_support_BT
        total, tally = policy_loss(
            new_BT, known, advantage_BT, trained_BT, objective=self.objective, beside_BT=beside_BT
        )
        return total, tally, self._gaps(scored, group, known, trained_BT)

    def _distilled(self, scored: Scored, group: Sequence[int]) -> tuple[Tensor, LossSums, Gaps]:
        scores, top_teacher_BTK, _ = self._token_scores(scored, group)
        known, trained_BT = self._known(scored, group, scores)
        trained_BT &= torch.tensor([[i in scored.tops] for i in group], device=scores.logp_BT.device)
        total, tally = distillation_loss(
            scores.logp_BT, scores.among_BTK, top_teacher_BTK, known, trained_BT,
            objective=self.objective,
            weight=self._divergence_weight * self._weight(scored, group, scores.logp_BT),
        )  # fmt: skip
        return total, tally, self._gaps(scored, group, known, trained_BT)

    def _token_scores(self, scored: Scored, group: Sequence[int]) -> tuple[TokenScores, Tensor, Tensor | None]:
        """Return the policy's scores, also of the teacher's likeliest tokens; the teacher's scores of these tokens; and
        the policy's scores of its own likeliest tokens before the steps, None unless these are trained.

        The teacher's scores are [B, T, K], NaN where there are none; K is 0 where its likeliest tokens are not needed.
        """
        suffixes = [scored.plain[i] for i in group]
        if self._top_tokens is None and not self._by_support:
            scores = self._model.token_scores(suffixes)
            return scores, scores.among_BTK, None
        tops = [scored.tops.get(i) or self._no_top(len(s.response_ids)) for i, s in zip(group, suffixes, strict=True)]
        supports = [self._support(scored, i) for i in group]
        asked = [torch.cat([top.ids_TK, support.ids_TS], 1) for top, support in zip(tops, supports, strict=True)]
        scores = self._model.token_scores(suffixes, asked)
        num_tops = self._top_tokens or 0
        support_BTS = scores.among_BTK[..., num_tops:] if self._by_support else None
        scores = scores._replace(among_BTK=scores.among_BTK[..., :num_tops])
        return scores, _padded([top.logp_TK for top in tops], like_BT=scores.among_BTK), support_BTS

    def _support_loss(self, scored: Scored, group: Sequence[int], new_BTS: Tensor) -> Tensor:
        supports = [self._support(scored, i) for i in group]
        old_BTS = _padded([support.old_TS for support in supports], like_BT=new_BTS)
        advantage_BTS = _padded([support.advantage_TS for support in supports], like_BT=new_BTS)
        return support_loss(new_BTS, old_BTS, advantage_BTS, objective=self.objective)

    def _known(self, scored: Scored, group: Sequence[int], scores: TokenScores) -> tuple[LogProbs, Tensor]:
        """Return the log-probs under the other weights, and which tokens are to be trained."""
        here_BT = scores.logp_BT.detach()
        samples = [scored.samples[i] for i in group]
        old_BT = here_BT if scored.old is None else _padded([scored.old[i] for i in group], like_BT=here_BT)
        sampled_BT = _padded([_floats(s.response_logprobs) for s in samples], like_BT=here_BT)
        if not self._model.at_temperature:  # then answers at others count as if the policy had just sampled them
            others = [row for row, i in enumerate(group) if scored.plain[i].scale != 1]
            sampled_BT[others] = torch.where(sampled_BT[others].isnan(), sampled_BT[others], old_BT[others])
        of_all = scored.reference
        reference_BT = None if of_all is None else _padded([of_all[i] for i in group], like_BT=here_BT)
        trained = _padded([torch.tensor(s.trained, dtype=torch.float32) for s in samples], like_BT=here_BT) == 1
        return LogProbs(old_BT, sampled_BT, reference_BT, scores.entropy_BT), trained

    def _gaps(self, scored: Scored, group: Sequence[int], known: LogProbs, trained_BT: Tensor) -> Gaps:
        """Return the gaps between teacher and policy, also in a contrast, where the loss uses other gaps."""
        gap_BT = _gap(replace(scored, students={}) if self._contrasts else scored, group, known.old)
        known_BT = trained_BT & gap_BT.isfinite()
        return {i: gap_BT[row][known_BT[row]].cpu() for row, i in enumerate(group) if i in scored.hinted}

    def _weight(self, scored: Scored, group: Sequence[int], like_BT: Tensor) -> Tensor:
        """Return how much each token [B, T] counts beside the others: thinking by a setting, all others once."""
        weight_BT = torch.ones_like(like_BT, requires_grad=False)
        for row, index in enumerate(group):
            weight_BT[row, : scored.samples[index].num_thinking] = self._thinking_weight
        return weight_BT

    def _no_top(self, num_tokens: int) -> Top:
        ids_TK, nothing_TK = self._nothing(num_tokens, self._top_tokens or 0)
        return Top(torch.full((num_tokens,), torch.nan, device=self._model.device), ids_TK, nothing_TK)

    def _support(self, scored: Scored, index: int) -> Support:
        if (found := scored.supports.get(index)) is not None:
            return found
        ids_TS, nothing_TS = self._nothing(len(scored.plain[index].response_ids), SUPPORT_TOKENS * self._by_support)
        return Support(ids_TS, nothing_TS, nothing_TS)

    def _nothing(self, num_tokens: int, num_asked: int) -> tuple[Tensor, Tensor]:
        """Return ids to ask about where nobody reads their scores, and NaN in place of the scores."""
        ids_TK = torch.zeros((num_tokens, num_asked), dtype=torch.long, device=self._model.device)
        return ids_TK, torch.full(ids_TK.shape, torch.nan, device=ids_TK.device)


def _gap(scored: Scored, group: Sequence[int], old_BT: Tensor) -> Tensor:
    """Return the gap [B, T] of each token; NaN where no hint counts."""
    nothing = old_BT.new_empty(0)
    students = [scored.students.get(i, nothing) for i in group]
    student_BT = _padded(students, like_BT=old_BT) if scored.students else old_BT
    return _padded([scored.hinted.get(i, nothing) for i in group], like_BT=old_BT) - student_BT


def _floats(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values], dtype=torch.float32)


def _padded(rows: Sequence[Tensor], *, like_BT: Tensor) -> Tensor:
    """Return the rows [T] as [B, T] with NaN past each one's end, or [T, K] as [B, T, K]; without a gradient."""
    out_BT = torch.full_like(like_BT, torch.nan)
    for row, values in enumerate(rows):
        out_BT[row, : len(values)] = values.to(like_BT.device)
    return out_BT


def choose_hints(
    model: Model, samples: Sequence[SampleAssembled], *, rule: Literal["fall", "overlap"],
    teacher: Weights, budget_tokens: int,
) -> tuple[int, ...]:  # fmt: skip
    """Return for each sample the number of the offer to train on; all processes call it together, and get the same."""
    if not any(sample.other_hints for sample in samples):
        return (0,) * len(samples)
    lengths = [(1 + len(s.other_hints)) * (len(s.prompt_ids) + len(s.response_ids)) for s in samples]
    mine = [number for number in model.share(lengths) if samples[number].other_hints]
    here = [samples[number] for number in mine]
    values = (_falls if rule == "fall" else _overlaps)(model, here, teacher, budget_tokens)
    best = {number: of_one.index(max(of_one)) for number, of_one in zip(mine, values, strict=True)}
    own = dict.fromkeys(range(len(samples)), 0)  # what a sample without a choice has
    return tuple((own | model.together(best)).values())


def _falls(model: Model, samples: Sequence[SampleAssembled], teacher: Weights, budget_tokens: int) -> list[list[float]]:
    """Return, for each offer of each sample, how unlikely the teacher finds the tokens that are trained on, in nats."""
    scores = iter(model.score(_questions(samples), weights=teacher, budget_tokens=budget_tokens))
    found = []
    for sample in samples:
        logp_OT = torch.stack([next(scores).double() for _ in offers(sample)])
        counts_T = torch.tensor(sample.trained, device=logp_OT.device).bool() & logp_OT.isfinite().all(0)
        found.append((-logp_OT[:, counts_T].sum(1)).tolist())
    return found


def _overlaps(
    model: Model, samples: Sequence[SampleAssembled], teacher: Weights, budget_tokens: int
) -> list[list[float]]:
    """Return, for each offer of each sample, how many of the policy's likeliest tokens are among the teacher's."""
    plain = [Suffix(one.prompt_ids, one.response_ids, one.temperature) for one in samples]
    own = model.likeliest(plain, num_tokens=SUPPORT_TOKENS, weights=None, budget_tokens=budget_tokens)
    told = iter(
        model.likeliest(_questions(samples), num_tokens=SUPPORT_TOKENS, weights=teacher, budget_tokens=budget_tokens)
    )
    found = []
    for sample, top in zip(samples, own, strict=True):
        counts_T = torch.tensor(sample.trained, device=top.ids_TK.device).bool()
        shared = [(top.ids_TK[:, :, None] == next(told).ids_TK[:, None, :]).any(2) for _ in offers(sample)]
        found.append([float(shared_TK[counts_T].sum()) for shared_TK in shared])
    return found


def _questions(samples: Sequence[SampleAssembled]) -> list[Suffix]:
    """Return each sample's answer after each of the prompts that it may be trained with."""
    return [
        Suffix(offered.hinted_prompt_ids, sample.response_ids, sample.temperature)
        for sample in samples
        for offered in offers(sample)
    ]
