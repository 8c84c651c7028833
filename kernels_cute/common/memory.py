"""Global memory: dtypes and fake tensors to compile for; for kernels without shared memory also pointers of stated alignment
and wide loads and stores.

Indices arrive as int32 or int64. A kernel reads an index as the caller gave it and compares it in that width, wherever it works
with int64 anyway (slots times strides). Where an int32 is wanted (registers, divisions, positions, which int32 holds),
`narrowed` decides first, in 64 bits, whether there is one. Offsets (cu_seqlens, query_start_loc) are the exception: the caller
promises that they are within the tokens, whose count is an int32, and they are narrowed as they are read.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from kernels_cute.common.choice import ACCESS_BYTES

_FLOATS: dict[str, Any] = {"float32": cutlass.Float32, "bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
_INTEGERS: dict[str, Any] = {"int32": Int32, "int64": Int64, "uint8": cutlass.Uint8}
CUTE_DTYPES = _FLOATS | _INTEGERS | {"float8_e4m3fn": cutlass.Float8E4M3FN, "bool": cutlass.Boolean}


def fake(dtype: str | None, *shape: Any, last: Any = None, align: int | None = None) -> Any:
    """A tensor to compile for; None without a dtype.

    shape: None = any size. last: stride of the last dim, or strides of the last dims, None = any; those before are any. align: of
    the address, in bytes. Strides carry no divisibility: the launch check would also test it on dims of size 1, where torch
    reports any stride. Kernels state the alignment at each access instead.
    """
    if dtype is None:
        return None
    given = last if isinstance(last, tuple) else (last,)
    strides = [cute.sym_int64() if one is None else one for one in (*[None] * (len(shape) - len(given)), *given)]
    sizes = [cute.sym_int() if one is None else one for one in shape]
    return make_fake_tensor(CUTE_DTYPES[dtype], tuple(sizes), stride=tuple(strides), assumed_align=align)


def without_batch(*tensors: Any) -> list[Any]:
    """[1, tokens, ...] as [tokens, ...]; an absent one stays None."""
    return [
        x if x is None else cute.make_tensor(x.iterator, cute.select(x.layout, mode=[*range(1, cute.rank(x))])) for x in tensors
    ]


@cute.jit
def pointer(gX: cute.Tensor, offset: Int64, align: Constexpr):
    """gX + offset elements, known to be a multiple of align bytes."""
    dtype = gX.element_type
    address = gX.iterator.toint() + offset * (dtype.width // 8)
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def columns(rows: Any, first: int, count: int) -> Any:
    """Columns [tokens, count] of rows, from `first` on."""
    token, step = rows.stride
    return cute.make_tensor(rows.iterator + first * step, cute.make_layout((rows.shape[0], count), stride=(token, step)))


def heads_of(rows: Any, first: int, count: int, dim: int) -> Any:
    """Columns of rows, from `first` on, as heads [tokens, count, dim]; columns are adjacent."""
    layout = cute.make_layout((rows.shape[0], count, dim), stride=(rows.stride[0], dim, 1))
    return cute.make_tensor(rows.iterator + first, layout)


@cute.jit
def words(gX: cute.Tensor, offset: Int64, align: Constexpr):
    """gX + offset elements as 32-bit words, known to be a multiple of align bytes."""
    return word_pointer(gX.iterator.toint() + offset * (gX.element_type.width // 8), align)


@cute.jit
def word_pointer(address: Int64, align: Constexpr):
    """A global address as a pointer to 32-bit words."""
    return cute.make_ptr(cutlass.Uint32, address, cute.AddressSpace.gmem, assumed_align=align)


@cute.jit
def load(source: cute.Pointer, width: Constexpr, rX: cute.Tensor, start: Constexpr, once: Constexpr):
    """rX[start : start + width] = the width elements at source, in the widest accesses; once: past L1."""
    dtype = source.dtype
    step = cutlass.const_expr(min(width, ACCESS_BYTES * 8 // dtype.width))
    priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE if once else cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), dtype, num_bits_per_copy=step * dtype.width, l1c_evict_priority=priority)
    for first in cutlass.range_constexpr(0, width, step):
        rSlice = cute.make_rmem_tensor(step, dtype)
        cute.copy(atom, cute.make_tensor(source + first, cute.make_layout(step)), rSlice)
        for e in cutlass.range_constexpr(step):
            rX[start + first + e] = rSlice[e].to(rX.element_type)


@cute.jit
def store(rX: cute.Tensor, start: Constexpr, width: Constexpr, target: cute.Pointer):
    """The width elements at target = rX[start : start + width], rounded to target's dtype, in the widest accesses."""
    dtype = target.dtype
    step = cutlass.const_expr(min(width, ACCESS_BYTES * 8 // dtype.width))
    atom = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), dtype, num_bits_per_copy=step * dtype.width)
    for first in cutlass.range_constexpr(0, width, step):
        rSlice = cute.make_rmem_tensor(step, dtype)
        for e in cutlass.range_constexpr(step):
            rSlice[e] = rX[start + first + e].to(dtype)
        cute.copy(atom, rSlice, cute.make_tensor(target + first, cute.make_layout(step)))


@cute.jit
def sigmoid(x: cutlass.Float32):
    """1 / (1 + exp(-x)) from the two approximate instructions: relative error below 1e-6, exact limits."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -1.4426950408889634, fastmath=True))


@cute.jit
def narrowed(index):
    """An index as an int32, -1 where an int64 is negative or more than an int32 holds."""
    result = index
    if cutlass.const_expr(isinstance(index, Int64)):
        result = Int32(-1)
        if index >= 0 and index < 2**31:
            result = Int32(index)
    return result


# Windows of a causal convolution in a pool [slots, channels, columns]: neighbouring channels of one column, for a thread.


def window_offset(gWindows: Any, slot: Any, column: Any, channel: Any) -> Any:
    return slot * gWindows.stride[0] + Int64(column) * gWindows.stride[2] + Int64(channel) * gWindows.stride[1]


@cute.jit
def load_channels(
    gWindows: cute.Tensor, offset: Int64, is_contiguous: Constexpr, count: Constexpr, rX: cute.Tensor, start: Constexpr
):
    """rX[start : start + count] = neighbouring channels from an offset on."""
    size = cutlass.const_expr(gWindows.element_type.width // 8)
    if cutlass.const_expr(is_contiguous):
        load(pointer(gWindows, offset, min(ACCESS_BYTES, count * size)), count, rX, start, True)
    else:
        # Neighbouring columns share a sector, which L1 keeps.
        for c in cutlass.range_constexpr(count):
            load(pointer(gWindows, offset + c * gWindows.stride[1], size), 1, rX, start + c, False)


@cute.jit
def store_channels(
    rX: cute.Tensor, start: Constexpr, count: Constexpr, gWindows: cute.Tensor, offset: Int64, is_contiguous: Constexpr
):
    size = cutlass.const_expr(gWindows.element_type.width // 8)
    if cutlass.const_expr(is_contiguous):
        store(rX, start, count, pointer(gWindows, offset, min(ACCESS_BYTES, count * size)))
    else:
        for c in cutlass.range_constexpr(count):
            store(rX, start + c, 1, pointer(gWindows, offset + c * gWindows.stride[1], size))
