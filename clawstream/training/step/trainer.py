"""The optimizer's steps on one planned batch, and the state that carries over from batch to batch.

A version is a function of its parent's checkpoint and its plan: there is no other state, and the plan's seed fixes
every random number. T response tokens, N trained tokens of a hinted answer.
"""

import json
import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clawstream.config import TrainingSettings
from clawstream.errors import GradientNotFinite, TrainingDiverged, UnusableCheckpoint
from clawstream.events import FollowedHint, KeptHint, Rehearsed, SampleAssembled
from clawstream.inference.model_folder import ADAPTER_CONFIG, STATE_FOLDER, fingerprint
from clawstream.training.base_folder import STEM
from clawstream.training.batches.choosing import corrected_hint, is_just_said
from clawstream.training.batches.memory import Trial
from clawstream.training.batches.trainable import hint_counts
from clawstream.training.gating import Gate, Writes, idle_rewards, refused
from clawstream.training.model import Model
from clawstream.training.step.batch_loss import BatchLoss, Gaps, Scored, choose_hints
from clawstream.training.step.carried import Carried
from clawstream.training.step.losses import LossFigures, LossSums, Suffix, figures
from clawstream.training.torch_model import TorchModel

log = logging.getLogger(__name__)

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1  # of AdamW, for matrices alone
MAX_GRAD_NORM = 1.0  # longer gradients are clipped to this, so that one odd batch moves the policy no further
CORRECTION_KL_NATS = 0.05  # a token; half of the least that the gate lets a step move the policy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The figures of one step; None: nothing to average, or no token to train on and so no step."""

    num_samples: int
    num_hinted: int
    num_rewarded: int
    loss: LossFigures
    mean_gap_nats: float | None  # of the trained tokens of hinted samples, before clipping
    mean_reward: float | None
    grad_norm: float | None  # before clipping; the largest of the update's steps
    learning_rate: float
    mean_response_tokens: float | None
    weights_changed_share: float | None  # of the numbers that are published
    rehearsed: tuple[Rehearsed, ...] = ()
    followed: tuple[FollowedHint, ...] = ()
    kept: tuple[KeptHint, ...] = ()


class _Taken(NamedTuple):
    """The results of the optimizer's steps in one update."""

    tallies: list[LossSums]
    gaps: Gaps
    grad_norms: list[float | None]  # of the steps that were taken; None: not known


class Trainer:
    """A policy being trained: its model, the weights that it started from, and its optimizer."""

    # The state that carries over from version to version, beside the weights and the optimizer's moments.
    _carried: Carried
    _writes: Writes | None = None  # how the gate has the model answer, where the weights are elsewhere

    def __init__(
        self, base: Path, settings: TrainingSettings, *, device: str = "cpu", model: Model | None = None,
        max_grad_norm: float = MAX_GRAD_NORM, weight_decay: float = WEIGHT_DECAY,
    ) -> None:  # fmt: skip
        """`model` is given where several processes hold parts of one model; then each of them has such a trainer."""
        self._settings = settings
        self._max_grad_norm = max_grad_norm
        self._model = model or TorchModel.load(base, **load_options(settings, device))
        self._base_sha256 = fingerprint(base)
        self._reference = self._model.copy()
        self._optimizer = _optimizer(self._model, settings, weight_decay)
        self._loss = BatchLoss(self._model, settings)
        self._begin()

    def update(
        self, samples: Sequence[SampleAssembled], *, version: int, seed: int, gated: bool = False,
        num_rejected: int = 0, advantages: Sequence[float] | None = None, trials: Sequence[Trial] = (),
        held: Collection[str] = (),
    ) -> StepSummary:  # fmt: skip
        """Take the steps that make `version`, on these samples in this order, after `num_rejected` rejected steps.
        With `advantages`, one per sample, the rewards are only recorded.

        `trials` are of these samples. The gate measures some of the `held` hints that are not in the batch.
        Where no token can be trained on, the weights stay as they are. Raises GradientNotFinite, with the weights as
        they were before that step of the optimizer, or TrainingDiverged. If `gated`, it raises only StepRefused, after
        which this trainer has to be restored before it is used.
        """
        torch.manual_seed(seed)
        model, settings, gate, changed_share = self._model, self._settings, None, None
        rewards = [s.learned_reward for s in samples if s.learned_reward is not None]
        rate = self._learning_rate(version, rewards, counts=bool(samples))
        mine = model.share([len(s.prompt_ids) + len(s.response_ids) for s in samples])
        scored = self._score(samples, mine, advantages)
        if gated:
            gate = Gate(
                model, settings, samples, self._carried.gate, scored=scored, mine=mine, num_rejected=num_rejected,
                held=held, version=version, writes=self._writes,
            )  # fmt: skip
        followed, kept = self._followed(samples, trials), tuple[KeptHint, ...]()
        before = model.published()
        with refused() if gated else nullcontext():
            taken = self._take(settings.epochs if samples else 0, scored, version=version, rate=rate, gate=gate)
            if taken.grad_norms:
                changed_share = model.changed_share(before)
                if rate > 0:
                    self._refuse_unmoved(version, changed_share, _largest(taken.grad_norms))
                if gate is not None:
                    kept = gate.let_out(version=version, seed=seed)
        mean_gap = self._see_gaps(version, {mine[i]: gap_N for i, gap_N in taken.gaps.items()}, samples)
        rehearsed = self._rehearsed(samples, mine, scored)
        # A step that stands on the log passed its gate, if with rewards that teach nothing: then those were accepted.
        idle = idle_rewards(settings, samples, self._carried.gate, grouped=advantages is not None)
        memory = self._carried.gate.after(samples, rehearsed, as_it_is=settings.gate and idle is not None)
        self._carried = replace(
            self._carried, gate=memory, tool_calls=self._carried.tool_calls.after(samples),
            judges=self._carried.judges.after(samples),
        )  # fmt: skip
        return StepSummary(
            num_samples=len(samples),
            num_hinted=sum(hint_counts(s, by_engine=settings.by_engine) for s in samples),
            num_rewarded=len(rewards),
            loss=figures(taken.tallies, self._loss.objective),
            mean_gap_nats=mean_gap,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            grad_norm=_largest(taken.grad_norms),
            learning_rate=rate,
            mean_response_tokens=sum(len(s.response_ids) for s in samples) / len(samples) if samples else None,
            weights_changed_share=changed_share,
            rehearsed=rehearsed,
            followed=followed,
            kept=kept,
        )

    def _rehearsed(
        self, samples: Sequence[SampleAssembled], mine: Sequence[int], scored: Scored
    ) -> tuple[Rehearsed, ...]:
        """Return how open the hints of the batch's rehearsals were, in the order of its samples."""
        here = {
            number: (scored.open_nats(i), scored.gain_nats(i))
            for i, number in enumerate(mine)
            if samples[number].hint_id is not None
        }
        return tuple(
            Rehearsed(hint_id=hint_id, open_nats=open_nats, gain_nats=gain_nats)
            for number, (open_nats, gain_nats) in sorted(self._model.together(here).items())
            if (hint_id := samples[number].hint_id) is not None
        )

    def _followed(self, samples: Sequence[SampleAssembled], trials: Sequence[Trial]) -> tuple[FollowedHint, ...]:
        """Return the trials whose answer followed the hint: the base finds it likelier with the hint, and by enough."""
        if not trials:
            return ()
        plain = {s.sample_id: Suffix(s.prompt_ids, s.response_ids, s.temperature) for s in samples}
        hinted = [plain[trial.sample_id]._replace(prompt_ids=trial.hinted_prompt_ids) for trial in trials]
        mine = self._model.share([suffix.num_tokens for suffix in hinted])
        own = list(dict.fromkeys(trials[i].sample_id for i in mine))
        scores = self._model.score(
            [*(hinted[i] for i in mine), *(plain[sample_id] for sample_id in own)], weights=self._reference,
            budget_tokens=self._settings.micro_batch_tokens,
        )  # fmt: skip
        without = dict(zip(own, scores[len(mine) :], strict=True))
        pairs = zip(mine, scores[: len(mine)], strict=True)
        gains = self._model.together(
            {i: float((with_T - without[trials[i].sample_id]).nansum()) for i, with_T in pairs}
        )
        return tuple(
            FollowedHint(
                hint_id=trials[i].hint_id, gain_nats=gain, accepted=trials[i].accepted, sample_id=trials[i].sample_id
            )
            for i, gain in sorted(gains.items())
            if gain >= trials[i].least_gain_nats
        )

    def _score(
        self, samples: Sequence[SampleAssembled], mine: Sequence[int], advantages: Sequence[float] | None
    ) -> Scored:
        """Return the scores of this process' samples by the policy before the step, its teacher and its reference."""
        return self._loss.score(
            [samples[i] for i in mine], reference=self._reference, moves=self._settings.epochs > 1,
            advantages=None if advantages is None else [advantages[i] for i in mine],
            tool_baseline=0.0 if self._settings.as_published else self._carried.tool_calls.baseline,
            judges=None if self._settings.as_published else self._carried.judges,
            corrected={corrected_hint(s) for s in samples if self._settings.corrects and is_just_said(s)},
        )  # fmt: skip

    def choose_hints(self, samples: Sequence[SampleAssembled]) -> tuple[int, ...]:
        """Return for each sample the number of the offered hint to train on, by the weights as they are."""
        rule, budget = self._settings.hint_choice, self._settings.micro_batch_tokens
        if rule == "longest":
            return (0,) * len(samples)
        return choose_hints(self._model, samples, rule=rule, teacher=self._reference, budget_tokens=budget)

    def _take(self, num_steps: int, scored: Scored, *, version: int, rate: float, gate: Gate | None) -> _Taken:
        """Take the optimizer's steps, each on all samples; a step without a token to train on is skipped.

        Where corrections are trained on at once, no step is taken once the policy is `CORRECTION_KL_NATS` a token from
        where the update began; the step that led there may have gone further.
        """
        taken = _Taken([], {}, [])
        for _ in range(num_steps):
            tally, gaps = self._accumulate(scored)
            if self._settings.corrects and tally.moved_sum > CORRECTION_KL_NATS * tally.num_tokens:
                self._forget_gradients()
                break
            if tally.num_tokens:
                if gate is not None and not taken.grad_norms:
                    gate.look_ahead(rate)
                taken.grad_norms.append(self._step(version, tally.num_sequences, rate))
            taken.tallies.append(tally)
            taken.gaps.update(gaps)
        return taken

    def save(self, folder: Path) -> None:
        """Write what engines load."""
        self._model.save(folder)

    def save_state(self, folder: Path) -> None:
        """Write what `restore` needs beside the weights; it is to be in the `STATE_FOLDER` of the weights' folder."""
        moments: dict[str, dict[str, Tensor]] = {}
        for name, moved in self._model.moved.items():
            for kind, value in self._optimizer.state.get(moved, {}).items():
                moments.setdefault(kind, {})[name] = value
        self._model.save_moments(folder, moments)
        if self._model.rounds:
            self._model.save_state(folder, "masters", {"": dict(self._model.trained)})
        if self._model.leads:
            self._save_facts(folder)

    def _save_facts(self, folder: Path) -> None:
        facts = {"base_sha256": self._base_sha256} | self._carried.plain()
        (folder / "state.json").write_text(json.dumps(facts))

    def settle(self, folder: Path) -> None:
        """Take over the weights that are published in `folder` wherever those that were trained round to others."""
        exact, dtype = self._model.copy(), self._model.published_dtype
        self._model.restore(folder)
        served = self._model.copy()
        same = {name: exact[name].to(dtype) == value.to(dtype) for name, value in served.items()}
        self._model.put({name: torch.where(same[name], exact[name], value) for name, value in served.items()})

    def restore(self, folder: Path | None) -> None:
        """Go on from a checkpoint of this policy, as if this process had made it; None: from its start.

        `folder` is verified already. Nothing of this trainer's former state is kept.
        """
        self._optimizer.state.clear()
        if folder is None:
            self._model.put(self._reference)
            self._begin()
            return
        if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob(f"{STEM}*")):
            raise UnusableCheckpoint(
                f"{folder}: a service has this version's weights, not this folder. Nothing is trained. Set "
                "training.trainer as it was, or give the new policy an id of its own"
            )
        state, self._carried = folder / STATE_FOLDER, self._carried_of(folder)
        self._model.restore(folder, state / "masters.safetensors" if any(state.glob("masters*")) else None)
        for kind, values in self._model.load_moments(state).items():
            for name, value in values.items():
                self._optimizer.state[self._model.moved[name]][kind] = value

    def _carried_of(self, folder: Path) -> Carried:
        """Return what the checkpoint carries over; raises UnusableCheckpoint where it is of another base."""
        state = folder / STATE_FOLDER
        facts = json.loads((state / "state.json").read_text())
        if missing := {"base_sha256", *Carried().plain()} - facts.keys():
            raise UnusableCheckpoint(
                f"{state / 'state.json'}: found {', '.join(sorted(facts)) or 'nothing'}, expected "
                f"{' and '.join(sorted(missing))} too. Nothing is trained. Remove {folder} to go on from the version "
                "before, restore it from a backup, or give the new policy an id of its own."
            )
        if facts["base_sha256"] != self._base_sha256:
            raise UnusableCheckpoint(
                f"{folder}: started from a base with sha256 {facts['base_sha256'][:12]}, but {self._model.folder} has "
                f"{self._base_sha256[:12]}. Nothing is trained. Set engine.model_path to the base that this policy was "
                "started with, or give the new policy an id of its own."
            )
        return Carried.of(facts)

    def _begin(self) -> None:
        """Set the carried state to that of the policy's start; the weights are those of the start already."""
        self._carried = Carried()

    def _learning_rate(self, version: int, rewards: Sequence[float], *, counts: bool) -> float:
        before = self._carried.schedule
        after = before.after(rewards) if counts else before  # a rollback is no update
        if counts and after.num_updates <= before.num_updates:
            log.warning("version=%d learning_rate=reset reason=rewards fell: people want something else", version)
        self._carried = replace(self._carried, schedule=after)
        peak = self._settings.learning_rate
        return peak if self._settings.as_published else after.learning_rate(peak=peak)

    def _see_gaps(self, version: int, gaps: Gaps, samples: Sequence[SampleAssembled]) -> float | None:
        """Remember the mean gap of each sample, of all processes; return the mean over all tokens.

        Gaps of rehearsals say what was forgotten, not what people want now, so they are not remembered.
        """
        num_samples = len(samples)
        here = [gaps.get(i, torch.empty(0)) for i in range(num_samples)]
        both = self._model.sums([*(float(gap_N.sum()) for gap_N in here), *(float(len(gap_N)) for gap_N in here)])
        totals, counts = both[:num_samples], both[num_samples:]
        before = self._carried.schedule
        seen = zip(samples, totals, counts, strict=True)
        after = before.having_seen([-total / n for sample, total, n in seen if n and sample.hint_id is None])
        if after.num_updates < before.num_updates:
            log.warning("version=%d learning_rate=reset_next reason=the mean gap is twice its least", version)
        self._carried = replace(self._carried, schedule=after)
        return sum(totals) / sum(counts) if any(counts) else None

    def _accumulate(self, scored: Scored) -> tuple[LossSums, Gaps]:
        """Sum the gradients, piece by piece; return all processes' tally, and the gaps of this one's hinted tokens."""
        self._forget_gradients()
        tally, gaps = LossSums(), dict[int, Tensor]()
        groups = self._model.groups(scored.plain, budget_tokens=self._settings.micro_batch_tokens)

        def total_of(group: Sequence[int]) -> Tensor:
            nonlocal tally
            total, part, gaps_here = self._loss.of(scored, group)
            tally += part
            gaps.update(gaps_here)
            return total

        self._model.accumulate(groups, scored.plain, total_of)
        return self._summed(tally), gaps

    def _summed(self, tally: LossSums) -> LossSums:
        """Return the tally over all processes."""
        here = asdict(tally)
        sums = self._model.sums([float(value) for value in here.values()])
        return LossSums(**{name: type(here[name])(total) for name, total in zip(here, sums, strict=True)})

    def _step(self, version: int, divisor: int, rate: float) -> float | None:
        for parameter in self._model.trained.values():
            if parameter.grad is not None:
                parameter.grad /= divisor
        norm = self._model.clip(self._max_grad_norm)
        if not isfinite(norm):
            self._forget_gradients()
            raise GradientNotFinite(
                f"update {version}: the norm of the gradient is {norm}, expected a finite number. The weights stay at "
                "the version before. Start a policy with an id of its own from an earlier checkpoint, with a lower "
                "training.learning_rate."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with self._model.moving():
            self._optimizer.step()
        return norm

    def _forget_gradients(self) -> None:
        for parameter in self._model.trained.values():
            parameter.grad = None

    def _refuse_unmoved(self, version: int, changed_share: float | None, grad_norm: float | None) -> None:
        if changed_share == 0 and grad_norm:
            raise TrainingDiverged(
                f"update {version}: the gradient's norm is {grad_norm:.3g}, and no published number has changed: "
                f"in {self._model.published_dtype} the step is too small to be seen. Nothing is published. "
                "Start a policy with an id of its own from the version before, with a higher training.learning_rate."
            )


def _largest(norms: Sequence[float | None]) -> float | None:
    return max((norm for norm in norms if norm is not None), default=None)


def load_options(settings: TrainingSettings, device: str) -> dict[str, Any]:
    """Return the options with which any trainer loads the model under these settings."""
    return {
        "lora_rank": settings.lora_rank, "device": device, "seed": settings.seed,
        "dtype": getattr(torch, settings.dtype), "recompute_layers": settings.gradient_checkpointing,
    }  # fmt: skip


def _optimizer(model: Model, settings: TrainingSettings, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW, without weight decay for norms and biases."""
    matrices = [model.moved[name] for name, p in model.trained.items() if p.ndim >= 2]
    vectors = [model.moved[name] for name, p in model.trained.items() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.learning_rate, betas=BETAS)
