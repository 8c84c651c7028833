"""Gated delta rule, token by token: decode, speculative decoding and short ragged sequences.

Per state head, S [K, V] float32 in registers over all tokens of a sequence, a = exp(g):

    u = beta * (v - a * S^T k)
    o = a * S^T q + u * (k . q)            equal to S_new^T q, and needs no second pass over S
    S = a * S + k u^T

q (times scale) and k are divided by their L2 norms on request; the norms are row scales, so they multiply the dot products
and u, never the registers of q and k.

Tensors: q [1, L, Hq, K], k [1, L, Hk, K], v and out [1, L, heads, V] bfloat16 | float16; g, beta [1, L, HS]; state
[slots, HS, V, K] or [slots, HS, K, V] float32 | bfloat16. `gdn.problems.RecurrentProblem` is the contract.

A block owns (sequence, state head, block_v columns of V). `lanes` threads share the K entries of `rows` columns each, so a
dot product is log2(lanes) shuffles; nothing passes through shared memory but the sums of K-first states, whose columns are
shared by several warps (`_state_sums`). A thread's part of the state is loaded at once (rows * K / lanes values in flight) and
every byte of it moves once each way, past L1 and out of L2 first. q, k, v and the gates of the next token are loaded while the
current one is computed; those of the first token before the state's slot is even known. For single tokens there is a form
without a token ahead: `_recurrent_in_turn`.
"""

from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import make_fake_tensor

from gdn.problems import RecurrentProblem
from gdn.recurrent_tiles import TUNED_WITHIN, Config, configs, default_config, fits, is_single, refusal
from kernels_cute.common.memory import CUTE_DTYPES, fake, without_batch
from kernels_cute.common.opaque import anew
from kernels_cute.common.rounding import mixed_seed
from kernels_cute.common.state_sums import StateSums, carveout, storage_type
from kernels_cute.common.state_tile import StateTile
from kernels_cute.recurrent.draft_tree import DraftTree
from kernels_cute.recurrent.single_token import InTurn

__all__ = [
    "TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "suits", "workspace_bytes",
]  # fmt: skip


def suits(problem: RecurrentProblem, config: Config) -> bool:
    """Whether tiles tuned at other sizes are a choice here: without a token ahead each further token waits for its loads, which
    K first the stores of the state cover."""
    return config.ahead or is_single(problem) or not problem.state_v_first and problem.write_every_token


def workspace_bytes(problem: RecurrentProblem, config: Config) -> int:
    return 0


def compile(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    return {"recurrent": build.library("recurrent", _Recurrent(problem, config), *_arguments(problem))}


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
    if q.shape[1] == 0 or cu_seqlens.shape[0] == 1:  # an empty tensor has no address to pass
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
        parent_token if problem.has_parent else absent,
        rounding_seed if problem.has_rounding else absent,
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
        return offsets() if dtype is None else fake(dtype, 1, num_tokens, HS)

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
        fake(problem.dtype, 1, num_tokens, problem.num_q_heads, K, last=1),
        fake(problem.dtype, 1, num_tokens, problem.num_k_heads, K, last=1),
        fake(problem.dtype, 1, num_tokens, problem.num_v_heads, V, last=1),
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
        fake("int32", num_tokens, last=1) if problem.has_parent else offsets(),
        fake("int64", 1, last=1) if problem.has_rounding else offsets(),
        fake(problem.dtype, 1, num_tokens, HS, V, last=1),
        cutlass.Float32(1.0),
        cutlass.Int64(-1),
    ]


class _Recurrent(StateTile, StateSums, DraftTree, InTurn):
    """The kernel for one problem and configuration; attributes are compile-time constants."""

    def __init__(self, problem: RecurrentProblem, config: Config) -> None:
        super().__init__(
            problem.head_k_dim, problem.head_v_dim, problem.state_v_first, problem.state_dtype, config.threads, config.lanes,
            config.rows, problem.has_rounding,
        )  # fmt: skip
        self.HS = problem.num_state_heads
        self.min_blocks = config.resident // config.threads
        self.entry = self.kernel if config.ahead else self.kernel_in_turn
        self.q_group = self.HS // problem.num_q_heads
        self.k_group = self.HS // problem.num_k_heads
        self.v_group = self.HS // problem.num_v_heads
        self.pooled, self.every_token = problem.pooled, problem.write_every_token
        self.read_state = problem.has_initial_state
        self.write_pool = problem.has_final_state and problem.pooled
        self.write_new = _has_new_final(problem)
        self.stores_after_loop = self.write_new or self.write_pool and not self.every_token
        self.has_accepted, self.has_final_indices = problem.has_accepted, problem.has_final_indices
        self.has_parent = problem.has_parent
        self.has_gate, self.has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
        self.use_gate, self.use_sigmoid = problem.use_gate and self.has_gate, problem.use_beta_sigmoid
        self.use_l2norm = problem.use_qk_l2norm
        self.dtype = CUTE_DTYPES[problem.dtype]
        self.gate_dtype = CUTE_DTYPES[problem.gate_dtype or "float32"]
        self.beta_dtype = CUTE_DTYPES[problem.beta_dtype or "float32"]

        self.v_tiles = -(-self.V // config.block_v)
        self.new_width = min(self.width, 4)
        self.num_sums = 2 * self.rows + (3 if self.use_l2norm else 1)  # S.k, S.q per column; k.q; k.k and q.q for norms
        self.shared_floats = self.parts_floats(1 if self.has_parent else 2)

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
        parent_token: cute.Tensor,
        rounding_seed: cute.Tensor,
        out: cute.Tensor,
        scale: cutlass.Float32,
        null_slot: cutlass.Int64,
        stream: CUstream,
    ):
        blocks = (cu_seqlens.shape[0] - 1) * (self.HS * self.v_tiles)
        q, k, v, g, beta, out = without_batch(q, k, v, g, beta, out)
        self.entry(
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
            parent_token,
            rounding_seed,
            out,
            scale,
            null_slot,
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            # Without a value the DSL asks a device for its limit.
            preferred_smem_carveout=carveout(4 * self.shared_floats, self.min_blocks) if self.shared_floats else 0,
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
        gParents: cute.Tensor,
        gSeed: cute.Tensor,
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
        lane, group = self.lane_and_group(thread)
        v_start = (block % self.v_tiles * self.groups + group) * rows

        parts = self.shared_parts()
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
        if cutlass.const_expr(not self.has_parent):
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

        seed = cutlass.Int32(0)
        if cutlass.const_expr(self.rounds):
            seed = mixed_seed(gSeed)
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

        chain_count = live_count
        if cutlass.const_expr(self.has_parent):
            chain_count = cutlass.Int32(0)
            self.run_tree(
                sequence, begin, live_count, head, lane, v_start, minus_decay, bias, seed, gQ, gK, gV, gG, gBeta, gPool, gIndices,
                gFinalIndices, gParents, gOut, scale, null_slot, rState, rQNext, rKNext, rVNext, rGNext, rBetaNext, rV, rK, rSums,
                rU, parts,
            )  # fmt: skip
        # Counted in tokens of the batch: counted from 0, the compiler peels the first token off and spills.
        for token in cutlass.range(begin, begin + chain_count, unroll=1):
            alpha, beta = self.multiply(rQNext, rKNext, rVNext, rGNext, rBetaNext, minus_decay, bias, rState, rV, rK, rSums)
            if token + 1 < begin + live_count:
                # K first the exchange of sums needs the registers: addresses are made here, not kept from before the loop.
                at_head, at_lane = (anew(head), anew(lane)) if self.k_warps > 1 else (head, lane)
                self.load_token(
                    token + 1, at_head, at_lane, v_start, gQ, gK, gV, gG, gBeta, rQNext, rKNext, rVNext, rGNext, rBetaNext
                )

            o_value = self.combine(alpha, beta, scale, lane, rV, rSums, rU, parts, token % 2)
            self.store_out(token, head, lane, v_start, o_value, gOut)

            self.update(alpha, rU, rK, rState)
            if cutlass.const_expr(self.write_pool and self.every_token):
                write_slot = self.slot_to_write(sequence, token - begin, null_slot, gIndices, gFinalIndices)
                if write_slot > null_slot:
                    self.store_state(write_slot, head, lane, v_start, self.width, gPool, rState, seed)

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
                    self.store_state(write_slot, head, lane, v_start, self.width, gPool, rState, seed)
        if cutlass.const_expr(self.write_new):
            # Without a pool an empty sequence passes its state on.
            self.store_state(cutlass.Int64(sequence), head, lane, v_start, self.new_width, gFinal, rState, seed)

    def shared_parts(self) -> Any:
        """Address of the sums that warps exchange."""
        if self.shared_floats == 0:
            return cutlass.Int32(0)
        return cutlass.utils.SmemAllocator().allocate(storage_type(self.shared_floats)).parts.data_ptr().toint()

    @cute.jit
    def multiply(
        self,
        rQ: cute.Tensor,
        rKIn: cute.Tensor,
        rVIn: cute.Tensor,
        rG: cute.Tensor,
        rBeta: cute.Tensor,
        minus_decay: cutlass.Float32,
        bias: cutlass.Float32,
        rState: cute.Tensor,
        rV: cute.Tensor,
        rK: cute.Tensor,
        rSums: cute.Tensor,
    ):
        """The thread's parts of a token's dot products in rSums, v and k as float32 in rV and rK; returns decay and beta."""
        for r in cutlass.range_constexpr(self.rows):
            rV[r] = rVIn[r].to(cutlass.Float32)
        alpha, beta = self.gates(rG, rBeta, minus_decay, bias)
        self.products(rQ, rKIn, rState, rK, rSums)
        return alpha, beta

    @cute.jit
    def gates(self, rG: cute.Tensor, rBeta: cute.Tensor, minus_decay: cutlass.Float32, bias: cutlass.Float32):
        """Decay and beta of a token."""
        alpha = cutlass.Float32(1.0)
        if cutlass.const_expr(self.has_gate):
            alpha = self.decay(rG[0].to(cutlass.Float32), minus_decay, bias)
        beta = cutlass.Float32(1.0)
        if cutlass.const_expr(self.has_beta):
            beta = rBeta[0].to(cutlass.Float32)
            if cutlass.const_expr(self.use_sigmoid):
                beta = 1.0 / (1.0 + cute.math.exp(-beta))
        return alpha, beta

    @cute.jit
    def products(self, rQ: cute.Tensor, rKIn: cute.Tensor, rState: cute.Tensor, rK: cute.Tensor, rSums: cute.Tensor):
        """The thread's parts of a token's dot products in rSums, k as float32 in rK."""
        rows = cutlass.const_expr(self.rows)
        rSums.fill(0.0)
        for i in cutlass.range_constexpr(self.entries):
            q_value = rQ[i].to(cutlass.Float32)
            k_value = rKIn[i].to(cutlass.Float32)
            rK[i] = k_value
            rSums[2 * rows] += q_value * k_value
            if cutlass.const_expr(self.use_l2norm):
                rSums[2 * rows + 1] += k_value * k_value
                rSums[2 * rows + 2] += q_value * q_value
            for r in cutlass.range_constexpr(rows):
                s_value = rState[self.at(r, i)]
                rSums[2 * r] += s_value * k_value
                rSums[2 * r + 1] += s_value * q_value

    @cute.jit
    def combine(
        self,
        alpha: cutlass.Float32,
        beta: cutlass.Float32,
        scale: cutlass.Float32,
        lane: cutlass.Int32,
        rV: cute.Tensor,
        rSums: cute.Tensor,
        rU: cute.Tensor,
        parts: cutlass.Int32,
        buffer: cutlass.Int32,
    ):
        """rU = what the columns take up of k; returns the output of column `lane`."""
        rows = cutlass.const_expr(self.rows)
        self.add_up(rSums, self.num_sums, parts, buffer, self.has_parent)

        q_factor = scale
        k_factor = cutlass.Float32(1.0)
        if cutlass.const_expr(self.use_l2norm):
            k_factor = cute.math.rsqrt(rSums[2 * rows + 1] + 1e-6)
            q_factor = scale * cute.math.rsqrt(rSums[2 * rows + 2] + 1e-6)

        o_value = cutlass.Float32(0.0)
        if cutlass.const_expr(self.k_warps > 1):
            for r in cutlass.range_constexpr(rows):
                rU[r] = k_factor * (beta * (rV[r] - alpha * (k_factor * rSums[2 * r])))
            return q_factor * (alpha * rSums[1] + self.own_column(lane, rU) * rSums[2 * rows])
        for r in cutlass.range_constexpr(rows):
            rU[r] = k_factor * (beta * (rV[r] - alpha * (k_factor * rSums[2 * r])))
            o_row = q_factor * (alpha * rSums[2 * r + 1] + rU[r] * rSums[2 * rows])
            if lane == r:
                o_value = o_row
        return o_value

    @cute.jit
    def update(self, alpha: cutlass.Float32, rU: cute.Tensor, rK: cute.Tensor, rState: cute.Tensor):
        for r in cutlass.range_constexpr(self.rows):
            for i in cutlass.range_constexpr(self.entries):
                rState[self.at(r, i)] = alpha * rState[self.at(r, i)] + rU[r] * rK[i]

    @cute.jit
    def slot_to_write(
        self,
        sequence: cutlass.Int32,
        node: cutlass.Int32,
        null_slot: cutlass.Int64,
        gIndices: cute.Tensor,
        gFinalIndices: cute.Tensor,
    ):
        """For the state after token `node` of a sequence; null where it has no column."""
        write_slot = null_slot
        if cutlass.const_expr(self.has_final_indices):
            if node < gFinalIndices.shape[1]:
                write_slot = cutlass.Int64(gFinalIndices[sequence, node])
        else:
            if node < gIndices.shape[1]:
                write_slot = cutlass.Int64(gIndices[sequence, node])
        return write_slot

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
