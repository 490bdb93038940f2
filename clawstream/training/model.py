"""What a trainer needs of a model, wherever its weights lie: in one process, or cut into pieces over several.

One function computes all log-probs, under whichever weights, so that the difference of two of them never compares two
implementations. Where several processes hold parts of a model, all call the same methods in the same order with the
same samples, and all get the same result for a batch. B rows, L tokens of a row, T response tokens, N response tokens
of all rows, E tokens scored at each of them, K of these that were asked about, V the vocabulary, H the model's width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import sqrt
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from clawstream.training.base_folder import key, stored
from clawstream.training.footprint import HEAD_BYTES
from clawstream.training.publishing import AnswerLikelihood
from clawstream.training.step.losses import Answers, Suffix
from clawstream.training.step.packing import micro_batches

Weights = Mapping[str, Tensor]
T = TypeVar("T")


class Top(NamedTuple):
    """A model's scores at each place of an answer: of the token that stands there, and of the likeliest tokens."""

    own_T: Tensor  # log-probs
    ids_TK: Tensor
    logp_TK: Tensor


class TokenScores(NamedTuple):
    """A model's scores at each place of answers, NaN past each row's end."""

    logp_BT: Tensor  # of the response's tokens
    entropy_BT: Tensor | None  # nats; without gradient
    among_BTK: Tensor  # log-probs of the tokens that were asked about


AnswerTensors = tuple[Tensor, ...]  # what is computed of one answer, each [T, ...]
ScoreGroup = Callable[[list[Suffix]], Sequence[AnswerTensors]]
# Given the next tokens [B, L] of rows, it returns the logits [B, V] of what follows them.
Read = Callable[[Tensor], Tensor]


class Model(ABC):
    """A causal model whose trained weights are float32, in evaluation mode."""

    folder: Path  # of the base
    trained: dict[str, nn.Parameter]  # the trained weights that this process holds
    device: torch.device
    published_dtype: torch.dtype
    at_temperature = True  # whether log-probs are at the temperature of sampling; else they are at 1

    @property
    def rounds(self) -> bool:
        """Whether published weights are less exact than the trained ones."""
        return self.published_dtype != torch.float32

    def published(self) -> dict[str, Tensor]:
        """Return the trained weights that this process counts, rounded as `save` writes them, in main memory."""
        return {n: p.to("cpu", self.published_dtype, copy=True) for n, p in self._counted(self.trained)}

    def changed_share(self, before: Weights) -> float | None:
        """Return the share of published numbers, over all processes, that differ from `before`; None: not known."""
        changed, numbers = 0, 0
        for name, value in self._counted(self.trained):
            changed += int((value.to("cpu", self.published_dtype) != before[name]).sum())
            numbers += value.numel()
        all_changed, all_numbers = self._totals([changed, numbers])
        return all_changed / all_numbers

    def gradient_rms(self) -> float:
        """Return the root mean square of the gradient's numbers, of all processes; 0 where there is no gradient."""
        gradients = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        parts = [value for _, value in self._counted(gradients)]
        squares, numbers = self._totals(
            [sum(float(part.square().sum()) for part in parts), sum(part.numel() for part in parts)]
        )
        return sqrt(squares / numbers) if numbers else 0.0

    def copy(self) -> dict[str, Tensor]:
        """Return a copy of the trained weights that this process holds."""
        return {name: p.detach().clone() for name, p in self.trained.items()}

    @contextmanager
    def holding(self, weights: Weights | None) -> Iterator[None]:
        """Compute with these weights instead of the current ones, which come back unchanged; None: the current ones."""
        if weights is None:
            yield
            return
        current = {name: p.data for name, p in self.trained.items()}
        try:
            for name, parameter in self.trained.items():
                parameter.data = weights[name]
            yield
        finally:
            for name, parameter in self.trained.items():
                parameter.data = current[name]

    def put(self, weights: Weights) -> None:
        """Take over a copy of these weights."""
        for name, parameter in self.trained.items():
            parameter.detach().copy_(weights[name])

    @property
    def moved(self) -> Mapping[str, nn.Parameter]:
        """Return the tensors that this process' optimizer moves: here the trained weights themselves."""
        return self.trained

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Bring gradients to the processes that move the weights; after the block, bring the weights to all."""
        yield

    def logprobs(self, suffixes: Sequence[Suffix]) -> Tensor:
        """Return log-probs [B, T] of the responses, NaN past each one's end; only a pipeline's last stage can do this.

        Logits are computed for response tokens only: the prompt's would cost the most and are not read.
        """
        answers, hidden_NH = self._before_head(suffixes)
        logp_N1, _ = self._under_head(hidden_NH, answers, answers.target_N.unsqueeze(1), entropy=False)
        return answers.rows(logp_N1.squeeze(1))

    def token_scores(self, suffixes: Sequence[Suffix], among: Sequence[Tensor] | None = None) -> TokenScores:
        """Return log-probs, entropies and the log-probs of other tokens, which `among` [T, K] names for each row."""
        answers, hidden_NH = self._before_head(suffixes)
        ids_NE = answers.target_N.unsqueeze(1)
        if among is not None:
            ids_NE = torch.cat([ids_NE, torch.cat([ids_TK.to(self.device) for ids_TK in among])], 1)
        logp_NE, entropy_N = self._under_head(hidden_NH, answers, ids_NE, entropy=True)
        return TokenScores(answers.rows(logp_NE[:, 0]), answers.rows(entropy_N), answers.rows(logp_NE[:, 1:]))

    @torch.no_grad()
    def likelihoods(self, suffixes: Sequence[Suffix], *, budget_tokens: int) -> list[AnswerLikelihood]:
        """Return how likely the current weights find each response, in order, without gradient."""

        def scored(group: list[Suffix]) -> list[AnswerTensors]:
            scores = self.token_scores(group)
            assert scores.entropy_BT is not None
            ends = [len(s.response_ids) for s in group]
            return [(scores.logp_BT[row, :end], scores.entropy_BT[row, :end]) for row, end in enumerate(ends)]

        found = self._in_groups(suffixes, scored, budget_tokens, (torch.float32, torch.float32), ())
        return [
            AnswerLikelihood(logps=tuple(logp_T.tolist()), entropy_nats=float(entropy_T.mean()))
            for logp_T, entropy_T in found
        ]

    @torch.no_grad()
    def score(self, suffixes: Sequence[Suffix], *, weights: Weights | None, budget_tokens: int) -> list[Tensor]:
        """Return the log-probs [T] of each response under the given weights (None: the current ones), in order."""

        def scored(group: list[Suffix]) -> list[AnswerTensors]:
            logp_BT = self.logprobs(group)
            return [(logp_BT[row, : len(s.response_ids)].clone(),) for row, s in enumerate(group)]

        with self.holding(weights):
            return [logp_T for (logp_T,) in self._in_groups(suffixes, scored, budget_tokens, (torch.float32,), ())]

    @torch.no_grad()
    def likeliest(
        self, suffixes: Sequence[Suffix], *, num_tokens: int, weights: Weights | None, budget_tokens: int
    ) -> list[Top]:
        """Return the `num_tokens` tokens that the given weights find likeliest at each place of each response."""

        def scored(group: list[Suffix]) -> list[AnswerTensors]:
            answers, hidden_NH = self._before_head(group)
            tops = []
            for at in self._pieces(hidden_NH):
                logits_NV = self._logits(hidden_NH[at], answers.scale_N[at])
                ids_NE = torch.cat([answers.target_N[at].unsqueeze(1), self._top_ids(logits_NV, num_tokens)], 1)
                tops.append((ids_NE, self._scores(logits_NV, ids_NE, entropy=False)[0]))
            ids, logps = (answers.each(torch.cat(parts)) for parts in zip(*tops, strict=True))
            return list(zip(ids, logps, strict=True))

        dtypes, tail = (torch.long, torch.float32), (1 + num_tokens,)
        with self.holding(weights):
            found = self._in_groups(suffixes, scored, budget_tokens, dtypes, tail)
        return [Top(logp_TE[:, 0], ids_TE[:, 1:], logp_TE[:, 1:]) for ids_TE, logp_TE in found]

    @torch.no_grad()
    def among(
        self, suffixes: Sequence[Suffix], ids: Sequence[Tensor], *, num_tokens: int, weights: Weights | None,
        budget_tokens: int,
    ) -> list[Tensor]:  # fmt: skip
        """Return under the given weights the log-probs [T, K] of the `num_tokens` tokens that `ids` [T, K] names at
        each place of each response, in order.
        """
        named = {id(suffix): ids_TK for suffix, ids_TK in zip(suffixes, ids, strict=True)}

        def scored(group: list[Suffix]) -> list[AnswerTensors]:
            ends = [len(s.response_ids) for s in group]
            nothing = (torch.zeros((end, num_tokens), dtype=torch.long) for end in ends)
            scores = self.token_scores(group, [named.get(id(s), none) for s, none in zip(group, nothing, strict=True)])
            return [(scores.among_BTK[row, :end].clone(),) for row, end in enumerate(ends)]

        with self.holding(weights):
            found = self._in_groups(suffixes, scored, budget_tokens, (torch.float32,), (num_tokens,))
        return [logp_TK for (logp_TK,) in found]

    def _under_head(
        self, hidden_NH: Tensor, answers: Answers, ids_NE: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the ids at each place, and the entropies [N], empty without `entropy`."""
        pieces = [(hidden_NH[at], answers.scale_N[at], ids_NE[at], entropy) for at in self._pieces(hidden_NH)]
        if len(pieces) == 1:
            return self._head_piece(*pieces[0])
        parts = [checkpoint(self._head_piece, *piece, use_reentrant=False) for piece in pieces]
        logps, entropies = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies)

    def _pieces(self, hidden_NH: Tensor) -> list[slice]:
        """Return the places to which the head is applied at once: as many as fit in `HEAD_BYTES` of logits."""
        size = max(1, HEAD_BYTES // (4 * self._head_rows))
        return [slice(start, start + size) for start in range(0, len(hidden_NH), size)]

    def _head_piece(self, hidden_NH: Tensor, scale_N: Tensor, ids_NE: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        return self._scores(self._logits(hidden_NH, scale_N), ids_NE, entropy=entropy)

    @property
    @abstractmethod
    def _head_rows(self) -> int:
        """The number of rows of the head, padding included, in each process."""

    @abstractmethod
    def _before_head(self, suffixes: Sequence[Suffix]) -> tuple[Answers, Tensor]:
        """Return the answers, and the states [N, H] from which their tokens are predicted."""

    @abstractmethod
    def _logits(self, hidden_NH: Tensor, scale_N: Tensor) -> Tensor:
        """Return the logits [N, V] of this process' rows of the head, divided by the scale."""

    @abstractmethod
    def _scores(self, logits_NV: Tensor, ids_NE: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return the log-probs [N, E] of the ids, with their gradient, and without one the entropies [N] of the places,
        empty without `entropy`.
        """

    @abstractmethod
    def _top_ids(self, logits_NV: Tensor, num_tokens: int) -> Tensor:
        """Return the ids [N, K] of the likeliest tokens."""

    @abstractmethod
    def _in_groups(
        self, suffixes: Sequence[Suffix], scored: ScoreGroup, budget_tokens: int, dtypes: Sequence[torch.dtype],
        tail: tuple[int, ...],
    ) -> list[AnswerTensors]:  # fmt: skip
        """Return in every process the tensors that `scored` computes of each suffix, in order.

        `scored` gets as many suffixes at once as fit. Its tensors are of these `dtypes` and of shape [T, *tail].
        """

    @abstractmethod
    def reading(self, mask_BL: Tensor) -> AbstractContextManager[Read]:
        """Read rows piece by piece, no token twice; the first piece has the mask's shape, and 0 marks padding.

        Rows are padded on the left. All processes read the same rows, without gradient.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what an engine loads: the model in its base's number type, with its tokenizer, or the adapter."""

    @abstractmethod
    def restore(self, folder: Path, masters: Path | None = None) -> None:
        """Take over the weights that `save` wrote, or the more exact ones that they were written from.

        The latter are in the file `masters`, or in its numbered parts.
        """

    @property
    def leads(self) -> bool:
        """Whether this process writes the files that are written once."""
        return True

    def share(self, lengths_tokens: Sequence[int]) -> list[int]:
        """Return the indices of the samples that this process computes; `lengths_tokens` are those of all samples."""
        return list(range(len(lengths_tokens)))

    def together(self, found: Mapping[int, T]) -> dict[int, T]:
        """Return the results of all processes for the samples that `share` dealt out."""
        return dict(found)

    def agreed(self, values: Tensor) -> Tensor:
        """Return the leading process' values in every process, so that all act alike."""
        return values

    def groups(self, suffixes: Sequence[Suffix], *, budget_tokens: int) -> list[list[int]]:
        """Return groups of indices of the suffixes to compute at once; each suffix is in one group."""
        return micro_batches([s.num_tokens for s in suffixes], budget_tokens=budget_tokens)

    def accumulate(
        self, groups: Sequence[Sequence[int]], suffixes: Sequence[Suffix], total_of: Callable[[Sequence[int]], Tensor]
    ) -> None:
        """Sum the gradients of `total_of` over the groups, and over all processes.

        `total_of` is called in the process where the answers' log-probs come out, and calls `token_scores` once on the
        group's `suffixes`.
        """
        del suffixes  # a process with the whole model needs only the arguments of `token_scores`
        for group in groups:
            total_of(group).backward()  # type: ignore[no-untyped-call]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all samples, whichever process computes them."""
        return list(values)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to `max_norm` where its norm is larger; return the norm before."""
        return float(nn.utils.clip_grad_norm_(list(self.trained.values()), max_norm))

    def save_state(self, folder: Path, stem: str, state: Mapping[str, Weights]) -> None:
        """Write tensors by kind, each shaped like a trained weight; every trainer can read every other's files."""
        tensors = {
            key(kind, name): value.detach().contiguous()
            for kind, values in state.items()
            for name, value in values.items()
        }
        save_file(tensors, folder / f"{stem}.safetensors")

    def load_state(self, folder: Path, stem: str) -> dict[str, dict[str, Tensor]] | None:
        """Return this process' part of what any trainer's `save_state` wrote; None: there is nothing."""
        state: dict[str, dict[str, Tensor]] = {}
        for one, read in stored(folder, stem):
            kind, _, name = one.rpartition("/")
            value = read()
            state.setdefault(kind, {})[name] = value if value.ndim == 0 else self._part(value, self.trained[name])
        return state or None

    def save_moments(self, folder: Path, moments: Mapping[str, Weights]) -> None:
        """Write tensors by kind, each shaped like one of `moved`; every trainer can read every other's files."""
        self.save_state(folder, "optimizer", moments)

    def load_moments(self, folder: Path) -> dict[str, dict[str, Tensor]]:
        """Return the part of `save_moments`' tensors that this process moves; empty where nothing was moved yet."""
        return self.load_state(folder, "optimizer") or {}

    def _part(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return what this process holds of a tensor that is shaped like the whole parameter."""
        return whole.to(parameter.device)

    def _counted(self, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
        """Return, of tensors shaped like the trained weights, the numbers that only this process counts."""
        return ((name, value.detach()) for name, value in tensors.items())

    def _totals(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes."""
        return list(values)


class SharedModel(Model):
    """A model of which every process of torch.distributed holds a part."""

    @property
    def leads(self) -> bool:
        return dist.get_rank() == 0

    def together(self, found: Mapping[int, T]) -> dict[int, T]:
        """Return the results of all processes; where several have the same key, all take one process' value."""
        parts: list[Mapping[int, T]] = [{}] * dist.get_world_size()
        dist.all_gather_object(parts, dict(found))
        return {number: value for part in parts for number, value in part.items()}

    def agreed(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        dist.broadcast(values, 0)
        return values

    def sums(self, values: Sequence[float]) -> list[float]:
        return self._totals(values)

    def _totals(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]
