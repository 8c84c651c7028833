"""Rows of `dim` 16-bit values in registers, and the indexer's steps on them: RMS norm, RoPE, rounding, e4m3, the cache.

A group of dim / 16 lanes owns a row; a lane holds two chunks of 8 neighbouring values, which are one 16-byte load each:

    rotated dims      chunk c of the first half and chunk c of the second: both members of every pair (i, i + rotary_dim / 2)
                      are in one thread, so RoPE needs no shuffle
    the other dims    likewise chunk c of their first half and chunk c of their second

Sums and maxima cross the group by shuffles; all lanes of a warp must take part in them. Values are held as words of two, as they
are loaded and stored; the arithmetic is float32, rounded to the row's dtype once.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels_cute.common.build import Kernel
from kernels_cute.common.memory import CUTE_DTYPES, load, narrowed, pointer, store, word_pointer, words
from kernels_cute.common.ptx import pack, unpack
from kernels_cute.indexer import ptx
from kernels_cute.indexer.forms import CAST, CHUNK, ELEMENTS, FP8_MAX, LEAST_PEAK, SCALED, WORDS, lanes_of


def store_scale(address: Any, scale: Any) -> None:
    """One float32 to a global address."""
    cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)[0] = scale


def row_offset(gX: Any, token: Any, head: Any) -> Any:
    """Elements before a row of [tokens, heads, dim]."""
    return Int64(token) * gX.stride[0] + Int64(head) * gX.stride[1]


class IndexerRows(Kernel):
    """Compile-time constants of rows, and the steps on them. Kernels that write keys set kv_heads and form (encoded form of
    a key in the cache); those that rotate set zero_centred."""

    def __init__(self, dim: int, rotary_dim: int, threads: int) -> None:
        self.dim, self.threads = dim, threads
        self.lanes = lanes_of(dim)
        self.groups = threads // self.lanes  # groups of lanes per block
        self.half = rotary_dim // 2
        self.rotated = self.half // CHUNK  # lanes whose chunks are rotated
        self.plain_half = (dim - rotary_dim) // 2

    @cute.jit
    def live_item(self, item: Int32, tokens: Int32, per_token: cutlass.Constexpr):
        """(token, item within it, whether it exists). Items beyond the last repeat it, because all lanes of a warp shuffle."""
        count = tokens * per_token
        is_live = item < count
        if item >= count:
            item = count - 1
        return item // per_token, item % per_token, is_live

    @cute.jit
    def columns_of(self, lane: Int32):
        """Starts of a lane's two chunks in a row."""
        first = lane * CHUNK
        second = first + self.half
        if cutlass.const_expr(self.rotated < self.lanes):
            if lane >= self.rotated:
                first = (lane + self.rotated) * CHUNK
                second = first + self.plain_half
        return first, second

    @cute.jit
    def load_row(self, gX: cute.Tensor, offset: Int64, lane: Int32, rWords: cute.Tensor, start: cutlass.Constexpr):
        """Fills rWords[start : start + WORDS] with a lane's part of the row at gX + offset elements; read once, past L1."""
        first, second = self.columns_of(lane)
        load(words(gX, offset + first, 16), WORDS // 2, rWords, start, True)
        load(words(gX, offset + second, 16), WORDS // 2, rWords, start + WORDS // 2, True)

    @cute.jit
    def load_factors(self, gWeight: cute.Tensor, gTable: cute.Tensor, position: Any, lane: Int32):
        """(gain, cosines, sines) of a lane's part of a row; the position is clamped to the table."""
        rGain = cute.make_rmem_tensor(ELEMENTS, Float32)
        rCos, rSin = cute.make_rmem_tensor(CHUNK, Float32), cute.make_rmem_tensor(CHUNK, Float32)
        first, second = self.columns_of(lane)
        load(pointer(gWeight, Int64(first), 16), CHUNK, rGain, 0, False)
        load(pointer(gWeight, Int64(second), 16), CHUNK, rGain, CHUNK, False)
        if cutlass.const_expr(self.zero_centred):
            for i in cutlass.range_constexpr(ELEMENTS):
                rGain[i] += 1.0
        row = Int64(position)
        last = Int64(gTable.shape[0] - 1)
        if row > last:
            row = last
        if row < 0:
            row = Int64(0)
        rCos.fill(0.0)
        rSin.fill(0.0)
        if lane < self.rotated:
            offset = row * gTable.stride[0] + lane * CHUNK
            load(pointer(gTable, offset, 16), CHUNK, rCos, 0, False)
            load(pointer(gTable, offset + self.half, 16), CHUNK, rSin, 0, False)
        return rGain, rCos, rSin

    @cute.jit
    def unpack(self, rWords: cute.Tensor, start: cutlass.Constexpr, dtype: cutlass.Constexpr, rX: cute.Tensor):
        for i in cutlass.range_constexpr(WORDS):
            rX[2 * i], rX[2 * i + 1] = unpack(CUTE_DTYPES[dtype], rWords[start + i])

    @cute.jit
    def pack(self, rX: cute.Tensor, dtype: cutlass.Constexpr, rWords: cute.Tensor, start: cutlass.Constexpr):
        for i in cutlass.range_constexpr(WORDS):
            rWords[start + i] = Uint32(pack(CUTE_DTYPES[dtype], rX[2 * i], rX[2 * i + 1]))

    @cute.jit
    def norm_and_rotate(self, rWords, start: cutlass.Constexpr, dtype: cutlass.Constexpr, factors, rX, eps: Float32, lane: Int32):
        """rope(rms_norm(row)) in place, rounded once; factors: of `load_factors`, rX: for its values.

        Norm: x * rsqrt(mean(x * x) + eps) * gain, multiplied in this order. RoPE: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
        on a lane's first and second chunk, where it is rotated.
        """
        rGain, rCos, rSin = factors
        self.unpack(rWords, start, dtype, rX)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(ELEMENTS):
            total += rX[i] * rX[i]
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        factor = cute.math.rsqrt(total * (1.0 / self.dim) + eps)
        for i in cutlass.range_constexpr(ELEMENTS):
            rX[i] = rX[i] * factor * rGain[i]
        if lane < self.rotated:
            for i in cutlass.range_constexpr(CHUNK):
                x1, x2 = rX[i], rX[CHUNK + i]
                rX[i] = x1 * rCos[i] - x2 * rSin[i]
                rX[CHUNK + i] = x2 * rCos[i] + x1 * rSin[i]
        self.pack(rX, dtype, rWords, start)

    @cute.jit
    def scale_of(self, rWords: cute.Tensor, start: cutlass.Constexpr, dtype: cutlass.Constexpr):
        """max(|row|, 1e-4) / 448, the same in all lanes of a group."""
        peak = ptx.magnitudes(rWords[start])
        for i in cutlass.range_constexpr(1, WORDS):
            peak = ptx.larger(peak, ptx.magnitudes(rWords[start + i]))
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            peak = ptx.larger(peak, cute.arch.shuffle_sync_bfly(peak, offset=1 << step))
        most = cute.arch.fmax(ptx.larger_half(dtype, peak), LEAST_PEAK, nan=True)  # NaN stays NaN
        # For infinity the remainder would be NaN.
        return ptx.where_infinite(most, most, ptx.quotient(most, Float32(1.0 / FP8_MAX), Float32(FP8_MAX)))

    @cute.jit
    def encode(self, rWords, start: cutlass.Constexpr, dtype: cutlass.Constexpr, form: cutlass.Constexpr, rCodes):
        """Fills rCodes with the row's words in `form`, 4 of e4m3 or 8 of a 16-bit dtype; returns the scale (1 without one)."""
        scale = Float32(1.0)
        if cutlass.const_expr(form == dtype):
            for i in cutlass.range_constexpr(WORDS):
                rCodes[i] = rWords[start + i]
        else:
            rX = cute.make_rmem_tensor(ELEMENTS, Float32)
            self.unpack(rWords, start, dtype, rX)
            if cutlass.const_expr(form == SCALED):
                scale = self.scale_of(rWords, start, dtype)
                inverse = cute.arch.rcp_approx(scale)
                # In a division by infinity the remainder would be NaN, although the quotient is 0.
                divisor = ptx.where_infinite(scale, Float32(0.0), scale)
                for i in cutlass.range_constexpr(ELEMENTS):
                    rX[i] = ptx.quotient(rX[i], inverse, divisor)
            if cutlass.const_expr(form in (SCALED, CAST)):
                for i in cutlass.range_constexpr(ELEMENTS // 4):
                    rCodes[i] = ptx.to_e4m3(rX[4 * i], rX[4 * i + 1], rX[4 * i + 2], rX[4 * i + 3])
            else:
                self.pack(rX, form, rCodes, 0)
        return scale

    @cute.jit
    def store_codes(self, rCodes: cute.Tensor, form: cutlass.Constexpr, address: Int64, lane: Int32):
        """Stores a lane's part of an encoded row that starts at this global address."""
        width = cutlass.const_expr(1 if form in (SCALED, CAST) else 2)  # bytes of a value
        count = cutlass.const_expr(CHUNK * width // 4)  # words of a chunk
        first, second = self.columns_of(lane)
        store(rCodes, 0, count, word_pointer(address + first * width, 4 * count))
        store(rCodes, count, count, word_pointer(address + second * width, 4 * count))

    @cute.jit
    def write_cache(
        self, rWords: cute.Tensor, dtype: cutlass.Constexpr, gCache: cute.Tensor, slot: Any, head: Int32, lane, is_live
    ):
        """Writes the row to slot (page * page_size + offset) of the cache, if it is live and the slot is in [0, 2**31)."""
        rCodes = cute.make_rmem_tensor(WORDS, Uint32)
        scale = self.encode(rWords, 0, dtype, self.form, rCodes)  # executed by all lanes, because it shuffles
        width = cutlass.const_expr(gCache.element_type.width // 8)
        row_bytes = cutlass.const_expr(self.dim * width)
        page_rows = Int32(gCache.shape[1]) // (self.dim + (4 if self.form == SCALED else 0))  # rows x key heads of a page
        row = narrowed(slot)  # memory holds fewer than 2**31 rows
        if is_live and row >= 0:
            page_size = page_rows // self.kv_heads
            page = row // page_size
            index = (row - page * page_size) * self.kv_heads + head
            base = gCache.iterator.toint() + Int64(page) * gCache.stride[0] * width
            self.store_codes(rCodes, self.form, base + Int64(index) * row_bytes, lane)
            if cutlass.const_expr(self.form == SCALED):
                if lane == 0:
                    store_scale(base + Int64(page_rows) * row_bytes + Int64(index) * 4, scale)
