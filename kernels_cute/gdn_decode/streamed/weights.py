"""Weights of the entries in the streamed form, for all value heads and tokens of an item at once.

A team of 8 lanes has an entry: an old one, the key of a token of the call, or the query of one, of which only its product with
itself is wanted. Lane l of the team ends with product l of (k_0, q_0, k_1, q_1, ...).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_cute.common import ptx
from kernels_cute.common.delta_rule import L2NORM_EPS
from kernels_cute.common.ring import TEAM, Live, log_decays
from kernels_cute.common.ring_batch import product, tail_of
from kernels_cute.gdn_decode.streamed.sizes import DIM
from kernels_cute.gdn_decode.streamed.spec import THREADS, Shared, Spec, of_head


@cute.jit
def weigh(spec: Spec, live: Live, thread: Int32, scale: Float32, shared: Shared):
    """Weights, factors of k and q, and totals, to shared memory."""
    ring, batch, ratio = spec.ring, cutlass.const_expr(spec.batch), cutlass.const_expr(spec.ratio)
    lane, part, before = thread % 32, thread % TEAM, live.count
    rTails = [cute.make_rmem_tensor(ring.chunks, Float32) for _ in range(ratio)]
    rG = cute.make_rmem_tensor(ratio * batch, Float32)
    for head in cutlass.range_constexpr(ratio):
        total = log_decays(ring, of_head(spec, shared.entries, head), (live.start, before, before), None, lane, rTails[head])
        for i in cutlass.range_constexpr(batch):
            rG[head * batch + i] = ptx.load_one(shared.gates + (i * ratio + head) * 8)
            total += rG[head * batch + i]
            if thread == 0:
                ptx.store_one(shared.totals + (head * batch + i) * 4, cute.math.exp(total))
    pitch, keys_end, end = cutlass.const_expr(4 * spec.token_floats), before + batch, before + 2 * batch
    index = part % spec.vectors
    # All teams of a warp make as many turns, since their lanes exchange log decays.
    for turn in cutlass.range(live.start + thread // 32 * (32 // TEAM), end, THREADS // TEAM, unroll=1):
        entry = cutlass.min(turn + lane // TEAM, end - 1)
        new = entry - before  # token of the call, or < 0; from `batch` on, of a query
        address = shared.entries.keys + entry * (4 * DIM)
        if new >= 0:
            address = shared.tokens + new * pitch + 4 * DIM
        if new >= batch:
            address = shared.tokens + (new - batch) * pitch
        value = product(ring, address, (shared.tokens, pitch), batch, part)
        for head in cutlass.range_constexpr(ratio):
            exponent = cutlass.select_(new < 0, tail_of(ring, cutlass.min(entry, before), rTails[head]), Float32(0.0))
            for m in cutlass.range_constexpr(batch):
                exponent += cutlass.select_((new < m) & (m <= index // 2), rG[head * batch + m], Float32(0.0))
            weights = of_head(spec, shared.entries, head).weights
            if (part < spec.vectors) & (entry < keys_end):
                ptx.store_one(weights + (entry * spec.vectors + index) * 4, cute.math.exp(exponent) * value)
        # Of a key its product with itself is that of the even number, of a query that of the odd one.
        is_query = new >= batch
        own = cutlass.select_(is_query, 2 * (new - batch) + 1, 2 * new)
        if (part < spec.vectors) & (index == own):
            factor = cute.math.rsqrt(value + L2NORM_EPS)
            ptx.store_one(shared.factors + index * 4, cutlass.select_(is_query, scale * factor, factor))
