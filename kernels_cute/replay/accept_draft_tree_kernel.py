"""Kernel of accept_draft_tree.py, which has its tensors."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from gdn.ops.delta_rule.problem import AcceptDraftTreeParams, AcceptDraftTreeProblem
from kernels_cute.common import build, ptx
from kernels_cute.common.memory import fake, narrowed
from kernels_cute.replay.shape import MOST_NODES


class AcceptDraftTree(build.Kernel, params=AcceptDraftTreeParams):
    def __init__(self, problem: AcceptDraftTreeProblem, config: Any) -> None:
        self.problem, self.threads = problem, config.threads
        self.ring_blocks = -(-problem.ring_width // 4 // config.threads)  # of a sequence and layer
        self.conv_blocks = -(-(problem.conv_dim or 0) // config.threads)
        self.parts = self.ring_blocks + self.conv_blocks

    def blocks(self, params: AcceptDraftTreeParams) -> Any:
        return (params.cu_seqlens.shape[0] - 1) * params.ring.shape[0] * self.parts

    @cute.kernel
    def kernel(self, params: AcceptDraftTreeParams):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        part, rest = block % self.parts, block // self.parts
        layer, number = rest % params.ring.shape[0], rest // params.ring.shape[0]
        begin = Int32(params.cu_seqlens[number])
        count = Int32(params.cu_seqlens[number + 1]) - begin
        slot = narrowed(params.state_indices[number])
        node = params.accepted_nodes[number]
        is_live = (count > 0) & (count <= MOST_NODES) & (node >= 0) & (node < count)
        is_live = is_live & (Int64(slot) > params.null_slot) & (slot >= 0) & (Int64(slot) < params.ring.shape[1])
        if is_live:
            path = path_of(params.parent_token, begin, node)
            if part < self.ring_blocks:
                unit = part * self.threads + thread
                if unit < self.problem.ring_width // 4:
                    self.move_entries(params, layer, slot, Uint32(params.num_computed_tokens[number]), path, unit)
            if cutlass.const_expr(self.conv_blocks > 0):
                channel = (part - self.ring_blocks) * self.threads + thread
                if (part >= self.ring_blocks) & (channel < self.problem.conv_dim):
                    self.move_inputs(params, layer, slot, path, channel)
            if (layer == 0) & (part == 0) & (thread == 0):
                params.num_accepted_tokens[number] = cute.arch.popc(path)

    @cute.jit
    def move_entries(self, params: AcceptDraftTreeParams, layer: Int32, slot: Int32, committed: Uint32, path: Int32, unit: Int32):
        """16 bytes of every row of the path."""
        rows, stride = cutlass.const_expr(self.problem.ring_rows), params.ring.stride
        source = params.ring.iterator.toint() + (Int64(layer) * stride[0] + Int64(slot) * stride[1]) * 4 + Int64(unit) * 16
        step = Int32(0)
        while path != 0:
            node = lowest(path)
            if node != step:
                four = ptx.load_global_four(source + Int64(row_of(committed, node, rows)) * stride[2] * 4)
                ptx.store_global_four(source + Int64(row_of(committed, step, rows)) * stride[2] * 4, four)
            path = path & (path - 1)
            step += 1

    @cute.jit
    def move_inputs(self, params: AcceptDraftTreeParams, layer: Int32, slot: Int32, path: Int32, channel: Int32):
        """A channel's inputs of every node of the path, from its column of the window to the next free one."""
        before = cutlass.const_expr(self.problem.conv_width - 2)  # columns of inputs of committed tokens
        columns, step = params.conv_state.shape[3], Int32(0)
        while path != 0:
            node = lowest(path)
            if (node != step) & (before + node < columns):
                value = params.conv_state[layer, slot, channel, before + node]
                params.conv_state[layer, slot, channel, before + step] = value
            path = path & (path - 1)
            step += 1


@cute.jit
def path_of(gParents: cute.Tensor, begin: Int32, node: Int32):
    """A bit for a node and each of its ancestors. A parent counts as earlier than its node, whatever the tensor holds."""
    path = Int32(0)
    while node >= 0:
        path = path | (Int32(1) << node)
        node = cutlass.min(gParents[begin + node], node - 1)
    return path


def lowest(path: Any) -> Any:
    """Number of the lowest bit that is set."""
    return cute.arch.popc((path & -path) - 1)


def row_of(committed: Any, node: Any, rows: int) -> Any:
    """Row of the ring of the token `node` of a call that begins at position `committed`."""
    return Int32((committed + Uint32(node)) % rows)


def library(problem: AcceptDraftTreeProblem, config: Any) -> dict[str, bytes]:
    p, layers = problem, cute.sym_int()
    ring = fake("float32", layers, cute.sym_int64(), p.ring_rows, p.ring_width, last=1)
    strides = (1, None) if p.conv_channels_contiguous else None
    windows = None
    if p.conv_dim is not None:
        windows = fake(p.conv_dtype, layers, cute.sym_int64(), p.conv_dim, None, last=strides)
    indices, nodes = fake(p.index_dtype, None), [fake("int32", None) for _ in range(3)]
    offsets = fake(p.cu_seqlens_dtype, None, last=1)
    fakes = AcceptDraftTreeParams(ring, windows, indices, fake("int32", None, last=1), *nodes, offsets, Int64(-1))
    return build.one_entry("accept_draft_tree", AcceptDraftTree(problem, config), fakes)
