"""A prefill step's sequences of one token: the decode step's kernel (kernels_cute.gdn_decode), in the last launch.

It reads nothing that the launches before it write, and writes other rows and states. So it begins once all blocks of the one
before have begun, if that one says when. Its first block waits for that one's end, so what follows in the stream, which waits for
this launch alone, waits for all of them.

Blocks of other sequences return at once. The rows that nobody has are zeroed here: those of padding sequences of any length, and
those after the last sequence.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams, GdnPrefillParams, GdnPrefillProblem
from kernels_cute.common import ptx
from kernels_cute.common.memory import narrowed
from kernels_cute.gdn_decode.config import Config
from kernels_cute.gdn_decode.convolution import load_gates, load_head_gates
from kernels_cute.gdn_decode.kernel import block_of, launch_shape, make_registers, run_sequence
from kernels_cute.gdn_decode.projections import flat_views
from kernels_cute.gdn_decode.spec import Block, Sequence, Spec, column_in_head
from kernels_cute.gdn_prefill import parts

_COLUMNS = 8  # of a store
_MOST_BLOCKS = 8  # of a cluster, which has a key head


def tiles(problem: GdnPrefillProblem) -> Config:
    """Tiles of the decode step: half of a head's state in a block, or all of it where a cluster has more heads.

    Most blocks may find nothing to do, so there are few of them; four are on an SM. A bfloat16 state V first that may start from
    zero takes more registers.
    """
    threads = 128 if 2 * problem.num_v_heads // problem.num_k_heads <= _MOST_BLOCKS else 256
    takes_more = problem.has_mask and problem.state_v_first and problem.state_dtype == "bfloat16"
    return Config(threads, 8, 4, 512 if not takes_more else 384 if threads == 128 else 256)


class OneToken:
    def __init__(self, problem: GdnPrefillProblem, *, waits: bool = False) -> None:
        """waits: for the end of the launch before, which does not say when all its blocks have begun."""
        self.spec, self.waits = Spec(parts.decode_problem(problem), tiles(problem)), waits

    @cute.jit
    def launch(self, p: GdnPrefillParams, stream: Any):
        """After a launch that lets this one begin, unless it waits."""
        params = GdnDecodeParams(
            p.mixed_qkv, p.z, p.b, p.a, p.conv_states, p.conv_weight, p.conv_bias, p.A_log, p.dt_bias, p.norm_weight,
            p.ssm_state, p.state_indices, None, p.cu_seqlens, *[None] * 6, p.out, p.scale, p.eps, p.null_slot, None,
        )  # fmt: skip
        params, sequences = flat_views(self.spec.problem, params), p.cu_seqlens.shape[0] - 1
        shape = launch_shape(self.spec, sequences)
        self.kernel(params, p.has_initial_state).launch(stream=stream, use_pdl=not self.waits, **shape)

    @cute.kernel
    def kernel(self, params: GdnDecodeParams, has_initial_state: cute.Tensor):
        spec, block = self.spec, block_of(self.spec)
        sequence, sequences = block.sequence, params.cu_seqlens.shape[0] - 1
        begin, end = Int32(params.cu_seqlens[sequence]), Int32(params.cu_seqlens[sequence + 1])
        slot = narrowed(params.state_indices[sequence])
        if Int64(slot) <= params.null_slot:
            self.zero_rows(params.out, block, begin, end, Int32(1))
        elif end - begin == 1:
            registers = make_registers(spec, params, block)
            load_head_gates(spec, params, block, registers.gates)
            load_gates(spec, params, begin, block, registers.gates)
            is_continued = None
            if cutlass.const_expr(has_initial_state is not None):
                is_continued = has_initial_state[sequence] != 0
            none = Int32(0)
            live = Sequence(begin, Int32(1), slot, slot, slot, none, none, none, none, is_continued)
            run_sequence(spec, params, block, live, registers)
        # Rows after the last sequence are dealt to all blocks of the head.
        after = Int32(params.cu_seqlens[sequences])
        self.zero_rows(params.out, block, after + sequence, params.out.shape[0], sequences)
        if cute.arch.block_idx()[0] == 0:
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def zero_rows(self, out: cute.Tensor, block: Block, first: Int32, end: Int32, step: Int32):
        """Zero the block's columns of rows first, first + step, ... before `end`."""
        units = self.spec.tiles.block_v // _COLUMNS
        rows, zeros = self.spec.tiles.threads // units, [Int32(0)] * (_COLUMNS // 2)
        column = column_in_head(self.spec, block.rank) + block.thread % units * _COLUMNS
        for row in cutlass.range(first + block.thread // units * step, end, rows * step, unroll=1):
            offset = Int64(row) * out.stride[0] + Int64(block.place.head) * out.stride[1] + column
            ptx.store_global_words(out.iterator.toint() + 2 * offset, zeros)
