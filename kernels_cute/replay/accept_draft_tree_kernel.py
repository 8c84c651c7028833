"""Kernel of accept_draft_tree.py, which has its tensors."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from gdn.ops.delta_rule.problem import AcceptDraftTreeParams, AcceptDraftTreeProblem
from gdn.problem import dtype_bytes
from kernels_cute.common import build, ptx
from kernels_cute.common.choice import ACCESS_BYTES
from kernels_cute.common.memory import fake, load_channels, narrowed, store_channels
from kernels_cute.replay.shape import BATCH, MOST_NODES


class AcceptDraftTree(build.Kernel, params=AcceptDraftTreeParams):
    def __init__(self, problem: AcceptDraftTreeProblem, config: Any) -> None:
        self.problem, self.threads = problem, config.threads
        # Neighbouring channels that a thread moves in one access.
        wide = ACCESS_BYTES // dtype_bytes(problem.conv_dtype) if problem.conv_channels_contiguous else 1
        self.channels = wide if (problem.conv_dim or 0) % wide == 0 else 1

    def blocks(self, params: AcceptDraftTreeParams) -> Any:
        return (params.cu_seqlens.shape[0] - 1) * params.ring.shape[0]

    @cute.kernel
    def kernel(self, params: AcceptDraftTreeParams):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        layer, number = block % params.ring.shape[0], block // params.ring.shape[0]
        begin = Int32(params.cu_seqlens[number])
        count = Int32(params.cu_seqlens[number + 1]) - begin
        slot = narrowed(params.state_indices[number])
        node = params.accepted_nodes[number]
        is_live = (count > 0) & (count <= MOST_NODES) & (node >= 0) & (node < count)
        is_live = is_live & (Int64(slot) > params.null_slot) & (slot >= 0) & (Int64(slot) < params.ring.shape[1])
        if is_live:
            path = path_of(params.parent_token, begin, count, node)
            self.move_entries(params, layer, slot, Uint32(params.num_computed_tokens[number]), path, thread)
            if cutlass.const_expr(self.problem.conv_dim is not None):
                self.move_inputs(params, layer, slot, path, thread)
            if (layer == 0) & (thread == 0):
                params.num_accepted_tokens[number] = cute.arch.popc(path)

    @cute.jit
    def move_entries(
        self, params: AcceptDraftTreeParams, layer: Int32, slot: Int32, committed: Uint32, path: Int32, thread: Int32
    ):
        """Every row of the path, 16 bytes at a time."""
        rows, units = cutlass.const_expr(self.problem.ring_rows), cutlass.const_expr(self.problem.ring_width // 4)
        stride = params.ring.stride
        first = params.ring.iterator.toint() + (Int64(layer) * stride[0] + Int64(slot) * stride[1]) * 4 + Int64(thread) * 16
        values = cute.make_rmem_tensor(4 * BATCH, Float32)
        step = Int32(0)
        while path != 0:
            node = lowest(path)
            if node != step:
                source = first + Int64(row_of(committed, node, rows)) * stride[2] * 4
                target = first + Int64(row_of(committed, step, rows)) * stride[2] * 4
                for unit in cutlass.range(thread, units, BATCH * self.threads, unroll=1):
                    offset = Int64(unit - thread) * 16
                    for i in cutlass.range_constexpr(BATCH):
                        if unit + i * self.threads < units:
                            four = ptx.load_global_four(source + offset + i * self.threads * 16)
                            for j in cutlass.range_constexpr(4):
                                values[4 * i + j] = four[j]
                    for i in cutlass.range_constexpr(BATCH):
                        if unit + i * self.threads < units:
                            four = [values[4 * i + j] for j in range(4)]
                            ptx.store_global_four(target + offset + i * self.threads * 16, four)
            path = path & (path - 1)
            step += 1

    @cute.jit
    def move_inputs(self, params: AcceptDraftTreeParams, layer: Int32, slot: Int32, path: Int32, thread: Int32):
        """Every channel's inputs of the nodes of the path, from a node's column of the window to the next free one."""
        windows, count = params.conv_state, cutlass.const_expr(self.channels)
        before = cutlass.const_expr(self.problem.conv_width - 2)  # columns of inputs of committed tokens
        is_wide, groups = cutlass.const_expr(count > 1), cutlass.const_expr(self.problem.conv_dim // count)
        columns, step = windows.shape[3], Int32(0)
        first = Int64(layer) * windows.stride[0] + Int64(slot) * windows.stride[1]
        values = cute.make_rmem_tensor(BATCH * count, windows.element_type)
        while path != 0:
            node = lowest(path)
            if (node != step) & (before + node < columns):
                source, target = (first + Int64(before + place) * windows.stride[3] for place in (node, step))
                for group in cutlass.range(thread, groups, BATCH * self.threads, unroll=1):
                    for i in cutlass.range_constexpr(BATCH):
                        own = group + i * self.threads
                        if own < groups:
                            offset = source + Int64(own * count) * windows.stride[2]
                            load_channels(windows, offset, is_wide, count, values, i * count)
                    for i in cutlass.range_constexpr(BATCH):
                        own = group + i * self.threads
                        if own < groups:
                            offset = target + Int64(own * count) * windows.stride[2]
                            store_channels(values, i * count, count, windows, offset, is_wide)
            path = path & (path - 1)
            step += 1


@cute.jit
def path_of(gParents: cute.Tensor, begin: Int32, count: Int32, node: Int32):
    """A bit for a node and each of its ancestors. A parent counts as earlier than its node, whatever the tensor holds. Lane i of
    a warp has the parent of node i."""
    lane = cute.arch.lane_idx()
    own = gParents[begin + cutlass.min(lane, count - 1)]
    path = Int32(0)
    while node >= 0:
        path = path | (Int32(1) << node)
        node = cutlass.min(cute.arch.shuffle_sync(own, node), node - 1)
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
