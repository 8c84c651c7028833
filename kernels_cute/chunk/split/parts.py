"""Summaries (h, P) of whole sequences, for sequences whose tokens lie on several devices: S' = P S + h.

Block roles, registers, shared memory and barriers are those of the first launch of a split call (summary.py); what differs: every
sequence is one segment, whatever its length, h starts from zero, and both leave as float32 matrices instead of a workspace's
tiles. A sequence without tokens gets h = 0 and P = 1. Its last chunk may be partial.
"""

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from gdn.ops.delta_rule.problem import ChunkSummaryParams
from kernels_cute.chunk import operands
from kernels_cute.chunk.arguments import TokenCopies, token_tensor
from kernels_cute.chunk.fused import launch_shape
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.shape import summary_spec
from kernels_cute.chunk.split.summary import summarize
from kernels_cute.common.memory import without_batch

_PER_TOKEN = ("k", "v", "g", "beta")


class PartSummaries:
    """The launch: a pair of blocks, at D = 64 one block, for every sequence and state head."""

    def __init__(self, spec: ChunkSpec):
        self.spec = summary_spec(spec)

    @cute.jit
    def launch(self, *values: Any):
        """values: Params, stream."""
        params, stream = ChunkSummaryParams(*values[:-1]), values[-1]
        present = [name for name in _PER_TOKEN if getattr(params, name) is not None]
        tensors = without_batch(*[getattr(params, name) for name in present])
        params = params._replace(**dict(zip(present, tensors, strict=True)))
        spec, load = self.spec, cpasync.CopyBulkTensorTileG2SOp()
        found: list[Any] = []
        for x, columns in ((params.k, spec.dim), (params.v, spec.columns)):
            layout = operands.by_rows(spec.dtype, CHUNK, columns)
            found += cpasync.make_tiled_tma_atom(load, token_tensor(x), layout, (CHUNK, columns))
        sequences = cute.size(params.cu_seqlens, mode=[0]) - 1
        self.kernel(params, TokenCopies(None, None, *found)).launch(
            grid=(spec.sharers * spec.heads * sequences, 1, 1), stream=stream, **launch_shape(spec)
        )

    @cute.kernel
    def kernel(self, params: ChunkSummaryParams, copies: TokenCopies):
        block, _, _ = cute.arch.block_idx()
        sharers, heads = self.spec.sharers, self.spec.heads
        summarize(self.spec, params, copies, block // (sharers * heads), block // sharers % heads, block % 2)
