"""A prefill step in two launches: the staged convolution, and the chunk kernel with the gated norm in it (chunk/roles/norm.py).

The chunk kernel is a programmatic dependent of the convolution: its blocks take SMs as that leaves them, and their loading warps
wait for its end before the first row is asked for. So what follows in the stream, which waits for the chunk kernel, waits for
both.

Workspace: the rows of q, k and v.
"""

from typing import Any

import cutlass
import cutlass.cute as cute

from gdn.ops.delta_rule.problem import ChunkParams
from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from kernels_cute.chunk import fused
from kernels_cute.chunk.arguments import TokenCopies, token_copies, z_copy
from kernels_cute.chunk.roles.norm import NormTerms
from kernels_cute.chunk.shape import NORM_QUERY_STAGES, STAGES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.gdn_prefill import parts
from kernels_cute.gdn_prefill.staged import StagedTiles
from kernels_cute.gdn_prefill.views import chunk_views, conv_views, norm_z, rows_view


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
    def __init__(self, problem: GdnPrefillProblem, conv_config: Any, is_persistent: bool) -> None:
        self.problem = problem
        self.conv = StagedTiles(problem, conv_config)
        self.spec = normed_spec(problem, is_persistent)
        self.chunk = NormedChunk(self.spec)

    @cute.jit
    def launch(self, *values):
        """values: GdnPrefillParams, clusters of the chunk kernel at most, stream."""
        params = GdnPrefillParams(*values[: len(GdnPrefillParams._fields)])
        max_clusters, stream = values[len(GdnPrefillParams._fields) :]
        problem, tokens = self.problem, params.mixed_qkv.shape[0]
        rows = rows_view(problem, params.workspace.iterator.toint(), tokens)
        conv = conv_views(problem, params, rows)
        self.conv.kernel(conv).launch(
            grid=(self.conv.blocks(conv), 1, 1), block=(self.conv.threads, 1, 1), stream=stream, **self.conv.limits
        )
        chunk = chunk_views(problem, params, rows.iterator, tokens)
        z_atom, z = z_copy(self.spec, norm_z(problem, params, tokens), problem.interleaved)
        copies = token_copies(self.spec, chunk)._replace(z_atom=z_atom, z=z)
        clusters = cutlass.min((params.cu_seqlens.shape[0] - 1) * self.spec.units, max_clusters)
        self.chunk.kernel(chunk, copies, NormTerms(params.norm_weight, params.eps)).launch(
            grid=(self.spec.sharers * clusters, 1, 1), stream=stream, use_pdl=True, **fused.launch_shape(self.spec)
        )
