"""Where the tokens of answers stand in a batch that is padded on the right. Pure.

B rows, L input tokens, T response tokens of the longest row, N response tokens of all rows; suffixes name the axes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clawstream.events.exchanges import GREEDY_BELOW


class Suffix(NamedTuple):
    """An answer to score, after what it answered."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    temperature: float  # below GREEDY_BELOW it is scored as 1: engines report it so

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def scale(self) -> float:
        """What its logits are divided by."""
        return 1.0 if self.temperature < GREEDY_BELOW else self.temperature


class Answers:
    """The response tokens of some suffixes, one row each."""

    def __init__(self, suffixes: Sequence[Suffix], device: torch.device) -> None:
        assert all(s.prompt_ids and s.response_ids for s in suffixes), "a suffix needs tokens before it and in it"
        self._lengths = [len(s.response_ids) for s in suffixes]
        width = max(s.num_tokens for s in suffixes) - 1  # nothing is read after the last response token
        ids_BL = torch.zeros((len(suffixes), width), dtype=torch.long)
        for row, s in enumerate(suffixes):
            tokens = [*s.prompt_ids, *s.response_ids[:-1]]
            ids_BL[row, : len(tokens)] = torch.tensor(tokens)
        self.ids_BL = ids_BL.to(device)
        row_N = [row for row, length in enumerate(self._lengths) for _ in range(length)]
        token_N = [t for length in self._lengths for t in range(length)]
        column_N = [len(suffixes[row].prompt_ids) - 1 + t for row, t in zip(row_N, token_N, strict=True)]
        self._row_N = torch.tensor(row_N, device=device)
        self._token_N = torch.tensor(token_N, device=device)
        self._column_N = torch.tensor(column_N, device=device)
        self.target_N = torch.tensor([i for s in suffixes for i in s.response_ids], device=device)
        self.scale_N = torch.tensor([suffixes[row].scale for row in row_N], device=device)

    def before(self, hidden_BLH: Tensor) -> Tensor:
        """Return what each response token is predicted from [N, H]."""
        return hidden_BLH[self._row_N, self._column_N]

    def rows(self, values_N: Tensor) -> Tensor:
        """Return values [N, ...] as [B, T, ...], NaN past each row's end."""
        shape = (len(self._lengths), max(self._lengths), *values_N.shape[1:])
        return values_N.new_full(shape, torch.nan).index_put((self._row_N, self._token_N), values_N)

    def each(self, values_N: Tensor) -> list[Tensor]:
        """Return values [N, ...] as one [T, ...] for each row."""
        return list(torch.split(values_N, self._lengths))
