"""A prefill step as launches that run side by side, each some chunks later than the one before.

    rows.py       the convolution, on `num_conv_blocks` SMs of its own
    chunk         the chunk kernel with two SMs a head, on the SMs that are left: it waits for the rows of each chunk
    outputs.py    the gated norm, on what the convolution's SMs have left: it waits for the outputs of each chunk and head
    one_token.py  with `max_short_tokens` the sequences of one token, which the others pass over

The convolution and the norm are bound by memory, the chunk kernel is not, and what one writes the next one reads from the L2
cache. Each is a programmatic dependent of the one before, whose blocks trigger as they begin: so a launch begins when all blocks
of the one before have. These have their SMs, and wait at most for blocks that began before them: no deadlock, whatever else runs
on the device. A launch that finds no room begins later, with all words there. The words (kernels_cute.chunk.signals) are cleared
by a launch of its own. A block of the last launch waits for the end of the one before, that for the end of the one before it, and
so on, so what follows in the stream sees all of them. Without a norm its launch is left out.

Workspace: the words `rows_made` and `outputs_done`, then the rows of q, k and v.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from kernels_cute.chunk import fused
from kernels_cute.chunk.arguments import token_copies
from kernels_cute.chunk.shape import CHUNK, STAGES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx
from kernels_cute.common.memory import fake
from kernels_cute.gdn_prefill import parts
from kernels_cute.gdn_prefill.one_token import OneToken
from kernels_cute.gdn_prefill.outputs import OutputNorm, norm_params
from kernels_cute.gdn_prefill.rows import RowMaker
from kernels_cute.gdn_prefill.shape import words, words_bytes
from kernels_cute.gdn_prefill.views import chunk_views, conv_views, rows_view

_CLEAR_THREADS = 256


class SideBySide:
    def __init__(self, problem: GdnPrefillProblem, conv_config: Any, is_persistent: bool, max_short_tokens: int) -> None:
        self.problem, skipped = problem, max_short_tokens
        self.one_token = OneToken(problem) if skipped else None
        self.rows = RowMaker(problem, conv_config, skipped)
        plain = ChunkSpec(parts.chunk_problem(problem), STAGES, 0, is_persistent, False, False)
        self.spec = plain.changed(row_tile=self.rows.rows, row_makers=self.rows.slices, skipped_tokens=skipped)
        self.chunk = fused.FusedChunk(self.spec)
        self.norm = OutputNorm(problem, self.spec.slices, skipped) if problem.has_norm else None

    @cute.jit
    def launch(self, *values):
        """values: GdnPrefillParams, blocks of the convolution, clusters of the chunk kernel at most, stream."""
        params = GdnPrefillParams(*values[: len(GdnPrefillParams._fields)])
        conv_blocks, max_clusters, stream = values[len(GdnPrefillParams._fields) :]
        problem, tokens = self.problem, params.mixed_qkv.shape[0]
        sequences = params.cu_seqlens.shape[0] - 1
        size = words_bytes(words(tokens, sequences, problem.num_v_heads))
        rows_made = params.workspace.iterator.toint()
        outputs_done = rows_made + Int64(tokens // CHUNK + sequences) * 4
        cleared = 16 * _CLEAR_THREADS  # by a block
        self.clear(rows_made, size).launch(
            grid=((size + (cleared - 1)) // cleared, 1, 1), block=(_CLEAR_THREADS, 1, 1), stream=stream
        )
        rows = rows_view(problem, rows_made + Int64(size), tokens)
        conv = conv_views(problem, params, rows)
        self.rows.kernel(conv, rows_made).launch(stream=stream, use_pdl=True, **self.rows.launch_options(conv_blocks))
        chunk = chunk_views(problem, params, rows.iterator, tokens)
        copies = token_copies(self.spec, chunk)._replace(rows_made=rows_made, outputs_done=outputs_done)
        clusters = cutlass.min(sequences * self.spec.units, max_clusters)
        options = {"grid": (self.spec.sharers * clusters, 1, 1), **fused.launch_shape(self.spec)}
        self.chunk.kernel(chunk, copies, Int32(0)).launch(stream=stream, use_pdl=True, **options)
        if cutlass.const_expr(self.norm is not None):
            norm = norm_params(problem, params)
            self.norm.kernel(norm, outputs_done).launch(stream=stream, use_pdl=True, **self.norm.launch_options(norm))
        if cutlass.const_expr(self.one_token is not None):
            self.one_token.launch(params, stream)

    @cute.kernel
    def clear(self, first: Int64, num_bytes: Int32):
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        offset = (block * _CLEAR_THREADS + thread) * 16
        if offset < num_bytes:
            ptx.store_global_words(first + offset, [Int32(0)] * 4)


def fakes(problem: GdnPrefillProblem) -> GdnPrefillParams:
    """Arguments to compile for."""
    p, HV, V = problem, problem.num_v_heads, problem.head_v_dim
    tokens, columns, slots = cute.sym_int(), cute.sym_int(), cute.sym_int64()
    has_pairs = p.interleaved or p.merged

    def given(dtype: str | None, *shape: Any, last: Any = None, present: bool = True, align: int | None = None) -> Any:
        return fake(dtype, *shape, last=last, align=align) if present else None

    channel_stride = 1 if p.conv_channels_contiguous else None
    return GdnPrefillParams(
        mixed_qkv=given(p.dtype, tokens, p.dim + (HV * V if has_pairs else 0), last=1),
        z=given(p.z_dtype, tokens, HV, V, last=1),
        b=given(p.b_dtype, tokens, 2 * HV if has_pairs else HV),
        a=given(p.a_dtype, tokens, HV),
        conv_states=given(p.conv_dtype, cute.sym_int64(), p.dim, cute.sym_int64(), last=(channel_stride, None)),
        conv_weight=given(p.weight_dtype, p.dim, p.width, last=(p.width, 1)),
        conv_bias=given(p.bias_dtype, p.dim, last=1),
        A_log=given(p.A_log_dtype, HV, last=1),
        dt_bias=given(p.dt_bias_dtype, HV, last=1),
        norm_weight=given(p.norm_dtype, V, last=1),
        ssm_state=given(p.state_dtype, slots, HV, V, V, last=1),
        state_indices=given(p.index_dtype, None),
        has_initial_state=given("bool", None, last=1, present=p.has_mask),
        cu_seqlens=given(p.cu_seqlens_dtype, None, last=1),
        checkpoint_offsets=given("int32", cute.sym_int(), columns, last=1, present=p.has_checkpoints),
        checkpoint_slots=given(p.index_dtype, cute.sym_int(), columns, last=1, present=p.has_checkpoints),
        checkpoint_states=given(p.checkpoint_state_dtype, cute.sym_int64(), HV, V, V, last=1),
        checkpoint_windows=given(p.checkpoint_window_dtype, cute.sym_int64(), p.dim, cute.sym_int64()),
        out=given(p.dtype, tokens, HV, V, last=(V, 1), align=16),
        workspace=fake("uint8", cute.sym_int64(), last=1, align=256),
        scale=cutlass.Float32(1.0),
        eps=cutlass.Float32(1e-6),
        null_slot=Int64(-1),
    )
