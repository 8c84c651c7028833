"""The merge of parts: first those of a block's math warps, then those of the cluster's blocks, each in a fixed order.

A part of a head is (best, total, O): the largest score in the log2 domain, the sum of exp2(score - best), and the sum of
that times the values. Its weight in a merge is exp2(best - the largest best).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.attention.problem import SparseDecodeParams
from kernels_cute.attention.decode.sizes import COLUMNS, VECTOR
from kernels_cute.attention.decode.spec import LOWEST, Spec, Work
from kernels_cute.attention.ptx import load_four_from_block, load_pair_from_block
from kernels_cute.common import ptx
from kernels_cute.common.memory import sigmoid

_LN_2 = 0.6931471805599453
_load_pair_of_words = ptx.instruction("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", Int32, Int32)


@cute.jit
def load_gates(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, work: Work, rGates: cute.Tensor):
    """Load the gates of the units that the thread will write, two words each. A thread that writes fewer units loads any."""
    thread, _, _ = cute.arch.thread_idx()
    row_units = cutlass.const_expr(spec.dim // VECTOR)
    for index in cutlass.range_constexpr(0, spec.gate_words, 2):
        unit = cutlass.min(work.rank * spec.units_each + thread + index // 2 * spec.threads, spec.units - 1)
        row = Int64(work.token) * params.gate.stride[0]
        row = row + Int64(work.kv_set * spec.heads + unit // row_units) * params.gate.stride[1]
        address = params.gate.iterator.toint() + (row + unit % row_units * VECTOR) * 2
        rGates[index], rGates[index + 1] = _load_pair_of_words(address)


@cute.jit
def merge(spec: cutlass.Constexpr[Spec], storage, params: SparseDecodeParams, work: Work, rGates):
    """Merge the parts that the math warps have stored. All threads of the block take part."""
    thread, _, _ = cute.arch.thread_idx()
    ring, sums = storage.ring.data_ptr().toint(), storage.sums.data_ptr().toint()
    block_part = ring + 4 * spec.math_warps * spec.part_floats
    block_sums = sums + 8 * spec.math_warps * COLUMNS
    row_units = cutlass.const_expr(spec.dim // VECTOR)
    for unit in cutlass.range(thread, spec.units, spec.threads, unroll=1):
        head, d = unit // row_units, unit % row_units * VECTOR
        # Column among those of all math warps, which have 8 each: of the first reader.
        first = head // spec.group * (spec.parts * COLUMNS) + head % spec.group
        addresses = []
        for reader in cutlass.range_constexpr(spec.readers):
            column = first + cutlass.const_expr(reader * spec.sharers * COLUMNS)
            addresses.append((sums + column * 8, ring + (column * spec.part_pitch + d) * 4))
        best, total, values = combined(addresses, ptx.load_pair, ptx.load_four)
        if cutlass.const_expr(spec.splits == 1):
            write(spec, params, work, head, d, best, total, values, rGates)
        else:
            ptx.store_pair(block_sums + head * 8, best, total)  # the same by all threads of the head
            for e in cutlass.range_constexpr(VECTOR):
                ptx.store_one(block_part + (head * spec.dim + d + e) * 4, values[e])

    if cutlass.const_expr(spec.splits > 1):
        cute.arch.sync_warp()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        end = cutlass.min((work.rank + 1) * spec.units_each, spec.units)
        for unit in cutlass.range(work.rank * spec.units_each + thread, end, spec.threads, unroll=1):
            head, d = unit // row_units, unit % row_units * VECTOR
            addresses = []
            for rank in cutlass.range_constexpr(spec.splits):
                of_sums = ptx.in_block(block_sums + head * 8, Int32(rank))
                addresses.append((of_sums, ptx.in_block(block_part + (head * spec.dim + d) * 4, Int32(rank))))
            best, total, values = combined(addresses, load_pair_from_block, load_four_from_block)
            write(spec, params, work, head, d, best, total, values, rGates)
        # Others may still read this block's part. Relaxed: a release would wait until the rows of out are in memory, and what was
        # read has arrived, since it was written there.
        cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


@cute.jit
def combined(addresses: cutlass.Constexpr, load_pair: cutlass.Constexpr, load_four: cutlass.Constexpr):
    """Return (best, total, four entries of O) over all parts. addresses: those of (best, total) and of the entries."""
    sums = [load_pair(of_sums) for of_sums, _ in addresses]
    parts = [load_four(of_part) for _, of_part in addresses]
    best = Float32(LOWEST)
    for part in cutlass.range_constexpr(len(addresses)):
        best = cute.arch.fmax(best, sums[part][0])
    total = Float32(0.0)
    values = [Float32(0.0)] * VECTOR
    for part in cutlass.range_constexpr(len(addresses)):
        weight = ptx.exp2(sums[part][0] - best)
        total = total + sums[part][1] * weight
        for e in cutlass.range_constexpr(VECTOR):
            values[e] = values[e] + parts[part][e] * weight
    return best, total, values


@cute.jit
def write(spec: cutlass.Constexpr[Spec], params: SparseDecodeParams, work: Work, head, d, best, total, values, rGates):
    """Write entries of O, and with a head's first entry its log-sum-exp. The gates' first two words are used up, and the others
    move up."""
    row = work.kv_set * spec.heads + head
    factor, lse = Float32(0.0), -Float32.inf
    if total != 0.0:  # NaN too
        factor, lse = 1.0 / total, (best + cute.math.log2(total, fastmath=True)) * _LN_2
    for e in cutlass.range_constexpr(VECTOR):
        value = (values[e] * factor).to(spec.dtype)
        if cutlass.const_expr(spec.problem.has_gate):
            gate = ptx.unpack(spec.dtype, rGates[e // 2])[e % 2]
            gate = cutlass.select_(total == 0.0, Float32(0.0), gate)  # without a position the gate may be NaN
            value = (value.to(Float32) * sigmoid(gate)).to(spec.dtype)
        params.out[work.token, row, d + e] = value
    if cutlass.const_expr(spec.problem.has_gate):
        for index in cutlass.range_constexpr(spec.gate_words - 2):
            rGates[index] = rGates[index + 2]
    if d == 0:
        params.lse[work.token, row] = lse
