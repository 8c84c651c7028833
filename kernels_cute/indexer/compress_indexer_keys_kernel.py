"""Kernel of compress_indexer_keys.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from gdn.ops.indexer.problem import CompressIndexerKeysParams, CompressIndexerKeysProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake, narrowed
from kernels_cute.indexer.forms import ELEMENTS, WORDS, form_of
from kernels_cute.indexer.rows import IndexerRows, row_offset


def _fakes(problem: CompressIndexerKeysProblem) -> CompressIndexerKeysParams:
    p, tokens, row = problem, cute.sym_int(), (problem.num_kv_heads, problem.head_dim)
    raw_k, ring = [fake(p.dtype, *outer, *row, last=1) for outer in ((tokens,), (None, None))]
    cache, cos_sin = fake(p.cache_dtype, None, None, last=1), fake(p.cos_sin_dtype, None, p.rotary_dim, last=1)
    positions, *slots = [fake(dtype, tokens) for dtype in (p.position_dtype, p.ring_slot_dtype, p.slot_dtype)]
    k_norm = fake(p.k_norm_dtype, p.head_dim, last=1)
    return CompressIndexerKeysParams(raw_k, ring, cache, positions, cos_sin, k_norm, *slots, Float32(1e-6), null_slot=Int64(-1))


class _CompressIndexerKeys(IndexerRows, params=CompressIndexerKeysParams):
    def __init__(self, problem: CompressIndexerKeysProblem, config: Any) -> None:
        super().__init__(problem.head_dim, problem.rotary_dim, config.threads)
        self.warps, self.warp_heads = config.threads // 32, 32 // self.lanes
        self.kv_heads, self.ratio, self.dtype = problem.num_kv_heads, problem.ratio, problem.dtype
        self.zero_centred, self.form = problem.zero_centred, form_of(problem.cache_dtype)

    def blocks(self, params: CompressIndexerKeysParams) -> Any:
        return (params.raw_k.shape[0] + self.warps - 1) // self.warps

    @cute.kernel
    def kernel(self, params: CompressIndexerKeysParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        token = block * self.warps + thread // 32
        if token < params.raw_k.shape[0]:  # the same for a whole warp, as every branch below but those on lanes
            slot, position = Int64(params.ring_slots[token]), narrowed(params.positions[token])
            if slot >= 0 and slot != params.null_slot and position >= 0:
                lane = thread % 32
                if (position + 1) % self.ratio == 0:
                    self.finish_group(params, token, slot, position, lane)
                self.keep_raw_key(params, token, slot, position, lane)

    @cute.jit
    def is_neighbour(self, params: CompressIndexerKeysParams, token: Int32, slot: Int64, position: Int32, distance: Int32):
        """Whether token + distance exists and is the token of the same sequence at position + distance."""
        other = token + distance
        last = params.positions.shape[0] - 1
        is_there = other >= 0 and other <= last
        other = cutlass.max(cutlass.min(other, last), Int32(0))  # loaded in any case, so that the loads overlap
        # Positions are compared in their own width: a position beyond int32 is never a neighbour's.
        own_width = params.positions.element_type
        return is_there and Int64(params.ring_slots[other]) == slot and params.positions[other] == own_width(position + distance)

    @cute.jit
    def extent(self, params, token: Int32, slot: Int64, position: Int32, lane: Int32, sign: cutlass.Constexpr, known: Int32):
        """Number of tokens of the sequence after (sign 1) or before (-1) this one, at least `known`. The whole warp searches."""
        low, size = Int32(known), token + 1 - known
        if cutlass.const_expr(sign > 0):
            size = params.positions.shape[0] - token - known
        while size > 1:
            step = (size + 31) // 32
            is_in = Boolean(False)
            if lane * step < size:
                is_in = self.is_neighbour(params, token, slot, position, sign * (low + lane * step))
            passed = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(is_in)) - 1, Int32(0))
            low += passed * step
            size = cutlass.min(size - passed * step, step)
        return low

    @cute.jit
    def ring_offset(self, slot: Int64, row: Int32, head: Int32, gRing: cute.Tensor):
        return slot * gRing.stride[0] + Int64(row) * gRing.stride[1] + Int64(head) * gRing.stride[2]

    @cute.jit
    def store_raw(self, rWords: cute.Tensor, gRing: cute.Tensor, offset: Int64, lane: Int32):
        self.store_codes(rWords, self.dtype, gRing.iterator.toint() + offset * 2, lane)

    @cute.jit
    def finish_group(self, params: CompressIndexerKeysParams, token: Int32, slot: Int64, position: Int32, warp_lane: Int32):
        """Writes the key of the group that ends with this token, and the ring rows that only this warp may overwrite."""
        lane = warp_lane % self.lanes
        size = Int32(params.ring.shape[1])
        cache_slot = params.slot_mapping[token]
        rHere = cute.make_rmem_tensor(self.ratio, Int32)
        for back in cutlass.range_constexpr(self.ratio):
            rHere[back] = Int32(1)
            if cutlass.const_expr(back > 0):
                if not self.is_neighbour(params, token, slot, position, Int32(-back)):
                    rHere[back] = Int32(0)
        # Number of later tokens of the sequence, where the group began before this call.
        following = Int32(0)
        if rHere[self.ratio - 1] == 0:
            following = self.extent(params, token, slot, position, warp_lane, 1, Int32(0))

        rMembers = cute.make_rmem_tensor(self.ratio * WORDS, Uint32)
        rWords = cute.make_rmem_tensor(WORDS, Uint32)
        rX, rMean = cute.make_rmem_tensor(ELEMENTS, Float32), cute.make_rmem_tensor(ELEMENTS, Float32)
        factors = self.load_factors(params.k_norm, params.cos_sin, position - (self.ratio - 1), lane)
        for first in cutlass.range_constexpr(0, self.kv_heads, self.warp_heads):
            head = first + warp_lane // self.lanes
            is_live = head < self.kv_heads
            head = cutlass.min(head, self.kv_heads - 1)
            for back in cutlass.range_constexpr(self.ratio):
                if rHere[back] != 0:
                    self.load_row(params.raw_k, row_offset(params.raw_k, token - back, head), lane, rMembers, back * WORDS)
                else:
                    row = (position - back) % size
                    self.load_row(params.ring, self.ring_offset(slot, row, head, params.ring), lane, rMembers, back * WORDS)
            rMean.fill(0.0)
            for back in cutlass.range_constexpr(self.ratio - 1, -1, -1):  # the group's first member first
                self.unpack(rMembers, back * WORDS, self.dtype, rX)
                for i in cutlass.range_constexpr(ELEMENTS):
                    rMean[i] += rX[i]
            for i in cutlass.range_constexpr(ELEMENTS):
                if cutlass.const_expr(self.ratio & (self.ratio - 1) == 0):
                    rMean[i] = rMean[i] * (1.0 / self.ratio)
                else:
                    rMean[i] = rMean[i] / float(self.ratio)
            self.pack(rMean, self.dtype, rWords, 0)
            self.norm_and_rotate(rWords, 0, self.dtype, factors, rX, params.eps, lane)
            self.write_cache(rWords, self.dtype, params.cache, cache_slot, head, lane, is_live)

            for back in cutlass.range_constexpr(1, self.ratio):
                later = (following + back) // size * size  # from the member's position to the last one of its ring row
                if is_live and rHere[back] == 0 and later > 0:
                    self.load_row(params.raw_k, row_offset(params.raw_k, token + later - back, head), lane, rWords, 0)
                    row = (position - back) % size
                    self.store_raw(rWords, params.ring, self.ring_offset(slot, row, head, params.ring), lane)

    @cute.jit
    def keep_raw_key(self, params: CompressIndexerKeysParams, token: Int32, slot: Int64, position: Int32, warp_lane: Int32):
        """Stores the token's raw key in the ring, unless a later token of this call takes the row, or another warp writes it."""
        lane = warp_lane % self.lanes
        size = Int32(params.ring.shape[1])
        is_kept = not self.is_neighbour(params, token, slot, position, size)
        reach = size - self.ratio + 1  # closer to the sequence's first token, no row belongs to the group across the start
        is_far = self.is_neighbour(params, token, slot, position, -reach)
        if is_kept and is_far:
            distance = self.extent(params, token, slot, position, warp_lane, -1, reach)
            before = (position - distance) % self.ratio  # members of that group from before this call
            rest = distance % size
            if rest > 0 and size - rest <= before:
                is_kept = Boolean(False)
        if is_kept:
            rWords = cute.make_rmem_tensor(WORDS, Uint32)
            for first in cutlass.range_constexpr(0, self.kv_heads, self.warp_heads):
                head = first + warp_lane // self.lanes
                if head < self.kv_heads:
                    self.load_row(params.raw_k, row_offset(params.raw_k, token, head), lane, rWords, 0)
                    self.store_raw(rWords, params.ring, self.ring_offset(slot, position % size, head, params.ring), lane)


def library(problem: CompressIndexerKeysProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _CompressIndexerKeys(problem, config), _fakes(problem))
