"""Only a contiguous run of done records is committed."""

from hypothesis import given
from hypothesis import strategies as st

from clawstream.stream.runner.fold import Watermark


@given(st.sets(st.integers(0, 50), max_size=12), st.data())
def test_it_never_passes_a_record_that_is_not_done(offsets: set[int], data: st.DataObject) -> None:
    mark = Watermark(0)
    reading = sorted(offsets)
    open_offsets: set[int] = set()
    while reading or open_offsets:
        if reading and (not open_offsets or data.draw(st.booleans())):
            open_offsets.add(reading[0])
            mark.read(reading.pop(0))
        else:
            done = data.draw(st.sampled_from(sorted(open_offsets)))
            open_offsets.remove(done)
            mark.done(done)
        read = offsets - set(reading)
        assert mark.committable == min(open_offsets, default=max(read, default=-1) + 1)
        assert mark.num_open == len(open_offsets)


def test_a_partition_that_was_not_read_is_committed_where_it_starts() -> None:
    assert Watermark(17).committable == 17
