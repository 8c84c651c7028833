"""Compile-time numbers of sparse decode attention, its parameters, and the tensors that a block keeps."""

from typing import Any

import tilelang.language as T

from kernels_tl.attention.decode.sizes import ROWS, TILE, Spec
from kernels_tl.common import build


def parameter_types(spec: Spec) -> dict[str, Any]:
    """Types of the parameters; None: absent."""
    problem = spec.problem
    tokens, sequences, k = T.dynamic("tokens"), T.dynamic("sequences"), T.dynamic("k")

    def strided(name: str, shape: tuple[Any, ...], dtype: str) -> Any:
        free = (T.dynamic(f"{name}_stride_{dim}", "int64") for dim in range(len(shape) - 1))
        return T.StridedTensor(shape, (*free, 1), dtype)

    def cache(name: str) -> Any:
        return strided(name, (T.dynamic(f"{name}_blocks"), spec.block_size, spec.kv_heads, spec.dim), spec.dtype)

    return {
        "q": T.Tensor((tokens, spec.heads, spec.dim), spec.dtype),
        "k_cache": cache("k_cache"),
        "v_cache": cache("v_cache"),
        "topk_indices": None if spec.dense else strided("topk_indices", (tokens, k), problem.index_dtype),
        "block_tables": strided("block_tables", (sequences, T.dynamic("max_blocks")), "int32"),
        "query_start_loc": T.Tensor((T.dynamic("num_offsets"),), "int32"),
        "seq_lens": T.Tensor((sequences,), "int32"),
        "topk_length": T.Tensor((tokens,), "int32") if problem.has_topk_length else None,
        "gate": strided("gate", (tokens, spec.heads, spec.dim), spec.dtype) if problem.has_gate else None,
        "out": strided("out", (tokens, spec.heads, spec.dim), spec.dtype),
        "lse": T.Tensor((tokens, spec.heads), "float32"),
        "workspace": T.Tensor((T.dynamic("workspace_words", "int64"),), "float32") if spec.splits > 1 else None,
        "scale": T.float32(),
    }


def allocate(spec: Spec) -> Any:
    """Shared memory and fragments of a block."""
    ring = (spec.stages, TILE, spec.dim)
    return build.named(
        queries=T.alloc_shared((ROWS, spec.dim), spec.dtype),
        keys=T.alloc_shared(ring, spec.dtype),
        values=T.alloc_shared(ring, spec.dtype),
        weights=T.alloc_shared((ROWS, TILE), spec.dtype),
        key_place=T.alloc_shared((spec.stages, TILE), "int64"),  # of a row in its cache, in 16-byte units; -1 = none
        value_place=T.alloc_shared((spec.stages, TILE), "int64"),
        found=T.alloc_shared((1,), "int32"),  # the token's sequence
        scores=T.alloc_fragment((ROWS, TILE), "float32"),
        sums=T.alloc_fragment((ROWS, spec.dim), "float32"),  # of weighted values, of the weight exp2(score - best)
        best=T.alloc_fragment((ROWS,), "float32"),  # largest score so far, times log2(e)
        best_before=T.alloc_fragment((ROWS,), "float32"),
        total=T.alloc_fragment((ROWS,), "float32"),  # sum of weights so far
        gates=T.alloc_fragment((ROWS, spec.dim), spec.dtype) if spec.gates_sums else None,
        tile_total=T.alloc_fragment((ROWS,), "float32"),
    )
