"""Kernel of prepare_indexer.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from gdn.ops.indexer.problem import PrepareIndexerParams, PrepareIndexerProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.indexer.forms import CAST, ELEMENTS, SCALED, WORDS, form_of
from kernels_cute.indexer.rows import IndexerRows, row_offset, store_scale


def _fakes(problem: PrepareIndexerProblem) -> PrepareIndexerParams:
    p, tokens, heads, dim = problem, cute.sym_int(), problem.num_heads, problem.head_dim
    q, q_out = [fake(dtype, tokens, heads, dim, last=1) for dtype in (p.dtype, p.q_out_dtype)]
    k, weights = fake(p.k_dtype, tokens, p.num_kv_heads, dim, last=1), fake(p.weights_dtype, tokens, heads)
    positions, slot_mapping = [fake(dtype, tokens) for dtype in (p.position_dtype, p.slot_dtype)]
    cos_sin, cache = fake(p.cos_sin_dtype, None, p.rotary_dim, last=1), fake(p.cache_dtype, None, None, last=1)
    q_norm, k_norm = [fake(dtype, dim, last=1) for dtype in (p.q_norm_dtype, p.k_norm_dtype)]
    weights_out = fake("float32" if p.folds_weights else None, tokens, heads, last=1)
    v = fake(p.k_dtype if p.has_values else None, tokens, p.num_kv_heads, dim, last=1)
    v_cache = fake(p.cache_dtype if p.has_values else None, None, None, last=1)
    keys = (q_norm, k_norm, cache, slot_mapping)
    return PrepareIndexerParams(q, k, weights, positions, cos_sin, *keys, q_out, weights_out, v, v_cache, eps=Float32(1e-6))


class _PrepareIndexer(IndexerRows, params=PrepareIndexerParams):
    def __init__(self, problem: PrepareIndexerProblem, config: Any) -> None:
        super().__init__(problem.head_dim, problem.rotary_dim, config.threads)
        self.rows = config.rows
        self.heads, self.kv_heads = problem.num_heads, problem.num_kv_heads
        self.parts = problem.num_heads // config.rows  # groups of lanes per token
        self.dtype, self.k_dtype, self.zero_centred = problem.dtype, problem.k_dtype, problem.zero_centred
        is_fp8 = problem.q_out_dtype == "float8_e4m3fn"
        self.query_form = SCALED if problem.folds_weights else CAST if is_fp8 else problem.dtype
        self.form = form_of(problem.cache_dtype)

    def blocks(self, params: PrepareIndexerParams) -> Any:
        query_blocks = (params.q.shape[0] * self.parts + self.groups - 1) // self.groups
        return self.key_blocks(params.q.shape[0]) + query_blocks

    @cute.jit
    def key_blocks(self, tokens: Int32):
        return (tokens * self.kv_heads + self.groups - 1) // self.groups

    @cute.kernel
    def kernel(self, params: PrepareIndexerParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        group, lane = thread // self.lanes, thread % self.lanes
        key_blocks = self.key_blocks(params.q.shape[0])
        if block < key_blocks:
            if cutlass.const_expr(self.kv_heads > 0):
                self.write_key(params, block * self.groups + group, lane)
        else:
            item = (block - key_blocks) * self.groups + group
            self.prepare_query(params, item, lane)

    @cute.jit
    def write_key(self, params: PrepareIndexerParams, item: Int32, lane: Int32):
        token, head, is_live = self.live_item(item, params.k.shape[0], self.kv_heads)
        position, slot = params.positions[token], params.slot_mapping[token]
        rWords, rX = cute.make_rmem_tensor(WORDS, Uint32), cute.make_rmem_tensor(ELEMENTS, Float32)
        self.load_row(params.k, row_offset(params.k, token, head), lane, rWords, 0)
        rValues = cute.make_rmem_tensor(WORDS, Uint32)
        if cutlass.const_expr(params.v is not None):  # asked for before anything waits
            self.load_row(params.v, row_offset(params.v, token, head), lane, rValues, 0)
        factors = self.load_factors(params.k_norm, params.cos_sin, position, lane)
        self.norm_and_rotate(rWords, 0, self.k_dtype, factors, rX, params.eps, lane)
        self.write_cache(rWords, self.k_dtype, params.cache, slot, head, lane, is_live)
        if cutlass.const_expr(params.v is not None):
            self.write_cache(rValues, self.k_dtype, params.v_cache, slot, head, lane, is_live)

    @cute.jit
    def prepare_query(self, params: PrepareIndexerParams, item: Int32, lane: Int32):
        token, part, is_live = self.live_item(item, params.q.shape[0], self.parts)
        position = params.positions[token]
        rRows = cute.make_rmem_tensor(self.rows * WORDS, Uint32)
        rWeights = cute.make_rmem_tensor(self.rows, Float32)
        for u in cutlass.range_constexpr(self.rows):
            head = part + u * self.parts
            self.load_row(params.q, row_offset(params.q, token, head), lane, rRows, u * WORDS)
        rWeights.fill(1.0)
        if cutlass.const_expr(params.weights is not None):
            for u in cutlass.range_constexpr(self.rows):
                rWeights[u] = params.weights[token, part + u * self.parts].to(Float32)
        factors = self.load_factors(params.q_norm, params.cos_sin, position, lane)
        rX, rCodes = cute.make_rmem_tensor(ELEMENTS, Float32), cute.make_rmem_tensor(WORDS, Uint32)
        for u in cutlass.range_constexpr(self.rows):
            self.norm_and_rotate(rRows, u * WORDS, self.dtype, factors, rX, params.eps, lane)
            scale = self.encode(rRows, u * WORDS, self.dtype, self.query_form, rCodes)
            index = Int64(token) * self.heads + part + u * self.parts
            if is_live:
                width = cutlass.const_expr(params.q_out.element_type.width // 8)
                self.store_codes(rCodes, self.query_form, params.q_out.iterator.toint() + index * (self.dim * width), lane)
                if cutlass.const_expr(self.query_form == SCALED):
                    if lane == 0:
                        weight = rWeights[u] * (scale * self.dim**-0.5)
                        store_scale(params.weights_out.iterator.toint() + index * 4, weight)


def library(problem: PrepareIndexerProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _PrepareIndexer(problem, config), _fakes(problem))
