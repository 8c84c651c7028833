"""Launches of the internal operators of context parallel: problems, and Params whose outputs are NaN."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gdn.ops.context.problem import (
    ContextPartsParams,
    ContextPartsProblem,
    ContextStartParams,
    ContextStartProblem,
    ContextTotalParams,
    ContextTotalProblem,
    message_numbers,
)

NULL_SLOT = 0
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int32: "int32", torch.int64: "int64", None: None}


@dataclass(frozen=True)
class Call:
    problem: Any
    params: Any
    written: tuple[str, ...]

    def copied(self, device: Any = "cpu") -> "Call":
        """The same with tensors of its own, strides kept."""

        def copy(x: Tensor) -> Tensor:
            whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(device, copy=True)
            return torch.as_strided(whole, x.shape, x.stride(), x.storage_offset())

        params = type(self.params)(*(copy(x) if isinstance(x, Tensor) else x for x in self.params))
        return replace(self, params=params)

    def in_float64(self) -> "Call":
        """The same in float64, but for pools, which keep their dtype."""
        pools = [name for name in ("initial_state", "final_state") if name in self.params._fields]
        given = {
            name: x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 and name not in pools else x
            for name, x in self.params._asdict().items()
        }
        return replace(self, problem=replace(self.problem, sum_dtype="float64"), params=self.params._replace(**given))

    def written_with(self, other: "Call") -> dict[str, tuple[Tensor, Tensor]]:
        """Outputs of this and of another call, by name."""
        names = [name for name in self.written if getattr(self.params, name) is not None]
        return {name: (getattr(self.params, name), getattr(other.params, name)) for name in names}


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _poisoned(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def _summaries(rows: int, heads: int, dims: tuple[int, int], v_first: bool, seed: int) -> tuple[Tensor, Tensor]:
    """h and P: neither symmetric nor near to the identity, and with a norm near 1, so that no factor of a chain is lost."""
    K, V = dims
    h = _random(rows, heads, *((V, K) if v_first else (K, V)), seed=seed)
    return h, _random(rows, heads, K, K, seed=seed + 1) / K**0.5


def _slots(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Different slots from 1 on with a stride of 2; the second sequence is padding."""
    order = 1 + torch.randperm(2 * count + 1, generator=torch.Generator().manual_seed(seed))[:count]
    if count > 1:
        order[1] = NULL_SLOT
    return torch.stack([order, torch.full_like(order, -(10**6))], dim=1).flatten().to(dtype)[::2]


def _pool(slots: int, heads: int, inner: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """A pool whose slots have gaps of NaN between them."""
    numbers = heads * inner[0] * inner[1]
    wide = torch.full((slots, numbers + 24), torch.nan, dtype=dtype)
    wide[:, :numbers] = _random(slots, numbers, seed=seed).to(dtype)
    return torch.as_strided(wide, (slots, heads, *inner), (numbers + 24, inner[0] * inner[1], inner[1], 1))


def _numbers(problem: Any) -> int:
    return -(-message_numbers(problem)[2] // 16) * 16


def parts_call(
    lengths: list[int], segments: int, offsets_dtype: torch.dtype | None, length: int = 0, index_dtype: Any = torch.int32
) -> Call:
    """offsets_dtype: of cu_seqlens; None: none, one sequence of `length` tokens."""
    count = len(lengths)
    cu_seqlens = None if offsets_dtype is None else torch.tensor([0, *lengths]).cumsum(0).to(offsets_dtype)
    problem = ContextPartsProblem(
        "float32", _NAMES[offsets_dtype], _NAMES[index_dtype], segments > 1, num_sequences=count, num_segments=segments
    )
    offsets = torch.full((count * segments + 1,), -7, dtype=offsets_dtype or torch.int32) if segments > 1 else None
    rows = torch.full((count * segments,), -7, dtype=torch.int32)
    slots = None if index_dtype is None else _slots(count, index_dtype, 1)
    params = ContextPartsParams(cu_seqlens, slots, offsets, rows, _poisoned(48 + count + 3), 48, length, segments, NULL_SLOT)
    return Call(problem, params, ("offsets", "rows", "message"))


def total_call(
    rank: int, count: int, segments: int, v_first: bool, heads: int = 3, dims: tuple[int, int] = (128, 128),
    pool_dtype: Any = torch.float32, index_dtype: Any = torch.int32, has_mask: bool = True,
) -> Call:  # fmt: skip
    """pool_dtype None: the first rank starts from zeros. index_dtype None: from a row for each sequence."""
    K, V = dims
    inner = (V, K) if v_first else (K, V)
    has_pool = rank == 0 and pool_dtype is not None
    indices = index_dtype if has_pool else None
    own = (_NAMES[pool_dtype] if has_pool else None, _NAMES[indices], has_mask and has_pool)
    problem = ContextTotalProblem(heads, K, V, "float32", v_first, rank == 0, True, *own, count, segments)
    h, P = _summaries(count * segments, heads, dims, v_first, seed=10 * rank)
    slots = None if indices is None else _slots(count, indices, 2)
    rows = count if indices is None else 2 * count + 2
    pool = _pool(rows, heads, inner, pool_dtype, 3) if has_pool else None
    mask = torch.arange(2 * count) % 3 != 2 if own[2] else None
    states = _poisoned(count * segments, heads, *inner) if rank == 0 else None
    params = ContextTotalParams(
        h, P, pool, slots, None if mask is None else mask[::2], states, _poisoned(_numbers(problem)), count, segments, NULL_SLOT
    )
    return Call(problem, params, ("states", "message"))


def start_call(
    rank: int, ranks: int, count: int, segments: int, v_first: bool, final: str | None, heads: int = 3,
    dims: tuple[int, int] = (128, 128), pool_dtype: torch.dtype = torch.float32, index_dtype: torch.dtype = torch.int32,
    final_index_dtype: torch.dtype | None = None,
) -> Call:  # fmt: skip
    """final: None, "rows" (a new tensor), "pool", or "ends here": states hold what the pass has left, for the pool."""
    K, V = dims
    inner = (V, K) if v_first else (K, V)
    ends_here, has_segments = final == "ends here", rank > 0 and final != "ends here"
    is_cut = has_segments and segments > 1
    pooled = (_NAMES[pool_dtype], _NAMES[index_dtype], _NAMES[final_index_dtype])
    kept = {None: (None, None, None), "rows": ("float32", None, None)}.get(final, pooled)
    problem = ContextStartProblem(heads, K, V, "float32", v_first, has_segments, is_cut, ends_here, *kept, count, segments, ranks)
    messages = _poisoned(ranks, _numbers(problem))
    before_P, before_flags, end = message_numbers(problem)
    for sender in range(ranks):
        h, P = _summaries(count, heads, dims, v_first, seed=10 * sender + 3)
        messages[sender, :before_P] = h.flatten()
        if sender:  # the first rank sends no P
            messages[sender, before_P:before_flags] = P.flatten()
        messages[sender, before_flags:end] = (torch.arange(count) % (ranks + 1) == sender).float()  # the last has none
    h = P = states = None
    if is_cut:
        h, P = _summaries(count * segments, heads, dims, v_first, seed=77)
    if has_segments or ends_here:
        states = _poisoned(count * segments, heads, *inner)
    if ends_here:
        states = _random(count * segments, heads, *inner, seed=5)
    slots = _slots(count, index_dtype, 2) if kept[1] else None
    final_slots = _slots(count, final_index_dtype, 4) if kept[2] and final_index_dtype else None
    into = None
    if final is not None:
        into = _poisoned(count, heads, *inner) if final == "rows" else _pool(2 * count + 2, heads, inner, pool_dtype, 6)
    written = ("final_state",) if ends_here else ("states", "final_state")
    params = ContextStartParams(messages, h, P, states, into, slots, final_slots, rank, count, segments, NULL_SLOT)
    return Call(problem, params, written)
