"""A policy that a Tinker service trains: an adapter on a base that the service has.

The service tells the log-probs of given tokens; the loss and its derivative by each log-prob are computed here, by the
code of every other trainer, and the service carries that derivative on to the adapter. Its `ppo` is given it as the
advantages, and the log-probs of the weights as they are: then the ratio is 1, nothing is clipped, and the gradient is
ours. Scores are at temperature 1. B rows, T response tokens.
"""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import torch
from torch import Tensor

from clawstream.config import TrainingSettings
from clawstream.errors import GradientNotFinite, UnusableCheckpoint
from clawstream.inference.model_folder import ADAPTER_CONFIG, fingerprint
from clawstream.inference.tinker_service import SNAPSHOT, STATE, TinkerService, last_logprobs, model_input
from clawstream.training.gating import ends_of, written_answer
from clawstream.training.model import Model, TokenScores, Weights
from clawstream.training.publishing import AnswerLikelihood, WrittenAnswer
from clawstream.training.step.batch_loss import BatchLoss
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import BETAS, MAX_GRAD_NORM, WEIGHT_DECAY, Trainer

CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
ADAM_EPS = 1e-12  # the API's own: a service may scale gradients down by as much as answers have tokens


def _refused(*_args: object, **_kwargs: object) -> NoReturn:
    raise AssertionError("the service has the weights; only log-probs of given tokens and answers come from there")


_not_here: Any = _refused


class _NotFinite(Exception):
    """The derivative by a token's log-prob is not a finite number."""


class TinkerModel(Model):
    """The service's adapter. Weights given as a mapping are the base's; None are the adapter's as it is."""

    at_temperature = False

    def __init__(self, folder: Path, service: TinkerService, *, rank: int, seed: int) -> None:
        self.folder = folder
        self.trained = {}
        self.device = torch.device("cpu")
        self.published_dtype = torch.float32
        self._service = service
        self._rank, self._seed = rank, seed
        self._client: Any = None
        self._base: Any = None
        self._known: dict[Suffix, Tensor] = {}  # log-probs by the weights as they are
        self._leaves: list[tuple[Sequence[Suffix], Tensor]] = []
        self._snapshot: str | None = None

    def resume(self, state: str | None) -> None:
        """Go on from a state that the service has; None: from the base."""
        self._client = self._service.trainer(rank=self._rank, seed=self._seed, state=state)
        self._changed()

    def _changed(self) -> None:
        self._known.clear()
        self._leaves.clear()
        self._snapshot = None

    @property
    def client(self) -> Any:
        """The SDK's training client."""
        if self._client is None:
            self.resume(None)
        return self._client

    def published(self) -> dict[str, Tensor]:
        return {}

    def changed_share(self, before: Weights) -> None:
        """Not known: the service keeps the weights."""

    def score(self, suffixes: Sequence[Suffix], *, weights: Weights | None, budget_tokens: int) -> list[Tensor]:
        del budget_tokens  # the service divides requests by itself
        return self._now(suffixes) if weights is None else self._by_base(suffixes)

    def likelihoods(self, suffixes: Sequence[Suffix], *, budget_tokens: int) -> list[AnswerLikelihood]:
        del budget_tokens
        return [AnswerLikelihood(logps=tuple(logp_T.tolist()), entropy_nats=None) for logp_T in self._now(suffixes)]

    def token_scores(self, suffixes: Sequence[Suffix], among: Sequence[Tensor] | None = None) -> TokenScores:
        """Return log-probs whose gradients `accumulate` collects; entropies and other tokens' are not known."""
        assert among is None, "the settings ask for no other tokens"
        rows = self._now(suffixes)
        logp_BT = torch.full((len(rows), max(map(len, rows))), torch.nan)
        for row, logp_T in enumerate(rows):
            logp_BT[row, : len(logp_T)] = logp_T
        logp_BT.requires_grad_()
        self._leaves.append((suffixes, logp_BT))
        return TokenScores(logp_BT, None, logp_BT.new_empty((*logp_BT.shape, 0)))

    def groups(self, suffixes: Sequence[Suffix], *, budget_tokens: int) -> list[list[int]]:
        del budget_tokens
        return [list(range(len(suffixes)))] if suffixes else []

    def forget_gradients(self) -> None:
        """Forget what `accumulate` collected."""
        self._leaves.clear()

    def gradient_rms(self) -> float:
        """0: where the gradient alone leads can't be tried out there."""
        return 0.0

    def step(self, divisor: int, rate: float) -> float | None:
        """Take one step along the collected gradients; return their norm before clipping, where the service tells it.

        Where all are 0 there is no step. Raises _NotFinite; then nothing was sent.
        """
        from tinker import types

        data = []
        for suffixes, leaf_BT in self._leaves:
            assert leaf_BT.grad is not None, "accumulate was called"
            for row, suffix in enumerate(suffixes):
                wanted_T = (-leaf_BT.grad[row, : len(suffix.response_ids)] / divisor).tolist()
                if not all(map(isfinite, wanted_T)):
                    raise _NotFinite
                if any(wanted_T):
                    data.append(_datum(suffix, self._known[suffix].tolist(), advantages=wanted_T))
        if not data:
            return 0.0
        client = self.client
        took = client.forward_backward(data, "ppo", loss_fn_config=CLIPS)
        moved = client.optim_step(
            types.AdamParams(
                learning_rate=rate, beta1=BETAS[0], beta2=BETAS[1], eps=ADAM_EPS, weight_decay=WEIGHT_DECAY,
                grad_clip_norm=MAX_GRAD_NORM,
            )
        )  # fmt: skip
        self._service.value(took, "a step's gradient")
        told = self._service.value(moved, "a step")
        self._changed()
        norms = [value for name, value in (told.metrics or {}).items() if "grad_norm" in name]
        return float(norms[0]) if norms else None

    def snapshot(self, name: str) -> str:
        """Return where the service has the weights as they are, for sampling."""
        if self._snapshot is None:
            saved = self.client.save_weights_for_sampler(name=f"{name}-{uuid4().hex[:8]}")
            self._snapshot = str(self._service.value(saved, "a version for sampling").path)
        return self._snapshot

    def write(self, questions: Sequence[Suffix], *, limit_tokens: int, seed: int) -> list[list[int]]:
        """Return the tokens of an answer to each question's prompt."""
        from tinker import types

        sampler = self._service.sampler(self.snapshot("trial"))
        asked = [
            sampler.sample(
                prompt=model_input(question.prompt_ids), num_samples=1,
                sampling_params=types.SamplingParams(
                    max_tokens=limit_tokens, temperature=question.scale, seed=seed + number
                ),
            )
            for number, question in enumerate(questions)
        ]  # fmt: skip
        return [list(self._service.value(one, "a trial answer").sequences[0].tokens) for one in asked]

    def save(self, folder: Path) -> None:
        """Write where the service has this version: for sampling, and to train on from."""
        name = folder.name.rpartition("-")[2]
        snapshot = self.snapshot(name)
        state = self._service.value(self.client.save_state(name=f"{name}-{uuid4().hex[:8]}"), "a version's state").path
        found = {
            "peft_type": "LORA", "r": self._rank, "base_model_name_or_path": self._service.base_model,
            SNAPSHOT: snapshot, STATE: str(state),
        }  # fmt: skip
        (folder / ADAPTER_CONFIG).write_text(json.dumps(found, indent=1))

    def restore(self, folder: Path, masters: Path | None = None) -> None:
        del masters
        found = json.loads((folder / ADAPTER_CONFIG).read_text())
        began_with = found.get("base_model_name_or_path")
        if STATE in found and began_with != self._service.base_model:
            raise UnusableCheckpoint(
                f"{folder / ADAPTER_CONFIG}: trained on {began_with}, and the base is {self._service.base_model} now. "
                "Nothing is trained. Set tinker.model as it was, or give the new policy an id of its own"
            )
        if STATE not in found:
            raise UnusableCheckpoint(
                f"{folder / ADAPTER_CONFIG} names no state at a Tinker service: another trainer wrote this version. "
                "Nothing is trained. Set training.trainer as it was, or give the new policy an id of its own"
            )
        self.resume(found[STATE])

    def _now(self, suffixes: Sequence[Suffix]) -> list[Tensor]:
        new = [suffix for suffix in dict.fromkeys(suffixes) if suffix not in self._known]
        if new:
            data = [_datum(suffix, [0.0] * len(suffix.response_ids)) for suffix in new]
            told = self._service.value(self.client.forward(data, "cross_entropy"), "log-probs").loss_fn_outputs
            for suffix, one in zip(new, told, strict=True):
                self._known[suffix] = self._last(suffix, one["logprobs"].data, suffix.num_tokens - 1)
        return [self._known[suffix] for suffix in suffixes]

    def _by_base(self, suffixes: Sequence[Suffix]) -> list[Tensor]:
        if self._base is None:
            self._base = self._service.sampler(None)
        asked = [
            self._service.scored(self._base, (*s.prompt_ids, *s.response_ids), len(s.response_ids)) for s in suffixes
        ]
        told = [self._service.value(one, "log-probs of the base") for one in asked]
        return [self._last(s, values, s.num_tokens) for s, values in zip(suffixes, told, strict=True)]

    def _last(self, suffix: Suffix, values: Sequence[float | None], num_tokens: int) -> Tensor:
        return torch.tensor(last_logprobs(values, num_tokens, len(suffix.response_ids), url=self._service.url))

    # What only a machine with the weights can do; the settings and this class ask for none of it.
    reading = likeliest = among = _before_head = _logits = _scores = _top_ids = _in_groups = _not_here
    _head_rows = 0


class TinkerTrainer(Trainer):
    """A trainer whose model a Tinker service has. A version's folder holds the names under which the service has it."""

    _model: TinkerModel

    def __init__(self, base: Path, settings: TrainingSettings, service: TinkerService) -> None:
        assert settings.lora_rank is not None, "the settings derive it"
        self._settings = settings
        self._model = TinkerModel(base, service, rank=settings.lora_rank, seed=settings.seed)
        self._base_sha256 = fingerprint(base)
        self._reference = self._model.copy()
        self._loss = BatchLoss(self._model, settings)
        self._begin()

    def save_state(self, folder: Path) -> None:
        """Write what `restore` needs beside the names in the version's folder."""
        self._save_facts(folder)

    def settle(self, folder: Path) -> None:
        """Go on from the weights and the state that were saved together with the version in use."""
        self._model.restore(folder)

    def restore(self, folder: Path | None) -> None:
        if folder is None:
            self._model.resume(None)
            self._begin()
            return
        self._carried = self._carried_of(folder)
        self._model.restore(folder)

    def _writes(
        self, model: Model, questions: Sequence[Suffix], *, limit_tokens: int, seed: int, budget_tokens: int
    ) -> list[WrittenAnswer]:
        del model, budget_tokens
        rows, ends = self._model.write(questions, limit_tokens=limit_tokens, seed=seed), ends_of(self._model.folder)
        return [written_answer(row, ends, len(q.response_ids)) for row, q in zip(rows, questions, strict=True)]

    def _step(self, version: int, divisor: int, rate: float) -> float | None:
        try:
            return self._model.step(divisor, rate)
        except _NotFinite as error:
            raise GradientNotFinite(
                f"update {version}: the derivative by a token's log-prob is not finite. The weights stay at the "
                "version before. Start a policy with an id of its own from an earlier checkpoint"
            ) from error

    def _forget_gradients(self) -> None:
        self._model.forget_gradients()


def _datum(suffix: Suffix, now: Sequence[float], *, advantages: Sequence[float] | None = None) -> Any:
    """Return an answer as the service takes it: tokens, the ones that follow them, and a number for each of these.

    Without `advantages` it is asked for log-probs alone.
    """
    from tinker import types

    before = [0.0] * (len(suffix.prompt_ids) - 1)
    targets = [*suffix.prompt_ids[1:], *suffix.response_ids]
    if advantages is None:
        numbers = {"weights": [*before, *([1.0] * len(suffix.response_ids))]}
    else:
        numbers = {"logprobs": [*before, *now], "advantages": [*before, *advantages]}
    return types.Datum(model_input=model_input(suffix.read_ids), loss_fn_inputs={"target_tokens": targets, **numbers})
