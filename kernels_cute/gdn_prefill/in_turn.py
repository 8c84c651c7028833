"""A prefill step as the launches of its three operators, one after the other in one entry: the convolution, the chunk kernel in
any of its forms, and the gated norm. With `max_short_tokens` these pass over the sequences of one token, and a last launch has
them (one_token.py): it begins with the norm, and runs next to it.

Views of the call's tensors and of the workspace are made in the launch, where they cost nothing.

Workspace: the rows of q, k and v, then what the chunk kernel needs.
"""

from itertools import accumulate
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint8

from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem, RmsNormGatedParams
from gdn.problem import DTYPE_BYTES
from kernels_cute.chunk import kernel as chunk
from kernels_cute.chunk import library as chunk_library
from kernels_cute.gdn_prefill import parts, plan
from kernels_cute.gdn_prefill.one_token import OneToken
from kernels_cute.gdn_prefill.outputs import OutputNorm, norm_params
from kernels_cute.gdn_prefill.staged import StagedTiles
from kernels_cute.gdn_prefill.steps import PrefillConv, PrefillNorm
from kernels_cute.gdn_prefill.views import chunk_views, conv_views, norm_z, rows_view


class InTurn:
    def __init__(self, problem: GdnPrefillProblem, config: Any) -> None:
        rule, variants = parts.chunk_problem(problem), chunk.variants(plan.bounded(config))
        self.problem, skipped = problem, config.max_short_tokens
        self.conv = StagedTiles(problem, config.conv, skipped) if skipped else PrefillConv(problem, config.conv)
        # Of each launch of the chunk kernel what launches it, and where its scalars end.
        specs = [chunk.spec_of(rule, variant).changed(skipped_tokens=skipped) for variant in variants]
        self.chunks = [chunk_library.host(spec, rule, variant) for spec, variant in zip(specs, variants, strict=True)]
        self.ends = [*accumulate(len(chunk.scalars(variant, 1, 1, 1)) for variant in variants)]
        self.has_workspace = any(chunk.needs_workspace(variant) for variant in variants)
        self.norm: OutputNorm | PrefillNorm | None = None
        if problem.has_norm:
            self.norm = OutputNorm(problem, 0, skipped) if skipped else PrefillNorm(problem, config.norm)
        self.one_token = OneToken(problem, waits=not problem.has_norm) if skipped else None

    @cute.jit
    def launch(self, *values):
        """values: GdnPrefillParams, the scalars of each variant of the chunk kernel, stream."""
        count = len(GdnPrefillParams._fields)
        params, scalars, stream = GdnPrefillParams(*values[:count]), values[count:-1], values[-1]
        problem, tokens = self.problem, params.mixed_qkv.shape[0]
        first = params.workspace.iterator.toint()
        rows = rows_view(problem, first, tokens)
        self.conv(*conv_views(problem, params, rows), stream)
        rule = chunk_views(problem, params, rows.iterator, tokens)
        if cutlass.const_expr(self.has_workspace):
            rule = rule._replace(workspace=self.rest(params.workspace, tokens))
        for host, begin, end in zip(self.chunks, (0, *self.ends), self.ends, strict=False):
            host.launch(*rule, *scalars[begin:end], stream)
        if cutlass.const_expr(isinstance(self.norm, OutputNorm)):
            norm = norm_params(problem, params)
            self.norm.kernel(norm, Int64(0)).launch(stream=stream, **self.norm.launch_options(norm))
        elif cutlass.const_expr(self.norm is not None):
            z = norm_z(problem, params, tokens)
            self.norm(*RmsNormGatedParams(params.out, z, params.norm_weight, params.out, params.eps), stream)
        if cutlass.const_expr(self.one_token is not None):
            self.one_token.launch(params, stream)

    def rest(self, workspace: Any, tokens: Any) -> Any:
        """The workspace after the rows."""
        size = Int64(tokens) * (self.problem.dim * DTYPE_BYTES[self.problem.dtype])
        begin = parts.whole(size)
        first = cute.make_ptr(Uint8, workspace.iterator.toint() + begin, cute.AddressSpace.gmem, assumed_align=parts.ALIGNMENT)
        return cute.make_tensor(first, cute.make_layout((workspace.shape[0] - begin,), stride=(1,)))
