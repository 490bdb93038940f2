"""One optimizer step on one planned batch, and the state that carries over from step to step.

The step that makes a version is a function of its parent's checkpoint and its plan: there is no other state, and no
random number that the plan's seed does not fix. B samples, T response tokens.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clawstream.config import TrainingSettings
from clawstream.errors import TrainingDiverged, UnusableCheckpoint
from clawstream.events import SampleAssembled
from clawstream.training.advantages import Baseline, Signals, has_signal, token_advantages
from clawstream.training.checkpoints import fingerprint
from clawstream.training.losses import LogProbs, LossFigures, Objective, Tally, figures, policy_loss
from clawstream.training.microbatches import micro_batches
from clawstream.training.schedule import learning_rate
from clawstream.training.torch_model import Suffix, TorchModel

log = logging.getLogger(__name__)

BETAS = (0.9, 0.98)
STATE_FOLDER = "trainer"  # apart from the weights: engines load every safetensors file they find beside config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one step did; None: there was nothing to average, or no token to train on and so no step."""

    num_samples: int
    num_hinted: int
    num_rewarded: int
    loss: LossFigures
    mean_gap_nats: float | None  # of the trained tokens of hinted samples, before clipping
    mean_reward: float | None
    grad_norm: float | None  # before clipping
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """What is known of a batch before its step; one entry per sample."""

    samples: Sequence[SampleAssembled]
    plain: list[Suffix]
    teacher: dict[int, Tensor]  # [T], by index; of the samples whose hint counts
    reference: list[Tensor] | None  # [T] each


class Trainer:
    """A policy being trained: its model, the weights at its start, and its optimizer."""

    def __init__(self, base: Path, settings: TrainingSettings, *, device: str = "cpu") -> None:
        self._settings = settings
        self._model = TorchModel.load(base, lora_rank=settings.lora_rank, device=device, seed=settings.seed)
        self._base_sha256 = fingerprint(base)
        self._reference = self._model.copy()
        self._ema = self._model.copy() if settings.teacher == "ema" else None
        self._baseline = Baseline()
        self._optimizer = _optimizer(self._model.trained, settings)
        w_binary, w_opd = settings.weights
        self._signals = Signals(
            w_binary=w_binary,
            w_opd=w_opd,
            gap_clip_nats=settings.gap_clip_nats,
            gap_mask_nats=settings.gap_mask_nats,
        )
        self._objective = Objective(
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            importance_cap=settings.importance_cap,
            kl=settings.kl,
            average=settings.average,
            ratio_to=settings.ratio_to,
        )

    def update(self, samples: Sequence[SampleAssembled], *, version: int, seed: int) -> Update:
        """Take the step that makes `version`, on these samples in this order.

        Where no token can be trained on, the weights stay as they are. Raises TrainingDiverged, with the weights as
        they were, when the gradient is not finite.
        """
        torch.manual_seed(seed)
        rate = learning_rate(
            version, peak=self._settings.learning_rate, constant_updates=self._settings.constant_updates
        )
        tally, gaps = self._accumulate(self._prepare(samples))
        grad_norm = self._step(version, tally.divisor(self._objective), rate) if tally.num_tokens else None
        rewards = [s.reward for s in samples if s.reward is not None]
        self._baseline = self._baseline.after(rewards)
        return Update(
            num_samples=len(samples),
            num_hinted=sum(s.hinted_prompt_ids is not None for s in samples),
            num_rewarded=len(rewards),
            loss=figures(tally, self._objective),
            mean_gap_nats=float(gaps.mean()) if len(gaps) else None,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            grad_norm=grad_norm,
            learning_rate=rate,
        )

    def save(self, folder: Path) -> None:
        """Write the weights for engines, and beside them all that `restore` needs."""
        self._model.save(folder)
        state = folder / STATE_FOLDER
        state.mkdir()
        moments = {
            f"{key}/{name}": value
            for name, parameter in self._model.trained.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        save_file(moments, state / "optimizer.safetensors")
        if self._ema is not None:
            save_file(self._ema, state / "ema.safetensors")
        facts = {"base_sha256": self._base_sha256, "baseline": asdict(self._baseline)}
        (state / "state.json").write_text(json.dumps(facts))

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint of this policy, as if this process had made it. `folder` is verified already."""
        state = folder / STATE_FOLDER
        facts = json.loads((state / "state.json").read_text())
        if facts["base_sha256"] != self._base_sha256:
            raise UnusableCheckpoint(
                f"{folder}: started from a base with sha256 {facts['base_sha256'][:12]}, but {self._model.folder} has "
                f"{self._base_sha256[:12]}. Nothing is trained. Set engine.model_path to the base that this policy was "
                "started with, or give the new policy an id of its own."
            )
        self._model.restore(folder)
        self._baseline = Baseline(**facts["baseline"])
        moments = load_file(state / "optimizer.safetensors")
        for key, value in moments.items():
            kind, _, name = key.partition("/")
            parameter = self._model.trained[name]
            self._optimizer.state[parameter][kind] = value if kind == "step" else value.to(parameter.device)
        if self._ema is not None:
            self._ema = self._saved_ema(state / "ema.safetensors")

    def _saved_ema(self, file: Path) -> dict[str, Tensor]:
        if file.exists():
            saved: dict[str, Tensor] = load_file(file, device=str(self._model.device))
            return saved
        log.warning("ema_starts_here file=%s reason=the checkpoint was made with another teacher", file)
        return self._model.copy()

    def _prepare(self, samples: Sequence[SampleAssembled]) -> _Batch:
        budget = self._settings.micro_batch_tokens
        plain = [Suffix(s.prompt_ids, s.response_ids, s.temperature) for s in samples]
        hinted = [i for i, s in enumerate(samples) if s.hinted_prompt_ids is not None and self._signals.w_opd > 0]
        weights = {"reference": self._reference, "ema": self._ema, "current": None}[self._settings.teacher]
        questions = [plain[i]._replace(prompt_ids=samples[i].hinted_prompt_ids or ()) for i in hinted]
        answers = self._model.score(questions, weights=weights, budget_tokens=budget)
        reference = None
        if self._objective.kl > 0:
            reference = self._model.score(plain, weights=self._reference, budget_tokens=budget)
        return _Batch(
            samples=samples, plain=plain, teacher=dict(zip(hinted, answers, strict=True)), reference=reference
        )

    def _accumulate(self, batch: _Batch) -> tuple[Tally, Tensor]:
        """Sum the gradients of the batch, piece by piece; return its tally and the gaps of its hinted tokens."""
        self._optimizer.zero_grad(set_to_none=True)
        tally, gaps = Tally(), []
        lengths = [s.num_tokens for s in batch.plain]
        for group in micro_batches(lengths, budget_tokens=self._settings.micro_batch_tokens):
            total, part, gap_N = self._loss(batch, group)
            if part.num_tokens:
                total.backward()  # type: ignore[no-untyped-call]
            tally += part
            gaps.append(gap_N)
        return tally, torch.cat(gaps) if gaps else torch.empty(0)

    def _loss(self, batch: _Batch, group: Sequence[int]) -> tuple[Tensor, Tally, Tensor]:
        new_BT = self._model.logprobs([batch.plain[i] for i in group])
        old_BT = new_BT.detach()  # one step a batch: the weights being trained are those just before the step
        samples = [batch.samples[i] for i in group]
        nothing = old_BT.new_full((0,), torch.nan)

        def padded(rows: Sequence[Tensor]) -> Tensor:
            return _padded(rows, like_BT=old_BT)

        rewarded_B = torch.tensor([s.reward is not None for s in samples], device=old_BT.device)
        reward_B = old_BT.new_tensor([torch.nan if s.reward is None else s.reward for s in samples])
        hinted_B = torch.tensor([i in batch.teacher for i in group], device=old_BT.device)
        sampled_BT = padded([_floats(s.response_logprobs) for s in samples])
        gap_BT = padded([batch.teacher.get(i, nothing) for i in group]) - old_BT
        reference_BT = padded([batch.reference[i] for i in group]) if batch.reference is not None else None
        trained_BT = padded([torch.tensor(s.trained, dtype=torch.float32) for s in samples]) == 1
        trained_BT &= has_signal(rewarded_B, hinted_B, signals=self._signals).unsqueeze(1)

        baseline = self._baseline.mean if self._settings.baseline == "running" else 0.0
        advantage_BT = token_advantages(
            reward_B, rewarded_B, gap_BT, hinted_B, signals=self._signals, baseline=baseline
        )
        known = LogProbs(old_BT, sampled_BT, reference_BT)
        total, tally = policy_loss(new_BT, known, advantage_BT, trained_BT, objective=self._objective)
        return total, tally, gap_BT[trained_BT & hinted_B.unsqueeze(1) & gap_BT.isfinite()]

    def _step(self, version: int, divisor: int, rate: float) -> float:
        parameters = list(self._model.trained.values())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= divisor
        norm = float(nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm))
        if not isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingDiverged(
                f"update {version}: the norm of the gradient is {norm}, expected a finite number. The weights stay at "
                "the version before. Start a policy with an id of its own from an earlier checkpoint, with a lower "
                "training.learning_rate."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if self._ema is not None:
            for name, parameter in self._model.trained.items():
                self._ema[name].lerp_(parameter.detach(), 1 - self._settings.ema_decay)
        return norm


def _optimizer(trained: dict[str, nn.Parameter], settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW, which does not pull norms and biases towards 0."""
    matrices = [p for p in trained.values() if p.ndim >= 2]
    vectors = [p for p in trained.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.learning_rate, betas=BETAS)


def _floats(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values], dtype=torch.float32)


def _padded(rows: Sequence[Tensor], *, like_BT: Tensor) -> Tensor:
    """Return the rows as [B, T] with NaN past each one's end."""
    out_BT = torch.full_like(like_BT, torch.nan)
    for row, values in enumerate(rows):
        out_BT[row, : len(values)] = values.to(like_BT.device)
    return out_BT
