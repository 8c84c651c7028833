"""Rule by which warps of `compress_indexer_keys` write the rows of a sequence's ring: the kernel's, in Python.

The group that lies across the start of a call reads raw keys of earlier tokens from the ring while the call's own tokens are
written to it, without a barrier. That is safe where every row has one writer, and every row that is read is written by its
reader alone.
"""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st


def reads_and_writes(start: int, count: int, ratio: int, size: int) -> tuple[dict[int, set[int]], list[tuple[int, int, int]]]:
    """A call with the tokens at positions start, ..., start + count - 1: rows read by each token's warp, and (warp, row, position
    of the raw key) of every write, as `finish_group` and `keep_raw_key` of the kernel have them."""
    last = start + count - 1
    reads, writes = defaultdict(set), []
    for token in range(start, last + 1):
        if (token + 1) % ratio == 0:
            for back in range(1, ratio):
                if token - back >= start:
                    continue  # in the call
                reads[token].add((token - back) % size)
                later = (last - token + back) // size * size
                if later > 0:
                    writes.append((token, (token - back) % size, token - back + later))
        is_kept = token + size > last
        distance = token - start
        if is_kept and distance >= size - ratio + 1:
            before, rest = start % ratio, distance % size
            is_kept = not (rest > 0 and size - rest <= before)
        if is_kept:
            writes.append((token, token % size, token))
    return reads, writes


@given(st.data())
def test_a_row_has_one_writer_which_alone_has_read_it(data: st.DataObject) -> None:
    ratio = data.draw(st.integers(1, 8))
    size = ratio * data.draw(st.integers(1, 4)) + data.draw(st.integers(0, 5))
    start, count = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 90))
    reads, writes = reads_and_writes(start, count, ratio, size)
    last = start + count - 1
    rows = {position % size: position for position in range(start, last + 1)}  # the last position of each row
    assert sorted((row, position) for _, row, position in writes) == sorted(rows.items())
    writer = {row: warp for warp, row, _ in writes}
    for warp, read in reads.items():
        assert all(writer.get(row, warp) == warp for row in read)
