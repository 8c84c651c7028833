"""Draft trees in the recurrent kernel: every node continues the state after its parent.

The starting state stays in registers next to the current one. A node whose parent is the node before it goes on from
there; otherwise its path is computed again from the start, ancestor by ancestor: their q, k, v are few and in cache, while
the states between are not kept anywhere that is sure to be written, or in full precision.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gdn.ops.delta_rule.problem import RecurrentParams
from kernels_cute.common.delta_rule import HeadGate, store_out, update
from kernels_cute.common.state_sums import Exchange
from kernels_cute.recurrent.tokens import Block, Spec, finish, load_token, multiply, slot_to_write, store_intermediate, store_node


@cute.jit
def run_tree(
    spec: Spec, params: RecurrentParams, block: Block, begin: Int32, live_count: Int32, gate: HeadGate, seed: Int32,
    registers: Any, exchange: Exchange,
):  # fmt: skip
    """Compute all nodes of a sequence in order. registers: of the state, inputs and work."""
    tile, place = spec.tile, block.place
    gParents = params.parent_token
    rState, inputs, work = registers
    rStart = cute.make_rmem_tensor(tile.values, Float32)
    for i in cutlass.range_constexpr(tile.values):
        rStart[i] = rState[i]
    for node in cutlass.range(live_count, unroll=1):
        parent = parent_of(Int32(node), begin, gParents)
        above = Int32(0)  # nodes between this one and the start of its path
        if parent != node - 1:
            above = depth_of(parent, begin, gParents)
            for i in cutlass.range_constexpr(tile.values):
                rState[i] = rStart[i]
        for step in cutlass.range(above + 1, unroll=1):
            token = begin + ancestor(Int32(node), above - step, begin, gParents)
            load_token(spec, params, token, place, inputs)
            alpha, beta = multiply(spec, inputs, gate, rState, work)
            o_value = finish(spec, params, alpha, beta, place, work, exchange)
            update(tile, alpha, work, rState)
            if step == above:
                store_out(tile, params.out, begin + node, place, o_value)
        if cutlass.const_expr(spec.writes_every_token):
            store_node(spec, params, slot_to_write(spec, params, block.sequence, Int32(node)), place, rState, seed)
        if cutlass.const_expr(spec.writes_intermediate):
            store_intermediate(spec, params, block.sequence, Int32(node), place, rState)


@cute.jit
def ancestor(node: Int32, steps: Int32, begin: Int32, gParents: cute.Tensor):
    """The node `steps` above `node`."""
    for _ in cutlass.range(steps, unroll=1):
        node = parent_of(node, begin, gParents)
    return node


@cute.jit
def parent_of(node: Int32, begin: Int32, gParents: cute.Tensor):
    """Return the parent of a node, -1 for the start. It is always less than the node, whatever the tensor holds, so every walk
    ends."""
    return cutlass.min(gParents[begin + node], node - 1)


@cute.jit
def depth_of(node: Int32, begin: Int32, gParents: cute.Tensor):
    """Return the number of nodes from a child of the start to this one; 0 for the start."""
    depth = Int32(0)
    while node >= 0:
        depth += 1
        node = parent_of(node, begin, gParents)
    return depth
