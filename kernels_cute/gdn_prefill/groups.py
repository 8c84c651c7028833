"""A prefill step of a few sequences of a batch: convolution, chunk kernel and norm, each a programmatic dependent of the last.

A batch whose chunk kernel fills all SMs goes through these three launches group by group. The rows of q, k and v of every group
are written to the same place, so that they stay in the L2 cache, as do the outputs until the norm reads them; what is read or
written for good is the first to leave it. Row t of the workspace is token cu_seqlens[0] + t, where cu_seqlens is that of the
group; all other tensors are those of the whole call.

Every launch is a programmatic dependent of the one before, and begins when all blocks of that have triggered:

    launch          its blocks wait for all of the launch before            and trigger
    convolution     of a call's first group at the start, else at the end   at the start, or after that wait
    chunk kernel    before the first row is asked for (one warp)            at the start
    norm            before the first output is asked for                    after that wait

So the convolution of a group begins when the chunk kernel has read the rows of the group before, while the norm of that one still
runs, and every launch has ended when the next one but one begins its work: each waits, at the latest at its end, and what follows
in the stream waits for the last norm. Blocks that wait do so for blocks that have begun: no deadlock.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.problems import ChunkParams, Conv1dParams, GdnPrefillParams, GdnPrefillProblem
from kernels_cute.chunk import fused
from kernels_cute.chunk.arguments import TokenCopies, token_copies
from kernels_cute.chunk.shape import CHUNK, STAGES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.conv1d.tiles import find_sequence
from kernels_cute.gdn_prefill import parts, policies
from kernels_cute.gdn_prefill.outputs import VECTOR, NormParams, OutputNorm
from kernels_cute.gdn_prefill.policies import EVICT_FIRST
from kernels_cute.gdn_prefill.staged import PART_BYTES, StagedTiles, ask_for_tile, finish_tile, span_of
from kernels_cute.gdn_prefill.views import chunk_views, conv_views, norm_z, rows_view


class GroupConv(StagedTiles, params=Conv1dParams):
    """The convolution of a group's sequences, to rows that are counted from its first token."""

    @cute.kernel
    def kernel(self, params: Conv1dParams, is_first: Int32):
        if is_first != 0:
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        place = self.stage(1) + thread * PART_BYTES
        num_sequences = params.cu_seqlens.shape[0] - 1
        begin, end = Int32(params.cu_seqlens[0]), Int32(params.cu_seqlens[num_sequences])
        first = begin // self.rows
        rows = cute.make_tensor(params.out.iterator - Int64(begin) * params.out.stride[0], params.out.layout)
        shifted = params._replace(out=rows)
        for unit in cutlass.range(block, (end // self.rows + num_sequences - first) * self.slices, blocks, unroll=1):
            tile = first + unit // self.slices
            channel = (unit % self.slices * self.threads + thread) * 8
            sequence = find_sequence(self.rows, tile, num_sequences, params.cu_seqlens)
            span = span_of(self, params, tile, sequence)
            ask_for_tile(self, params, span, channel, place)
            finish_tile(self, shifted, tile, sequence, span, channel, place)
        cute.arch.griddepcontrol_wait()


class GroupChunk(fused.FusedChunk):
    """The chunk kernel on such rows."""

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, split_if_longest_exceeds: Int32):
        cute.arch.griddepcontrol_launch_dependents()
        to_group = (-Int32(params.cu_seqlens[0]), 0, 0)
        q, k, v = [cute.domain_offset(to_group, x) for x in (copies.q, copies.k, copies.v)]
        fused.run_block(self.spec, params, copies._replace(q=q, k=k, v=v), None)


class GroupNorm(OutputNorm):
    """The norm of a group's outputs, a chunk and head after the other."""

    @cute.kernel
    def kernel(self, params: NormParams, outputs_done: Int64):
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        sequences = params.cu_seqlens.shape[0] - 1
        before = Int32(params.cu_seqlens[0]) // CHUNK
        chunks = Int32(params.cu_seqlens[sequences]) // CHUNK + sequences - before
        for unit in cutlass.range(block, chunks * self.heads, blocks, unroll=1):
            chunk, head = before + unit // self.heads, unit % self.heads
            sequence = find_sequence(CHUNK, chunk, sequences, params.cu_seqlens)
            begin = Int32(params.cu_seqlens[sequence])
            first = (chunk - begin // CHUNK - sequence) * CHUNK
            valid = cutlass.min(Int32(params.cu_seqlens[sequence + 1]) - begin - first, CHUNK)
            if (first >= 0) & (valid > 0):
                if Int64(params.state_indices[sequence]) > params.null_slot:
                    self.normalise(params, outputs_done, begin + first, valid, head)
        # Blocks without rows, too.
        self.await_outputs(outputs_done, block)

    def await_outputs(self, done: Int64, thread: Int32) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_part(self, source: cute.Pointer, rX: cute.Tensor, start: cutlass.Constexpr):
        policies.load(source, VECTOR, rX, start, EVICT_FIRST)

    @cute.jit
    def store_part(self, rOut: cute.Tensor, target: cute.Pointer):
        policies.store(rOut, 0, VECTOR, target, EVICT_FIRST)


class Groups:
    def __init__(self, problem: GdnPrefillProblem, conv_config: Any) -> None:
        self.problem = problem
        self.conv = GroupConv(problem, conv_config)
        self.spec = ChunkSpec(parts.chunk_problem(problem), STAGES, 0, False, False, False).changed(follows_rows=True)
        self.chunk = GroupChunk(self.spec)
        self.norm = GroupNorm(problem, 0)

    @cute.jit
    def launch(self, *values):
        """values: GdnPrefillParams, sequences of a group, stream."""
        params = GdnPrefillParams(*values[: len(GdnPrefillParams._fields)])
        count, stream = values[len(GdnPrefillParams._fields) :]
        problem, tokens = self.problem, params.mixed_qkv.shape[0]
        sequences = params.cu_seqlens.shape[0] - 1
        rows = rows_view(problem, params.workspace.iterator.toint(), tokens)
        copies = token_copies(self.spec, chunk_views(problem, params, rows.iterator, tokens))
        for group in cutlass.range((sequences + count - 1) // count, unroll=1):
            start = group * count
            size = cutlass.min(count, sequences - start)
            # Grids are made for as many tokens as a group has on average: their blocks go on where it has more.
            mean_tokens = (tokens + sequences - 1) // sequences * size
            # Rows after the last sequence belong to the last group.
            last = Int32(start + size == sequences)
            given = self.of_group(params, start, size)
            self.launch_group(given, rows, copies, mean_tokens, last * tokens, Int32(group == 0), stream)

    def of_group(self, params: GdnPrefillParams, start: Any, size: Any) -> GdnPrefillParams:
        """The arguments with the offsets, slots and checkpoints of some sequences."""
        own = {"cu_seqlens": size + 1, "state_indices": size, "has_initial_state": size}
        own |= {"checkpoint_offsets": size, "checkpoint_slots": size}
        views = {}
        for name, rows in own.items():
            x = getattr(params, name)
            if x is not None:
                layout = cute.make_layout((rows, *x.shape[1:]), stride=x.stride)
                views[name] = cute.make_tensor(x.iterator + Int64(start) * x.stride[0], layout)
        return params._replace(**views)

    @cute.jit
    def launch_group(self, params, rows, copies, mean_tokens, rest, is_first, stream):
        problem, tokens = self.problem, params.mixed_qkv.shape[0]
        sequences = params.cu_seqlens.shape[0] - 1
        tiles = mean_tokens // self.conv.rows + sequences
        self.conv.kernel(conv_views(params, rows), is_first).launch(
            grid=(tiles * self.conv.slices, 1, 1), block=(self.conv.threads, 1, 1), stream=stream, use_pdl=True,
            **self.conv.limits,
        )  # fmt: skip
        chunk = chunk_views(problem, params, rows.iterator, tokens)
        out = cute.make_tensor(params.out.iterator, cute.make_layout((rest, *params.out.shape[1:]), stride=params.out.stride))
        self.chunk.kernel(chunk._replace(out=out), copies, Int32(0)).launch(
            grid=(self.spec.sharers * sequences * self.spec.units, 1, 1), stream=stream, use_pdl=True,
            **fused.launch_shape(self.spec),
        )  # fmt: skip
        norm = NormParams(
            norm_z(problem, params, tokens), params.norm_weight, params.state_indices, params.cu_seqlens, params.out,
            params.eps, params.null_slot,
        )  # fmt: skip
        options = self.norm.launch_options(norm)
        options["grid"] = ((mean_tokens // CHUNK + sequences) * problem.num_v_heads, 1, 1)
        self.norm.kernel(norm, Int64(0)).launch(stream=stream, use_pdl=True, **options)
