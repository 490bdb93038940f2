"""What a trainer needs of a model, wherever its weights lie: in one process, or cut into pieces over several.

A model that is whole in this process overrides none of the methods that are defined here. With other models every
process calls the same methods in the same order with the same samples, and all get the same result for a batch. B rows,
L tokens of a row, T response tokens, K tokens looked at, V the vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import sqrt
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from clawstream.training.step.losses import Suffix
from clawstream.training.step.packing import micro_batches

HEAD_BYTES = 2**29  # of logits at once, and thrice that computed from them; with more, some are computed again backward

Weights = Mapping[str, Tensor]
T = TypeVar("T")


class Top(NamedTuple):
    """A model's scores at each place of an answer: of the token that stands there, and of the likeliest tokens."""

    own_T: Tensor  # log-probs
    ids_TK: Tensor
    logp_TK: Tensor

    @classmethod
    def of(cls, ids_TE: Tensor, logp_TE: Tensor) -> "Top":
        """Return a `Top` of tokens and their log-probs; the answer's own token comes first."""
        return cls(logp_TE[:, 0], ids_TE[:, 1:], logp_TE[:, 1:])


class Look(NamedTuple):
    """A model's scores at each place of answers, NaN past each row's end."""

    logp_BT: Tensor  # of the response's tokens
    entropy_BT: Tensor  # nats; without gradient
    among_BTK: Tensor  # log-probs of the tokens that were asked about


class Glance(NamedTuple):
    """A model's scores at each place of one answer."""

    logp_T: Tensor
    entropy_T: Tensor  # nats


def head_pieces(num_tokens: int, rows: int) -> list[slice]:
    """Return the slices of places to which the head is applied at once: as many as fit in `HEAD_BYTES` of logits."""
    size = max(1, HEAD_BYTES // (4 * rows))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


# Given the next tokens [B, L] of rows, it returns the logits [B, V] of what follows them.
Read = Callable[[Tensor], Tensor]


class Model(ABC):
    """A causal model whose trained weights are float32, in evaluation mode."""

    folder: Path  # of the base
    trained: dict[str, nn.Parameter]  # the part of them that this process holds
    device: torch.device
    published_dtype: torch.dtype

    @property
    def rounds(self) -> bool:
        """Whether published weights are less exact than the trained ones."""
        return self.published_dtype != torch.float32

    def published(self) -> dict[str, Tensor]:
        """Return the trained weights that this process holds, as exact as `save` writes them, in main memory."""
        return {name: p.detach().to("cpu", self.published_dtype, copy=True) for name, p in self.trained.items()}

    def changed_share(self, before: Weights) -> float:
        """Return the share of published numbers, over all processes, that differ from `before`."""
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
        """Put the gradients where the weights are moved; after the block the moved weights are in every process."""
        yield

    @abstractmethod
    def logprobs(self, suffixes: Sequence[Suffix]) -> Tensor:
        """Return log-probs [B, T] of the responses, NaN past each one's end."""

    @abstractmethod
    def look(self, suffixes: Sequence[Suffix], among: Sequence[Tensor] | None = None) -> Look:
        """Return a `Look` at each place; `among` [T, K] names tokens to score beside those of each row."""

    @abstractmethod
    def glance(self, suffixes: Sequence[Suffix], *, budget_tokens: int) -> list[Glance]:
        """Return a `Glance` at each response by the current weights, in order, without gradient."""

    @abstractmethod
    def reading(self, mask_BL: Tensor) -> AbstractContextManager[Read]:
        """Read rows piece by piece, no token twice; the first piece has the mask's shape, and 0 marks padding.

        Rows are padded on the left. All processes read the same ones, without gradient.
        """

    @abstractmethod
    def score(self, suffixes: Sequence[Suffix], *, weights: Weights | None, budget_tokens: int) -> list[Tensor]:
        """Return the log-probs [T] of each response under the given weights (None: the current ones), in order."""

    @abstractmethod
    def likeliest(
        self, suffixes: Sequence[Suffix], *, num_tokens: int, weights: Weights | None, budget_tokens: int
    ) -> list[Top]:
        """Return the `num_tokens` tokens that the given weights find likeliest at each place of each response."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what an engine loads: the model as exact as its base, with its tokenizer, or the adapter."""

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
        """Return which samples this process computes, of all samples, which have these lengths."""
        return list(range(len(lengths_tokens)))

    def together(self, found: Mapping[int, T]) -> dict[int, T]:
        """Return the results of all processes for the samples that `share` dealt out."""
        return dict(found)

    def agreed(self, values: Tensor) -> Tensor:
        """Return the leading process' values in every process, so that all act alike."""
        return values

    def groups(self, suffixes: Sequence[Suffix], *, budget_tokens: int) -> list[list[int]]:
        """Return which suffixes to compute at once, each in one group."""
        return micro_batches([s.num_tokens for s in suffixes], budget_tokens=budget_tokens)

    def accumulate(
        self, groups: Sequence[Sequence[int]], suffixes: Sequence[Suffix], total_of: Callable[[Sequence[int]], Tensor]
    ) -> None:
        """Sum the gradients of `total_of` over the groups, and over all processes.

        `total_of` is called in the process where the answers' log-probs come out, and calls `look` once on the group's
        `suffixes`.
        """
        del suffixes  # a process with the whole model needs only the arguments of `look`
        for group in groups:
            total_of(group).backward()  # type: ignore[no-untyped-call]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all samples, whichever process computes them."""
        return list(values)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to the norm where it is larger; return its norm before."""
        return float(nn.utils.clip_grad_norm_(list(self.trained.values()), max_norm))

    def save_state(self, folder: Path, stem: str, state: Mapping[str, Weights]) -> None:
        """Write kinds of tensors, each shaped like the trained weights; every trainer can read every other's files."""
        tensors = {
            key(kind, name): value.detach().contiguous()
            for kind, values in state.items()
            for name, value in values.items()
        }
        save_file(tensors, folder / f"{stem}.safetensors")

    def load_state(self, folder: Path, stem: str) -> dict[str, dict[str, Tensor]] | None:
        """Return what `save_state` wrote, on this model's device except for scalars; None: there is nothing."""
        found = dict(stored(folder, stem))
        state: dict[str, dict[str, Tensor]] = {}
        for one, read in found.items():
            kind, _, name = one.rpartition("/")
            value = read()
            state.setdefault(kind, {})[name] = value if value.ndim == 0 else value.to(self.device)
        return state or None

    def save_moments(self, folder: Path, moments: Mapping[str, Weights]) -> None:
        """Write kinds of tensors, each shaped like `moved`; every trainer can read every other's files."""
        self.save_state(folder, "optimizer", moments)

    def load_moments(self, folder: Path) -> dict[str, dict[str, Tensor]]:
        """Return the part of `save_moments`' tensors that this process moves; empty where nothing was moved yet."""
        return self.load_state(folder, "optimizer") or {}

    def _counted(self, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
        """Return, of tensors shaped like the trained weights, the numbers that only this process counts."""
        return ((name, value.detach()) for name, value in tensors.items())

    def _totals(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes."""
        return list(values)


def stored(folder: Path, stem: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Return the tensors in STEM.safetensors, or in its numbered parts, by name; each is read when it is called for."""
    return tensors_of(sorted(folder.glob(f"{stem}*.safetensors")))


def tensors_of(files: Sequence[Path]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Return the tensors in these files by name; each is read when it is called for."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
        for name in names:
            yield name, _reader(file, name)


def _reader(file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            value: Tensor = tensors.get_tensor(name)
            return value

    return read


def key(kind: str, name: str) -> str:
    """Return the name in a file of a tensor of this kind; the kind "" has no name."""
    return f"{kind}/{name}" if kind else name
