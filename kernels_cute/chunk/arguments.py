"""Arguments of the chunk kernels on the device: the operator's Params, and the bulk copies of its token tensors; and whether a
launch works at all.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk import operands
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common.memory import without_batch

NUM_PARAMS = len(ChunkParams._fields)
_PER_TOKEN = ("q", "k", "v", "g", "beta", "out")


class TokenCopies(NamedTuple):
    """Bulk copies between token tensors and shared memory: the atom of each, and its tensor [tokens, D, heads]."""

    q_atom: Any
    q: Any
    k_atom: Any
    k: Any
    v_atom: Any
    v: Any
    out_atom: Any = None  # None where the kernel writes no outputs
    out: Any = None
    # Addresses of words, see signals.py; None where no other kernel runs at the same time.
    rows_made: Any = None
    outputs_done: Any = None
    # Input of the output gate, where the kernel has the gated norm.
    z_atom: Any = None
    z: Any = None


def packed_params(values: tuple[Any, ...]) -> tuple[ChunkParams, tuple[Any, ...]]:
    """Return the Params among a launch's values, and the values after them. Token tensors become [tokens, ...] where the launch
    was given [1, tokens, ...]."""
    params = ChunkParams(*values[:NUM_PARAMS])
    if cute.rank(params.q) == 3:
        return params, values[NUM_PARAMS:]
    present = [name for name in _PER_TOKEN if getattr(params, name) is not None]
    tensors = without_batch(*[getattr(params, name) for name in present])
    return params._replace(**dict(zip(present, tensors, strict=True))), values[NUM_PARAMS:]


def token_copies(spec: ChunkSpec, params: ChunkParams, multicast: bool = False) -> TokenCopies:
    """Make the bulk copies of q, k, v and out. multicast: a tile of K or Q may go to several blocks of a cluster."""
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    to_several = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else load
    found: list[Any] = []
    for op, x, columns in (
        *((to_several, params.q, spec.dim), (to_several, params.k, spec.dim)),
        *((load, params.v, spec.columns), (store, params.out, spec.columns)),
    ):
        layout = operands.by_rows(spec.dtype, CHUNK, columns)
        found += cpasync.make_tiled_tma_atom(op, token_tensor(x), layout, (CHUNK, columns))
    return TokenCopies(*found)


@cute.jit
def token_tensor(x: cute.Tensor):
    """[tokens, heads, D] as (tokens, D, heads); strides are multiples of 16 bytes by contract."""
    tokens, heads, dim = x.shape
    token_stride = cute.assume(x.stride[0], divby=8)
    # The stride of a single head is never used and may be anything.
    head_stride = cute.assume(x.stride[1], divby=8) if cutlass.const_expr(heads > 1) else dim
    return cute.make_tensor(x.iterator, cute.make_layout((tokens, dim, heads), stride=(token_stride, 1, head_stride)))


@cute.jit
def z_copy(spec: ChunkSpec, z: cute.Tensor, is_grouped: bool):
    """Make the bulk copy of tiles of z [tokens, heads, V], whose heads may be in groups: the atom, and the tensor [tokens, V,
    heads]."""
    head_strides = z.stride[1]
    if cutlass.const_expr(not is_grouped):
        # As in token_tensor.
        head_strides = cute.assume(head_strides, divby=8) if cutlass.const_expr(spec.heads > 1) else spec.dim
    strides = (cute.assume(z.stride[0], divby=8), 1, head_strides)
    first = cute.make_ptr(spec.dtype, z.iterator.toint(), cute.AddressSpace.gmem, assumed_align=16)
    by_head = cute.make_tensor(first, cute.make_layout((z.shape[0], spec.dim, z.shape[1]), stride=strides))
    layout = operands.by_rows(spec.dtype, CHUNK, spec.columns)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), by_head, layout, (CHUNK, spec.columns))


def partition_tiles(spec: Any, field: Any, atom: Any, x: Any, width: int, stages: int, begin: Any, head: Any, piece: Any) -> Any:
    """Shared and global sides of a tensor's tiles: (copy, stage) and (copy, chunk of the sequence)."""
    layout = operands.by_rows(spec.dtype, CHUNK, width, stages)
    shared = field.get_tensor(layout.outer, swizzle=layout.inner)
    rows = cute.domain_offset((begin, 0), x[None, None, head])
    chunks = cute.local_tile(rows, (CHUNK, width), (None, piece))
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(chunks, 0, 2))


def partition_keys(spec: Any, storage: Any, copies: Any, work_tile: Any, q_stages: int, k_stages: int) -> Any:
    """Return the shared and the global side of a work tile's Q, then those of its K."""
    q_head, k_head = work_tile.head // spec.q_group, work_tile.head // spec.k_group
    to_q, from_q = partition_tiles(spec, storage.q, copies.q_atom, copies.q, spec.dim, q_stages, work_tile.begin, q_head, 0)
    to_k, from_k = partition_tiles(spec, storage.k, copies.k_atom, copies.k, spec.dim, k_stages, work_tile.begin, k_head, 0)
    return to_q, from_q, to_k, from_k


@cute.jit
def is_selected_launch(spec: ChunkSpec, cu_seqlens: cute.Tensor, split_if_longest_exceeds: Int32):
    """Return whether this launch has to work: segments where some sequence has more tokens than the bound, whole sequences
    elsewhere. Where short sequences are skipped: segments where the longer ones are at most as many as the bound, for which there
    are slots (split/segments.py).

    A call that may be split launches both forms, and the blocks of the one that is not selected return at once. Whole sequences
    take as long as the longest one, segments as long as all tokens together, and the host does not know the lengths. All threads
    get the same answer.
    """
    if cutlass.const_expr(not spec.has_both_variants):
        return Boolean(True)
    if cutlass.const_expr(spec.skipped_tokens > 0):
        are_cut = longer_sequences(cu_seqlens, spec.skipped_tokens) <= split_if_longest_exceeds
    else:
        are_cut = longest_sequence(cu_seqlens) > split_if_longest_exceeds
    if cutlass.const_expr(not spec.is_split):
        return not are_cut
    # Launched before whole sequences are done, which saves microseconds where it then has nothing to do. Their first launch
    # waited for what came before the call, so the lengths may be read; nothing else is touched before this, and what follows
    # in the stream waits for it.
    cute.arch.griddepcontrol_wait()
    return are_cut


@cute.jit
def longest_sequence(cu_seqlens: cute.Tensor):
    """Return the tokens of the longest sequence. Each warp finds it for itself."""
    most, count = Int32(0), cute.size(cu_seqlens, mode=[0]) - 1
    for first in cutlass.range(0, count, 32, unroll=1):
        sequence = first + cute.arch.lane_idx()
        if sequence < count:
            most = cutlass.max(most, Int32(cu_seqlens[sequence + 1]) - Int32(cu_seqlens[sequence]))
    return cute.arch.warp_redux_sync(most, "max")


@cute.jit
def longer_sequences(cu_seqlens: cute.Tensor, skipped: cutlass.Constexpr):
    """Return how many sequences have more than `skipped` tokens. Each warp counts them for itself."""
    found, count = Int32(0), cute.size(cu_seqlens, mode=[0]) - 1
    for first in cutlass.range(0, count, 32, unroll=1):
        sequence, is_longer = first + cute.arch.lane_idx(), Boolean(False)
        if sequence < count:
            is_longer = Int32(cu_seqlens[sequence + 1]) - Int32(cu_seqlens[sequence]) > skipped
        found = found + cute.arch.popc(cute.arch.vote_ballot_sync(is_longer))
    return found
