"""The chain of a partition holds as long as nobody touched a record, and names the one that somebody did."""

from collections.abc import Sequence
from hashlib import md5
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.projections.write.chain import BLOCK_OFFSETS, ChainBlock, Link, blocks, chain_check, seed
from clawstream.stream.log import PartitionId, Raw, digest_of

PLACE = PartitionId("topic", 3)
_offsets = st.lists(st.integers(0, 5 * BLOCK_OFFSETS), min_size=1, max_size=60, unique=True).map(sorted)


def _links(offsets: Sequence[int]) -> list[Link]:
    return [Link(offset, md5(str(offset).encode()).digest()) for offset in offsets]


def _recorded(links: Sequence[Link], cuts: Sequence[int] = ()) -> list[ChainBlock]:
    """The blocks on record after the links were written in batches, as the database merges them."""
    by_number: dict[int, ChainBlock] = {}
    chain = seed(PLACE)
    bounds = [0, *sorted(cuts), len(links)]
    for first, end in pairwise(bounds):
        for block in blocks(chain, links[first:end]):
            before = by_number[block.number].marks if block.number in by_number else b""
            by_number[block.number] = ChainBlock(
                number=block.number, next_offset=block.next_offset, chain=block.chain, marks=before + block.marks
            )
            chain = block.chain
    return list(by_number.values())


def _breaks(links: Sequence[Link], recorded: Sequence[ChainBlock], *, begin: int = 0) -> tuple[list[int], int]:
    """The offsets at which a check finds breaks, and how many records it compared."""
    first = links[0].offset if links else 0
    check = chain_check(PLACE, recorded, chain_from=min(first, 0), log_begin=begin)
    check.tell(link for link in links if link.offset >= begin)
    check.finish(recorded[-1].chain)
    return [found.first_offset for found in check.breaks], check.num_records


@given(_offsets, st.data())
def test_a_log_that_nobody_touched_has_no_breaks_however_it_was_cut_into_batches(
    offsets: list[int], data: st.DataObject
) -> None:
    links = _links(offsets)
    cuts = data.draw(st.lists(st.integers(0, len(links)), max_size=5))
    recorded = _recorded(links, cuts)
    assert recorded == _recorded(links)
    assert _breaks(links, recorded) == ([], len(links))


@given(_offsets, st.data())
def test_a_record_changed_taken_away_or_added_is_the_one_break(offsets: list[int], data: st.DataObject) -> None:
    links = _links(offsets)
    recorded = _recorded(links)
    at = data.draw(st.integers(0, len(links) - 1))
    changed = [link if n != at else Link(link.offset, md5(b"other").digest()) for n, link in enumerate(links)]
    assert _breaks(changed, recorded)[0] == [offsets[at]]
    if len(links) > 1:
        assert _breaks(links[:at] + links[at + 1 :], recorded)[0] == [offsets[at]]
        assert _breaks(links, _recorded(links[:at] + links[at + 1 :]))[0][0] == offsets[at]


@given(_offsets, st.integers(0, 5 * BLOCK_OFFSETS))
def test_a_log_that_lost_its_beginning_is_checked_from_the_first_block_that_it_reaches(
    offsets: list[int], begin: int
) -> None:
    links = _links(offsets)
    recorded = _recorded(links)
    breaks, compared = _breaks(links, recorded, begin=begin)
    assert breaks == []
    reached = sum(link.offset >= begin for link in links)
    assert reached - BLOCK_OFFSETS <= compared <= reached


def test_a_chain_that_was_rewritten_on_record_is_a_break_of_its_block() -> None:
    links = _links(range(300))
    recorded = _recorded(links)
    block = recorded[1]
    recorded[1] = ChainBlock(number=1, next_offset=block.next_offset, chain=b"x" * 32, marks=block.marks)
    # The next block does not follow from the chain that stands there now.
    assert _breaks(links, recorded)[0] == [BLOCK_OFFSETS, 2 * BLOCK_OFFSETS]


def test_a_block_or_a_head_that_is_not_on_record_is_a_break() -> None:
    links = _links(range(300))
    recorded = _recorded(links)
    assert _breaks(links, [recorded[0], recorded[2]])[0] == [BLOCK_OFFSETS]
    check = chain_check(PLACE, recorded, chain_from=0, log_begin=0)
    check.tell(links)
    check.finish(b"another")
    assert [found.first_offset for found in check.breaks] == [300]


def _raw(key: bytes | None, value: bytes | None, *headers: tuple[str, bytes]) -> Raw:
    return Raw(topic="t", partition=0, offset=0, timestamp_ms=0, key=key, value=value, headers=headers)


@pytest.mark.parametrize(
    "other",
    [
        _raw(b"a", b"bc"), _raw(b"", b"abc"), _raw(None, b"abc"), _raw(b"abc", None), _raw(b"ab", b"c", ("", b"")),
        _raw(b"a", b"b", ("c", b"")), _raw(b"a", b"b", ("", b"c")),
    ],
)  # fmt: skip
def test_the_digest_of_a_record_tells_where_its_parts_end(other: Raw) -> None:
    assert digest_of(_raw(b"ab", b"c")) != digest_of(other)
    assert digest_of(_raw(b"ab", b"c")) == digest_of(_raw(b"ab", b"c"))
