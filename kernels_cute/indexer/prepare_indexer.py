"""One step of the indexer between its projection and its logits, in one kernel:

    q = rope(rms_norm(q)), k = rope(rms_norm(k))      float32, rounded once to the input's dtype
    q to e4m3 with a scale per head, weights_out = weights * q_scale / sqrt(D); k into the cache, in the cache's form

Tensors: q [L, H, D], k [L, kv_heads, D] bfloat16 | float16, weights [L, H], positions, slot_mapping [L], cos_sin
[max_positions, rotary_dim], cache [pages, elements of a page] -> q_out [L, H, D], weights_out [L, H] float32.
`gdn.problems.PrepareIndexerParams` is the contract; `rows.py` describes a row in registers.

The first blocks write keys, one row per group of lanes: they wait longest, for slots and pages. The others prepare queries:
a group of lanes takes `rows` heads of one token, loads them all, and reads the token's angles once. Heads are dealt so that
the groups of a warp load neighbouring ones.
"""

from dataclasses import dataclass
from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from gdn.device import DeviceSpec
from gdn.problems import PrepareIndexerParams, PrepareIndexerProblem
from kernels_cute.common.memory import FLOAT_DTYPES, fake
from kernels_cute.indexer import rows as _indexer_rows
from kernels_cute.indexer.rows import CAST, ELEMENTS, SCALED, WORDS, IndexerRows, form_of


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # heads per group of lanes: more bytes in flight, more registers, fewer blocks


def refusal(problem: PrepareIndexerProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    refused = _indexer_rows.refusal(
        problem.head_dim,
        {"q": problem.dtype, "k": problem.k_dtype},
        problem.cache_dtype,
        {"positions": problem.position_dtype, "slot_mapping": problem.slot_dtype},
    )
    if refused is not None:
        return refused
    others = {
        "weights": problem.weights_dtype,
        "cos_sin": problem.cos_sin_dtype,
        "q_norm": problem.q_norm_dtype,
        "k_norm": problem.k_norm_dtype,
    }
    for name, dtype in others.items():
        if dtype is not None and dtype not in FLOAT_DTYPES:
            return f"requires {name} of float32, bfloat16 or float16, got {dtype}"
    if problem.num_heads < 1:
        return f"requires at least one head, got {problem.num_heads}"
    return _indexer_rows.rotation_refusal(problem.rotary_dim, problem.head_dim)


def fits(problem: PrepareIndexerProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled and launched."""
    return config.threads in (32, 64, 128, 256) and config.rows in (1, 2, 4) and problem.num_heads % config.rows == 0


def configs(problem: PrepareIndexerProblem, device: DeviceSpec) -> list[Config]:
    """Every feasible configuration."""
    space = [Config(threads, rows) for threads in (32, 64, 128, 256) for rows in (1, 2, 4)]
    return [config for config in space if fits(problem, config, device)]


def default_config(problem: PrepareIndexerProblem, device: DeviceSpec) -> Config:
    """The most heads per group that leave every SM a full load of threads, then blocks small enough to reach every SM."""
    lanes = _indexer_rows.lanes_of(problem.head_dim)
    threads_wanted = problem.num_tokens * problem.num_heads * lanes
    for rows in (4, 2):
        if problem.num_heads % rows == 0 and threads_wanted >= rows * 1024 * device.num_sms:
            return Config(128, rows)
    return Config(128 if threads_wanted >= 256 * device.num_sms else 32, 1)


def workspace_bytes(problem: PrepareIndexerProblem, config: Config) -> int:
    return 0


def compile(problem: PrepareIndexerProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    return {"prepare_indexer": build.library("prepare_indexer", _PrepareIndexer(problem, config), *_arguments(problem))}


def launch(compiled: Any, params: PrepareIndexerParams) -> None:
    compiled.functions["prepare_indexer"](*params)


def _arguments(problem: PrepareIndexerProblem) -> PrepareIndexerParams:
    """Fake tensors and scalars to compile for."""
    tokens, heads, dim = cute.sym_int(), problem.num_heads, problem.head_dim
    kv_heads, folds = problem.num_kv_heads, problem.folds_weights
    return PrepareIndexerParams(
        q=fake(problem.dtype, tokens, heads, dim, last=1),
        k=fake(str(problem.k_dtype), tokens, kv_heads, dim, last=1) if kv_heads else None,
        weights=fake(str(problem.weights_dtype), tokens, heads) if problem.weights_dtype is not None else None,
        positions=fake(problem.position_dtype, tokens),
        cos_sin=fake(problem.cos_sin_dtype, cute.sym_int(), problem.rotary_dim, last=1),
        q_norm=fake(problem.q_norm_dtype, dim, last=1),
        k_norm=fake(str(problem.k_norm_dtype), dim, last=1) if kv_heads else None,
        cache=fake(str(problem.cache_dtype), cute.sym_int(), cute.sym_int(), last=1) if kv_heads else None,
        slot_mapping=fake(str(problem.slot_dtype), tokens) if kv_heads else None,
        q_out=fake(problem.q_out_dtype, tokens, heads, dim, last=1),
        weights_out=fake("float32", tokens, heads, last=1) if folds else None,
        eps=Float32(1e-6),
    )


class _PrepareIndexer(IndexerRows):
    """The kernel for one problem and configuration; attributes are compile-time constants."""

    def __init__(self, problem: PrepareIndexerProblem, config: Config) -> None:
        super().__init__(problem.head_dim, problem.rotary_dim, config.threads)
        self.rows = config.rows
        self.heads, self.kv_heads = problem.num_heads, problem.num_kv_heads
        self.parts = problem.num_heads // config.rows  # groups of lanes per token
        self.dtype, self.k_dtype, self.zero_centred = problem.dtype, problem.k_dtype, problem.zero_centred
        is_fp8 = problem.q_out_dtype == "float8_e4m3fn"
        self.form = SCALED if problem.folds_weights else CAST if is_fp8 else problem.dtype
        self.key_form = form_of(problem.cache_dtype)

    @cute.jit
    def __call__(self, *values: Any):
        params, stream = PrepareIndexerParams(*values[:-1]), values[-1]
        query_blocks = (params.q.shape[0] * self.parts + self.groups - 1) // self.groups
        self.kernel(params).launch(
            grid=[self.key_blocks(params.q.shape[0]) + query_blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.jit
    def key_blocks(self, tokens: Int32):
        return (tokens * self.kv_heads + self.groups - 1) // self.groups

    @cute.kernel
    def kernel(self, params: PrepareIndexerParams):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
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
        count = params.k.shape[0] * self.kv_heads
        is_live = item < count
        if item >= count:  # repeats the last row, because all lanes of a warp shuffle
            item = count - 1
        token, head = item // self.kv_heads, item % self.kv_heads
        position, slot = params.positions[token], params.slot_mapping[token]
        rWords = cute.make_rmem_tensor(WORDS, Uint32)
        rX = cute.make_rmem_tensor(ELEMENTS, Float32)
        rGain = cute.make_rmem_tensor(ELEMENTS, Float32)
        rCos = cute.make_rmem_tensor(ELEMENTS // 2, Float32)
        rSin = cute.make_rmem_tensor(ELEMENTS // 2, Float32)
        self.load_row(params.k, Int64(token) * params.k.stride[0] + Int64(head) * params.k.stride[1], lane, rWords, 0)
        self.load_gain(params.k_norm, lane, self.zero_centred, rGain)
        self.load_angles(params.cos_sin, position, lane, rCos, rSin)
        self.unpack(rWords, 0, self.k_dtype, rX)
        self.norm(rX, rGain, params.eps)
        self.rotate(rX, rCos, rSin, lane)
        self.pack(rX, self.k_dtype, rWords, 0)
        self.write_cache(rWords, self.k_dtype, params.cache, self.key_form, self.kv_heads, slot, head, lane, is_live)

    @cute.jit
    def prepare_query(self, params: PrepareIndexerParams, item: Int32, lane: Int32):
        count = params.q.shape[0] * self.parts
        is_live = item < count
        if item >= count:
            item = count - 1
        token, part = item // self.parts, item % self.parts
        position = params.positions[token]
        rRows = cute.make_rmem_tensor(self.rows * WORDS, Uint32)
        rWeights = cute.make_rmem_tensor(self.rows, Float32)
        rGain = cute.make_rmem_tensor(ELEMENTS, Float32)
        rCos = cute.make_rmem_tensor(ELEMENTS // 2, Float32)
        rSin = cute.make_rmem_tensor(ELEMENTS // 2, Float32)
        rX = cute.make_rmem_tensor(ELEMENTS, Float32)
        rCodes = cute.make_rmem_tensor(WORDS, Uint32)
        for u in cutlass.range_constexpr(self.rows):
            head = part + u * self.parts
            self.load_row(params.q, Int64(token) * params.q.stride[0] + Int64(head) * params.q.stride[1], lane, rRows, u * WORDS)
        rWeights.fill(1.0)
        if cutlass.const_expr(params.weights is not None):
            for u in cutlass.range_constexpr(self.rows):
                rWeights[u] = params.weights[token, part + u * self.parts].to(Float32)
        self.load_gain(params.q_norm, lane, self.zero_centred, rGain)
        self.load_angles(params.cos_sin, position, lane, rCos, rSin)
        for u in cutlass.range_constexpr(self.rows):
            self.unpack(rRows, u * WORDS, self.dtype, rX)
            self.norm(rX, rGain, params.eps)
            self.rotate(rX, rCos, rSin, lane)
            self.pack(rX, self.dtype, rRows, u * WORDS)
            scale = self.encode(rRows, u * WORDS, self.dtype, self.form, rCodes)
            place = Int64(token) * self.heads + part + u * self.parts
            if is_live:
                width = cutlass.const_expr(params.q_out.element_type.width // 8)
                self.store_codes(rCodes, self.form, params.q_out.iterator.toint() + place * (self.dim * width), lane)
                if cutlass.const_expr(self.form == SCALED):
                    if lane == 0:
                        target = cute.make_ptr(
                            Float32, params.weights_out.iterator.toint() + place * 4, cute.AddressSpace.gmem, assumed_align=4
                        )
                        target[0] = rWeights[u] * (scale * self.dim**-0.5)
