"""Seeded inputs of the two logits operators, built from a problem: shared by the tests and the autotuner.

Everything that no row may see is NaN: keys outside every range, the rest of a sequence's last page, unused pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gdn.ops.indexer.problem import LogitsProblem, MqaLogitsProblem, PagedMqaLogitsProblem

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class MqaInputs:
    q: torch.Tensor  # [M, H, D]
    k: torch.Tensor  # [Nk, kv_heads, D]
    k_scale: torch.Tensor | None  # [Nk, kv_heads] float32
    weights: torch.Tensor | None  # [M, H], a column slice of a wider tensor
    cu_seqlen_ks: torch.Tensor  # [M] int32
    cu_seqlen_ke: torch.Tensor  # [M] int32


@dataclass(frozen=True)
class PagedInputs:
    q: torch.Tensor  # [B, next_n, H, D]
    cache: torch.Tensor  # as for gdn.paged_mqa_logits, with 4 dims
    weights: torch.Tensor | None  # [B * next_n, H]
    context_lens: torch.Tensor  # [B] or [B, next_n] int32
    block_tables: torch.Tensor  # [B, max_pages] int32; after a sequence's last page the number of a poisoned page
    max_context_len: int
    page_size: int
    rows: torch.Tensor  # [B, longest, kv_heads, D]: content of the pages, in key order
    row_scales: torch.Tensor | None  # [B, longest, kv_heads] float32

    def arguments(self) -> dict[str, Any]:
        """Arguments of gdn.paged_mqa_logits."""
        names = ("q", "cache", "weights", "context_lens", "block_tables", "max_context_len")
        return {name: getattr(self, name) for name in names}


def _randn(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float32)


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448.0, 448.0).to(FP8)


def _queries(problem: LogitsProblem, rows: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, H, D] in the problem's dtype; scaled FP8 spans e4m3's range, as quantised queries do."""
    q = _randn((rows, problem.num_heads, problem.head_dim), generator)
    if problem.dtype != "float8_e4m3fn":
        return q.to(getattr(torch, problem.dtype))
    return _to_fp8(q * 112.0 if problem.has_k_scale else q)


def _keys(problem: LogitsProblem, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[rows, kv_heads, D] and, where the problem has them, scales [rows, kv_heads] over some octaves."""
    k = _randn((rows, problem.num_kv_heads, problem.head_dim), generator)
    if problem.dtype != "float8_e4m3fn":
        return k.to(getattr(torch, problem.dtype)), None
    if not problem.has_k_scale:
        return _to_fp8(k), None
    scale = torch.exp(_randn((rows, problem.num_kv_heads), generator)) / 112.0
    return _to_fp8(k * 112.0), scale


def _weights(problem: LogitsProblem, rows: int, generator: torch.Generator) -> torch.Tensor | None:
    if problem.weights_dtype is None:
        return None
    factor = 1.0 / 112.0 if problem.has_k_scale else 1.0
    wide = _randn((rows, problem.num_heads + 8), generator) * factor
    return wide.to(getattr(torch, problem.weights_dtype))[:, 8:]


def key_ranges(kind: str, num_queries: int, num_keys: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """cu_seqlen_ks and cu_seqlen_ke [M] int32.

    causal: [0, Nk - M + i + 1), the end of one prefill. full: every key. random: any sub-range of the middle half.
    sequences: several packed sequences, causal in each. hard: random ranges among empty, full, ks > ke, ke > Nk, ks < 0.
    """
    device = generator.device
    row = torch.arange(num_queries, device=device)
    if kind == "full":
        start, end = torch.zeros_like(row), torch.full_like(row, num_keys)
    elif kind == "causal":
        start, end = torch.zeros_like(row), (num_keys - num_queries + row + 1).clamp(0, num_keys)
    elif kind in ("random", "hard"):
        low, high = (num_keys // 4, 3 * num_keys // 4) if kind == "random" else (0, num_keys)
        pair = torch.randint(low, max(low, high) + 1, (2, num_queries), generator=generator, device=device)
        start, end = pair.min(dim=0).values, pair.max(dim=0).values
        if kind == "hard":
            middle = num_keys // 2
            # Empty (ks == ke), everything, ks > ke, ke > Nk, ks < 0; None = as drawn.
            hard = ((middle, middle), (0, num_keys), (num_keys, num_keys // 3), (None, num_keys + 1000), (-5, None))
            for case, (first, last) in enumerate(hard):
                start = start if first is None else start.masked_fill(row % 7 == case, first)
                end = end if last is None else end.masked_fill(row % 7 == case, last)
    elif kind == "sequences":
        count = max(1, min(4, num_queries))
        sequence = row * count // max(1, num_queries)
        first_row = (sequence * num_queries + count - 1) // count
        start, limit = sequence * num_keys // count, (sequence + 1) * num_keys // count
        step = (row - first_row + 1) * num_keys // max(1, num_queries)
        end = torch.minimum(start + step, limit)
    else:
        raise ValueError(f"kind: expected causal, full, random, sequences or hard, got {kind!r}")
    return start.to(torch.int32), end.to(torch.int32)


def make_mqa_inputs(
    problem: MqaLogitsProblem, device: torch.device | str = "cpu", seed: int = 0, ranges: str = "causal", poison: bool = True
) -> MqaInputs:
    """Inputs of `gdn.mqa_logits` for one problem; with `poison`, keys that no row sees (and their scales) are NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    q = _queries(problem, problem.num_queries, generator)
    k, k_scale = _keys(problem, problem.num_keys, generator)
    weights = _weights(problem, problem.num_queries, generator)
    starts, ends = key_ranges(ranges, problem.num_queries, problem.num_keys, generator)
    if poison and problem.num_keys:
        # +1 at each start, -1 at each end: keys where the running sum is 0 lie in no range.
        low = starts.long().clamp(0, problem.num_keys)
        high = torch.maximum(ends.long().clamp(0, problem.num_keys), low)
        edges = torch.zeros(problem.num_keys + 1, dtype=torch.int64, device=device)
        ones = torch.ones_like(low)
        edges.index_add_(0, low, ones).index_add_(0, high, -ones)
        unseen = edges.cumsum(0)[: problem.num_keys] == 0
        k.view(torch.uint8)[unseen] = 0xFF
        if k_scale is not None:
            k_scale[unseen] = torch.nan
    return MqaInputs(q, k, k_scale, weights, starts, ends)


def make_paged_inputs(
    problem: PagedMqaLogitsProblem, device: torch.device | str = "cpu", seed: int = 0,
    lengths: Sequence[int] | Sequence[Sequence[int]] | None = None, page_pad_bytes: int = 0, spare_pages: int = 3,
) -> PagedInputs:  # fmt: skip
    """Inputs of `gdn.paged_mqa_logits` for one problem.

    lengths: per sequence, or with per_draft_lengths per sequence and draft; None = all max_context_len. The cache holds
    pages for max_context_len keys of every sequence, so a graph may be replayed with other lengths; keys beyond the
    longest draft of a sequence are NaN. page_pad_bytes: bytes between pages, a multiple of 16. Pages are shuffled.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    batch, next_n, page_size = problem.batch, problem.next_n, problem.page_size
    kv_heads, dim, longest = problem.num_kv_heads, problem.head_dim, problem.max_context_len
    if lengths is None:
        lengths = [[longest] * next_n] * batch if problem.per_draft_lengths else [longest] * batch
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = _queries(problem, batch * next_n, generator).view(batch, next_n, problem.num_heads, dim)
    weights = _weights(problem, batch * next_n, generator)
    flat_rows, flat_scales = _keys(problem, batch * longest, generator)
    rows = flat_rows.view(batch, longest, kv_heads, dim)
    row_scales = flat_scales.view(batch, longest, kv_heads) if flat_scales is not None else None

    pages_each = -(-longest // page_size)
    used = batch * pages_each
    total = used + spare_pages
    value_bytes = page_size * kv_heads * dim * rows.element_size()
    page_bytes = value_bytes + (page_size * kv_heads * 4 if problem.has_k_scale else 0)
    stride = page_bytes + page_pad_bytes
    storage = torch.full((total, stride), 0xFF, dtype=torch.uint8, device=device)  # 0xFF.. is NaN in every dtype
    order = torch.randperm(total, generator=generator, device=device)[:used].view(batch, pages_each)
    guard = torch.ones(total, dtype=torch.bool, device=device).index_fill_(0, order.flatten(), False)
    guard_page = int(guard.nonzero()[0]) if spare_pages else 0
    block_tables = torch.full((batch, pages_each + 2), guard_page, dtype=torch.int32, device=device)[:, : pages_each + 1]
    for sequence in range(batch):
        visible = min(max(int(context_lens[sequence].max()), 0), longest)
        pages = -(-visible // page_size)
        if pages == 0:
            continue
        own = order[sequence, :pages]
        block_tables[sequence, :pages] = own.to(torch.int32)
        parts = [rows[sequence, :visible]] + ([row_scales[sequence, :visible]] if row_scales is not None else [])
        for first, part in zip((0, value_bytes), parts, strict=False):  # a page holds all values, then all scales
            content = torch.full((pages * page_size, part[0].nbytes), 0xFF, dtype=torch.uint8, device=device)
            content[:visible] = part.reshape(visible, -1).view(torch.uint8)
            storage[own, first : first + page_size * part[0].nbytes] = content.view(pages, -1)
    # Rows of bytes with a scale after the values, or of values.
    row, typed = (dim + 4, storage) if problem.has_k_scale else (dim, storage.view(rows.dtype))
    cache = typed.as_strided((total, page_size, kv_heads, row), (typed.stride(0), kv_heads * row, row, 1))
    return PagedInputs(q, cache, weights, context_lens, block_tables, longest, page_size, rows, row_scales)
