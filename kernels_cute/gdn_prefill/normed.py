"""A prefill step in two launches: the staged convolution, and the chunk kernel with the gated norm in it (chunk/roles/norm.py).
With `max_short_tokens` others after them have the short sequences: those of more than one token (short/kernel.py), then those of
one (one_token.py).

The chunk kernel is a programmatic dependent of the convolution: its blocks take SMs as that leaves them, and their loading warps
wait for its end before the first row is asked for. So what follows in the stream, which waits for the chunk kernel, waits for
both. Each launch after it begins on what SMs are left once all blocks of the one before have begun. Its first block waits for
that one's end, so that what follows waits for all.

Workspace: the rows of q, k and v.
"""

from typing import Any

import cutlass
import cutlass.cute as cute

from gdn.ops.delta_rule.problem import ChunkParams
from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from kernels_cute.chunk import fused
from kernels_cute.chunk.arguments import TokenCopies, longest_sequence, token_copies, z_copy
from kernels_cute.chunk.roles.norm import NormTerms
from kernels_cute.chunk.shape import NORM_QUERY_STAGES, STAGES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.gdn_prefill import parts
from kernels_cute.gdn_prefill.one_token import OneToken
from kernels_cute.gdn_prefill.short.kernel import ShortStep
from kernels_cute.gdn_prefill.staged import StagedTiles
from kernels_cute.gdn_prefill.views import chunk_views, conv_views, norm_z, rows_view


class NormedChunk:
    """Two SMs a head, and the step's result instead of the outputs."""

    def __init__(self, spec: ChunkSpec) -> None:
        self.spec = spec

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, terms: NormTerms):
        if cutlass.const_expr(self.spec.skipped_tokens > 0):
            cute.arch.griddepcontrol_launch_dependents()
            if longest_sequence(params.cu_seqlens) > self.spec.skipped_tokens:
                fused.run_block(self.spec, params, copies, None, terms)
            # A block without work must not end before the convolution either.
            cute.arch.griddepcontrol_wait()
        else:
            fused.run_block(self.spec, params, copies, None, terms)


def normed_spec(problem: GdnPrefillProblem, is_persistent: bool, skipped_tokens: int) -> ChunkSpec:
    own = ChunkSpec(parts.chunk_problem(problem), STAGES, 0, is_persistent, False, False)
    return own.changed(
        has_norm=True, norm_sigmoid=problem.gate_sigmoid, query_stages=NORM_QUERY_STAGES, follows_rows=True,
        skipped_tokens=skipped_tokens,
    )  # fmt: skip


class Normed:
    def __init__(self, problem: GdnPrefillProblem, conv_config: Any, is_persistent: bool, max_short_tokens: int) -> None:
        self.problem = problem
        self.spec = normed_spec(problem, is_persistent, max_short_tokens)
        self.one_token = OneToken(problem) if max_short_tokens else None
        self.conv = StagedTiles(problem, conv_config, max_short_tokens)
        self.chunk = NormedChunk(self.spec)
        self.short = ShortStep(problem, self.spec) if max_short_tokens > 1 else None

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
        z, terms = norm_z(problem, params, tokens), NormTerms(params.norm_weight, params.eps)
        z_atom, z_tiles = z_copy(self.spec, z, problem.interleaved)
        copies = token_copies(self.spec, chunk)._replace(z_atom=z_atom, z=z_tiles)
        sequences = params.cu_seqlens.shape[0] - 1
        clusters = cutlass.min(sequences * self.spec.units, max_clusters)
        self.chunk.kernel(chunk, copies, terms).launch(
            grid=(self.spec.sharers * clusters, 1, 1), stream=stream, use_pdl=True, **fused.launch_shape(self.spec)
        )
        if cutlass.const_expr(self.short is not None):
            self.short.kernel(conv, chunk, terms, z).launch(stream=stream, use_pdl=True, **self.short.launch_shape(sequences))
        if cutlass.const_expr(self.one_token is not None):
            self.one_token.launch(params, stream)
