"""Whether a step's outcome may be published, and what the next step's gate has to know of the past. Pure.

A step is rejected only if it is certainly bad. A measurement is an interval over a few answers, and the whole interval
has to lie beyond the bound. Too few answers never lead to a rejection; numbers that are not finite always do. The
answers are the step's own and the canaries, the first that the policy was trained on. An evaluation's answers are never
among them: it asks in side turns, which give no samples.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from math import comb, exp, isfinite, prod, sqrt
from statistics import fmean
from typing import Any, NamedTuple

from clawstream.conversation.messages import loops
from clawstream.events import KeptHint, Rehearsed, SampleAssembled
from clawstream.training.batches.memory import OPEN_NATS

CANARIES = 4
RECENT = 8  # answers of the step's own samples that are measured before and after it
ANSWERED = 4  # of the samples' prompts are answered by the policy after the step, as are the canaries' prompts
WRITTEN_TOKENS = 128  # the longest that such an answer may get
BRIEF_TOKENS = WRITTEN_TOKENS // 2  # where the answer that people got was no longer, one that does not end is bad
HELD_ANSWERS = 64  # remembered: the newest, each of another hint
LOOKED_AT = 8  # of these are measured before a version is published
KL_NATS = 0.1  # a token; none of 100 healthy steps of the demo's policy was rejected for it
KL_SHARE = 1 / 3  # of the entropy before a step, where that is more: a model that has more to say moves further ...
MOST_KL_NATS = 0.3  # ... up to this; of 141 healthy steps of SmolLM2 none certainly moved it by more than 0.18
ENTROPY_FACTOR = 4.0  # a step may not make a policy surer, or less sure, by this factor
ENTROPY_NATS = 0.1  # a smaller change of entropy is harmless, whatever the factor
ALIKE_REWARDS = 149  # if so many are all good, the share of good ones exceeds 0.98 (95 % sure): they teach nothing
EARLIER_REWARDS = 32
RARE = 1e-4  # anything less probable is not put down to chance
NEEDLESS_HINTS = 0.2  # the share of good answers that may have a hint all the same
MIN_ANSWERS = 3
BAD_SHARE = 0.5  # of the answers written after the step
STILL_NATS = 0.01  # a token; a smaller move may come from the leash alone, so its direction says nothing
REJECTED_IN_A_ROW = 8  # after so many, one-sided rewards are accepted
NEAR_NATS = 0.18  # the KL of a whole answer; below it at most 0.3 of all answers differ from before

# One-sided 99 % quantiles of Student's t, by degrees of freedom from 1 on.
_T99 = (31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718, 2.681, 2.650, 2.624, 2.602)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """An answer that every step's gate measures."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    temperature: float
    stopped: bool = False  # its end may come from the client's request, as from a stop string


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAnswer:
    """The newest rehearsal of a held hint that followed it; the hint was not in the answer's prompt."""

    hint_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    temperature: float
    logp_nats: float  # a token, when it was written

    def kept(self, now: "AnswerLikelihood") -> KeptHint | None:
        """Return how much less likely the answer has become since it was written; None: it has no finite log-prob."""
        lost_nats = self.logp_nats - fmean(now.logps)
        return KeptHint(hint_id=self.hint_id, lost_nats=lost_nats) if isfinite(lost_nats) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedReward:
    """The judge's part of a reward; people's feedback is left out, since it is unasked and can't be one-sided."""

    good: bool  # above 0
    hinted: bool  # the answer has a hint that says how it should have been


@dataclass(frozen=True, slots=True, kw_only=True)
class GateMemory:
    """What the gate remembers from version to version; it is kept in the checkpoint, so a rollback restores it."""

    canaries: tuple[Canary, ...] = ()
    held: tuple[HeldAnswer, ...] = ()  # of different hints, the newest last
    verdicts: tuple[JudgedReward, ...] = ()  # the latest ones, the newest last
    as_it_is: bool = False  # a judge that says yes to everything is accepted as it is: a person was told

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "GateMemory":
        """Return the memory that a checkpoint's plain values describe."""
        canaries = [Canary(**_with_tuples(one)) for one in plain["canaries"]]
        held = [HeldAnswer(**_with_tuples(one)) for one in plain.get("held", ())]
        verdicts = [JudgedReward(good=good, hinted=hinted) for good, hinted in plain["verdicts"]]
        return cls(canaries=tuple(canaries), held=tuple(held), verdicts=tuple(verdicts), as_it_is=plain["as_it_is"])

    def plain(self) -> dict[str, Any]:
        """Return the plain values that `of` takes."""
        return {
            "canaries": [asdict(canary) for canary in self.canaries],
            "held": [asdict(answer) for answer in self.held],
            "verdicts": [(verdict.good, verdict.hinted) for verdict in self.verdicts],
            "as_it_is": self.as_it_is,
        }

    def to_look_at(
        self, held: Collection[str], samples: Sequence[SampleAssembled], *, version: int
    ) -> tuple[HeldAnswer, ...]:
        """Return `LOOKED_AT` answers at most, of held hints that are not in the batch; others for each version."""
        here = {sample.hint_id for sample in samples}
        others = sorted(
            (one for one in self.held if one.hint_id in held and one.hint_id not in here), key=lambda one: one.hint_id
        )
        first = version * LOOKED_AT % max(1, len(others))
        return tuple([*others[first:], *others[:first]][:LOOKED_AT])

    def after(
        self, samples: Sequence[SampleAssembled], rehearsed: Sequence[Rehearsed] = (), *, as_it_is: bool = False
    ) -> "GateMemory":
        """Return the memory after an accepted step on these samples; `rehearsed` says how open their hints were.

        A judge that was accepted `as_it_is` for this step stays accepted until it says no once.
        """
        first = [
            Canary(prompt_ids=s.prompt_ids, response_ids=s.response_ids, temperature=s.temperature, stopped=stopped(s))
            for s in samples
            if s.hint_id is None  # a rehearsal's prompt is another sample's
        ]
        canaries = (*self.canaries, *first)[:CANARIES]
        here = _verdicts(samples)
        rehearsals = [sample for sample in samples if sample.hint_id is not None]
        answers = {one.hint_id: one for one in self.held}
        for sample, found in zip(rehearsals, rehearsed, strict=bool(rehearsed)):
            if (new := _held_answer(sample, found)) is not None:
                answers.pop(new.hint_id, None)
                answers[new.hint_id] = new
        return GateMemory(
            canaries=canaries,
            held=tuple(answers.values())[-HELD_ANSWERS:],
            verdicts=(*self.verdicts, *here)[-ALIKE_REWARDS:],
            as_it_is=(self.as_it_is or as_it_is) and all(verdict.good for verdict in here),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLikelihood:
    """How likely a policy finds an answer."""

    logps: tuple[float, ...]  # of its tokens, nats
    entropy_nats: float | None  # a token; None: not known


Way = tuple[float, ...]  # how strongly each token of an answer is to become likelier, or below 0 less likely


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """A short answer by the policy after the step, to a prompt that people got an answer to."""

    token_ids: tuple[int, ...]  # without the end token
    ended: bool | None  # False: it was cut off; None: it is not known how the model's answers end
    answered_tokens: int  # of the answer that people got


def stopped(sample: SampleAssembled) -> bool:
    """Return whether the client's request may have ended the answer, so that its own end is not known."""
    return bool(sample.sampling.stop or sample.sampling.shaping)


def _held_answer(sample: SampleAssembled, found: Rehearsed) -> HeldAnswer | None:
    """Return the answer if it followed the hint that it rehearses, and each of its tokens has a log-prob."""
    logps = [logp for logp in sample.response_logprobs if logp is not None]
    if found.open_nats is None or found.open_nats > OPEN_NATS or len(logps) < len(sample.response_ids):
        return None
    return HeldAnswer(
        hint_id=found.hint_id, prompt_ids=sample.prompt_ids, response_ids=sample.response_ids,
        temperature=sample.temperature, logp_nats=fmean(logps),
    )  # fmt: skip


def _with_tuples(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {**answer, "prompt_ids": tuple(answer["prompt_ids"]), "response_ids": tuple(answer["response_ids"])}


def one_sided(samples: Sequence[SampleAssembled], memory: GateMemory) -> str | None:
    """Return why the rewards teach nothing, in words for a person; None: they do teach something.

    A judge that says yes to everything is recognised by one of three signs: it began suddenly, it has hints for many
    answers that it calls good, or the last `ALIKE_REWARDS` are all good. A policy that improves step by step shows
    neither of the first two. Even with the third a step teaches if it has a hint for an answer without a verdict, or
    for one whose verdict people overruled.
    """
    here = _verdicts(samples)
    if not here or not all(verdict.good for verdict in here):
        return None
    before = memory.verdicts[-EARLIER_REWARDS:]
    num_good = sum(verdict.good for verdict in before)
    chance = _chance_of_all(len(here), num_good=num_good, num_before=len(before))
    if before and chance < RARE:
        return (
            f"all {len(here)} rewards are above 0, and {num_good} of the {len(before)} before them were: the chance of "
            f"that is {chance:.1g}. So the judge says yes to everything"
        )
    alike = list(takewhile(lambda verdict: verdict.good, reversed((*memory.verdicts, *here))))
    hinted = sum(verdict.hinted for verdict in alike)
    if _tail(hinted, len(alike), NEEDLESS_HINTS) < RARE:
        return (
            f"the last {len(alike)} rewards are all above 0, and for {hinted} of these answers there is a hint how "
            "they should have been: the judge says yes to everything"
        )
    said = [s for s in samples if s.hint_id is None]  # a rehearsal is of what was said before
    if len(alike) >= ALIKE_REWARDS and not any(s.hinted_prompt_ids is not None and not _counts(s) for s in said):
        return (
            f"the last {len(alike)} rewards are all above 0: the judge says yes to everything, or there is nothing to "
            "learn"
        )
    return None


def harm(before: Sequence[AnswerLikelihood], after: Sequence[AnswerLikelihood], *, kl_nats: float) -> str | None:
    """Return the harm that the step did to the policy, as these answers show; None: they show none.

    `before` and `after` hold the same answers. A step may move the policy by `kl_nats` a token, or by `KL_SHARE` of the
    answers' entropy before it where that is more, up to `MOST_KL_NATS`.
    """
    told = (number for one in after for number in (*one.logps, one.entropy_nats) if number is not None)
    if not all(map(isfinite, told)):
        return "log-probs of the policy after the step are not finite numbers"
    moved = _interval([_kl(b.logps, a.logps) for b, a in zip(before, after, strict=True)])
    known = [one.entropy_nats for one in before if one.entropy_nats is not None]
    most_nats = max(kl_nats, min(KL_SHARE * fmean(known), MOST_KL_NATS)) if known else kl_nats
    if moved is not None and moved[0] > most_nats:
        return f"the policy moved by {_words(moved)} nats a token in one step, expected at most {most_nats:.3g}"
    return _entropy_gone(before, after)


def astray(
    before: Sequence[AnswerLikelihood],
    after: Sequence[AnswerLikelihood],
    ahead: Sequence[AnswerLikelihood],
    wanted: Sequence[Way | None],
) -> str | None:
    """Return how the step leads away from what its own samples ask for; None: that is not certain.

    `ahead` is where the step's gradient alone leads. All arguments begin with the same answers, the step's own.
    """
    for what, there in (("the step", after), ("the gradient", ahead)):
        pairs = list(zip(before, there, strict=False))
        moves = [abs(new - old) for b, a in pairs for old, new in zip(b.logps, a.logps, strict=True)]
        if sum(moves) < STILL_NATS * len(moves):
            continue
        gains = [_gain(way, b.logps, a.logps) for way, (b, a) in zip(wanted, pairs, strict=False) if way and any(way)]
        gained = _interval([gain.cosine for gain in gains])
        # Where one bad answer decides the step, most answers may lose a little although together they gain.
        if gained is not None and gained[2] < 0 and sum(gain.nats for gain in gains) < 0:
            return (
                f"{what} leads away from what its own samples ask for: the cosine between their tokens' moves and the "
                f"wanted ones is {_words(gained)}, expected above 0"
            )
    return None


def is_near(before: Sequence[AnswerLikelihood], after: Sequence[AnswerLikelihood]) -> bool:
    """Return whether it is certain that the step changes few answers.

    Two distributions of whole answers differ in a share of at most sqrt(KL / 2), by Pinsker's inequality.
    """
    moved = _interval([_kl(b.logps, a.logps) * len(b.logps) for b, a in zip(before, after, strict=True)])
    return moved is not None and moved[2] < NEAR_NATS


def misspoken(written: Sequence[WrittenAnswer]) -> str | None:
    """Return what is wrong with most of the answers written after the step; None: nothing."""
    kinds = {
        "are empty": [not one.token_ids for one in written],
        "say one thing over and over": [loops(one.token_ids) for one in written],
        "do not end": [one.ended is False for one in written if one.answered_tokens <= BRIEF_TOKENS],
    }
    for what, bad in kinds.items():
        if bad and _tail(sum(bad), len(bad), BAD_SHARE) < 0.05:
            return f"{sum(bad)} of {len(bad)} answers after the step {what}"
    return None


def _entropy_gone(before: Sequence[AnswerLikelihood], after: Sequence[AnswerLikelihood]) -> str | None:
    both = [(b.entropy_nats, a.entropy_nats) for b, a in zip(before, after, strict=True)]
    known = [(was, now) for was, now in both if was is not None and now is not None]
    for what, sign in (("surer", -1), ("less sure", 1)):
        # The entropies are too far apart only if their excess over the bound is certainly above 0.
        excess = []
        for was, now in known:
            low, high = (now, was) if sign < 0 else (was, now)
            excess.append(high - max(ENTROPY_FACTOR * low, low + ENTROPY_NATS))
        beyond = _interval(excess)
        if beyond is not None and beyond[0] > 0:
            was, now = (fmean(entropies) for entropies in zip(*known, strict=True))
            return (
                f"the policy is {what} by more than a factor of {ENTROPY_FACTOR:g}: its entropy goes from "
                f"{was:.3g} to {now:.3g} nats a token"
            )
    return None


def _verdicts(samples: Sequence[SampleAssembled]) -> tuple[JudgedReward, ...]:
    """Return the judge's verdicts that count: not those on cut answers, nor those that people overruled."""
    return tuple(
        JudgedReward(good=s.reward > 0, hinted=s.hinted_prompt_ids is not None)
        for s in samples
        if s.reward is not None and _counts(s) and not s.cut
    )


def _counts(sample: SampleAssembled) -> bool:
    return sample.reward is not None and sample.reward * (sample.learned_reward or 0) > 0


def _chance_of_all(num: int, *, num_good: int, num_before: int) -> float:
    """Return the probability that `num` are all good, estimated from `num_good` of `num_before` alone."""
    return prod((num_good + 1 + more) / (num_before + 2 + more) for more in range(num))


class _Gain(NamedTuple):
    """How much an answer moved the way it should."""

    nats: float  # per token, each weighted by how strongly it should move
    cosine: float  # between the tokens' moves and the wanted ones; by it all answers count alike


def _gain(way: Way, old: Sequence[float], new: Sequence[float]) -> _Gain:
    moves = [after - before for before, after in zip(old, new, strict=True)]
    along = sum(much * move for much, move in zip(way, moves, strict=True))
    longest = sqrt(sum(much * much for much in way) * sum(move * move for move in moves))
    return _Gain(along / len(way), along / max(longest, 1e-12))


def _kl(old: Sequence[float], new: Sequence[float]) -> float:
    """Return the mean KL over tokens sampled by the old policy, by the k3 estimate, which is never below 0."""
    total = 0.0
    for before, after in zip(old, new, strict=True):
        d = min(after - before, 20.0)  # keeps the exponential finite
        total += exp(d) - 1 - d
    return total / len(old)


def _interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return (low, mean, high): the true mean is outside with 1 % on each side, if values are normal. None: too few."""
    n = len(values)
    if n < MIN_ANSWERS:
        return None
    mean = fmean(values)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = _T99[min(n - 1, len(_T99)) - 1] * deviation / sqrt(n)
    return mean - half, mean, mean + half


def _words(interval: tuple[float, float, float]) -> str:
    low, mean, high = interval
    return f"{mean:.3g} ({low:.3g} to {high:.3g}, 98 %)"


def _tail(num_bad: int, num: int, share: float) -> float:
    """Return the probability of `num_bad` or more of `num`, where each is bad with the probability `share`."""
    return sum(comb(num, k) * share**k * (1 - share) ** (num - k) for k in range(num_bad, num + 1))
