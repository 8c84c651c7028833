"""A prefill step in two launches: the convolution, and the chunk kernel with the gated norm in it (chunk/roles/norm.py).

The chunk kernel is a programmatic dependent of the convolution: its blocks take SMs as that leaves them, and their loading warps
wait for its end before the first row is asked for. So what follows in the stream, which waits for the chunk kernel, waits for
both.

Workspace: the rows of q, k and v.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from gdn.problems import ChunkParams, Conv1dParams, GdnPrefillParams, GdnPrefillProblem
from kernels_cute.chunk import fused, operands
from kernels_cute.chunk.arguments import TokenCopies, token_copies
from kernels_cute.chunk.roles.norm import NormTerms
from kernels_cute.chunk.shape import CHUNK, NORM_QUERY_STAGES, STAGES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common.memory import CUTE_DTYPES
from kernels_cute.gdn_prefill import parts
from kernels_cute.gdn_prefill.staged import StagedTiles
from kernels_cute.gdn_prefill.steps import PrefillConv
from kernels_cute.gdn_prefill.views import chunk_views, norm_z


class NormedChunk:
    """Two SMs a head, and the step's result instead of the outputs."""

    def __init__(self, spec: ChunkSpec) -> None:
        self.spec = spec

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, terms: NormTerms):
        fused.run_block(self.spec, params, copies, None, terms)


def normed_spec(problem: GdnPrefillProblem, is_persistent: bool) -> ChunkSpec:
    own = ChunkSpec(parts.chunk_problem(problem), STAGES, 0, is_persistent, False, False)
    return own.changed(
        has_norm=True, norm_sigmoid=problem.gate_sigmoid, query_stages=NORM_QUERY_STAGES, follows_rows=True
    )  # fmt: skip


class Normed:
    def __init__(self, problem: GdnPrefillProblem, conv_config: Any, is_persistent: bool, is_staged: bool) -> None:
        self.problem = problem
        self.conv: Any = (StagedTiles if is_staged else PrefillConv)(problem, conv_config)
        self.spec = normed_spec(problem, is_persistent)
        self.chunk = NormedChunk(self.spec)

    @cute.jit
    def launch(self, *values):
        """values: GdnPrefillParams, clusters of the chunk kernel at most, stream."""
        params = GdnPrefillParams(*values[: len(GdnPrefillParams._fields)])
        max_clusters, stream = values[len(GdnPrefillParams._fields) :]
        problem, tokens = self.problem, params.mixed_qkv.shape[0]
        dtype = CUTE_DTYPES[problem.dtype]
        first = cute.make_ptr(dtype, params.workspace.iterator.toint(), cute.AddressSpace.gmem, assumed_align=256)
        rows = cute.make_tensor(first, cute.make_layout((tokens, problem.dim), stride=(problem.dim, 1)))
        conv = Conv1dParams(
            params.mixed_qkv, params.conv_weight, params.conv_bias, params.conv_states, params.cu_seqlens, params.state_indices,
            params.has_initial_state, params.checkpoint_offsets, params.checkpoint_slots, rows, params.null_slot,
        )  # fmt: skip
        self.conv.kernel(conv).launch(
            grid=(self.conv.blocks(conv), 1, 1), block=(self.conv.threads, 1, 1), stream=stream, **self.conv.limits
        )
        chunk = chunk_views(problem, params, first, tokens)
        z_atom, z = z_copy(self.spec, problem, params, tokens)
        copies = token_copies(self.spec, chunk)._replace(z_atom=z_atom, z=z)
        clusters = cutlass.min((params.cu_seqlens.shape[0] - 1) * self.spec.units, max_clusters)
        self.chunk.kernel(chunk, copies, NormTerms(params.norm_weight, params.eps)).launch(
            grid=(self.spec.sharers * clusters, 1, 1), stream=stream, use_pdl=True, **fused.launch_shape(self.spec)
        )


@cute.jit
def z_copy(spec, problem, params, tokens):
    """The bulk copy of z's tiles: its atom, and its tensor [tokens, V, heads]."""
    z = norm_z(problem, params, tokens)
    head_strides = z.stride[1]
    if cutlass.const_expr(not problem.interleaved):
        # The stride of a single head is never used and may be anything.
        head_strides = cute.assume(head_strides, divby=8) if cutlass.const_expr(spec.heads > 1) else spec.dim
    strides = (cute.assume(z.stride[0], divby=8), 1, head_strides)
    first = cute.make_ptr(spec.dtype, z.iterator.toint(), cute.AddressSpace.gmem, assumed_align=16)
    by_head = cute.make_tensor(first, cute.make_layout((z.shape[0], spec.dim, z.shape[1]), stride=strides))
    layout = operands.by_rows(spec.dtype, CHUNK, spec.columns)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), by_head, layout, (CHUNK, spec.columns))
