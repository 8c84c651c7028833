"""Lengths and bounds that the caller of `gdn.attention` knows on the host, checked against each other and the device."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn.core.call import reads_values
from gdn.core.check import bad_value


class HostSequence(NamedTuple):
    """A sequence of the call, on the host."""

    row: int
    token: int  # first row of q
    query_len: int
    seq_len: int


def sequences_of(
    query_lens: Sequence[int] | None, seq_lens: Sequence[int] | None, *, tokens: int, addressed: int, max_seq_len: int | None
) -> list[HostSequence]:
    """The sequences, checked against each other and the bound; none without both lengths.

    tokens: rows of q. addressed: positions that a block table addresses.
    """
    if seq_lens is None or query_lens is None:
        return []
    most = addressed if max_seq_len is None else min(addressed, max_seq_len)
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        if query_len < 0 or query_len > max(seq_len, 0):
            bad_value("query_lens_host", f"numbers >= 0, none above the sequence's {seq_len} tokens", query_len)
        if query_len and seq_len > most:
            if seq_len > addressed:
                bad_value("seq_lens_host", f"at most {addressed} tokens, which block_tables address", seq_len)
            bad_value("max_seq_len", f"at least {seq_len}, a sequence of seq_lens_host", max_seq_len)
    if sum(query_lens) > tokens:
        bad_value("query_lens_host", f"numbers that sum to at most the {tokens} rows of q", sum(query_lens))
    starts = itertools.accumulate(query_lens, initial=0)
    return [HostSequence(n, *one) for n, one in enumerate(zip(starts, query_lens, seq_lens, strict=False))]


def check_lengths(
    query_lens: Sequence[int] | None, host_lens: Sequence[int] | None, query_start_loc: Tensor, seq_lens: Tensor
) -> None:
    """Checks lengths on the host: their number, and where values are checked that they are those on the device."""
    count = seq_lens.shape[0]
    for name, lengths in (("query_lens_host", query_lens), ("seq_lens_host", host_lens)):
        if lengths is None:
            continue
        if len(lengths) != count:
            bad_value(name, f"{count} lengths, one per sequence", len(lengths))
        if reads_values(seq_lens.device):
            values = (seq_lens if name == "seq_lens_host" else query_start_loc.diff()).tolist()
            if values != list(lengths):
                bad_value(name, f"the lengths on the device {values}", tuple(lengths))


def check_bounds(bounds: Mapping[str, int | None], query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """Checks bounds on the lengths, where values are checked."""
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if not given or not seq_lens.numel() or not reads_values(seq_lens.device):
        return
    queries = query_start_loc.diff()
    longest = {"max_query_len": queries, "max_seq_len": torch.where(queries > 0, seq_lens, 0)}  # others are not read
    for name, bound in given.items():
        if bound < (most := int(longest[name].max())):
            bad_value(name, f"at least {most}, the longest of the sequences", bound)
