"""Which records of a partition are done. Pure.

The one rule: only a contiguous run of done records is committed, whatever order they are done in. Offsets may have
holes, so only their order is relied on.
"""


class Watermark:
    """The records of a partition in the order read, and which of them are not done."""

    def __init__(self, next_offset: int) -> None:
        self._next_offset = next_offset
        self._open: dict[int, None] = {}

    def read(self, offset: int) -> None:
        """Note a record that was read; it is open until it is done."""
        assert offset >= self._next_offset, f"offset {offset} was read after {self._next_offset - 1}"
        self._open[offset] = None
        self._next_offset = offset + 1

    def done(self, offset: int) -> None:
        """Note that the record is done."""
        del self._open[offset]

    @property
    def next_offset(self) -> int:
        """The offset after the last record that was read."""
        return self._next_offset

    @property
    def committable(self) -> int:
        """The offset below which every record is done."""
        return next(iter(self._open), self._next_offset)

    @property
    def num_open(self) -> int:
        """How many records were read and are not done."""
        return len(self._open)
