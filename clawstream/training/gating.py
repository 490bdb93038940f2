"""The gate of one step: it measures where the step leads, and refuses an outcome that may not be published.

A refusal raises StepRefused; the trainer must then be restored. Nothing here computes a gradient or changes the policy.
The direction that a step should take is computed without the loss, so that a loss with a wrong sign is noticed. Several
processes each measure a share of the answers, and all decide by the same numbers. Where they hold one model in parts,
all write the same answers: the leading process draws each token. B rows, L tokens of a padded prompt or of a piece, A
all tokens so far, V the vocabulary, N heads, D their width.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite, isnan
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from clawstream.config import TrainingSettings
from clawstream.errors import GradientNotFinite, StepRefused, TrainingDiverged
from clawstream.events import KeptHint, SampleAssembled
from clawstream.training.model import Model
from clawstream.training.publishing import (
    ANSWERED,
    KL_NATS,
    RECENT,
    REJECTED_IN_A_ROW,
    WRITTEN_TOKENS,
    AnswerLikelihood,
    Canary,
    GateMemory,
    HeldAnswer,
    Way,
    WrittenAnswer,
    astray,
    harm,
    is_near,
    misspoken,
    one_sided,
    stopped,
)
from clawstream.training.step.batch_loss import Scored
from clawstream.training.step.losses import GAP_CLIP_NATS, Suffix
from clawstream.training.step.packing import micro_batches

_NO_TOKEN = -1  # in place of a token where a probability is not finite
WRITES_EVERY = 4  # a version divisible by this writes answers, however small its step: small steps add up


@torch.no_grad()
def write(
    model: Model, questions: Sequence[Suffix], *, limit_tokens: int, seed: int, budget_tokens: int = 16_384
) -> list[WrittenAnswer] | None:
    """Return an answer to each question's prompt, drawn at its temperature; None: a probability was not finite.

    `budget_tokens` bounds how many tokens are computed at once. What is drawn follows from it and from the seed.
    """
    lengths = [len(question.prompt_ids) + limit_tokens for question in questions]
    ends = ends_of(model.folder)
    found: dict[int, WrittenAnswer] = {}
    for number, group in enumerate(micro_batches(lengths, budget_tokens=budget_tokens)):
        rows = _write(model, [questions[i] for i in group], ends, limit_tokens=limit_tokens, seed=seed + number)
        if rows is None:
            return None
        found |= {
            i: written_answer(row, ends, len(questions[i].response_ids)) for i, row in zip(group, rows, strict=True)
        }
    return [found[i] for i in range(len(questions))]


def _write(
    model: Model, questions: Sequence[Suffix], ends: list[int], *, limit_tokens: int, seed: int
) -> list[list[int]] | None:
    ids_BL, mask_BL = _padded(questions, model.device)
    scale_B1 = torch.tensor([[q.scale] for q in questions], device=model.device)
    ends_E = torch.tensor(ends, device=model.device)
    draw = torch.Generator(model.device).manual_seed(seed)
    ended_B = torch.zeros(len(questions), dtype=torch.bool, device=model.device)
    written: list[Tensor] = []
    with model.reading(mask_BL) as read:
        for _ in range(limit_tokens):
            ids_BL = model.agreed(_drawn(read(ids_BL) / scale_B1, draw))
            if bool((ids_BL == _NO_TOKEN).any()):
                return None
            written.append(ids_BL)
            ended_B |= torch.isin(ids_BL.squeeze(1), ends_E)
            if bool(ended_B.all()):
                break
    rows: list[list[int]] = torch.cat(written, 1).tolist()
    return rows


def _drawn(logits_BV: Tensor, draw: torch.Generator) -> Tensor:
    """Return the next token [B, 1] of each row."""
    chances_BV = logits_BV.softmax(1)
    if not bool(chances_BV.isfinite().all()):
        return torch.full((len(chances_BV), 1), _NO_TOKEN, device=chances_BV.device)
    return torch.multinomial(chances_BV, 1, generator=draw)


def _padded(questions: Sequence[Suffix], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts [B, L], padded on the left, and a mask of their own tokens."""
    width = max(len(q.prompt_ids) for q in questions)
    ids_BL = torch.zeros((len(questions), width), dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, question in enumerate(questions):
        ids_BL[row, width - len(question.prompt_ids) :] = torch.tensor(question.prompt_ids)
        mask_BL[row, width - len(question.prompt_ids) :] = 1
    return ids_BL.to(device), mask_BL.to(device)


def ends_of(folder: Path) -> list[int]:
    """Return the tokens that end an answer, as the model's own files name them."""
    if (folder / GENERATION_CONFIG_NAME).is_file():
        named = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        named = GenerationConfig.from_model_config(config).eos_token_id  # some configurations name it in a nested part
    if named is None:
        return []
    return list(named) if isinstance(named, (list, tuple)) else [named]


def written_answer(token_ids: list[int], ends: list[int], answered_tokens: int) -> WrittenAnswer:
    """Return the answer in these tokens, up to the first of `ends`."""
    end = next((place for place, token in enumerate(token_ids) if token in ends), None)
    ended = end is not None if ends else None
    return WrittenAnswer(token_ids=tuple(token_ids[:end]), ended=ended, answered_tokens=answered_tokens)


class PiecewiseCache:
    """The keys and values, by layer, of the tokens read so far; rows are read piece by piece."""

    def __init__(self, mask_BL: Tensor) -> None:
        """`mask_BL` is 0 at the first piece's padding, which is on the left."""
        self.num_read = 0  # tokens of a row, before this piece
        self._mask_BL = None if bool(mask_BL.all()) else mask_BL.bool()
        self._device = mask_BL.device
        self._num_next = 0
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int | None, Tensor] = {}  # the piece's masks, by window; layers share them

    @contextmanager
    def piece(self, num_tokens: int) -> Iterator[None]:
        """Read `num_tokens` more of each row in the `with` block; padding after these is neither seen nor kept."""
        self._num_next = num_tokens
        yield
        self._seen.clear()
        self.num_read += num_tokens

    def so_far(self, layer: nn.Module, key_BNLD: Tensor, value_BNLD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the piece's keys and values to the layer's, and return all of them."""
        if layer in self._kept:
            key_BNLD = torch.cat([self._kept[layer][0], key_BNLD], 2)
            value_BNLD = torch.cat([self._kept[layer][1], value_BNLD], 2)
        end = self.num_read + self._num_next
        self._kept[layer] = key_BNLD[:, :, :end], value_BNLD[:, :, :end]
        return key_BNLD, value_BNLD

    def seen(self, length: int, window: int | None) -> Tensor | None:
        """Return a mask [B or 1, 1, L, A] of the tokens that each token of the piece sees; None: causal in the piece.

        A padding token sees nothing, and torch gives zeros as its attention's result.
        """
        if window is not None and window >= self.num_read + length:
            window = None
        if self.num_read == 0 and window is None and self._mask_BL is None:
            return None
        if window not in self._seen:
            self._seen[window] = self._worked_out(length, window)
        return self._seen[window]

    def _worked_out(self, length: int, window: int | None) -> Tensor:
        places_A = torch.arange(self.num_read + length, device=self._device)
        places_L1 = places_A[self.num_read :].unsqueeze(1)
        seen_B1LA = (places_A <= places_L1)[None, None]
        if window is not None:
            seen_B1LA &= places_A > places_L1 - window
        if self._mask_BL is not None:
            token_BA = functional.pad(self._mask_BL, (0, len(places_A) - self._mask_BL.shape[1]), value=True)
            seen_B1LA = seen_B1LA & token_BA[:, None, None, :]
        return seen_B1LA


def idle_rewards(
    settings: TrainingSettings, samples: Sequence[SampleAssembled], memory: GateMemory, *, grouped: bool
) -> str | None:
    """Return why the rewards of a step teach nothing, unless that was accepted before; None: they teach something.

    A group's advantages are never one-sided.
    """
    judged = settings.weights[0] > 0 and not grouped
    return one_sided(samples, memory) if judged and not memory.as_it_is else None


class Writes(Protocol):
    """Has a model answer, as `write` does."""

    def __call__(
        self, model: Model, questions: Sequence[Suffix], *, limit_tokens: int, seed: int, budget_tokens: int
    ) -> list[WrittenAnswer] | None: ...


class Gate:
    """The checks of one step, on some of its samples, on the canaries and on answers that followed held hints."""

    def __init__(
        self, model: Model, settings: TrainingSettings, samples: Sequence[SampleAssembled], memory: GateMemory, *,
        scored: Scored, mine: Sequence[int], num_rejected: int, held: Collection[str] = (), version: int = 0,
        writes: "Writes | None" = None,
    ) -> None:  # fmt: skip
        """Measure the policy before the step that makes `version`; `scored` holds this process' samples, whose indices
        are `mine`. Answers that followed some of the `held` hints are measured too.

        Raises StepRefused if the rewards teach nothing. A person is told of such rejections. After `REJECTED_IN_A_ROW`
        rejections a judge that still says yes to everything is accepted as it is.
        """
        refusal = idle_rewards(settings, samples, memory, grouped=scored.advantages is not None)
        if refusal is not None and num_rejected < REJECTED_IN_A_ROW:
            raise StepRefused(refusal)
        self._model = model
        self._settings = settings
        self._writes = writes
        wanted = model.together({index: scored.wanted(place) for place, index in enumerate(mine)})
        self._chosen = _telling(samples, wanted, RECENT)
        chosen = [samples[index] for index in self._chosen]
        self._kept = memory.to_look_at(held, samples, version=version)
        measured: list[SampleAssembled | Canary | HeldAnswer] = [*chosen, *memory.canaries, *self._kept]
        self._suffixes = [Suffix(s.prompt_ids, s.response_ids, s.temperature) for s in measured]
        self._stopped = [*map(stopped, chosen), *(c.stopped for c in memory.canaries)]
        self._before = self._measured(self._suffixes)
        self._ahead = self._before[: len(self._chosen)]
        seen = zip(self._chosen, self._before, strict=False)
        ways = model.together({at: self._way(scored, mine.index(at), one) for at, one in seen if at in mine})
        self._wanted = [ways[index] for index in self._chosen]

    def look_ahead(self, learning_rate: float) -> None:
        """Measure where the first gradient alone leads, since momentum may hide a wrong gradient.

        The gradient is scaled so that the root mean square of its entries is `learning_rate`.
        """
        rms = self._model.gradient_rms()
        if rms == 0 or not isfinite(rms):
            return
        pace = learning_rate / rms
        ahead = {
            name: p.detach() if p.grad is None else p.detach() - pace * p.grad
            for name, p in self._model.trained.items()
        }
        with self._model.holding(ahead):
            self._ahead = self._measured(self._suffixes[: len(self._chosen)])

    def let_out(self, *, version: int, seed: int) -> tuple[KeptHint, ...]:
        """Return how well held hints are kept, if the policy may be published as it is now; else raise StepRefused."""
        num = len(self._suffixes) - len(self._kept)
        both = self._measured(self._suffixes)
        before, after = self._before[:num], both[:num]
        refusal = harm(before, after, kl_nats=KL_NATS)
        refusal = refusal or astray(before, after, self._ahead, self._wanted)
        if refusal is None and not (is_near(before, after) and version % WRITES_EVERY):
            refusal = self._misspoken(seed)
        if refusal is not None:
            raise StepRefused(refusal)
        return tuple(kept for one, now in zip(self._kept, both[num:], strict=True) if (kept := one.kept(now)))

    def _misspoken(self, seed: int) -> str | None:
        asked = [*_spread(len(self._chosen), ANSWERED), *range(len(self._chosen), len(self._stopped))]
        answers = (self._writes or write)(
            self._model, [self._suffixes[place] for place in asked], limit_tokens=WRITTEN_TOKENS, seed=seed,
            budget_tokens=self._settings.micro_batch_tokens,
        )  # fmt: skip
        if answers is None:
            return "the policy gives its next tokens no finite probabilities"
        known = zip(asked, answers, strict=True)
        return misspoken([replace(a, ended=None) if self._stopped[place] else a for place, a in known])

    def _measured(self, suffixes: Sequence[Suffix]) -> list[AnswerLikelihood]:
        mine = self._model.share([suffix.num_tokens for suffix in suffixes])
        found = self._model.likelihoods(
            [suffixes[place] for place in mine], budget_tokens=self._settings.micro_batch_tokens
        )
        everyones = self._model.together(dict(zip(mine, found, strict=True)))
        return [everyones[place] for place in range(len(suffixes))]

    def _way(self, scored: Scored, index: int, seen: AnswerLikelihood) -> Way | None:
        """Return how strongly each token of a sample is to become likelier (below 0: less); None: there is no signal.

        A hint gives a value for each token; without a hint the reward gives one value for all tokens. In a
        contrast the divergence, as far as it counts, pulls towards the teacher's log-prob of the token: then both are
        added.
        """
        num_thinking = scored.samples[index].num_thinking
        counts = [self._settings.w_thinking] * num_thinking + [1.0] * (len(seen.logps) - num_thinking)
        teacher_T = scored.hinted.get(index)
        if teacher_T is not None:
            taught, student_T = teacher_T.tolist(), scored.students.get(index)
            way = _gaps(taught, seen.logps if student_T is None else student_T.tolist())
            if student_T is not None and (weight := self._settings.divergence_weight):
                counted = scored.pull(index).tolist() or [1.0] * len(way)
                pulls = zip(_gaps(taught, seen.logps), counted, strict=True)
                way = tuple(gap + weight * much * pull for gap, (pull, much) in zip(way, pulls, strict=True))
            return tuple(much * gap for much, gap in zip(counts, way, strict=False))
        wanted = scored.wanted(index)
        if wanted is None or self._settings.weights[0] == 0:
            return None
        return tuple(much * wanted for much in counts[: len(seen.logps)])


def _gaps(taught: Sequence[float], student: Sequence[float]) -> Way:
    """Return the clipped gap of each token; 0 where it is not known."""
    clip = GAP_CLIP_NATS
    gaps = [theirs - ours for theirs, ours in zip(taught, student, strict=True)]
    return tuple(0.0 if isnan(gap) else max(-clip, min(clip, gap)) for gap in gaps)


def _telling(samples: Sequence[SampleAssembled], wanted: Mapping[int, float | None], at_most: int) -> list[int]:
    """Return the indices of `at_most` samples, those hinted or badly rewarded first: they make most of the gradient."""
    order = sorted(range(len(samples)), key=lambda i: samples[i].hinted_prompt_ids is None and (wanted[i] or 0) > 0)
    return order[:at_most]


def _spread(num: int, at_most: int) -> list[int]:
    count = min(num, at_most)
    return [position * num // count for position in range(count)]


@contextmanager
def refused() -> Iterator[None]:
    """Turn an error that would end the training into a refusal of this step alone."""
    try:
        yield
    except GradientNotFinite as error:
        raise StepRefused("the gradient is not finite") from error
    except TrainingDiverged as error:
        raise StepRefused(str(error)) from error
