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
from kernels_cute.replay.shape import MOST_NODES, MOVES, UNITS


class AcceptDraftTree(build.Kernel, params=AcceptDraftTreeParams):
    def __init__(self, problem: AcceptDraftTreeProblem, config: Any) -> None:
        self.problem, self.threads = problem, config.threads
        # Neighbouring channels that a thread moves in one access.
        wide = ACCESS_BYTES // dtype_bytes(problem.conv_dtype) if problem.conv_channels_contiguous else 1
        self.channels = wide if (problem.conv_dim or 0) % wide == 0 else 1
        # Accesses of a row of the ring and of a column of the window, and the blocks that have those of a sequence and layer.
        self.units, self.groups = problem.ring_width // 4, (problem.conv_dim or 0) // self.channels
        self.ring_blocks, self.window_blocks = (-(-n // (UNITS * config.threads)) for n in (self.units, self.groups))

    def blocks(self, params: AcceptDraftTreeParams) -> Any:
        return (params.cu_seqlens.shape[0] - 1) * params.ring.shape[0] * (self.ring_blocks + self.window_blocks)

    @cute.kernel
    def kernel(self, params: AcceptDraftTreeParams):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        parts = cutlass.const_expr(self.ring_blocks + self.window_blocks)
        part, rest = block % parts, block // parts
        layer, number = rest % params.ring.shape[0], rest // params.ring.shape[0]
        begin = Int32(params.cu_seqlens[number])
        count = Int32(params.cu_seqlens[number + 1]) - begin
        slot = narrowed(params.state_indices[number])
        node = params.accepted_nodes[number]
        is_live = (count > 0) & (count <= MOST_NODES) & (node >= 0) & (node < count)
        is_live = is_live & (Int64(slot) > params.null_slot) & (slot >= 0) & (Int64(slot) < params.ring.shape[1])
        if is_live:
            path = path_of(params.parent_token, begin, count, node)
            if part < self.ring_blocks:
                committed = Uint32(params.num_computed_tokens[number])
                self.move_entries(params, layer, slot, committed, path, part * (UNITS * self.threads) + thread)
            if cutlass.const_expr(self.window_blocks > 0):
                if part >= self.ring_blocks:
                    self.move_inputs(params, layer, slot, path, (part - self.ring_blocks) * (UNITS * self.threads) + thread)
            if (layer == 0) & (part == 0) & (thread == 0):
                params.num_accepted_tokens[number] = cute.arch.popc(path)

    @cute.jit
    def move_entries(
        self, params: AcceptDraftTreeParams, layer: Int32, slot: Int32, committed: Uint32, path: Int32, first: Int32
    ):
        """Every row of the path, 16 bytes at a time: accesses first, first + threads, ... of each."""
        rows, stride = cutlass.const_expr(self.problem.ring_rows), params.ring.stride
        ring = params.ring.iterator.toint() + (Int64(layer) * stride[0] + Int64(slot) * stride[1]) * 4 + Int64(first) * 16
        values = cute.make_rmem_tensor(4 * UNITS * MOVES, Float32)
        step = Int32(0)
        while path != 0:
            nodes, moves = next_moves(path, step)
            for m in cutlass.range_constexpr(MOVES):
                source = ring + Int64(row_of(committed, nodes[m], rows)) * stride[2] * 4
                for i in cutlass.range_constexpr(UNITS):
                    if moves[m] & (first + i * self.threads < self.units):
                        four = ptx.load_global_four(source + i * self.threads * 16)
                        for j in cutlass.range_constexpr(4):
                            values[4 * (m * UNITS + i) + j] = four[j]
            for m in cutlass.range_constexpr(MOVES):
                target = ring + Int64(row_of(committed, step + m, rows)) * stride[2] * 4
                for i in cutlass.range_constexpr(UNITS):
                    if moves[m] & (first + i * self.threads < self.units):
                        four = [values[4 * (m * UNITS + i) + j] for j in range(4)]
                        ptx.store_global_four(target + i * self.threads * 16, four)
            path = without_lowest(path, MOVES)
            step += MOVES

    @cute.jit
    def move_inputs(self, params: AcceptDraftTreeParams, layer: Int32, slot: Int32, path: Int32, first: Int32):
        """The inputs of the nodes of the path: channels first, first + threads, ..., or as many groups of neighbouring ones."""
        windows, count = params.conv_state, cutlass.const_expr(self.channels)
        before = cutlass.const_expr(self.problem.conv_width - 2)  # columns of inputs of committed tokens
        is_wide, step = cutlass.const_expr(count > 1), Int32(0)
        window = Int64(layer) * windows.stride[0] + Int64(slot) * windows.stride[1]
        values = cute.make_rmem_tensor(UNITS * MOVES * count, windows.element_type)
        while path != 0:
            nodes, moves = next_moves(path, step)
            for m in cutlass.range_constexpr(MOVES):
                is_moved = moves[m] & (before + nodes[m] < windows.shape[3])
                source = window + Int64(before + nodes[m]) * windows.stride[3]
                for i in cutlass.range_constexpr(UNITS):
                    own = first + i * self.threads
                    if is_moved & (own < self.groups):
                        offset = source + Int64(own * count) * windows.stride[2]
                        load_channels(windows, offset, is_wide, count, values, (m * UNITS + i) * count)
            for m in cutlass.range_constexpr(MOVES):
                is_moved = moves[m] & (before + nodes[m] < windows.shape[3])
                target = window + Int64(before + step + m) * windows.stride[3]
                for i in cutlass.range_constexpr(UNITS):
                    own = first + i * self.threads
                    if is_moved & (own < self.groups):
                        offset = target + Int64(own * count) * windows.stride[2]
                        store_channels(values, (m * UNITS + i) * count, count, windows, offset, is_wide)
            path = without_lowest(path, MOVES)
            step += MOVES


def next_moves(path: Any, step: Any) -> tuple[list[Any], list[Any]]:
    """The next nodes of a path that has `step` nodes before them, and which of them are not yet in their place."""
    nodes, moves = [], []
    for m in range(MOVES):
        rest = without_lowest(path, m)
        node = lowest(rest)
        nodes.append(node)
        moves.append((rest != 0) & (node != step + m))
    return nodes, moves


def without_lowest(path: Any, count: int) -> Any:
    """A path without its first nodes. What is empty stays empty."""
    for _ in range(count):
        path = path & (path - 1)
    return path


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
