"""The merge of split positions: a block adds up the parts of one query token and head, in the order of the positions."""

from typing import Any

import tilelang.language as T

from kernels_tl.attention.decode.kernel import LN_2, LOWEST, gated
from kernels_tl.attention.decode.sizes import Spec
from kernels_tl.attention.decode.spec import parameter_types
from kernels_tl.common import build
from kernels_tl.common.versions import prim_func


def merge(spec: Spec) -> Any:
    """The prim_func."""
    types = parameter_types(spec)
    threads = spec.dim

    @prim_func
    def merge_parts():
        tensors = build.parameters(**{name: types[name] for name in ("workspace", "gate", "out", "lse")})
        with T.Kernel(tensors.out.shape[0] * spec.heads, threads=threads) as block:
            d = T.get_thread_binding(0)
            token = block // spec.heads
            head = block % spec.heads
            first = T.cast(block, "int64") * spec.splits
            stats = T.cast(tensors.out.shape[0], "int64") * (spec.heads * spec.splits * spec.dim)
            best, total, value, weight = build.variables(4, "float32")
            gate = T.alloc_var(spec.dtype)
            if spec.problem.has_gate:
                gate = tensors.gate[token, head, d]  # on its way while the parts are added up
            best = LOWEST
            total = 0.0
            value = 0.0
            for s in T.serial(spec.splits):
                best = T.max(best, tensors.workspace[stats + (first + s) * 2])
            for s in T.serial(spec.splits):
                weight = T.exp2(tensors.workspace[stats + (first + s) * 2] - best)
                total = total + weight * tensors.workspace[stats + (first + s) * 2 + 1]
                value = value + weight * tensors.workspace[(first + s) * spec.dim + d]
            if spec.problem.has_gate:
                rounded = T.cast(T.if_then_else(total == 0.0, 0.0, value / total), spec.dtype)
                tensors.out[token, head, d] = gated(spec, rounded, gate, total)
            else:
                tensors.out[token, head, d] = T.cast(T.if_then_else(total == 0.0, 0.0, value / total), spec.dtype)
            if d == 0:
                tensors.lse[token, head] = T.if_then_else(total == 0.0, -T.infinity("float32"), (best + T.log2(total)) * LN_2)

    return merge_parts
