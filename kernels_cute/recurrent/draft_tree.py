"""Draft trees in the recurrent kernel: every node continues the state after its parent.

The starting state stays in registers beside the current one. A node whose parent is the node before it goes on from
there; otherwise its path is computed anew from the start, ancestor by ancestor: their q, k, v are few and in cache, while
the states between are not kept anywhere that is sure to be written, or in full precision.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


class DraftTree:
    """Part of the recurrent kernel's class, whose attributes and methods it uses."""

    @cute.jit
    def ancestor(self, node: Int32, steps: Int32, begin: Int32, gParents: cute.Tensor):
        """The node `steps` above `node`."""
        for _ in cutlass.range(steps, unroll=1):
            node = self.parent_of(node, begin, gParents)
        return node

    @cute.jit
    def parent_of(self, node: Int32, begin: Int32, gParents: cute.Tensor):
        """-1 for the start. Always below the node, whatever the tensor holds: every walk ends."""
        return cutlass.min(gParents[begin + node], node - 1)

    @cute.jit
    def depth_of(self, node: Int32, begin: Int32, gParents: cute.Tensor):
        """Nodes from a child of the start to this one; 0 for the start."""
        depth = Int32(0)
        while node >= 0:
            depth += 1
            node = self.parent_of(node, begin, gParents)
        return depth

    @cute.jit
    def run_tree(
        self, sequence, begin, live_count, head, lane, v_start, minus_decay, bias, seed, gQ, gK, gV, gG, gBeta, gPool, gIndices,
        gFinalIndices, gParents, gOut, scale: Float32, null_slot: Int64, rState, rQ, rKIn, rVIn, rG, rBeta, rV, rK, rSums, rU,
        parts: Int32,
    ):  # fmt: skip
        rStart = cute.make_rmem_tensor(self.rows * self.entries, Float32)
        for i in cutlass.range_constexpr(self.rows * self.entries):
            rStart[i] = rState[i]
        for node in cutlass.range(live_count, unroll=1):
            parent = self.parent_of(Int32(node), begin, gParents)
            above = Int32(0)  # how far above the node the walk down begins
            if parent != node - 1:
                above = self.depth_of(parent, begin, gParents)
                for i in cutlass.range_constexpr(self.rows * self.entries):
                    rState[i] = rStart[i]
            for step in cutlass.range(above + 1, unroll=1):
                token = begin + self.ancestor(Int32(node), above - step, begin, gParents)
                self.load_token(token, head, lane, v_start, gQ, gK, gV, gG, gBeta, rQ, rKIn, rVIn, rG, rBeta)
                alpha, beta = self.multiply(rQ, rKIn, rVIn, rG, rBeta, minus_decay, bias, rState, rV, rK, rSums)
                o_value = self.combine(alpha, beta, scale, lane, rV, rSums, rU, parts, Int32(0))
                self.update(alpha, rU, rK, rState)
                if step == above:
                    self.store_out(begin + node, head, lane, v_start, o_value, gOut)
            if cutlass.const_expr(self.write_pool):
                write_slot = self.slot_to_write(sequence, Int32(node), null_slot, gIndices, gFinalIndices)
                if write_slot > null_slot:
                    self.store_state(write_slot, head, lane, v_start, self.width, gPool, rState, seed)
