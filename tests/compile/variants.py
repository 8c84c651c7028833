"""The variants of each operator that its kernels must compile for: axes of dtypes, layouts and flags -> problems.

Axes that only make sense together (which state tensors there are) are one axis of whole combinations, so that almost
every row is a call that the public operators accept. Some axes change the configuration, not the problem.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gdn.device import H100
from gdn.problems import (
    ChunkProblem,
    CompressIndexerKeysProblem,
    Conv1dProblem,
    Conv1dUpdateProblem,
    ExpandTopkGroupsProblem,
    GatherIndexerCacheProblem,
    GatingProblem,
    GdnDecodeProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PrepareIndexerProblem,
    Problem,
    QuantizeFp8Problem,
    RecurrentProblem,
    RmsNormGatedProblem,
    SplitProblem,
    TopkProblem,
    WriteIndexerCacheProblem,
)
from tests.compile import pairwise, shrink

Axes = Mapping[str, Sequence[Any]]
Row = pairwise.Row
Variant = tuple[Problem, Any]  # a problem and its configuration, None = the analytic default


def _state(initial: bool, final: bool, index: str | None = None, final_indices: bool = False, **more: bool) -> Row:
    """Which state tensors there are; index: dtype of the pool's indices, None = one row per sequence."""
    fields = {"has_initial_state": initial, "has_final_state": final, "has_final_indices": final_indices}
    return fields | {"index_dtype": index} | more


# What the chunk and the recurrent operator share. heads: (query, key, value).
_DELTA_AXES: dict[str, Sequence[Any]] = {
    "heads": [(16, 16, 32), (4, 4, 4), (8, 2, 2)],
    "head_dim": [128, 64],
    "dtype": ["bfloat16", "float16"],
    "state_dtype": ["float32", "bfloat16"],
    "gate": [(None, False), ("float32", False), ("bfloat16", True)],  # dtype, raw
    "beta": [(None, False), ("float32", False), ("bfloat16", True)],
    "cu_seqlens_dtype": ["int32", "int64"],
    "state_v_first": [False, True],
    "use_qk_l2norm": [False, True],
}
_CHUNK_AXES: Axes = _DELTA_AXES | {
    "state": [
        _state(False, False, has_mask=False, has_checkpoints=False),
        _state(False, True, has_mask=False, has_checkpoints=False),
        _state(True, True, has_mask=False, has_checkpoints=False),
        _state(True, True, "int32", has_mask=True, has_checkpoints=False),
        _state(True, True, "int32", has_mask=False, has_checkpoints=True),
        _state(True, True, "int64", True, has_mask=True, has_checkpoints=True),
    ],
}
# Fields of a module's configuration that choose among its kernels; the others are the default's.
_CONFIG_AXES: dict[str, Axes] = {
    "kernels_tl.chunk": {
        "split_chunks": [0, 16],  # chunks per segment, 0: sequences are whole
        "cluster_size": [2, 3, 4],  # of the one launch: blocks per sequence and head
        "split_if_longest_exceeds": [0],  # both ways in a call are compiled in test_chunk_launches.py
    },
    "kernels_cute.chunk": {
        "split_chunks": [0, 16],
        "split_if_longest_exceeds": [0, 4096],  # with segments: whole sequences and segments, the lengths decide
        "num_persistent_clusters": [0, 3],  # one cluster per work tile, or 3 that take one after the other
        "prefetch": [0, 2],
    },
}
# The wide form of the CuTe chunk kernel.
_WIDE_AXES: Axes = _CHUNK_AXES | {
    "head_dim": [128],
    "stages": [3, 2],
    "prefetch": [0, 2],
}
_RECURRENT_AXES: Axes = _DELTA_AXES | {
    "state": [
        _state(False, True, write_every_token=False, has_accepted=False, has_parent=False),
        _state(True, True, write_every_token=False, has_accepted=False, has_parent=False),
        _state(True, True, "int32", write_every_token=False, has_accepted=False, has_parent=False),
        _state(True, False, "int64", write_every_token=False, has_accepted=False, has_parent=False),
        _state(True, True, "int32", write_every_token=True, has_accepted=True, has_parent=False),
        _state(True, True, "int64", True, write_every_token=True, has_accepted=True, has_parent=False),
        _state(True, True, "int32", write_every_token=True, has_accepted=True, has_parent=True),
    ],
    "has_rounding": [False, True],
}
_LOGITS_AXES: dict[str, Sequence[Any]] = {
    "heads": [(64, 1), (16, 1), (4, 1), (32, 2), (15, 3)],  # query heads, key heads
    "head_dim": [128, 64],
    "kind": [("float8_e4m3fn", True), ("float8_e4m3fn", False), ("bfloat16", False)],  # dtype, with key scales
    "weights_dtype": ["float32", "bfloat16", None],
    "relu": [True, False],
    "clean": [True, False],
    "out_dtype": ["float32", "bfloat16"],
}
_CONVOLUTION_AXES: dict[str, Sequence[Any]] = {
    "dim": [8192, 2560],
    "width": [4, 3, 2],
    "dtype": ["bfloat16", "float16"],
    "weight_dtype": ["bfloat16", "float32"],
    "bias_dtype": [None, "float32", "bfloat16"],
    "silu": [True, False],
    "index_dtype": ["int32", "int64", None],
}
_POOLS = [("bfloat16", True), ("bfloat16", False), ("float32", True), ("float32", False)]  # dtype, channels contiguous
_CACHE_DTYPES = ["uint8", "float8_e4m3fn", "bfloat16"]
_ROTATED_AXES: dict[str, Sequence[Any]] = {
    "dims": [(128, 64), (64, 32), (128, 128), (256, 64), (32, 16)],  # of a head, rotated
    "dtype": ["bfloat16", "float16"],
    "cos_sin_dtype": ["float32", "bfloat16"],
    "norm_dtype": ["bfloat16", "float32"],
    "index_dtype": ["int64", "int32"],
    "zero_centred": [True, False],
    "num_tokens": [8, 8192],
}
_INDEXER_AXES: dict[str, Axes] = {
    "quantize_fp8": {
        "num_groups": [1, 6],
        "group_dim": [128, 64, 32, 256],
        "dtype": ["bfloat16", "float16"],
        "num_tokens": [8, 131072],
    },
    "write_indexer_cache": {
        "num_kv_heads": [1, 2],
        "head_dim": [128, 64, 32, 256],
        "cache_dtype": _CACHE_DTYPES,
        "dtype": ["bfloat16", "float16"],
        "slot_dtype": ["int64", "int32"],
        "num_tokens": [8, 8192],
    },
    "prepare_indexer": _ROTATED_AXES
    | {
        "num_heads": [16, 6, 64],
        # Key heads, dtype of the cache, whether the query is quantised, whether with scales.
        "keys": [
            (1, "uint8", True, True),
            (2, "uint8", True, True),
            (1, "float8_e4m3fn", True, False),
            (1, "bfloat16", False, False),
            (0, None, True, False),
        ],
        "weights_dtype": ["bfloat16", "float32", None],
    },
    "compress_indexer_keys": _ROTATED_AXES
    | {"num_kv_heads": [1, 3], "cache_dtype": _CACHE_DTYPES, "ratio": [4, 2, 3], "ring_slot_dtype": ["int32", "int64"]},
    "gather_indexer_cache": {
        "num_kv_heads": [1, 2],
        "head_dim": [128, 64],
        "cache_dtype": _CACHE_DTYPES,
        "cu_seqlens_dtype": ["int32", "int64"],
        "num_rows": [8, 8192, 131072],
    },
    "expand_topk_groups": {
        "ratio": [4, 1, 3, 8],
        "group_dtype": ["int32", "int64"],
        "position_dtype": ["int64", "int32"],
        "num_tokens": [8, 4096],
        "k": [512, 64, 5000],
    },
}
AXES: dict[str, Axes] = _INDEXER_AXES | {
    "conv1d": _CONVOLUTION_AXES
    | {
        "pool": [*_POOLS, (None, False)],
        "cu_seqlens_dtype": ["int32", "int64"],
        "has_mask": [True, False],
        "checkpoint_dtype": [None, "int32", "int64"],
    },
    "conv1d_update": _CONVOLUTION_AXES
    | {
        "pool": _POOLS,
        "cu_seqlens_dtype": ["int32", "int64", None],
        "drafts": [(False, False, False), (True, False, False), (True, True, False), (True, True, True)],
        "tokens": [1, 2, 4],  # of a sequence: they choose the configuration
    },
    "gdn_decode": {
        "heads": [(16, 32), (4, 4), (2, 6), (2, 16)],
        "head_dims": [(128, 128), (64, 64), (256, 256), (96, 160)],
        "width": [4, 3, 2],
        "dtypes": [("bfloat16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")],  # of rows; of z and the gates
        "parameter_dtype": ["float32", "bfloat16"],  # of A_log, dt_bias and the norm's weight
        "weight_dtype": ["bfloat16", "float32"],
        "bias_dtype": [None, "float32", "bfloat16"],
        "silu": [True, False],
        "gate_sigmoid": [False, True],
        "interleaved": [False, True],
        "pool": _POOLS,
        "state_dtype": ["float32", "bfloat16"],
        "state_v_first": [True, False],
        "index_dtype": ["int32", "int64"],
        "cu_seqlens_dtype": ["int32", "int64", None],
        "drafts": [(False, False), (True, False), (True, True)],  # columns of the indices, accepted counts
        "has_rounding": [False, True],
        "num_sequences": [1, 8, 128],  # they choose the configuration
    },
    "split": {
        "heads": [(16, 32), (4, 4), (2, 6)],
        "head_dims": [(128, 128), (60, 100), (256, 64)],
        "dtype": ["bfloat16", "float16"],
        "ba_dtype": ["bfloat16", "float32"],
        "num_tokens": [8, 8192],
    },
    "gating": {
        "num_heads": [32, 6, 1],
        "a_dtype": ["bfloat16", "float32", "float16"],
        "b_dtype": ["bfloat16", "float32"],
        "A_log_dtype": ["float32", "bfloat16"],
        "dt_bias_dtype": ["float32", "bfloat16"],
        "num_tokens": [8, 8192],
    },
    "rms_norm_gated": {
        "num_heads": [1, 32, 6],
        "head_dim": [128, 64, 100, 512],
        "dtype": ["bfloat16", "float16"],
        "z_dtype": ["bfloat16", "float32"],
        "weight_dtype": ["float32", "bfloat16"],
        "sigmoid": [False, True],
        "num_tokens": [8, 8192],
    },
    "chunk": _CHUNK_AXES,
    "recurrent": _RECURRENT_AXES,
    "mqa_logits": _LOGITS_AXES | {"packed": [False, True]},
    "paged_mqa_logits": _LOGITS_AXES
    | {"page_size": [64, 16, 544], "drafts": [(1, False), (2, True), (4, False)]},  # next_n, per-draft lengths
    "topk": {
        "dtype": ["float32", "bfloat16"],
        "bounds": [(None, None), ("int32", "int32"), (None, "int64"), ("int64", None)],  # dtypes of starts and ends
        "sorted_by": ["index", "score"],
        "k": [2048, 4096],
        "num_columns": [32768, 2048, 131072],  # each compiles other tiles
    },
}


def _delta_fields(row: Row) -> dict[str, Any]:
    num_q_heads, num_k_heads, num_v_heads = row["heads"]
    gate_dtype, use_gate = row["gate"]
    beta_dtype, use_beta_sigmoid = row["beta"]
    same = ("dtype", "state_dtype", "cu_seqlens_dtype", "state_v_first", "use_qk_l2norm")
    return {
        "num_q_heads": num_q_heads,
        "num_k_heads": num_k_heads,
        "num_v_heads": num_v_heads,
        "head_k_dim": row["head_dim"],
        "head_v_dim": row["head_dim"],
        "gate_dtype": gate_dtype,
        "use_gate": use_gate,
        "beta_dtype": beta_dtype,
        "use_beta_sigmoid": use_beta_sigmoid,
        **{name: row[name] for name in same},
        **row["state"],
    }


def _logits_fields(row: Row) -> dict[str, Any]:
    num_heads, num_kv_heads = row["heads"]
    dtype, has_k_scale = row["kind"]
    same = ("head_dim", "weights_dtype", "relu", "clean", "out_dtype")
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "dtype": dtype,
        "has_k_scale": has_k_scale,
        **{name: row[name] for name in same},
    }


def _step(op: str, row: Row) -> Problem | None:
    """A problem of the steps around the recurrence; None as in `problem`."""
    if op == "split":
        num_k_heads, num_v_heads = row["heads"]
        head_k_dim, head_v_dim = row["head_dims"]
        return SplitProblem(
            num_k_heads=num_k_heads,
            num_v_heads=num_v_heads,
            head_k_dim=head_k_dim,
            head_v_dim=head_v_dim,
            dtype=row["dtype"],
            ba_dtype=row["ba_dtype"],
            num_tokens=row["num_tokens"],
        )
    if op == "gating":
        return GatingProblem(**row)
    if op == "rms_norm_gated":
        return RmsNormGatedProblem(**row)
    fields = {name: row[name] for name in (*_CONVOLUTION_AXES, "cu_seqlens_dtype")}
    fields["state_dtype"], fields["state_channels_contiguous"] = row["pool"]
    if op == "conv1d":
        if fields["state_dtype"] is None and (row["has_mask"] or row["checkpoint_dtype"]):
            return None
        return Conv1dProblem(
            **fields,
            has_mask=row["has_mask"],
            checkpoint_dtype=row["checkpoint_dtype"],
            num_tokens=8192,
            num_sequences=8,
        )
    has_columns, has_accepted, has_parent = row["drafts"]
    if has_columns and fields["index_dtype"] is None or fields["cu_seqlens_dtype"] is None and row["tokens"] > 1:
        return None
    return Conv1dUpdateProblem(
        **fields,
        has_columns=has_columns,
        has_accepted=has_accepted,
        has_parent=has_parent,
        num_tokens=128 * row["tokens"],
        num_sequences=128,
    )


def _decode(row: Row) -> Problem | None:
    """A whole decode step; None as in `problem`."""
    if row["has_rounding"] and row["state_dtype"] != "bfloat16":
        return None
    same = (
        "width", "weight_dtype", "bias_dtype", "silu", "gate_sigmoid", "interleaved", "state_dtype", "state_v_first",
        "index_dtype", "cu_seqlens_dtype", "has_rounding", "num_sequences",
    )  # fmt: skip
    dtype, other = row["dtypes"]
    parameters = dict.fromkeys(("A_log_dtype", "dt_bias_dtype", "norm_dtype"), row["parameter_dtype"])
    return GdnDecodeProblem(
        num_k_heads=row["heads"][0],
        num_v_heads=row["heads"][1],
        head_k_dim=row["head_dims"][0],
        head_v_dim=row["head_dims"][1],
        dtype=dtype,
        z_dtype=None if row["interleaved"] else other,
        a_dtype=None if row["interleaved"] else other,
        b_dtype=other,
        conv_dtype=row["pool"][0],
        conv_channels_contiguous=row["pool"][1],
        has_columns=row["drafts"][0],
        has_accepted=row["drafts"][1],
        num_tokens=row["num_sequences"] * (1 if row["cu_seqlens_dtype"] is None else 4),
        **parameters,
        **{name: row[name] for name in same},
    )


def _indexer_step(op: str, row: Row) -> Problem | None:
    """A problem of the steps around the indexer; None as in `problem`."""
    if op == "quantize_fp8":
        return QuantizeFp8Problem(**row)
    if op == "write_indexer_cache":
        return WriteIndexerCacheProblem(**row)
    if op == "gather_indexer_cache":
        return GatherIndexerCacheProblem(**row, num_sequences=4)
    if op == "expand_topk_groups":
        return ExpandTopkGroupsProblem(**row)
    same = {name: row[name] for name in ("dtype", "cos_sin_dtype", "zero_centred", "num_tokens")}
    same["head_dim"], same["rotary_dim"] = row["dims"]
    same["position_dtype"] = row["index_dtype"]
    if op == "compress_indexer_keys":
        return CompressIndexerKeysProblem(
            **same,
            num_kv_heads=row["num_kv_heads"],
            cache_dtype=row["cache_dtype"],
            k_norm_dtype=row["norm_dtype"],
            slot_dtype=row["index_dtype"],
            ratio=row["ratio"],
            ring_slot_dtype=row["ring_slot_dtype"],
            ring_aligned=True,
        )
    num_kv_heads, cache_dtype, is_fp8, folds = row["keys"]
    if row["weights_dtype"] is not None and not folds:
        return None  # weights that are returned as given are no part of the problem
    return PrepareIndexerProblem(
        **same,
        num_kv_heads=num_kv_heads,
        cache_dtype=cache_dtype,
        k_norm_dtype=row["norm_dtype"] if num_kv_heads else None,
        slot_dtype=row["index_dtype"] if num_kv_heads else None,
        num_heads=row["num_heads"],
        k_dtype=row["dtype"] if num_kv_heads else None,
        weights_dtype=row["weights_dtype"],
        q_norm_dtype=row["norm_dtype"],
        q_out_dtype="float8_e4m3fn" if is_fp8 else row["dtype"],
        folds_weights=folds,
    )


def problem(op: str, row: Row) -> Problem | None:
    """The problem of a row, or None where the public operator would not make it."""
    if op == "gdn_decode":
        return _decode(row)
    if op in _INDEXER_AXES:
        return _indexer_step(op, row)
    if op in ("conv1d", "conv1d_update", "split", "gating", "rms_norm_gated"):
        return _step(op, row)
    if op in ("chunk", "recurrent"):
        delta = _delta_fields(row)
        if not delta["has_initial_state"] and delta["state_dtype"] != "float32":
            return None  # without a state, problems say float32
        if op == "chunk":
            return ChunkProblem(**delta, num_tokens=8192, num_sequences=4)
        if row["has_rounding"] and not (delta["state_dtype"] == "bfloat16" and delta["index_dtype"] and delta["has_final_state"]):
            return None  # only a stored bf16 state is rounded
        return RecurrentProblem(**delta, has_rounding=row["has_rounding"], num_tokens=128, num_sequences=128)
    if op == "topk":
        starts_dtype, ends_dtype = row["bounds"]
        sizes = {"k": row["k"], "num_rows": 4096, "num_columns": row["num_columns"]}
        return TopkProblem(row["dtype"], starts_dtype, ends_dtype, row["sorted_by"], **sizes)
    logits = _logits_fields(row)
    if op == "mqa_logits":
        return MqaLogitsProblem(**logits, packed=row["packed"], num_queries=4096, num_keys=32768, num_columns=32768)
    next_n, per_draft_lengths = row["drafts"]
    return PagedMqaLogitsProblem(
        **logits,
        page_size=row["page_size"],
        next_n=next_n,
        per_draft_lengths=per_draft_lengths,
        batch=64,
        max_context_len=32768,
    )


def _allowed(op: str, refusal: Callable[[Problem], str | None]) -> Callable[[Row], bool]:
    def allowed(row: Row) -> bool:
        if row.get("cluster_size", 2) > 2 and not _in_one_launch(row):
            return False
        if row.get("split_if_longest_exceeds") and not row["split_chunks"]:
            return False
        if row.get("num_persistent_clusters") and row["split_chunks"] and not row["split_if_longest_exceeds"]:
            return False  # segments have one cluster each
        made = problem(op, row)
        return made is not None and refusal(made) is None

    return allowed


def _in_one_launch(row: Row) -> bool:
    """Whether TileLang's chunk kernel takes whole sequences in one launch."""
    return row["head_dim"] == 128 and not row["split_chunks"]


def _cost(row: Row) -> float:
    """Of compiling it, as far as the rows of an operator differ: TileLang's chunk kernel in two launches, and with segments."""
    if "cluster_size" not in row or _in_one_launch(row):
        return 1.0
    return (1.3 if row["head_dim"] == 128 else 0.8) + (0.8 if row["split_chunks"] else 0.0)


def _least(axes: Axes, allowed: Callable[[Row], bool]) -> list[Row]:
    return shrink.shrink(axes, allowed, pairwise.pairwise(axes, allowed), _cost)


def _variants(op: str, rows: Iterable[Row], module: Any) -> Iterator[Variant]:
    in_config = _CONFIG_AXES.get(module.__name__, {})
    for row in rows:
        made = problem(op, row)
        if made is None:
            continue
        changes = {name: row[name] for name in in_config}
        default = module.default_config(made, H100)
        if getattr(default, "num_four_sm_clusters", 0) and changes:  # that form has no segments
            changes = {"num_four_sm_clusters": 0, "max_l2_ring_groups": 0, "stages": 4} | changes
        yield made, dataclasses.replace(default, **changes) if changes else None


def _axes(op: str, module: Any) -> Axes:
    return {**AXES[op], **_CONFIG_AXES.get(module.__name__, {})}


@functools.cache
def cover(op: str, module: Any) -> list[Variant]:
    """Variants that a backend's module serves and that hold every pair of axis values it serves."""
    return list(_variants(op, _least(_axes(op, module), _allowed(op, module.refusal)), module))


@functools.cache
def wide_cover(module: Any) -> list[Variant]:
    """The same for the wide form of the CuTe chunk kernel, of what it serves."""
    fields = ("stages", "prefetch")

    def allowed(row: Row) -> bool:
        return problem("chunk", row) is not None

    found: list[Variant] = []
    for row in _least(_WIDE_AXES, allowed):
        made = problem("chunk", row)
        assert made is not None
        changes = {name: row[name] for name in fields}
        form = {"split_chunks": 0, "split_if_longest_exceeds": 0, "num_persistent_clusters": 0, **changes}
        form |= {"num_four_sm_clusters": 30, "max_l2_ring_groups": 3}
        found.append((made, dataclasses.replace(module.default_config(made, H100), **form)))
    return found


def product(op: str, module: Any) -> list[Variant]:
    """Every variant of the axes that a backend's module serves."""
    return list(_variants(op, pairwise.full(_axes(op, module), _allowed(op, module.refusal)), module))
