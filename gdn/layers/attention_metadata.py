"""Metadata of the full attention layers of one step, built on the host without a wait for the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gdn.distributed import zigzag
from gdn.layers.attention_runs import MOST_DECODE_TOKENS
from gdn.layers.host_arrays import (
    Array,
    Ints,
    PersistentBuffers,
    are_beyond,
    as_array,
    as_indices,
    as_steps,
    at_least,
    check_own_slots,
    check_padding,
    check_rank,
    refuse,
    to_device,
)
from gdn.layers.parallel import DealtRows
from gdn.runtime import env


@dataclass(frozen=True)
class AttentionMetadata:
    """Sequences of one step as the full attention layers and their indexers see them.

    Parameters
    ----------
    query_start_loc : Tensor [N + 1] of int32
        Token offsets of the rows. Padded rows have an empty range.
    seq_lens : Tensor [N] of int32
        Tokens of each sequence, the new ones included; 0 in padded rows.
    block_tables : Tensor [N, max_blocks] of int32
        Block of each block_size positions; all caches of attention share it. Places after the last block hold 0.
    slot_mapping : Tensor [tokens] of int64
        Row of each new token in the paged caches: block * block_size + offset; -1 = padding.
    sequence_slots : Tensor [N] of int32
        Slot of each sequence in the rings of raw indexer keys; -1 in padded rows.
    token_sequences : Tensor [tokens] of int64
        Row of each token; the last row for padding.
    max_query_len, max_seq_len, num_actual_tokens : int
        Upper bounds of the new tokens and of all tokens of a sequence; tokens without padding.
    seq_lens_host, query_lens_host : tuple of int, optional
        Lengths on the host. None in batches for a captured graph, where they change from replay to replay.
    index_ratio : int
        Tokens of an indexer key, for which the following are; an indexer with another ratio computes them itself.
    visible_keys : Tensor [tokens] of int32, optional
        Indexer keys that each token sees: tokens, or whole groups of tokens, up to its own; 0 for padding.
    group_slots, ring_slots : Tensor [tokens] of int64, Tensor [tokens] of int32, optional
        Compressed indexer keys alone: row of each token's group in the indexer's pages, and slot of its sequence in the rings;
        -1 = padding.
    dealt : DealtRows, optional
        Query rows by context-parallel rank. None = every rank computes all.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    sequence_slots: Tensor
    token_sequences: Tensor | None
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    seq_lens_host: tuple[int, ...] | None = None
    query_lens_host: tuple[int, ...] | None = None
    index_ratio: int = 1
    visible_keys: Tensor | None = None
    group_slots: Tensor | None = None
    ring_slots: Tensor | None = None
    dealt: DealtRows | None = None


class AttentionMetadataBuilder:
    """Builds `AttentionMetadata` from what the host knows of a step.

    Parameters
    ----------
    device : torch.device
        Where the tensors go; on a CUDA device from pinned memory, without a wait.
    block_size : int
        Tokens of a block.
    max_seq_len : int
        Most tokens of a sequence: the width of padded block tables, and what a captured graph takes for the longest sequence.
    index_ratio : int
        Tokens of an indexer key.
    max_num_sequences, max_query_len : int
        Most rows and most new tokens of a row in batches for a captured graph: the sizes of the persistent buffers, which the
        first such batch makes.
    cp_rank, cp_size : int
        This process among context-parallel ranks. With ``VLLM_QSA_PREFILL_USE_CP`` and a prompt in the step whose sequence is
        longer than ``VLLM_DSA_USE_CONTEXT_PARALLEL_THRESHOLD`` tokens, the query rows are dealt over them: those of such a prompt
        zig-zag, so that all ranks have as much to score, those of another sequence to the rank that has the fewest.
    deal_longer_than : int, optional
        Threshold for this builder, whatever the switches say.

    Notes
    -----
    Tensors of a batch built with `pad_to` are views of the builder's persistent buffers: they keep their addresses, and the
    next such batch of the same builder overwrites them.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        block_size: int,
        max_seq_len: int,
        index_ratio: int = 1,
        max_num_sequences: int = 256,
        max_query_len: int = 1,
        cp_rank: int = 0,
        cp_size: int = 1,
        deal_longer_than: int | None = None,
    ) -> None:
        check_rank(cp_rank, cp_size)
        self.cp_rank, self.cp_size, self.deal_longer_than = cp_rank, cp_size, deal_longer_than
        sizes = {"block_size": block_size, "max_seq_len": max_seq_len, "index_ratio": index_ratio}
        for name, value in {**sizes, "max_num_sequences": max_num_sequences, "max_query_len": max_query_len}.items():
            at_least(name, value, 1)
        self.device = torch.device(device)
        self.block_size, self.max_seq_len, self.index_ratio = block_size, max_seq_len, index_ratio
        self.max_num_sequences, self.max_query_len = max_num_sequences, max_query_len
        self._buffers = PersistentBuffers(self.device)

    def build(
        self,
        query_lens: Ints,
        seq_lens: Ints,
        block_tables: Sequence[Sequence[int]] | Tensor | Array,
        sequence_slots: Ints,
        *,
        pad_to: int | None = None,
        pad_query_len: int | None = None,
    ) -> AttentionMetadata:
        """Metadata of one step.

        Parameters
        ----------
        query_lens, seq_lens : sequence of int or CPU tensor [N]
            New tokens of each row, and all its tokens, the new ones included.
        block_tables : sequence of sequences of int, or CPU tensor or array [N, blocks]
            Blocks of each sequence, in order, enough for all its tokens; what comes after these is not read. An array is much
            faster than lists.
        sequence_slots : [N]
            Slot of each sequence, from the allocator. With `index_ratio` > 1, where it is a ring of keys, no two rows with tokens
            have the same; negative ones do not count.
        pad_to, pad_query_len : int, optional
            Rows of the captured graph's batch, and its tokens per row (None = the builder's max_query_len): the batch has
            pad_to * pad_query_len token rows. Rows without tokens are left out.

        Returns
        -------
        AttentionMetadata

        Raises
        ------
        ValueError, TypeError
            Named after the argument; no buffer is written then.
        """
        queries, lengths = as_steps(query_lens, seq_lens)
        if (lengths > self.max_seq_len).any():
            refuse("seq_lens", f"at most {self.max_seq_len} tokens (max_seq_len)", int(lengths.max()))
        slots = as_indices("sequence_slots", sequence_slots, queries.shape[0])
        if self.index_ratio > 1:
            in_use = np.flatnonzero((queries > 0) & (slots >= 0))
            check_own_slots(["sequence_slots"], [slots[in_use]], [in_use])
        needed = -(-lengths // self.block_size)
        tables = _tables(block_tables, needed)
        if pad_to is not None:  # rows without tokens are padding: token i of a decode step is then that of row i
            has_tokens = queries > 0
            queries, lengths, slots, tables = (values[has_tokens] for values in (queries, lengths, slots, tables))
        fields = self._fields(queries, lengths, slots, tables)
        if pad_to is not None:
            longest_query = self.max_query_len if pad_query_len is None else pad_query_len
            return self._padded(fields, int(queries.max(initial=0)), int(queries.sum()), pad_to, longest_query)
        step = self._moved(fields, queries, lengths)
        threshold, switches = self.deal_longer_than, env.current()
        if threshold is None and switches.qsa_prefill_use_cp:
            threshold = switches.dsa_context_parallel_threshold
        if self.cp_size == 1 or threshold is None:
            return step
        is_dealt = (queries > MOST_DECODE_TOKENS) & (lengths > threshold)
        if not is_dealt.any():
            return step
        return replace(step, dealt=self._dealt(queries, lengths, slots, tables, is_dealt))

    def _dealt(self, queries: Array, lengths: Array, slots: Array, tables: Array, is_dealt: Array) -> DealtRows:
        """Deals the rows of a step."""
        blocks: list[list[tuple[int, range]]] = [[] for _ in range(self.cp_size)]  # of each rank: sequence, rows of it
        counts = [0] * self.cp_size
        for sequence, count in enumerate(queries.tolist()):
            if is_dealt[sequence]:
                shares = zigzag(count, self.cp_size)
            else:
                fewest = counts.index(min(counts))
                shares = [(range(count),) if rank == fewest and count else () for rank in range(self.cp_size)]
            for rank, share in enumerate(shares):
                blocks[rank] += [(sequence, block) for block in share]
                counts[rank] += sum(map(len, share))
        starts = np.concatenate(([0], np.cumsum(queries)))
        rows = [
            np.concatenate([np.arange(starts[one] + block.start, starts[one] + block.stop) for one, block in share])
            if share
            else np.zeros(0, np.int64)
            for share in blocks
        ]
        own = blocks[self.cp_rank]
        sequences = np.array([one for one, _ in own], np.int64)
        queries_of = np.array([len(block) for _, block in own], np.int64)
        lengths_of = (lengths - queries)[sequences] + np.array([block.stop for _, block in own], np.int64)
        fields = self._fields(queries_of, lengths_of, slots[sequences], tables[sequences])
        return DealtRows(
            self._moved(fields, queries_of, lengths_of),
            to_device(rows[self.cp_rank], self.device),
            to_device(np.argsort(np.concatenate(rows)), self.device),
            tuple(counts),
            self.cp_rank,
        )

    def _fields(self, queries: Array, lengths: Array, slots: Array, tables: Array) -> dict[str, Array]:
        """Tensors of a batch, on the host."""
        rows = np.repeat(np.arange(queries.shape[0]), queries)
        starts = np.concatenate(([0], np.cumsum(queries)))
        positions = (lengths - queries)[rows] + np.arange(rows.shape[0]) - starts[rows]
        blocks = tables[rows, positions // self.block_size] if rows.size else positions
        slot_mapping = blocks * self.block_size + positions % self.block_size
        fields = {
            "query_start_loc": starts.astype(np.int32),
            "seq_lens": lengths.astype(np.int32),
            "block_tables": tables.astype(np.int32),
            "slot_mapping": slot_mapping,
            "sequence_slots": slots.astype(np.int32),
            "token_sequences": rows,
            "visible_keys": ((positions + 1) // self.index_ratio).astype(np.int32),
        }
        if self.index_ratio > 1:
            fields |= {"group_slots": slot_mapping // self.index_ratio, "ring_slots": slots[rows].astype(np.int32)}
        return fields

    def _moved(self, fields: dict[str, Array], queries: Array, lengths: Array) -> AttentionMetadata:
        """A batch that is not padded, on the device."""
        tensors: dict[str, Any] = {name: to_device(value, self.device) for name, value in fields.items()}
        return AttentionMetadata(
            **tensors,
            max_query_len=int(queries.max(initial=0)),
            max_seq_len=int(lengths.max(initial=0)),
            num_actual_tokens=int(queries.sum()),
            index_ratio=self.index_ratio,
            seq_lens_host=tuple(lengths.tolist()),
            query_lens_host=tuple(queries.tolist()),
        )

    def _padded(self, fields: dict[str, Array], longest: int, tokens: int, pad_to: int, query_len: int) -> AttentionMetadata:
        count = fields["seq_lens"].shape[0]
        check_padding(count, pad_to, self.max_num_sequences)
        at_least("pad_query_len", query_len, 0)
        if not longest <= query_len <= self.max_query_len:
            refuse("pad_query_len", f"{longest} (longest row) to {self.max_query_len} (max_query_len)", query_len)
        columns = -(-self.max_seq_len // self.block_size)
        tables = np.zeros((count, columns), np.int32)
        given = fields["block_tables"][:, :columns]
        tables[:, : given.shape[1]] = given
        write, most = self._buffers.write, self.max_num_sequences
        padded, most_tokens = pad_to * query_len, most * self.max_query_len
        fills = {"slot_mapping": -1, "token_sequences": max(0, pad_to - 1), "visible_keys": 0}
        fills |= {"group_slots": -1, "ring_slots": -1}
        of_tokens: dict[str, Any] = {
            name: write(name, fields[name], padded, fill, most=most_tokens) for name, fill in fills.items() if name in fields
        }
        return AttentionMetadata(
            query_start_loc=write("query_start_loc", fields["query_start_loc"], pad_to + 1, tokens, most=most + 1),
            seq_lens=write("seq_lens", fields["seq_lens"], pad_to, 0, most=most),
            block_tables=write("block_tables", tables, pad_to, 0, most=most),
            sequence_slots=write("sequence_slots", fields["sequence_slots"], pad_to, -1, most=most),
            **of_tokens,
            max_query_len=query_len,
            max_seq_len=self.max_seq_len,
            num_actual_tokens=tokens,
            index_ratio=self.index_ratio,
        )


def _tables(block_tables: Any, needed: Array) -> Array:
    """Block tables as one array [N, most blocks of a row], 0 after the last block that a row needs."""
    count = needed.shape[0]
    if not isinstance(block_tables, Tensor | np.ndarray):  # rows of different lengths
        block_tables = _padded_rows([as_array(f"block_tables[{row}]", table) for row, table in enumerate(block_tables)])
    tables = as_array("block_tables", block_tables, count, ranks=(2,))
    columns = int(needed.max(initial=0))
    if columns > tables.shape[1]:
        row = int(needed.argmax())
        refuse(f"block_tables[{row}]", f"at least {columns} blocks", f"{tables.shape[1]} blocks")
    found = np.where(np.arange(columns) < needed[:, None], tables[:, :columns], 0)
    if are_beyond(found):
        row = next(row for row, blocks in enumerate(found) if are_beyond(blocks))
        refuse(f"block_tables[{row}]", f"{needed[row]} blocks, none of them negative or beyond int32", tables[row].tolist())
    return found


def _padded_rows(rows: list[Array]) -> Array:
    """Rows in one array, -1 after the last of each: no block."""
    found = np.full((len(rows), max((row.shape[0] for row in rows), default=0)), -1, np.int64)
    for row, values in enumerate(rows):
        found[row, : values.shape[0]] = values
    return found
