"""Items of the streamed form: a sequence and a key head each, dealt to blocks in turn; what a call says of a sequence."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common.memory import narrowed
from kernels_cute.common.ring import boundary, is_served
from kernels_cute.common.state_tile import Place
from kernels_cute.gdn_decode.spec import Block
from kernels_cute.gdn_decode.streamed.spec import Item, Spec

COUNTS = 5  # values of `load_counts`


@cute.jit
def load_counts(spec: Spec, params: GdnDecodeParams, item: Int32, rCounts: cute.Tensor):
    """Load the first token, number of tokens, slot, committed and accepted tokens of an item's sequence, all at once. Nothing
    waits for them here."""
    sequence = item // spec.problem.num_k_heads
    rCounts[0], rCounts[1] = sequence, Int32(1)
    if cutlass.const_expr(spec.has_several_tokens):
        rCounts[0] = Int32(params.cu_seqlens[sequence])
        rCounts[1] = Int32(params.cu_seqlens[sequence + 1]) - rCounts[0]
    rCounts[2] = narrowed(params.state_indices[sequence])
    rCounts[3] = Int32(params.num_computed_tokens[sequence])
    rCounts[4] = Int32(1)
    if cutlass.const_expr(spec.problem.has_accepted):
        rCounts[4] = params.num_accepted_tokens[sequence]


@cute.jit
def is_live(spec: Spec, params: GdnDecodeParams, rCounts: cute.Tensor) -> Boolean:
    """Return whether the sequence is no padding, as far as its counts tell."""
    count, slot, committed, accepted = [rCounts[i] for i in range(1, COUNTS)]
    found = is_served(spec.ring, committed, accepted, count)
    found = found & (Int64(slot) > params.null_slot) & (Int64(slot) < params.ring.shape[0])
    if cutlass.const_expr(spec.keeps_columns):
        most = params.conv_state.shape[2] - spec.history
        found = found & (accepted - 1 <= most) & (count <= most + 1)
    return found


def item_of(spec: Spec, params: GdnDecodeParams, number: Any, rCounts: cute.Tensor) -> Item:
    """The item of a live sequence."""
    begin, count, slot, committed, accepted = [rCounts[i] for i in range(COUNTS)]
    column = accepted - 1 if spec.keeps_columns else Int32(0)
    first = boundary(spec.ring, committed - accepted, params.fold_phase)
    return Item(number % spec.problem.num_k_heads, begin, count, slot, column, first, committed)


def block_of(spec: Spec, key_head: Any, thread: Any, head: int = 0) -> Block:
    """A thread's part as `convolution` takes it. head: value head of the key head that the place has."""
    return Block(None, key_head, Int32(head), thread, Place(key_head * spec.ratio + head, Int32(0), Int32(0)))
