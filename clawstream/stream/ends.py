"""Whether a log still has what was read of it. Pure.

The one rule: a reader goes on where it stopped only on the log that it stopped on. Another log, or one that lost its
end, would get new records below the offset where the reader stopped, and the reader would skip them silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.errors import LogContradicted
from clawstream.stream.log import PartitionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A partition that changed since it was read up to `offset`."""

    place: PartitionId
    offset: int
    end: int

    def __str__(self) -> str:
        found = f"ends at {self.end}" if self.end < self.offset else f"has another record at {self.offset - 1}"
        return f"{self.place.topic} partition {self.place.partition} was read up to offset {self.offset} and {found}"


def past_the_end(offsets: Mapping[PartitionId, int], ends: Mapping[PartitionId, int]) -> list[PartitionId]:
    """Return the partitions that were read beyond the log's end."""
    return [place for place, offset in offsets.items() if offset > ends.get(place, 0)]


def contradictions(
    offsets: Mapping[PartitionId, int],
    ends: Mapping[PartitionId, int],
    last: Mapping[PartitionId, str],
    found: Mapping[PartitionId, str],
) -> list[Contradiction]:
    """Return the partitions that end before what was read of them, or whose `last` read record is another now.

    A record that is not `found`, being past its topic's retention, contradicts nothing.
    """
    cut = set(past_the_end(offsets, ends))
    other = {place for place, digest in last.items() if found.get(place, digest) != digest}
    return [
        Contradiction(place=place, offset=offset, end=ends.get(place, 0))
        for place, offset in offsets.items()
        if place in cut | other
    ]


def refuse(reader: str, wrong: list[Contradiction], remedy: str) -> None:
    """Raise LogContradicted if any partition contradicts."""
    if wrong:
        more = f", and {len(wrong) - 1} more partitions" if len(wrong) > 1 else ""
        raise LogContradicted(
            f"{reader}: {wrong[0]}{more}: this is not the log that {reader} read, or it has lost its end. Nothing was "
            f"read: what was written there since would be passed over. Name the right broker and prefix; {remedy}"
        )
