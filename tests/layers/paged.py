"""Steps of a paged batch for one attention layer: caches, metadata, and the packed rows of several sequences."""

from dataclasses import dataclass, field
from typing import Any

import torch

from gdn.layers.config import HybridConfig
from gdn.layers.sparse_attention import SparseAttention


@dataclass(frozen=True)
class Metadata:
    """Fields of AttentionMetadata that the layer reads."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    sequence_slots: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    seq_lens_host: tuple[int, ...] | None
    query_lens_host: tuple[int, ...] | None


@dataclass
class Batch:
    """Sequences of one attention layer on paged caches: shuffled blocks, shuffled ring slots, stale contents everywhere."""

    layer: SparseAttention
    config: HybridConfig
    count: int
    longest: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    num_drafts: int = 0
    device: torch.device | str = "cpu"
    seed: int = 0
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.lengths = [0] * self.count
        blocks = -(-self.longest // self.block_size)
        order = torch.randperm(self.count * blocks + 2, generator=generator)[: self.count * blocks]
        self.block_tables = order.view(self.count, blocks).int().to(self.device)
        shape = (self.count * blocks + 2, self.block_size, self.config.num_key_value_heads, self.config.head_dim)
        self.kv = tuple(torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(2))
        self.keys = self.ring = None
        if self.config.index_topk:
            ratio, dim, heads = self.config.index_ratio, self.config.index_head_dim, self.config.index_kv_heads
            cache_dtype = self.cache_dtype or self.dtype
            width = dim + 4 if cache_dtype == torch.uint8 else dim
            stale = torch.randn(shape[0], self.block_size // ratio, heads, width, generator=generator)
            self.keys = stale.clamp(0, 1).to(self.device, cache_dtype)
            if ratio > 1:
                size = -(-(ratio + self.num_drafts) // ratio) * ratio
                self.ring = torch.randn(self.count + 1, size, heads, dim, generator=generator).to(self.device, self.dtype)
        self.slots = (torch.randperm(self.count, generator=generator) + 1).int().to(self.device)

    def metadata(self, queries: list[int], *, on_host: bool = True, padding: int = 0) -> Metadata:
        """Metadata of `queries` new tokens per sequence, and of `padding` rows after them."""
        lengths = [old + new for old, new in zip(self.lengths, queries, strict=True)]
        slots = []
        for sequence, (new, length) in enumerate(zip(queries, lengths, strict=True)):
            position = torch.arange(length - new, length, device=self.device)
            block = self.block_tables[sequence, position // self.block_size].long()
            slots.append(block * self.block_size + position % self.block_size)
        slots.append(torch.full((padding,), -1, device=self.device))
        return Metadata(
            query_start_loc=torch.tensor([0, *queries]).cumsum(0).int().to(self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_tables=self.block_tables,
            slot_mapping=torch.cat(slots).long(),
            sequence_slots=self.slots,
            max_query_len=max(queries),
            max_seq_len=max(lengths) if on_host else self.longest,
            num_actual_tokens=sum(queries),
            seq_lens_host=tuple(lengths) if on_host else None,
            query_lens_host=tuple(queries) if on_host else None,
        )

    def step(self, rows: list[torch.Tensor], *, on_host: bool = True, padding: int = 0, keep: list[int] | None = None) -> Any:
        """Runs the layer on new rows [new, hidden] of every sequence; returns the results in the same form.

        keep: how many of the new tokens of each sequence stay (the others were rejected drafts).
        """
        queries = [len(one) for one in rows]
        metadata = self.metadata(queries, on_host=on_host, padding=padding)
        positions = [torch.arange(old, old + new) for old, new in zip(self.lengths, queries, strict=True)]
        positions.append(torch.zeros(padding, dtype=torch.int64))
        hidden = torch.cat([*rows, torch.randn(padding, self.config.hidden_size).to(self.device, self.dtype)])
        out = self.layer(hidden, torch.cat(positions).to(self.device), metadata, self.kv, self.keys, self.ring)
        kept = queries if keep is None else keep
        self.lengths = [old + new for old, new in zip(self.lengths, kept, strict=True)]
        assert bool((out[sum(queries) :] == 0).all()), "rows of padding are not zero"
        return list(out[: sum(queries)].split(queries))
