"""Where the sequences of a call of attention are in the paged cache."""

from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """Arguments of `gdn.attention`, for some rows of q."""

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor  # counted from the first of these rows
    seq_lens: Tensor

    def of(self, sequences: slice, first: int) -> "Pages":
        """The pages of neighbouring sequences. first: the first row of theirs."""
        starts = self.query_start_loc[sequences.start : sequences.stop + 1]
        starts = starts - first if first else starts
        return Pages(self.k_cache, self.v_cache, self.block_tables[sequences], starts, self.seq_lens[sequences])

    @property
    def are_heads_adjacent(self) -> bool:
        """Whether the rows of a position's key heads are one piece of memory, in both caches."""
        kv_heads, dim = self.k_cache.shape[2:]
        return kv_heads == 1 or self.k_cache.stride(2) == self.v_cache.stride(2) == dim
