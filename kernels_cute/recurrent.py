"""Gated delta rule, token by token: decode, speculative decoding and short ragged sequences.

Per state head, S [K, V] float32 in registers over all tokens of a sequence, a = exp(g):

    u = beta * (v - a * S^T k)
    o = a * S^T q + u * (k . q)            equal to S_new^T q, and needs no second pass over S
    S = a * S + k u^T

q (times scale) and k are divided by their L2 norms on request; the norms are row scales, so they multiply the dot products
and u, never the registers of q and k.

Tensors: q [L, Hq, K], k [L, Hk, K], v and out [L, heads, V] bfloat16 | float16; g, beta [L, HS]; state [slots, HS, V, K] or
[slots, HS, K, V] float32 | bfloat16. `gdn.problems.RecurrentProblem` is the contract.

A block owns (sequence, state head, block_v columns of V). `lanes` threads share the K entries of `rows` columns each, so a
dot product is log2(lanes) shuffles and nothing passes through shared memory. A thread's part of the state is loaded at once
(rows * K / lanes values in flight) and every byte of it moves once each way, past L1 and out of L2 first. q, k, v and the
gates of the next token are loaded while the current one is computed; those of the first token before the state's slot is
even known.
"""

from dataclasses import dataclass, replace
from typing import Any

from kernels_cute import _build

# isort: split
import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import make_fake_tensor

from gdn.device import DeviceSpec
from gdn.problems import DTYPE_BYTES, RecurrentProblem
from kernels_cute._memory import CUTE_DTYPES, fake

_MAX_STATE_REGISTERS = 64  # state values a thread may hold
_OTHER_REGISTERS = 50  # of a thread: addresses, gates, counters, and what alignment wastes
_RESIDENT = (512, 384, 256)
_GATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block; more share one set of index loads, fewer make more blocks
    lanes: int  # threads that share one column of V: each holds K / lanes of its entries
    rows: int  # columns of V per thread: more bytes in flight and fewer shuffles per byte, more registers
    resident: int  # threads an SM must be able to hold: caps a thread at 65536 / resident registers

    @property
    def block_v(self) -> int:
        """Columns of V per block."""
        return self.threads // self.lanes * self.rows


def refusal(problem: RecurrentProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if k % 4 or v % 4 or not 4 <= k <= 256 or not 4 <= v <= 256:
        return f"requires head dims that are multiples of 4 up to 256, got K={k}, V={v}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"requires q, k, v of bfloat16 or float16, got {problem.dtype}"
    if problem.state_dtype not in ("float32", "bfloat16"):
        return f"requires a state of float32 or bfloat16, got {problem.state_dtype}"
    for name, dtype in (("g", problem.gate_dtype), ("beta", problem.beta_dtype)):
        if dtype is not None and dtype not in _GATE_DTYPES:
            return f"requires {name} of float32, bfloat16 or float16, got {dtype}"
    for heads in (problem.num_q_heads, problem.num_k_heads, problem.num_v_heads):
        if problem.num_state_heads % heads:
            return f"requires head counts that divide {problem.num_state_heads}, got {heads}"
    if problem.has_parent:
        return "requires drafts in a chain, got parent_token (a tree)"
    if problem.has_rounding:
        return "requires rounding to nearest, got rounding_seed"
    return None


def _k_vector(problem: RecurrentProblem) -> int:
    """Consecutive K entries of a thread: a 16-byte load of the state where K is its last dim, else 8 bytes of q and k."""
    if problem.state_v_first and problem.state_dtype == "bfloat16" and problem.head_k_dim % 8 == 0:
        return 8
    return 4


def _k_per_thread(problem: RecurrentProblem, lanes: int) -> int:
    vector = _k_vector(problem)
    return -(-problem.head_k_dim // (lanes * vector)) * vector


def _registers(problem: RecurrentProblem, config: Config) -> int:
    """Estimate of the registers that a thread cannot do without."""
    entries = _k_per_thread(problem, config.lanes)
    per_entry = 2 * entries  # k; the next token's q and k, two in a register
    per_column = 9 * config.rows // 2 + 3  # sums of S k and S q, u, v, the next token's v; k q and two norms
    masked = config.lanes * entries != problem.head_k_dim or problem.head_v_dim % config.block_v != 0
    write_slots = problem.write_every_token and problem.has_final_indices and problem.use_gate  # addresses beside softplus
    return config.rows * entries + per_entry + per_column + 4 * masked + 2 * write_slots + _OTHER_REGISTERS


def _most_resident(problem: RecurrentProblem, threads: int, lanes: int, rows: int, device: DeviceSpec) -> Config | None:
    """With the tightest cap on registers that the estimate allows."""
    configs = (Config(threads, lanes, rows, resident) for resident in _RESIDENT)
    return next((config for config in configs if fits(problem, config, device)), None)


def fits(problem: RecurrentProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled, without spills, and launched."""
    if config.lanes not in (4, 8, 16, 32) or config.threads not in (32, 64, 128, 256):
        return False
    if config.resident not in _RESIDENT or config.resident % config.threads:
        return False
    if config.rows not in (1, 2, 4, 8) or config.rows > config.lanes or problem.head_v_dim % config.rows:
        return False
    if config.lanes * _k_vector(problem) >= 2 * problem.head_k_dim and config.lanes > 4:
        return False  # half of the lanes would hold nothing
    if _k_per_thread(problem, config.lanes) * config.rows > _MAX_STATE_REGISTERS:
        return False
    if _registers(problem, config) > min(device.registers_per_sm // config.resident // 8 * 8, 255):
        return False
    return config.block_v < 2 * problem.head_v_dim or config.threads == 32


def _few_columns(problem: RecurrentProblem, block_v: int, device: DeviceSpec) -> bool:
    """Whether blocks of block_v columns would not give every SM two."""
    columns = max(problem.num_sequences, 1) * problem.num_state_heads * problem.head_v_dim
    return columns < 2 * device.num_sms * block_v


def configs(problem: RecurrentProblem, device: DeviceSpec) -> list[Config]:
    """The feasible configurations worth measuring: 8 to 16 entries of K a thread, and all that fit into an SM."""
    threads = (32, 64, 128) if _few_columns(problem, 64, device) else (64, 128, 256)
    lanes = [n for n in (4, 8, 16, 32) if n == 4 or 8 <= _k_per_thread(problem, n)]
    lanes = [n for n in lanes if _k_per_thread(problem, n) <= 16] or lanes[-1:]
    rows = (1, 2, 4) if problem.state_v_first else (1, 2, 4, 8)  # 8 would only widen accesses along V
    found = [_most_resident(problem, t, n, r, device) for t in threads for n in lanes for r in rows]
    space = [config for config in found if config is not None]
    # The compiler overlaps more of a large state where it has more registers than it needs.
    roomy = [replace(c, resident=256) for c in space if c.resident == 384 and c.threads < 256]
    return space + [config for config in roomy if fits(problem, config, device)]


def default_config(problem: RecurrentProblem, device: DeviceSpec) -> Config:
    """As much state per thread as registers for 384 threads an SM allow, then smaller blocks until every SM has two."""
    lanes = 16 if problem.head_k_dim > 128 else 8
    while lanes > 4 and lanes * _k_vector(problem) >= 2 * problem.head_k_dim:
        lanes //= 2
    rows = next(r for r in (8, 4, 2, 1) if r == 1 or fits(problem, Config(32, lanes, r, 384), device))
    # Fewer columns a thread would narrow the loads of a K-first state below 16 bytes.
    narrow = [r for r in (4, 2, 1) if r < rows and problem.state_v_first]
    shapes = [(128, rows), (64, rows), *((64, r) for r in narrow), *((32, r) for r in (rows, *narrow))]
    found = [_most_resident(problem, threads, lanes, r, device) for threads, r in shapes]
    feasible = [config for config in found if config is not None]
    enough = [config for config in feasible if not _few_columns(problem, config.block_v, device)]
    return enough[0] if enough else min(feasible, key=lambda config: config.block_v)


def workspace_bytes(problem: RecurrentProblem, config: Config) -> int:
    return 0


def compile(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    return {"recurrent": _build.library("recurrent", _Recurrent(problem, config), *_arguments(problem))}


def launch(
    compiled: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    final_state: Any,
    final_state_indices: Any,
    cu_seqlens: Any,
    parent_token: Any,
    rounding_seed: Any,
    out: Any,
    scale: float,
    null_slot: int,
) -> None:
    problem: RecurrentProblem = compiled.problem
    if q.shape[0] == 0 or cu_seqlens.shape[0] == 1:  # an empty tensor has no address to pass
        _launch_empty(problem, initial_state, final_state, out)
        return
    absent = cu_seqlens  # stands in for every tensor that the problem's flags leave out
    pool = initial_state if problem.has_initial_state else final_state
    compiled.functions["recurrent"](
        q,
        k,
        v,
        absent if problem.gate_dtype is None else g,
        absent if problem.beta_dtype is None else beta,
        A_log if problem.use_gate else absent,
        dt_bias if problem.use_gate else absent,
        pool if _has_pool(problem) else absent,
        state_indices if problem.pooled else absent,
        num_accepted_tokens if problem.has_accepted else absent,
        final_state if _has_new_final(problem) else absent,
        final_state_indices if problem.has_final_indices else absent,
        cu_seqlens,
        out,
        scale,
        null_slot,
    )


def _launch_empty(problem: RecurrentProblem, initial_state: Any, final_state: Any, out: Any) -> None:
    """No token, or no sequence: nothing to compute, the states of unpooled sequences pass through."""
    out.zero_()
    if _has_new_final(problem):
        if problem.has_initial_state:
            final_state.copy_(initial_state)
        else:
            final_state.zero_()


def _has_new_final(problem: RecurrentProblem) -> bool:
    """The final state is a float32 tensor of its own (which may still be initial_state itself)."""
    return problem.has_final_state and not problem.pooled


def _has_pool(problem: RecurrentProblem) -> bool:
    """A tensor that states are read from, and with indices written to."""
    return problem.has_initial_state or problem.pooled


def _arguments(problem: RecurrentProblem) -> list[Any]:
    """Fake tensors and scalars in the order of the compiled function."""
    K, V, HS = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    num_tokens, num_offsets = cute.sym_int(), cute.sym_int()

    def offsets() -> Any:
        return fake(problem.cu_seqlens_dtype, num_offsets, last=1)

    def per_head() -> Any:
        return fake("float32", HS, last=1) if problem.use_gate else offsets()

    def gate(dtype: str | None) -> Any:
        return offsets() if dtype is None else fake(dtype, num_tokens, HS)

    def state(dtype: str) -> Any:
        inner = (V, K) if problem.state_v_first else (K, V)
        strides = (cute.sym_int64(), cute.sym_int64(), inner[1], 1)
        return make_fake_tensor(CUTE_DTYPES[dtype], (cute.sym_int64(), HS, *inner), stride=strides)

    def indices(present: bool) -> Any:
        if not present:
            return offsets()
        shape = (cute.sym_int(), cute.sym_int()) if problem.write_every_token else (cute.sym_int(),)
        return fake(str(problem.index_dtype), *shape)

    return [
        fake(problem.dtype, num_tokens, problem.num_q_heads, K, last=1),
        fake(problem.dtype, num_tokens, problem.num_k_heads, K, last=1),
        fake(problem.dtype, num_tokens, problem.num_v_heads, V, last=1),
        gate(problem.gate_dtype),
        gate(problem.beta_dtype),
        per_head(),
        per_head(),
        state(problem.state_dtype) if _has_pool(problem) else offsets(),
        indices(problem.pooled),
        fake("int32", cute.sym_int()) if problem.has_accepted else offsets(),
        state("float32") if _has_new_final(problem) else offsets(),
        indices(problem.has_final_indices),
        offsets(),
        fake(problem.dtype, num_tokens, HS, V, last=1),
        cutlass.Float32(1.0),
        cutlass.Int64(-1),
    ]


class _Recurrent:
    """The kernel for one problem and configuration; attributes are compile-time constants."""

    def __init__(self, problem: RecurrentProblem, config: Config) -> None:
        self.threads, self.lanes, self.rows = config.threads, config.lanes, config.rows
        self.min_blocks = config.resident // config.threads
        self.K, self.V, self.HS = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
        self.q_group = self.HS // problem.num_q_heads
        self.k_group = self.HS // problem.num_k_heads
        self.v_group = self.HS // problem.num_v_heads
        self.v_first, self.pooled, self.every_token = problem.state_v_first, problem.pooled, problem.write_every_token
        self.read_state = problem.has_initial_state
        self.write_pool = problem.has_final_state and problem.pooled
        self.write_new = _has_new_final(problem)
        self.stores_after_loop = self.write_new or self.write_pool and not self.every_token
        self.has_accepted, self.has_final_indices = problem.has_accepted, problem.has_final_indices
        self.has_gate, self.has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
        self.use_gate, self.use_sigmoid = problem.use_gate and self.has_gate, problem.use_beta_sigmoid
        self.use_l2norm = problem.use_qk_l2norm
        self.dtype = CUTE_DTYPES[problem.dtype]
        self.gate_dtype = CUTE_DTYPES[problem.gate_dtype or "float32"]
        self.beta_dtype = CUTE_DTYPES[problem.beta_dtype or "float32"]

        self.vec = _k_vector(problem)
        self.entries = _k_per_thread(problem, self.lanes)  # K entries of a thread
        self.chunks = self.entries // self.vec
        self.v_tiles = -(-self.V // config.block_v)
        self.groups = self.threads // self.lanes
        self.groups_per_warp = 32 // self.lanes
        # V first: the lanes of a group are neighbours, so that a group reads whole lines of one column's K entries. K
        # first: neighbouring lanes hold neighbouring columns.
        self.lane_step = 1 if self.v_first else self.groups_per_warp
        self.mask_k = self.chunks * self.lanes * self.vec != self.K
        self.mask_v = self.V % config.block_v != 0
        self.width = self.vec if self.v_first else min(self.rows, 16 // DTYPE_BYTES[problem.state_dtype])
        self.new_width = min(self.width, 4)
        self.num_sums = 2 * self.rows + (3 if self.use_l2norm else 1)  # S.k, S.q per column; k.q; k.k and q.q for norms

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        pool: cute.Tensor,
        state_indices: cute.Tensor,
        num_accepted_tokens: cute.Tensor,
        final_state: cute.Tensor,
        final_state_indices: cute.Tensor,
        cu_seqlens: cute.Tensor,
        out: cute.Tensor,
        scale: cutlass.Float32,
        null_slot: cutlass.Int64,
        stream: CUstream,
    ):
        blocks = (cu_seqlens.shape[0] - 1) * (self.HS * self.v_tiles)
        self.kernel(
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            pool,
            state_indices,
            num_accepted_tokens,
            final_state,
            final_state_indices,
            cu_seqlens,
            out,
            scale,
            null_slot,
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=0,  # none is used; without a value the DSL asks a device for its limit
        )

    @cute.kernel
    def kernel(
        self,
        gQ: cute.Tensor,
        gK: cute.Tensor,
        gV: cute.Tensor,
        gG: cute.Tensor,
        gBeta: cute.Tensor,
        gALog: cute.Tensor,
        gBias: cute.Tensor,
        gPool: cute.Tensor,
        gIndices: cute.Tensor,
        gAccepted: cute.Tensor,
        gFinal: cute.Tensor,
        gFinalIndices: cute.Tensor,
        gOffsets: cute.Tensor,
        gOut: cute.Tensor,
        scale: cutlass.Float32,
        null_slot: cutlass.Int64,
    ):
        rows, entries = cutlass.const_expr(self.rows), cutlass.const_expr(self.entries)
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        num_sequences = gOffsets.shape[0] - 1
        sequence = block // (self.HS * self.v_tiles)
        head = block // self.v_tiles % self.HS
        if cutlass.const_expr(self.v_first):
            lane = thread % self.lanes
            group = thread // self.lanes
        else:
            lane = thread % 32 // self.groups_per_warp
            group = thread // 32 * self.groups_per_warp + thread % self.groups_per_warp
        v_start = (block % self.v_tiles * self.groups + group) * rows

        rState = cute.make_rmem_tensor(rows * entries, cutlass.Float32)
        rQNext = cute.make_rmem_tensor(entries, self.dtype)
        rKNext = cute.make_rmem_tensor(entries, self.dtype)
        rVNext = cute.make_rmem_tensor(rows, self.dtype)
        rGNext = cute.make_rmem_tensor(1, self.gate_dtype)
        rBetaNext = cute.make_rmem_tensor(1, self.beta_dtype)
        rK = cute.make_rmem_tensor(entries, cutlass.Float32)
        rV = cute.make_rmem_tensor(rows, cutlass.Float32)
        rSums = cute.make_rmem_tensor(self.num_sums, cutlass.Float32)
        rU = cute.make_rmem_tensor(rows, cutlass.Float32)
        rState.fill(0.0)
        rQNext.fill(0.0)
        rKNext.fill(0.0)
        rVNext.fill(0.0)
        rGNext.fill(0.0)
        rBetaNext.fill(0.0)

        begin = cutlass.Int32(gOffsets[sequence])
        count = cutlass.Int32(gOffsets[sequence + 1]) - begin
        written_tokens = cutlass.Int32(gOffsets[num_sequences])
        if count < 0:
            count = cutlass.Int32(0)
        if count > 0:
            self.load_token(begin, head, lane, v_start, gQ, gK, gV, gG, gBeta, rQNext, rKNext, rVNext, rGNext, rBetaNext)

        # The slot to read. A padding sequence has none: its rows become zero and nothing else happens.
        read_slot = cutlass.Int64(sequence)
        live_count = count
        if cutlass.const_expr(self.pooled):
            if cutlass.const_expr(self.every_token):
                accepted = cutlass.Int32(1)
                if cutlass.const_expr(self.has_accepted):
                    accepted = gAccepted[sequence]
                read_slot = null_slot
                if accepted >= 1:
                    if accepted <= gIndices.shape[1]:
                        read_slot = cutlass.Int64(gIndices[sequence, accepted - 1])
            else:
                read_slot = cutlass.Int64(gIndices[sequence])
            if read_slot <= null_slot:
                live_count = cutlass.Int32(0)

        if cutlass.const_expr(self.read_state):
            if cutlass.const_expr(self.pooled):
                if live_count > 0:
                    self.load_state(read_slot, head, lane, v_start, gPool, rState)
            else:
                self.load_state(read_slot, head, lane, v_start, gPool, rState)

        minus_decay = cutlass.Float32(0.0)
        bias = cutlass.Float32(0.0)
        if cutlass.const_expr(self.use_gate):
            minus_decay = -cute.math.exp(gALog[head])
            bias = gBias[head]

        # Zero rows, while the state is on its way: after the tokens, their bounds would have taken registers all along.
        zero = cutlass.Float32(0.0)
        for t in cutlass.range(live_count, count, unroll=1):
            self.store_out(begin + t, head, lane, v_start, zero, gOut)
        # Rows beyond the last sequence are dealt to all blocks of the head.
        for t in cutlass.range(written_tokens + sequence, gOut.shape[0], num_sequences, unroll=1):
            self.store_out(t, head, lane, v_start, zero, gOut)

        # Counted in tokens of the batch: counted from 0, the compiler peels the first token off and spills.
        for token in cutlass.range(begin, begin + live_count, unroll=1):
            for r in cutlass.range_constexpr(rows):
                rV[r] = rVNext[r].to(cutlass.Float32)
            alpha = cutlass.Float32(1.0)
            if cutlass.const_expr(self.has_gate):
                alpha = self.decay(rGNext[0].to(cutlass.Float32), minus_decay, bias)
            beta = cutlass.Float32(1.0)
            if cutlass.const_expr(self.has_beta):
                beta = rBetaNext[0].to(cutlass.Float32)
                if cutlass.const_expr(self.use_sigmoid):
                    beta = 1.0 / (1.0 + cute.math.exp(-beta))

            rSums.fill(0.0)
            for i in cutlass.range_constexpr(entries):
                q_value = rQNext[i].to(cutlass.Float32)
                k_value = rKNext[i].to(cutlass.Float32)
                rK[i] = k_value
                rSums[2 * rows] += q_value * k_value
                if cutlass.const_expr(self.use_l2norm):
                    rSums[2 * rows + 1] += k_value * k_value
                    rSums[2 * rows + 2] += q_value * q_value
                for r in cutlass.range_constexpr(rows):
                    s_value = rState[self.at(r, i)]
                    rSums[2 * r] += s_value * k_value
                    rSums[2 * r + 1] += s_value * q_value

            if token + 1 < begin + live_count:
                self.load_token(
                    token + 1, head, lane, v_start, gQ, gK, gV, gG, gBeta, rQNext, rKNext, rVNext, rGNext, rBetaNext
                )

            for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                for i in cutlass.range_constexpr(self.num_sums):
                    rSums[i] += cute.arch.shuffle_sync_bfly(rSums[i], offset=self.lane_step << step)

            q_factor = scale
            k_factor = cutlass.Float32(1.0)
            if cutlass.const_expr(self.use_l2norm):
                k_factor = cute.math.rsqrt(rSums[2 * rows + 1] + 1e-6)
                q_factor = scale * cute.math.rsqrt(rSums[2 * rows + 2] + 1e-6)

            o_value = cutlass.Float32(0.0)
            for r in cutlass.range_constexpr(rows):
                rU[r] = k_factor * (beta * (rV[r] - alpha * (k_factor * rSums[2 * r])))
                o_row = q_factor * (alpha * rSums[2 * r + 1] + rU[r] * rSums[2 * rows])
                if lane == r:
                    o_value = o_row
            self.store_out(token, head, lane, v_start, o_value, gOut)

            for r in cutlass.range_constexpr(rows):
                for i in cutlass.range_constexpr(entries):
                    rState[self.at(r, i)] = alpha * rState[self.at(r, i)] + rU[r] * rK[i]

            if cutlass.const_expr(self.write_pool and self.every_token):
                write_slot = null_slot
                if cutlass.const_expr(self.has_final_indices):
                    if token < begin + gFinalIndices.shape[1]:
                        write_slot = cutlass.Int64(gFinalIndices[sequence, token - begin])
                else:
                    if token < begin + gIndices.shape[1]:
                        write_slot = cutlass.Int64(gIndices[sequence, token - begin])
                if write_slot > null_slot:
                    self.store_state(write_slot, head, lane, v_start, self.width, gPool, rState)

        if cutlass.const_expr(not self.stores_after_loop):
            # With nothing live after the loop, its branch back is compiled in a form from which ptxas peels an iteration:
            # twice the code, and spills.
            cute.arch.inline_ptx("// {$r0} is used", read_only_args=[rState[0]])
        if cutlass.const_expr(self.write_pool and not self.every_token):
            write_slot = read_slot
            if cutlass.const_expr(self.has_final_indices):
                write_slot = cutlass.Int64(gFinalIndices[sequence])
            if live_count > 0:
                if write_slot > null_slot:
                    self.store_state(write_slot, head, lane, v_start, self.width, gPool, rState)
        if cutlass.const_expr(self.write_new):
            # Without a pool an empty sequence passes its state on.
            self.store_state(cutlass.Int64(sequence), head, lane, v_start, self.new_width, gFinal, rState)

    def at(self, row: int, entry: int) -> int:
        """Place of (column row, K entry) in a thread's state: the dim that is contiguous in memory runs fastest."""
        return row * self.entries + entry if self.v_first else entry * self.rows + row

    @cute.jit
    def decay(self, gate: cutlass.Float32, minus_decay: cutlass.Float32, bias: cutlass.Float32):
        """exp(g), from g or from raw a."""
        if cutlass.const_expr(self.use_gate):
            raw = gate + bias
            softplus = raw
            if raw <= 20.0:
                softplus = cute.math.log1p(cute.math.exp(raw))
            gate = minus_decay * softplus
        return cute.math.exp(gate)

    @cute.jit
    def is_live(self, lane: cutlass.Int32, chunk: cutlass.Constexpr, v_start: cutlass.Int32):
        """Whether a thread's chunk of K and columns of V exist."""
        live = cutlass.Boolean(True)
        if cutlass.const_expr(self.mask_k):
            live = (chunk * self.lanes + lane) * self.vec < self.K
        if cutlass.const_expr(self.mask_v):
            live = live & (v_start < self.V)
        return live

    @cute.jit
    def pointer(self, gX: cute.Tensor, offset: cutlass.Int64, align: cutlass.Constexpr):
        """gX + offset elements, known to be a multiple of align bytes."""
        dtype = gX.element_type
        address = gX.iterator.toint() + offset * (dtype.width // 8)
        return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)

    @cute.jit
    def load(
        self,
        source: cute.Pointer,
        width: cutlass.Constexpr,
        streaming: cutlass.Constexpr,
        rX: cute.Tensor,
        start: cutlass.Constexpr,
    ):
        """rX[start : start + width] = the width elements at source, one access."""
        dtype = source.dtype
        rSlice = cute.make_rmem_tensor(width, dtype)
        priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE if streaming else cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyG2ROp(), dtype, num_bits_per_copy=width * dtype.width, l1c_evict_priority=priority
        )
        cute.copy(atom, cute.make_tensor(source, cute.make_layout(width)), rSlice)
        for e in cutlass.range_constexpr(width):
            rX[start + e] = rSlice[e].to(rX.element_type)

    @cute.jit
    def store(self, rX: cute.Tensor, start: cutlass.Constexpr, width: cutlass.Constexpr, target: cute.Pointer):
        """The width elements at target = rX[start : start + width], rounded to target's dtype, one access."""
        dtype = target.dtype
        rSlice = cute.make_rmem_tensor(width, dtype)
        for e in cutlass.range_constexpr(width):
            rSlice[e] = rX[start + e].to(dtype)
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyR2GOp(),
            dtype,
            num_bits_per_copy=width * dtype.width,
            store_cache_mode=cute.nvgpu.StoreCacheMode.STREAMING,
        )
        cute.copy(atom, rSlice, cute.make_tensor(target, cute.make_layout(width)))

    @cute.jit
    def load_token(
        self,
        token: cutlass.Int32,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        v_start: cutlass.Int32,
        gQ: cute.Tensor,
        gK: cute.Tensor,
        gV: cute.Tensor,
        gG: cute.Tensor,
        gBeta: cute.Tensor,
        rQ: cute.Tensor,
        rK: cute.Tensor,
        rV: cute.Tensor,
        rG: cute.Tensor,
        rBeta: cute.Tensor,
    ):
        row = cutlass.Int64(token)
        q_offset = row * gQ.stride[0] + cutlass.Int64(head // self.q_group) * gQ.stride[1] + lane * self.vec
        k_offset = row * gK.stride[0] + cutlass.Int64(head // self.k_group) * gK.stride[1] + lane * self.vec
        q_source = self.pointer(gQ, q_offset, self.vec * self.dtype.width // 8)
        k_source = self.pointer(gK, k_offset, self.vec * self.dtype.width // 8)
        for c in cutlass.range_constexpr(self.chunks):
            step = cutlass.const_expr(c * self.lanes * self.vec)
            if cutlass.const_expr(self.mask_k):
                if step + lane * self.vec < self.K:
                    self.load(q_source + step, self.vec, False, rQ, c * self.vec)
                    self.load(k_source + step, self.vec, False, rK, c * self.vec)
            else:
                self.load(q_source + step, self.vec, False, rQ, c * self.vec)
                self.load(k_source + step, self.vec, False, rK, c * self.vec)
        v_offset = row * gV.stride[0] + cutlass.Int64(head // self.v_group) * gV.stride[1] + v_start
        v_source = self.pointer(gV, v_offset, self.rows * self.dtype.width // 8)
        if cutlass.const_expr(self.mask_v):
            if v_start < self.V:
                self.load(v_source, self.rows, False, rV, 0)
        else:
            self.load(v_source, self.rows, False, rV, 0)
        if cutlass.const_expr(self.has_gate):
            rG[0] = gG[token, head]
        if cutlass.const_expr(self.has_beta):
            rBeta[0] = gBeta[token, head]

    @cute.jit
    def load_state(
        self,
        slot: cutlass.Int64,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        v_start: cutlass.Int32,
        gState: cute.Tensor,
        rState: cute.Tensor,
    ):
        source = self.state_pointer(slot, head, lane, v_start, self.width, gState)
        for r in cutlass.range_constexpr(self.rows if self.v_first else self.entries):
            for c in cutlass.range_constexpr(self.entries // self.width if self.v_first else self.rows // self.width):
                step, start, chunk = self.state_place(r, c, self.width)
                if cutlass.const_expr(self.mask_k or self.mask_v):
                    if self.is_live(lane, chunk, v_start):
                        self.load(source + step, self.width, True, rState, start)
                else:
                    self.load(source + step, self.width, True, rState, start)

    @cute.jit
    def store_state(
        self,
        slot: cutlass.Int64,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        v_start: cutlass.Int32,
        width: cutlass.Constexpr,
        gState: cute.Tensor,
        rState: cute.Tensor,
    ):
        target = self.state_pointer(slot, head, lane, v_start, width, gState)
        for r in cutlass.range_constexpr(self.rows if self.v_first else self.entries):
            for c in cutlass.range_constexpr(self.entries // width if self.v_first else self.rows // width):
                step, start, chunk = self.state_place(r, c, width)
                if cutlass.const_expr(self.mask_k or self.mask_v):
                    if self.is_live(lane, chunk, v_start):
                        self.store(rState, start, width, target + step)
                else:
                    self.store(rState, start, width, target + step)

    @cute.jit
    def state_pointer(
        self,
        slot: cutlass.Int64,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        v_start: cutlass.Int32,
        width: cutlass.Constexpr,
        gState: cute.Tensor,
    ):
        """A thread's first element of a head's state."""
        within = head * (self.K * self.V)
        if cutlass.const_expr(self.v_first):
            within += v_start * self.K + lane * self.vec
        else:
            within += lane * (self.vec * self.V) + v_start
        return self.pointer(gState, slot * gState.stride[0] + within, width * gState.element_type.width // 8)

    def state_place(self, r: int, c: int, width: int) -> tuple[int, int, int]:
        """Of access (r, c) of `width` elements: offset from the thread's first one, place in registers, chunk of K."""
        if self.v_first:
            chunk, within = c * width // self.vec, c * width % self.vec
            return r * self.K + chunk * self.lanes * self.vec + within, r * self.entries + c * width, chunk
        chunk, within = r // self.vec, r % self.vec
        return (chunk * self.lanes * self.vec + within) * self.V + c * width, r * self.rows + c * width, chunk

    @cute.jit
    def store_out(
        self,
        token: cutlass.Int32,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        v_start: cutlass.Int32,
        value: cutlass.Float32,
        gOut: cute.Tensor,
    ):
        """Lane r of a group stores the group's r-th column."""
        live = lane < self.rows
        if cutlass.const_expr(self.mask_v):
            live = live & (v_start < self.V)
        if live:
            gOut[token, head, v_start + lane] = value.to(self.dtype)
