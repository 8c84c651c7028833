"""The gated RMS norm of a value head's outputs, from the tile that they are in to the step's result.

Half a warp has a row, a lane 8 of its columns. Sums have the order of the norm's own kernel.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.chunk import operands
from kernels_cute.chunk.roles.gates import head_offset
from kernels_cute.chunk.roles.norm import NormTerms, gated_words
from kernels_cute.chunk.shape import TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx
from kernels_cute.common.memory import load, pointer
from kernels_cute.common.memory import words as words_of
from kernels_cute.gdn_prefill.short.rows import Sequence
from kernels_cute.gdn_prefill.short.shape import THREADS

_COLUMNS = 8  # of a lane
_LANES = 16  # of a row


@cute.jit
def norm_head(
    spec: ChunkSpec, storage: Any, terms: NormTerms, z: cute.Tensor, out: cute.Tensor, sequence: Sequence, head: Int32,
    thread: Int32,
):  # fmt: skip
    unit, tile = thread % _LANES, storage.v.data_ptr().toint()
    weight = cute.make_rmem_tensor(_COLUMNS, Float32)
    align = cutlass.const_expr(min(16, _COLUMNS * terms.weight.element_type.width // 8))
    load(pointer(terms.weight, Int64(unit * _COLUMNS), align), _COLUMNS, weight, 0, False)
    gates = cute.make_rmem_tensor(_COLUMNS // 2, Int32)
    for first in cutlass.range(0, sequence.length, THREADS // _LANES, unroll=1):
        row = first + thread // _LANES
        # Half a warp may be past the end; the whole of it takes part in the sums.
        token = Int64(sequence.begin + cutlass.min(row, sequence.length - 1))
        load(words_of(z, token * z.stride[0] + head_offset(z, head) + unit * _COLUMNS, 16), _COLUMNS // 2, gates, 0, True)
        words = ptx.load_words(operands.address(tile + unit // 8 * TILE_BYTES, row, unit % 8))
        squares = Float32(0.0)
        for word in cutlass.range_constexpr(_COLUMNS // 2):
            for value in ptx.unpack(spec.dtype, words[word]):
                squares += value * value
        for bit in cutlass.range_constexpr(_LANES.bit_length() - 1):
            squares += cute.arch.shuffle_sync_bfly(squares, offset=1 << bit)
        factor = cute.math.rsqrt(squares * (1.0 / spec.dim) + terms.eps)
        result = gated_words(spec, words, gates, factor, weight)
        if row < sequence.length:
            offset = token * out.stride[0] + Int64(head) * out.stride[1] + unit * _COLUMNS
            ptx.store_global_words(out.iterator.toint() + 2 * offset, result)
