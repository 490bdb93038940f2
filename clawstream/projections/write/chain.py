"""The hash chain over a partition shows whether the log still holds what the projector read. Pure.

Each record adds a link: a hash of the chain so far, the record's offset and its digest. The chain begins with a hash of
topic and partition. The chain is stored in blocks of BLOCK_OFFSETS offsets, with a short mark per record. So a break
names the record, and a log that has lost its beginning is checked from the first block whose end it still has. The
chain shows an edit of the log or of the database, but not one of both by the same person.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

from clawstream.stream.log import PartitionId

BLOCK_OFFSETS = 128
CHAIN_BYTES = 32
MARK_BYTES = 4


class Link(NamedTuple):
    """The part of a record that goes into the chain."""

    offset: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBlock:
    """The records that were read of a block of BLOCK_OFFSETS offsets, which begins at `number` * BLOCK_OFFSETS."""

    number: int
    next_offset: int  # the offset after the last of these records
    chain: bytes  # after the last of these records
    marks: bytes  # for each record that was read: its place in the block (one byte), and the start of its digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Where the chain breaks: at records that differ from those that were projected, or at a wrong stored block."""

    place: PartitionId
    first_offset: int
    end_offset: int  # exclusive, so one more than `first_offset` where a single record differs
    what: str  # what is wrong


def seed(place: PartitionId) -> bytes:
    """Return the initial chain of a partition."""
    topic, partition = place
    return blake2b(f"{partition} {topic}".encode(), digest_size=CHAIN_BYTES).digest()


def blocks(chain: bytes, links: Iterable[Link]) -> list[ChainBlock]:
    """Return the blocks that `links` (by ascending offset) add to a partition whose chain is `chain`."""
    made = []
    for number, group in groupby(links, key=_block_of):
        marks = bytearray()
        for link in group:
            chain = _linked(chain, link)
            marks += _mark(link)
            last = link.offset
        made.append(ChainBlock(number=number, next_offset=last + 1, chain=chain, marks=bytes(marks)))
    return made


@dataclass(slots=True, kw_only=True)
class ChainCheck:
    """Compares the recorded blocks with the log's links: `tell` them in order, then `finish`."""

    place: PartitionId
    recorded: deque[ChainBlock]  # the blocks that are still to be compared, ascending
    chain: bytes | None  # the chain before `start`; None: the log has no record that could be compared
    start: int  # the first offset that is compared
    breaks: list[Break] = field(default_factory=list)
    num_records: int = 0
    _waiting: list[Link] = field(default_factory=list)  # links of one block, which may not be complete yet

    def tell(self, links: Iterable[Link]) -> None:
        """Take the next records of the partition."""
        for link in links:
            if self.chain is None or link.offset < self.start:
                continue
            if self._waiting and _block_of(self._waiting[0]) != _block_of(link):
                self._compare(self._waiting)
                self._waiting = []
            self._waiting.append(link)

    def finish(self, head: bytes | None) -> None:
        """Note that no more links come; `head` is the recorded chain of the whole partition."""
        if self._waiting:
            self._compare(self._waiting)
        while self.recorded:
            self._gone(self.recorded.popleft())
        if self.chain is not None and self.chain != (head or seed(self.place)):
            self._broken(self._end, self._end, "the stored head of the chain is not that of its last block")

    @property
    def _end(self) -> int:
        return self._waiting[-1].offset + 1 if self._waiting else self.start

    def _compare(self, links: Sequence[Link]) -> None:
        assert self.chain is not None, "links before the start are not kept"
        self.num_records += len(links)
        number = _block_of(links[0])
        while self.recorded and self.recorded[0].number < number:
            self._gone(self.recorded.popleft())
        [read] = blocks(self.chain, links)
        if not self.recorded or self.recorded[0].number > number:
            self._broken(links[0].offset, read.next_offset, "the database has no block for these records")
            self.chain = read.chain
            return
        block = self.recorded.popleft()
        self.chain = block.chain  # so that a break here is not one of the following blocks too
        if block.chain == read.chain:
            return
        found = _differences(self.place, block, links)
        if not found:
            self._broken(links[0].offset, read.next_offset, "the stored chain is not that of these records")
        self.breaks += found

    def _gone(self, block: ChainBlock) -> None:
        self.breaks += _differences(self.place, block, ())
        self.chain = block.chain

    def _broken(self, first: int, end: int, what: str) -> None:
        self.breaks.append(Break(place=self.place, first_offset=first, end_offset=end, what=what))


def chain_check(
    place: PartitionId, recorded: Sequence[ChainBlock], *, chain_from: int | None, log_begin: int
) -> ChainCheck:
    """Return a check that starts where the chain does, or else after the first block whose end the log still has.

    `recorded` is ascending.
    """
    if chain_from is not None and log_begin <= chain_from:
        return ChainCheck(place=place, recorded=deque(recorded), chain=seed(place), start=chain_from)
    reached = deque(block for block in recorded if block.next_offset >= log_begin)
    if chain_from is None or not reached:
        return ChainCheck(place=place, recorded=deque(), chain=None, start=log_begin)
    first = reached.popleft()
    return ChainCheck(place=place, recorded=reached, chain=first.chain, start=first.next_offset)


def _differences(place: PartitionId, block: ChainBlock, links: Iterable[Link]) -> list[Break]:
    base = block.number * BLOCK_OFFSETS
    width = 1 + MARK_BYTES
    marks = [block.marks[at : at + width] for at in range(0, len(block.marks), width)]
    recorded = {base + mark[0]: mark for mark in marks}
    found = {link.offset: _mark(link) for link in links}
    breaks = []
    for offset in sorted(recorded.keys() | found.keys()):
        if recorded.get(offset) == found.get(offset):
            continue
        if offset not in found:
            what = "the log does not have the record any more"
        elif offset not in recorded:
            what = "the record was not there when the log was projected"
        else:
            what = "the record is not the one that was projected"
        breaks.append(Break(place=place, first_offset=offset, end_offset=offset + 1, what=what))
    return breaks


def _block_of(link: Link) -> int:
    return link.offset // BLOCK_OFFSETS


def _linked(chain: bytes, link: Link) -> bytes:
    return blake2b(chain + link.offset.to_bytes(8, "big") + link.digest, digest_size=CHAIN_BYTES).digest()


def _mark(link: Link) -> bytes:
    return (link.offset % BLOCK_OFFSETS).to_bytes(1, "big") + link.digest[:MARK_BYTES]
