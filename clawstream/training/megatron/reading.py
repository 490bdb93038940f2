"""The keys and values that attention keeps of rows that are read piece by piece, as answers are written.

B rows, L tokens of a piece, A all tokens so far, N heads, D their width.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional


class PiecewiseCache:
    """Rows that are read piece by piece: their keys and values so far, of each layer here."""

    def __init__(self, mask_BL: Tensor) -> None:
        """The mask is 0 where the first piece pads, on the left."""
        self.num_read = 0  # tokens of a row, before this piece
        self._mask_BL = None if bool(mask_BL.all()) else mask_BL.bool()
        self._device = mask_BL.device
        self._num_next = 0
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int | None, Tensor] = {}  # in this piece, by window: layers share it

    @contextmanager
    def piece(self, num_tokens: int) -> Iterator[None]:
        """Read `num_tokens` more of each row; tokens that only fill up its length are neither seen nor kept."""
        self._num_next = num_tokens
        yield
        self._seen.clear()
        self.num_read += num_tokens

    def so_far(self, layer: nn.Module, key_BNLD: Tensor, value_BNLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all that was read, given the piece's."""
        if layer in self._kept:
            key_BNLD = torch.cat([self._kept[layer][0], key_BNLD], 2)
            value_BNLD = torch.cat([self._kept[layer][1], value_BNLD], 2)
        end = self.num_read + self._num_next
        self._kept[layer] = key_BNLD[:, :, :end], value_BNLD[:, :, :end]
        return key_BNLD, value_BNLD

    def seen(self, length: int, window: int | None) -> Tensor | None:
        """Return [B or 1, 1, L, A] what each token of the piece sees; None: itself and what is before it in the piece.

        What pads sees nothing, and torch gives it zeros.
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
