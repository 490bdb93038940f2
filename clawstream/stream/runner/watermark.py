"""Which records of a partition are done. Pure.

The one rule: only a contiguous run of done records is committed, whatever order they are done in. Offsets may have
holes, so only their order is relied on.
"""


class Watermark:
    """Records in the order read, and those of them that are not done."""

    def __init__(self, next_offset: int) -> None:
        self._next_offset = next_offset
        self._open: dict[int, None] = {}

    def read(self, offset: int) -> None:
        """A record was read; it is open until it is done."""
        assert offset >= self._next_offset, f"offset {offset} was read after {self._next_offset - 1}"
        self._open[offset] = None
        self._next_offset = offset + 1

    def done(self, offset: int) -> None:
        """The record needs nothing more."""
        del self._open[offset]

    @property
    def next_offset(self) -> int:
        """The offset after the last record that was read."""
        return self._next_offset

    @property
    def committable(self) -> int:
        """The offset before which everything is done."""
        return next(iter(self._open), self._next_offset)

    @property
    def num_open(self) -> int:
        """How many records were read and are not done."""
        return len(self._open)
