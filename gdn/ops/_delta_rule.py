"""What the chunk and the recurrent operator share: checks of their arguments, and the packed form that kernels take.

Checks read metadata only: no launch, no sync, no allocation, so an error leaves everything as it was; gdn.ops._values has those
of what tensors hold. Packing happens after a kernel has been chosen; the reference takes the caller's form.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch

from gdn.ops import _rows
from gdn.ops._call import make
from gdn.ops._checks import bad_value, check_tensor
from gdn.ops._checks import dtype_name as _dtype_name
from gdn.ops._memo import ALIGNMENT
from gdn.ops._modes import address, has_memory, is_empty
from gdn.runtime import log

Tensor = torch.Tensor

TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)

dtype_name = functools.cache(_dtype_name)


@dataclass(slots=True)
class Sizes:
    """The checked shapes of a call."""

    batch: int
    length: int  # tokens of one batch row; all tokens where the call is packed
    num_sequences: int
    num_q_heads: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int

    @property
    def num_heads(self) -> int:
        """Heads of o, g, beta and the state."""
        return max(self.num_q_heads, self.num_v_heads)

    @property
    def num_tokens(self) -> int:
        return self.batch * self.length

    def state_shape(self, state_v_first: bool) -> tuple[int, int, int]:
        inner = (self.v_dim, self.k_dim) if state_v_first else (self.k_dim, self.v_dim)
        return (self.num_heads, *inner)


def check_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_beta_sigmoid: bool,
    null_slot: int,
    out: Tensor | None,
) -> Sizes:
    """Checks everything but states and indices."""
    check_tensor("q", q, shape=("B", "T", "Hq", "K"), dtypes=TOKEN_DTYPES)
    batch, length, num_q_heads, k_dim = q.shape
    device, dtypes = q.device, (q.dtype,)
    check_tensor("k", k, shape=(batch, length, "Hk", k_dim), dtypes=dtypes, device=device)
    check_tensor("v", v, shape=(batch, length, "HV", "V"), dtypes=dtypes, device=device)
    num_k_heads, num_v_heads, v_dim = k.shape[2], v.shape[2], v.shape[3]
    if not (num_q_heads and num_k_heads and num_v_heads and k_dim and v_dim):
        bad_value("q, k, v", "at least one head and one element per head", f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    is_gva = num_q_heads == num_k_heads and num_v_heads % num_k_heads == 0
    is_gqa = num_k_heads == num_v_heads and num_q_heads % num_k_heads == 0
    if not (is_gva or is_gqa):
        bad_value(
            "q, k, v",
            "GVA heads (Hq = Hk, HV a multiple of Hk) or GQA heads (Hk = HV, Hq a multiple of Hk)",
            f"Hq={num_q_heads}, Hk={num_k_heads}, HV={num_v_heads}",
        )
    heads = max(num_q_heads, num_v_heads)
    if g is not None:
        check_tensor("g", g, shape=(batch, length, heads), dtypes=FLOAT_DTYPES, device=device)
    if beta is not None:
        check_tensor("beta", beta, shape=(batch, length, heads), dtypes=FLOAT_DTYPES, device=device)
    if use_gate:
        if g is None:
            bad_value("g", "the raw gate a with use_gate_in_kernel=True", "None")
        check_tensor("A_log", A_log, shape=(heads,), dtypes=FLOAT_DTYPES, device=device)
        if dt_bias is not None:
            check_tensor("dt_bias", dt_bias, shape=(heads,), dtypes=FLOAT_DTYPES, device=device)
    if use_beta_sigmoid and beta is None:
        bad_value("beta", "the raw b with use_beta_sigmoid_in_kernel=True", "None")
    check_null_slot(null_slot)

    num_sequences = batch
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, device)
        if batch != 1:
            bad_value("q", "shape [1, T, Hq, K] with cu_seqlens", f"shape {list(q.shape)}")
        num_sequences = cu_seqlens.shape[0] - 1
    if out is not None:
        check_tensor("out", out, shape=(batch, length, heads, v_dim), dtypes=dtypes, device=device, last_contiguous=True)
        if batch > 1 and length > 1 and isinstance(length, int) and out.stride(0) != length * out.stride(1):
            bad_value("out", "batch rows that follow each other (stride(0) == T * stride(1))", f"strides {out.stride()}")
    return Sizes(batch, length, num_sequences, num_q_heads, num_k_heads, num_v_heads, k_dim, v_dim)


def check_null_slot(null_slot: int) -> None:
    if not -1 <= null_slot < 2**31:
        bad_value("null_slot", "an int >= -1 that int32 holds", null_slot)


def is_less(size: int, least: int) -> bool:
    """Whether a size is known to be too small. One that a compiler keeps symbolic is compared when the program runs."""
    return isinstance(size, int) and isinstance(least, int) and size < least


def check_offsets(name: str, offsets: Tensor, device: torch.device) -> None:
    check_tensor(name, offsets, shape=("N + 1",), dtypes=INDEX_DTYPES, device=device)
    if is_empty(offsets.shape[0]):
        bad_value(name, "at least one offset", "shape [0]")


def check_indices(name: str, indices: Tensor, num_sequences: int, device: torch.device, *, ranks: tuple[int, ...]) -> None:
    """[>= N], or [>= N, columns] where ranks allow it."""
    check_tensor(name, indices, dtypes=INDEX_DTYPES, device=device)
    wanted = " or ".join({1: "[>= N]", 2: "[>= N, columns >= 1]"}[rank] for rank in ranks)
    if indices.dim() not in ranks or is_less(indices.shape[0], num_sequences) or is_empty(*indices.shape[1:]):
        bad_value(name, f"shape {wanted} with N = {num_sequences}", f"shape {list(indices.shape)}")


def check_per_sequence(
    name: str, value: Tensor, num_sequences: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """[>= N]."""
    check_tensor(name, value, shape=(">= N",), dtypes=dtypes, device=device)
    if is_less(value.shape[0], num_sequences):
        bad_value(name, f"shape [>= N] with N = {num_sequences}", f"shape {list(value.shape)}")


def check_state(name: str, state: Tensor, sizes: Sizes, state_v_first: bool, q: Tensor) -> None:
    """One state per sequence, read only."""
    _check_state_dtype(name, state, q)
    shape = (sizes.num_sequences, *sizes.state_shape(state_v_first))
    check_tensor(name, state, shape=shape, device=q.device)


def check_pool(name: str, pool: object, sizes: Sizes, state_v_first: bool, q: Tensor, num_slots: int | str = "slots") -> None:
    """States that are updated in place: nothing may be copied, so the strides must be those that kernels take."""
    if pool is None:
        bad_value(name, "the state pool, which indices refer to", "None")
    assert isinstance(pool, Tensor)
    _check_state_dtype(name, pool, q)
    shape = sizes.state_shape(state_v_first)
    check_tensor(name, pool, shape=(num_slots, *shape), device=q.device)
    heads, rows, columns = shape
    inner = rows * columns
    contiguous = (
        (pool.stride(3) == 1 or columns == 1)
        and (pool.stride(2) == columns or rows == 1)
        and (pool.stride(1) == inner or heads == 1)
    )
    slot_stride = pool.stride(0)
    many = pool.shape[0] > 1 if isinstance(pool.shape[0], int) else True
    if not contiguous or (many and slot_stride < heads * inner):
        bad_value(name, "contiguous inner three dims and slots that do not overlap", f"strides {pool.stride()}")
    size = pool.element_size()
    if (many and slot_stride * size % ALIGNMENT) or address(pool) % ALIGNMENT:
        bad_value(
            name,
            "a slot stride and an address that are multiples of 16 bytes",
            f"a slot stride of {slot_stride * size} bytes at address {address(pool):#x}",
        )


def _check_state_dtype(name: str, state: Tensor, q: Tensor) -> None:
    dtypes = (*STATE_DTYPES, torch.float64) if q.dtype == torch.float64 else STATE_DTYPES
    check_tensor(name, state, dtypes=dtypes)


@dataclass(slots=True)
class Packed:
    """Token tensors as the chunk kernels take them: [1, L, heads, D] and [1, L, HS]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor


def pack(
    sizes: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Packed:
    """With constants for what the caller left out, and parameters in float32."""
    device = q.device
    if use_gate:
        assert A_log is not None  # checked
        A_log = make(_float32, A_log)
        if dt_bias is None:
            dt_bias = make(functools.partial(zeros, sizes.num_heads, device))
        else:
            dt_bias = make(_float32, dt_bias)
    else:
        A_log = dt_bias = None
    if cu_seqlens is None:
        cu_seqlens = make(functools.partial(even_offsets, sizes.batch, sizes.length, device))
    return Packed(
        _packed_rows("q", q),
        _packed_rows("k", k),
        _packed_rows("v", v),
        None if g is None else _one_row(g),
        None if beta is None else _one_row(beta),
        A_log,
        dt_bias,
        cu_seqlens.contiguous(),
    )


def _float32(x: Tensor) -> Tensor:
    return x.float().contiguous()


def as_int32(x: Tensor) -> Tensor:
    """int32, saturated: what no int32 holds stays out of every range."""
    return x if x.dtype == torch.int32 else x.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def contiguous_int32(x: Tensor) -> Tensor:
    return as_int32(x).contiguous()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Counts in an index dtype, saturated."""
    return as_int32(x) if dtype == torch.int32 else x.to(dtype)


def as_int64(x: Tensor) -> Tensor:
    return x.to(torch.int64)


def common_dtype(*indices: Tensor | None) -> torch.dtype:
    """The dtype in which all of a call's slots are compared: int64 where one of them is."""
    return torch.int64 if any(x is not None and x.dtype == torch.int64 for x in indices) else torch.int32


def widened(indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Indices in the call's dtype, which is their own or wider."""
    return indices if indices.dtype == dtype else make(as_int64, indices)


def _one_row(x: Tensor) -> Tensor:
    """[B, T, ...] -> [1, B * T, ...]. What is one row stays the same tensor: even a view costs the host a microsecond or two."""
    return x if x.shape[0] == 1 else x.flatten(0, 1)[None]


def _packed_rows(name: str, x: Tensor) -> Tensor:
    """[B, T, heads, D] -> [1, B * T, heads, D]: no copy where address and strides are multiples of 16 bytes."""
    packed = _one_row(x)
    was_copied = address(packed) != address(x)
    _, tokens, heads, dim = packed.shape
    access = _stride_access(packed)
    is_aligned = address(packed) % ALIGNMENT == 0 and (dim == 1 or packed.stride(3) == 1)
    # Strides of dims with one entry are never used.
    is_aligned = is_aligned and (tokens == 1 or packed.stride(1) * packed.element_size() % access == 0)
    is_aligned = is_aligned and (heads == 1 or packed.stride(2) * packed.element_size() % access == 0)
    if is_aligned and not was_copied:
        return packed
    if was_copied and is_aligned:
        log.once(
            f"{name}: copied, because its batch rows are not evenly spaced (shape {list(x.shape)}, strides {x.stride()})",
            logging.WARNING,
            key=("copied", name),
        )
        return packed
    return _rows.copied(name, packed, "its last dimension is not contiguous, or address or strides are no multiples of 16 bytes")


def _stride_access(x: Tensor) -> int:
    """Bytes that token and head strides must be multiples of: a head that is none of 16 bytes stays so in any copy."""
    return ALIGNMENT if x.shape[-1] * x.element_size() % ALIGNMENT == 0 else ALIGNMENT // 2


def output(sizes: Sizes, v: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [B, T, HS, V] for the caller, and the tensor [1, B * T, HS, V] that the kernel writes: o itself or a view, except where
    `out` is not aligned, which `finish` copies back into."""
    shape = (sizes.batch, sizes.length, sizes.num_heads, sizes.v_dim)
    o = make(functools.partial(torch.empty, shape, dtype=v.dtype, device=v.device)) if out is None else out
    written = o if sizes.batch == 1 else o.view(1, sizes.num_tokens, *shape[2:])
    size, access = written.element_size(), _stride_access(written)
    if out is not None and (
        address(written) % ALIGNMENT or written.stride(1) * size % access or written.stride(2) * size % access
    ):
        written = torch.empty(written.shape, dtype=v.dtype, device=v.device)
    return o, written


def finish(o: Tensor, written: Tensor) -> Tensor:
    """Copies back where `output` had to take a tensor of its own."""
    if address(written) != address(o):
        o.copy_(written.view(o.shape))
    return o


def aligned_state(state: Tensor) -> Tensor:
    """A state that is only read, contiguous and aligned."""
    state = state.contiguous()
    return state.clone() if address(state) % ALIGNMENT else state


def pass_through(
    initial_state: Tensor | None, has_initial_state: Tensor | None, final_state: Tensor | None, num_sequences: int
) -> None:
    """The new final state of sequences that have no tokens: what they started from."""
    if final_state is None:
        return
    if initial_state is None:
        final_state.zero_()
        return
    final_state.copy_(initial_state)
    if has_initial_state is not None:
        final_state.masked_fill_(~has_initial_state[:num_sequences].view(-1, 1, 1, 1), 0)


def even_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    """[batch + 1] int32: 0, length, 2 * length, ..."""
    return _constant(_build_offsets, batch, length, device)


def zeros(count: int, device: torch.device) -> Tensor:
    """[count] float32."""
    return _constant(_build_zeros, count, 0, device)


def row_indices(count: int, device: torch.device) -> Tensor:
    """[count] int32: 0, 1, 2, ..."""
    return _constant(_build_offsets, count, 1, device)[:count]


def _build_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def _build_zeros(count: int, _: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.float32, device=device)


_cached_offsets = functools.lru_cache(maxsize=1024)(_build_offsets)
_cached_zeros = functools.lru_cache(maxsize=64)(_build_zeros)
_CACHED = {_build_offsets: _cached_offsets, _build_zeros: _cached_zeros}


def _constant(build: Any, first: int, second: int, device: torch.device) -> Tensor:
    """A constant, kept between calls. During graph capture it is built as part of the graph: memory that belongs to a
    graph, with contents that exist only once it is replayed, must not reach other calls. Nor must a tensor without memory."""
    if not has_memory() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return build(first, second, device)  # type: ignore[no-any-return]
    return _CACHED[build](first, second, device)


def static_fields(
    sizes: Sizes,
    q: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    index_dtype: torch.dtype | None,
) -> dict[str, Any]:
    """The fields of DeltaRuleProblem that follow from tensors."""
    return {
        "num_q_heads": sizes.num_q_heads,
        "num_k_heads": sizes.num_k_heads,
        "num_v_heads": sizes.num_v_heads,
        "head_k_dim": sizes.k_dim,
        "head_v_dim": sizes.v_dim,
        "dtype": dtype_name(q.dtype),
        "state_dtype": "float32" if initial_state is None else dtype_name(initial_state.dtype),
        "gate_dtype": None if g is None else dtype_name(g.dtype),
        "beta_dtype": None if beta is None else dtype_name(beta.dtype),
        "cu_seqlens_dtype": "int32" if cu_seqlens is None else dtype_name(cu_seqlens.dtype),
        "index_dtype": None if index_dtype is None else dtype_name(index_dtype),
        "has_initial_state": initial_state is not None,
        "num_tokens": sizes.num_tokens,
        "num_sequences": sizes.num_sequences,
    }
