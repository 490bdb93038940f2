"""Where the tokens of answers stand in a batch. Pure.

R rows, one where they are packed; L input tokens of a row, B answers, T response tokens of the longest one, N response
tokens of all answers; suffixes name the axes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clawstream.events.exchanges import GREEDY_BELOW
from clawstream.training.step.packing import Pack, Tokens


class Suffix(NamedTuple):
    """An answer to score, after what it answered."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    temperature: float  # below GREEDY_BELOW it is scored as at 1, since engines report it so

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
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
    """Return rows of equal length, one per sequence, and its tokens' places once all rows are joined."""
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
        # Not by an index: several answers may follow one place, and threads would sum its gradient in any order.
        return nn.functional.embedding(self._place_N, hidden_RLH.flatten(0, 1))

    def rows(self, values_N: Tensor) -> Tensor:
        """Return values [N, ...] as [B, T, ...], NaN past each row's end."""
        shape = (len(self._lengths), max(self._lengths), *values_N.shape[1:])
        return values_N.new_full(shape, torch.nan).index_put((self._row_N, self._token_N), values_N)

    def each(self, values_N: Tensor) -> list[Tensor]:
        """Return values [N, ...] as one [T, ...] for each row."""
        return list(torch.split(values_N, self._lengths))
