"""Variants of the steps around the recurrence."""

from collections.abc import Collection, Sequence
from typing import Any

from gdn.ops.layer_step.problem import AddRmsNormProblem, RmsNormGatedProblem, SplitProblem
from gdn.problem import Problem
from tests.compile.expectations import NO_REUSE, TENSOR_CORES, Expectation
from tests.compile.variants.base import (
    CONVOLUTION_POOLS,
    HEAD_DIMS,
    LAYER_HEADS,
    Row,
    Variants,
    always,
    example,
    problem_of,
    spread,
    without,
)

_CONVOLUTION_AXES: dict[str, Sequence[Any]] = {
    "dim": [8192, 2560],
    "width": [4, 3, 2],
    "dtype": ["bfloat16", "float16"],
    "weight_dtype": ["bfloat16", "float32"],
    "bias_dtype": [None, "float32", "bfloat16"],
    "silu": [True, False],
    "index_dtype": ["int32", "int64", None],
}


_POOL = ("state_dtype", "state_channels_contiguous")


def _conv1d(row: Row) -> Problem | None:
    fields = spread(row, pool=_POOL)
    has_checkpoints, windows = row["checkpoint_dtype"] is not None, row["checkpoint_window_dtype"]
    if fields["state_dtype"] is None and (row["has_mask"] or has_checkpoints and windows is None):
        return None
    if windows is not None and not has_checkpoints:
        return None
    return problem_of("conv1d", fields | {"num_sequences": 8})


def _conv1d_update(row: Row) -> Problem | None:
    fields = spread(without(row, "tokens"), pool=_POOL, drafts=("has_columns", "has_accepted", "has_parent"))
    if fields["has_columns"] and row["index_dtype"] is None or row["cu_seqlens_dtype"] is None and row["tokens"] > 1:
        return None
    return problem_of("conv1d_update", fields | {"num_tokens": 128 * row["tokens"]})


def _split(row: Row) -> Problem:
    return problem_of("split", spread(row, heads=LAYER_HEADS, head_dims=HEAD_DIMS))


def _convolution_code(rows: int) -> Any:
    """rows: in 16-byte accesses at a time; the filter is another load."""
    return always(Expectation({"LDG.128": rows + 1, "STG.128": rows}, none_of=NO_REUSE))


def _split_code(problem: SplitProblem, backend: str, entries: Collection[str]) -> Expectation:
    wide = "128" if problem.head_k_dim % 8 == 0 and problem.head_v_dim % 8 == 0 else "64"
    return Expectation({f"LDG.{wide}": 1, f"STG.{wide}": 1}, none_of=NO_REUSE)


def _norm_code(problem: RmsNormGatedProblem, backend: str, entries: Collection[str]) -> Expectation:
    wide = "128" if problem.head_dim % 8 == 0 else "64"
    return Expectation({f"LDG.{wide}": 1, f"STG.{wide}": 1}, none_of=NO_REUSE)


def _add_norm_code(problem: AddRmsNormProblem, backend: str, entries: Collection[str]) -> Expectation:
    # Shared memory holds the sums of the warps.
    wide = 2 if problem.has_residual else 1
    return Expectation({"LDG.128": wide, "STG.128": wide, "LDS": 1, "STS": 1}, none_of=TENSOR_CORES)


def _add_norm(row: Row) -> Problem:
    return problem_of("add_rms_norm", spread(row, added=("has_residual", "layer_scale_dtype")))


conv1d = Variants(
    _CONVOLUTION_AXES
    | {
        "pool": [*CONVOLUTION_POOLS, (None, False)],
        "cu_seqlens_dtype": ["int32", "int64"],
        "has_mask": [True, False],
        "checkpoint_dtype": [None, "int32", "int64"],
        "checkpoint_window_dtype": [None, "float32", "bfloat16"],
    },
    _conv1d,
    _convolution_code(2),
)
conv1d_update = Variants(
    _CONVOLUTION_AXES
    | {
        "pool": CONVOLUTION_POOLS,
        "cu_seqlens_dtype": ["int32", "int64", None],
        "drafts": [
            (False, False, False),
            (False, True, False),
            (False, True, True),
            (True, False, False),
            (True, True, False),
            (True, True, True),
        ],  # columns of the indices, accepted counts, parents
        "tokens": [1, 2, 4],  # of a sequence: they choose the configuration
    },
    _conv1d_update,
    _convolution_code(1),
)
split = Variants(
    {
        "heads": [(16, 32), (4, 4), (2, 6)],
        "head_dims": [(128, 128), (60, 100), (256, 64)],
        "dtype": ["bfloat16", "float16"],
        "ba_dtype": ["bfloat16", "float32"],
        "num_tokens": [8, 8192],
    },
    _split,
    _split_code,
)
gating = Variants(
    {
        "num_heads": [32, 6, 1],
        "a_dtype": ["bfloat16", "float32", "float16"],
        "b_dtype": ["bfloat16", "float32"],
        "A_log_dtype": ["float32", "bfloat16"],
        "dt_bias_dtype": ["float32", "bfloat16"],
        "num_tokens": [8, 8192],
    },
    lambda row: example("gating", **row),
    always(Expectation({"LDG": 4, "STG": 2}, none_of=NO_REUSE)),
)
rms_norm_gated = Variants(
    {
        "num_heads": [1, 32, 6],
        "head_dim": [128, 64, 100, 512],
        "dtype": ["bfloat16", "float16"],
        "z_dtype": ["bfloat16", "float32"],
        "weight_dtype": ["float32", "bfloat16"],
        "sigmoid": [False, True],
        "num_tokens": [8, 8192],
    },
    lambda row: example("rms_norm_gated", **row),
    _norm_code,
)
add_rms_norm = Variants(
    {
        "dim": [2048, 4096, 5120, 40, 16384],
        "dtype": ["bfloat16", "float16"],
        "weight_dtype": ["bfloat16", "float32"],
        "added": [(True, None), (True, "bfloat16"), (True, "float32"), (False, None)],  # residual, dtype of layer_scale
        "zero_centred": [True, False],
        "num_tokens": [8, 8192],
    },
    _add_norm,
    _add_norm_code,
)
