"""Where the sequences of a call of attention are in the paged cache."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.core.call import make, part
from gdn.core.check import dtype_name
from gdn.core.tensors import is_aligned


class Pages(NamedTuple):
    """Arguments of `gdn.attention`, for some rows of q."""

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor  # counted from the first of these rows
    seq_lens: Tensor

    def of(self, sequences: slice, first: int) -> "Pages":
        """The pages of neighbouring sequences. first: the first row of theirs."""
        tables, lengths = (part(x, sequences) for x in (self.block_tables, self.seq_lens))
        starts = part(self.query_start_loc, slice(sequences.start, sequences.stop + 1))
        starts = make(functools.partial(torch.sub, other=first), starts) if first else starts
        return Pages(self.k_cache, self.v_cache, tables, starts, lengths)


def leading_columns(columns: int, x: Tensor) -> Tensor:
    return x[:, :columns]


def fields_of(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> dict[str, Any]:
    """Fields of every problem of attention that follow from queries [tokens, heads, D] and both caches."""
    (_, heads, dim), (_, block_size, kv_heads, _) = q.shape, k_cache.shape
    return {
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "dtype": dtype_name(q.dtype), "block_size": block_size,
        "heads_adjacent": kv_heads == 1 or k_cache.stride(2) == v_cache.stride(2) == dim,
        "rows_aligned": is_aligned(k_cache) and is_aligned(v_cache),
    }  # fmt: skip


def rounded_columns(length: int, block_size: int) -> int:
    """Blocks of a sequence of this length, to a power of two.

    A number of its own for each step would be a problem of its own, with tiles and plan of its own.
    """
    return 1 << (-(-length // block_size) - 1).bit_length()
