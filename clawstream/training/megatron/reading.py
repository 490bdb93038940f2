"""What attention keeps of rows that are read piece by piece, as answers are written.

B rows, L tokens of a piece, A all tokens so far, N heads, D their width.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional


class Reading:
    """Rows that are read piece by piece: their keys and values so far, of each layer here."""

    def __init__(self, mask_BL: Tensor) -> None:
        """The mask is 0 where the first piece pads, on the left."""
        self.num_read = 0  # tokens of a row, before this piece
        self._mask_BL = mask_BL.bool()
        self._num_next = 0
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def piece(self, num_tokens: int) -> Iterator[None]:
        """Read so many tokens more of each row; those that only fill up its length are seen and kept by none."""
        self._num_next = num_tokens
        yield
        self.num_read += num_tokens

    def so_far(self, layer: nn.Module, key_BNLD: Tensor, value_BNLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all that was read, given the piece's."""
        if layer in self._kept:
            key_BNLD = torch.cat([self._kept[layer][0], key_BNLD], 2)
            value_BNLD = torch.cat([self._kept[layer][1], value_BNLD], 2)
        end = self.num_read + self._num_next
        self._kept[layer] = key_BNLD[:, :, :end], value_BNLD[:, :, :end]
        return key_BNLD, value_BNLD

    def seen(self, length: int, window: int | None) -> Tensor:
        """Return [B, 1, L, A] what each token of the piece sees; what pads sees nothing, and torch gives it zeros."""
        places_A = torch.arange(self.num_read + length, device=self._mask_BL.device)
        back_LA = places_A[self.num_read :].unsqueeze(1) - places_A
        near_LA = (back_LA >= 0) & (back_LA < (window or len(places_A)))
        token_BA = functional.pad(self._mask_BL, (0, len(places_A) - self._mask_BL.shape[1]), value=True)
        return near_LA & token_BA[:, None, None, :]
