"""Variants of the fused decode and prefill steps."""

import functools
from collections.abc import Collection, Sequence
from typing import Any

from gdn.device import H100
from gdn.ops.layer_step.problem import GdnDecodeProblem
from gdn.problem import Problem
from tests.compile.expectations import TENSOR_CORES, Expectation
from tests.compile.variants import least
from tests.compile.variants.base import (
    CONVOLUTION_POOLS,
    HEAD_DIMS,
    LAYER_HEADS,
    Axes,
    Row,
    Variant,
    Variants,
    always,
    problem_of,
    spread,
    without,
)

_AXES: Axes = {
    "heads": [(16, 32), (4, 4), (2, 6), (2, 16)],
    "head_dims": [(128, 128), (64, 64), (256, 256), (96, 160)],
    "width": [4, 3, 2],
    "dtypes": [("bfloat16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")],  # of rows; of z and the gates
    "parameter_dtype": ["float32", "bfloat16"],  # of A_log, dt_bias and the norm's weight
    "has_norm": [True, False],
    "weight_dtype": ["bfloat16", "float32"],
    "bias_dtype": [None, "float32", "bfloat16"],
    "silu": [True, False],
    "gate_sigmoid": [False, True],
    "layout": ["flat", "interleaved", "merged", "concatenated"],
    "pool": CONVOLUTION_POOLS,
    "state_dtype": ["float32", "bfloat16"],
    "state_v_first": [True, False],
    "index_dtype": ["int32", "int64"],
    "cu_seqlens_dtype": ["int32", "int64", None],
    "drafts": [(False, False), (True, False), (True, True)],  # columns of the indices, accepted counts
    "has_rounding": [False, True],
    "intermediate_dtype": [None, "float32", "bfloat16"],
    "ring": [None, (16, 15), (22, 15), (39, 24)],  # rows, tokens from one fold to the next
    "num_sequences": [1, 8, 128],  # they choose the configuration
}


_OF_DRAFTS = ((22, 15), (19, 12), (39, 24))  # rings that hold several tokens a call


def _problem(row: Row) -> Problem | None:
    if row["has_rounding"] and row["state_dtype"] != "bfloat16":
        return None
    if row["intermediate_dtype"] and (row["drafts"][0] or row["has_rounding"]):
        return None
    ring_rows, fold_every = ring = row["ring"] or (None, None)
    has_columns, has_accepted = row["drafts"]
    if ring_rows is not None:
        if row["intermediate_dtype"] or has_columns != has_accepted or has_accepted != (ring in _OF_DRAFTS):
            return None
        has_columns = False
    norm_dtype = row["parameter_dtype"] if row["has_norm"] else None
    plain = without(row, "parameter_dtype", "has_norm", "drafts", "ring") | {"norm_dtype": norm_dtype}
    fields = _fields(plain, head_dims=HEAD_DIMS) | dict.fromkeys(("A_log_dtype", "dt_bias_dtype"), row["parameter_dtype"])
    if row["layout"] == "concatenated":
        fields |= {"concatenated": True, "b_dtype": None}
    fields |= {"has_columns": has_columns, "has_accepted": has_accepted, "ring_rows": ring_rows, "fold_every": fold_every}
    tokens = row["num_sequences"] * (1 if row["cu_seqlens_dtype"] is None else 4)
    return problem_of("gdn_decode", fields | {"num_tokens": tokens})


def _fields(row: Row, **parts: Sequence[str]) -> Row:
    """Fields of either step; parts: of its own axes."""
    dtype, other = row["dtypes"]
    layout, norm_dtype = row["layout"], row["norm_dtype"]
    pool = ("conv_dtype", "conv_channels_contiguous")
    return spread(without(row, "dtypes", "layout"), heads=LAYER_HEADS, pool=pool, **parts) | {
        "dtype": dtype,
        "interleaved": layout == "interleaved",
        "merged": layout == "merged",
        "z_dtype": other if layout == "flat" and norm_dtype is not None else None,
        "a_dtype": other if layout == "flat" else None,
        "b_dtype": other,
    }


def _code(problem: GdnDecodeProblem, backend: str, entries: Collection[str]) -> Expectation:
    # The state in wide loads and stores, like the recurrent kernel's; a part of a row in 8-byte accesses.
    stored = problem.intermediate_dtype or problem.state_dtype
    narrow = {"LDG": problem.state_dtype == "bfloat16", "STG": "bfloat16" in (stored, problem.state_dtype)}
    wides = {name: "64|{0}.128" if narrow[name] or not problem.state_v_first else "128" for name in narrow}
    patterns = {f"{name}.{wide.format(name)}": 1 for name, wide in wides.items()}
    if problem.cu_seqlens_dtype is not None and problem.state_v_first:  # several tokens: the state waits in shared memory
        patterns = {f"{name}|LDGSTS.128" if name.startswith("LDG") else name: count for name, count in patterns.items()}
    if problem.ring_rows is not None and problem.state_v_first:  # the form that streams states copies them in bulk
        patterns = {f"{name}|UBLKCP" if name.startswith("LDG") else name: count for name, count in patterns.items()}
    # That form multiplies by mma.sync; which form a problem takes, its configuration says.
    may_stream = problem.ring_rows is not None and problem.state_v_first and problem.head_k_dim == problem.head_v_dim == 128
    return Expectation(patterns, none_of=tuple(name for name in TENSOR_CORES if name != "HMMA" or not may_stream))


gdn_decode = Variants(_AXES, _problem, _code)

# The form of large batches with a ring that streams states through shared memory.
_STREAMED_AXES: Axes = _AXES | {
    "heads": [(16, 32), (4, 4), (2, 6)],
    "head_dims": [(128, 128)],
    "state_v_first": [True],
    "intermediate_dtype": [None],
    "ring": [(16, 15), (12, 11), (22, 15), (19, 12)],
    "num_sequences": [256],
}


@functools.cache
def streamed_cover(module: Any) -> list[Variant]:
    """Cover of that form, as far as it serves the rows."""

    def allowed(row: Row) -> bool:
        problem = _problem(row)
        return problem is not None and module.default_config(problem, H100).stages > 0

    found: list[Variant] = []
    for row in least(_STREAMED_AXES, allowed):
        made = _problem(row)
        assert made is not None
        found.append((made, module.default_config(made, H100)))
    return found


_PREFILL_AXES: Axes = {
    "heads": [(16, 32), (4, 4), (2, 6), (16, 64)],
    "head_dim": [128, 64, 96],
    "width": [4, 3, 2],
    "dtypes": [("bfloat16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")],  # of rows; of z and the gates
    "norm_dtype": ["float32", "bfloat16", None],
    "A_log_dtype": ["float32", "bfloat16"],
    "dt_bias_dtype": ["float32", "bfloat16"],
    "weight_dtype": ["bfloat16", "float32"],
    "bias_dtype": [None, "float32", "bfloat16"],
    "silu": [True, False],
    "gate_sigmoid": [False, True],
    "layout": ["flat", "interleaved", "merged"],
    "pool": CONVOLUTION_POOLS,
    "state_dtype": ["float32", "bfloat16"],
    "state_v_first": [True, False],
    "index_dtype": ["int32", "int64"],
    "cu_seqlens_dtype": ["int32", "int64"],
    "has_mask": [True, False],
    "has_checkpoints": [False, True],
    "kept": [(None, None), ("float32", None), (None, "bfloat16"), ("bfloat16", "float32")],  # states and windows of checkpoints
    "lengths": [(8192, 8), (8192, 1), (1024, 1), (32768, 1)],  # tokens, sequences: they choose the configuration
}


def _prefill_problem(row: Row) -> Problem | None:
    if any(row["kept"]) and not row["has_checkpoints"]:
        return None
    kept, lengths = ("checkpoint_state_dtype", "checkpoint_window_dtype"), ("num_tokens", "num_sequences")
    fields = _fields(without(row, "head_dim"), kept=kept, lengths=lengths)
    return problem_of("gdn_prefill", fields | dict.fromkeys(HEAD_DIMS, row["head_dim"]))


gdn_prefill = Variants(_PREFILL_AXES, _prefill_problem, always(Expectation({"HGMMA": 1, "UTMALDG": 1})))
