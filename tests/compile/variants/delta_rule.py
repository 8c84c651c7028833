"""Variants of the chunk and the recurrent kernels."""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

from gdn.device import H100
from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem, RecurrentProblem
from gdn.problem import Problem
from tests.compile.expectations import NO_REUSE, TENSOR_CORES, Expectation
from tests.compile.variants import least
from tests.compile.variants.base import HEAD_DIMS, Axes, Row, Variant, Variants, always, problem_of, spread


def _ring(index: str, rows: int, fold_every: int, has_drafts: bool, has_parent: bool = False, final: bool = True) -> Row:
    """The same of replay decode."""
    flags = {"write_every_token": False, "has_accepted": has_drafts, "has_parent": has_parent}
    return _state(True, final, index, **flags) | {"ring_rows": rows, "fold_every": fold_every}


def _state(initial: bool, final: bool, index: str | None = None, final_indices: bool = False, **more: bool | str) -> Row:
    """Fields of the state tensors; index: dtype of the pool's indices, None = one row per sequence."""
    fields = {"has_initial_state": initial, "has_final_state": final, "has_final_indices": final_indices}
    return fields | {"index_dtype": index} | more


# Axes of both operators. heads: (query, key, value).
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
        _state(True, True, "int32", has_mask=True, has_checkpoints=True, checkpoint_state_dtype="bfloat16"),
        _state(False, False, has_mask=False, has_checkpoints=True, checkpoint_state_dtype="float32"),
    ],
}
# Fields of a module's configuration that choose among its kernels; the others keep the default's values.
_CONFIG_AXES: dict[str, Axes] = {
    "kernels_tl.chunk": {
        "split_chunks": [0, 16],  # chunks of a segment, 0: sequences are whole
        "cluster_size": [2, 3, 4],  # of the one launch: blocks of a sequence and head
        "split_if_longest_exceeds": [0],  # 1 and more is compiled in test_chunk_launches.py
    },
    "kernels_cute.chunk": {
        "split_chunks": [0, 16],
        "split_if_longest_exceeds": [0, 4096],  # with segments: both forms, the lengths decide
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
# Two state heads a cluster.
_KEY_HEAD_AXES: Axes = {**_CHUNK_AXES, "heads": [(16, 16, 32), (2, 2, 8)], "head_dim": [128], "prefetch": [0, 2]}
_RECURRENT_AXES: Axes = _DELTA_AXES | {
    "state": [
        _state(False, True, write_every_token=False, has_accepted=False, has_parent=False),
        _state(True, True, write_every_token=False, has_accepted=False, has_parent=False),
        _state(True, True, "int32", write_every_token=False, has_accepted=False, has_parent=False),
        _state(True, False, "int64", write_every_token=False, has_accepted=False, has_parent=False),
        _state(True, True, "int32", write_every_token=True, has_accepted=True, has_parent=False),
        _state(True, True, "int64", True, write_every_token=True, has_accepted=True, has_parent=False),
        _state(True, True, "int32", write_every_token=True, has_accepted=True, has_parent=True),
        _state(True, False, "int32", write_every_token=False, has_accepted=False, has_parent=False, intermediate_dtype="float32"),
        _state(
            True, False, "int64", write_every_token=False, has_accepted=False, has_parent=False, intermediate_dtype="bfloat16"
        ),
        _state(True, False, "int32", write_every_token=False, has_accepted=False, has_parent=True, intermediate_dtype="float32"),
        _ring("int32", 16, 15, has_drafts=False),
        _ring("int64", 22, 15, has_drafts=True),
        _ring("int32", 39, 24, has_drafts=True, has_parent=True),
        _ring("int32", 12, 11, has_drafts=False, final=False),
    ],
    "has_rounding": [False, True],
}


_SUMMARY_AXES: Axes = {name: axis for name, axis in _DELTA_AXES.items() if name != "state_dtype"}


_HEADS = ("num_q_heads", "num_k_heads", "num_v_heads")


def _delta_fields(row: Row) -> Row:
    """Fields of the axes of both operators, but for the states'."""
    own = {name: row[name] for name in _DELTA_AXES if name not in ("head_dim", "state_dtype")}
    gate, beta = ("gate_dtype", "use_gate"), ("beta_dtype", "use_beta_sigmoid")
    return spread(own, heads=_HEADS, gate=gate, beta=beta) | dict.fromkeys(HEAD_DIMS, row["head_dim"])


def _with_states(row: Row) -> Row | None:
    """All fields; None where a row without a state has another dtype of states than such problems say."""
    if not row["state"]["has_initial_state"] and row["state_dtype"] != "float32":
        return None
    return {**_delta_fields(row), "state_dtype": row["state_dtype"], **row["state"]}


def _chunk_problem(row: Row) -> Problem | None:
    fields = _with_states(row)
    return None if fields is None else problem_of("chunk", fields)


def _summary_problem(row: Row) -> Problem | None:
    fields = _delta_fields(row)
    fields["use_k_l2norm"] = fields.pop("use_qk_l2norm")
    fields["num_state_heads"] = max(fields.pop("num_q_heads"), fields["num_v_heads"])
    return problem_of("chunk_summary", fields)


def _recurrent_problem(row: Row) -> Problem | None:
    fields = _with_states(row)
    if fields is None:
        return None
    if row["has_rounding"] and not (fields["state_dtype"] == "bfloat16" and fields["index_dtype"] and fields["has_final_state"]):
        return None  # only a stored bf16 state is rounded
    return problem_of("recurrent", fields | {"has_rounding": row["has_rounding"]})


def _is_chunk_config(row: Row) -> bool:
    if row.get("cluster_size", 2) > 2 and not _in_one_launch(row):
        return False
    if row.get("split_if_longest_exceeds") and not row["split_chunks"]:
        return False
    # Segments have one cluster each.
    return not (row.get("num_persistent_clusters") and row["split_chunks"] and not row["split_if_longest_exceeds"])


def _chunk_config(default: Any, changes: Row) -> Any:
    if getattr(default, "num_four_sm_clusters", 0):  # that form has no segments
        changes = {"num_four_sm_clusters": 0, "max_l2_ring_groups": 0, "stages": 4} | changes
    return dataclasses.replace(default, **changes)


def _in_one_launch(row: Row) -> bool:
    """Whether TileLang's chunk kernel takes whole sequences in one launch."""
    return bool(row["head_dim"] == 128 and not row["split_chunks"])


def _chunk_cost(row: Row) -> float:
    """Compile time of TileLang's chunk kernel in two launches, and with segments, against the other rows."""
    if "cluster_size" not in row or _in_one_launch(row):
        return 1.0
    return (1.3 if row["head_dim"] == 128 else 0.8) + (0.8 if row["split_chunks"] else 0.0)


def _chunk_code(problem: ChunkProblem, backend: str, entries: Collection[str]) -> Expectation:
    # Products of mma.sync on purpose, of 16 x 16 blocks: below a warpgroup matmul's 64 rows. In TileLang's one launch the
    # inverse's are 20, and the diagonal blocks of K K^T another 16; the norms of Q, there and in `chunk_prepare`, are one for
    # 8 columns. A tile's product that fell back to mma.sync would be 32 at least.
    norms = problem.head_k_dim // 8 if problem.use_qk_l2norm else 0
    wanted = {"chunk_fused": 36 + norms, "chunk_prepare": norms}
    at_most = {"HMMA": sum(wanted.get(entry, 0) for entry in entries)} if backend == "tilelang" else {}
    return Expectation({"HGMMA": 4, "UTMALDG|UBLKCP": 3}, none_of=("QGMMA",), at_most=at_most)


def _recurrent_code(problem: RecurrentProblem, backend: str, entries: Collection[str]) -> Expectation:
    # A matrix times a vector: no tensor cores, but the state in wide loads and stores: four values of a thread.
    width = "{0}.128" if problem.state_dtype == "float32" else "{0}.64|{0}.128"
    wide = {width.format("LDG"): problem.has_initial_state, width.format("STG"): problem.has_final_state}
    # K first, the warps that share columns pass their sums through shared memory; the entries of a ring lie there.
    none_of = NO_REUSE if problem.state_v_first and problem.ring_rows is None else TENSOR_CORES
    return Expectation({pattern: 1 for pattern, wanted in wide.items() if wanted}, none_of=none_of)


def chunk_of(
    heads: int | tuple[int, ...], num_tokens: int, num_sequences: int = 1, dim: int = 128, **changes: Any
) -> ChunkProblem:
    """A chunk call in bfloat16. heads: of q, k and v; of keys and of values; or one number for all."""
    per_tensor = (heads,) * 3 if isinstance(heads, int) else (heads[0], *heads[-2:])
    sizes: Row = {"num_tokens": num_tokens, "num_sequences": num_sequences, **dict.fromkeys(HEAD_DIMS, dim)}
    return chunk_problem(**dict(zip(_HEADS, per_tensor, strict=True)), **{"dtype": "bfloat16", **sizes, **changes})


@functools.cache
def wide_cover(module: Any) -> list[Variant]:
    """Cover of the wide form of the CuTe chunk kernel, as far as it serves the rows."""
    return _form_cover(module, _WIDE_AXES, num_persistent_clusters=0, num_four_sm_clusters=30, max_l2_ring_groups=3)


@functools.cache
def key_head_cover(module: Any) -> list[Variant]:
    """The same of its form with two state heads a cluster."""
    form = {"num_four_sm_clusters": 0, "max_l2_ring_groups": 0, "num_persistent_clusters": 3, "stages": 2, "state_heads": 2}
    return _form_cover(module, _KEY_HEAD_AXES, **form)


def _form_cover(module: Any, axes: Axes, **form: int) -> list[Variant]:
    def allowed(row: Row) -> bool:
        return _chunk_problem(row) is not None

    found: list[Variant] = []
    for row in least(axes, allowed):
        made = _chunk_problem(row)
        assert made is not None
        changes: Row = {name: row[name] for name in ("stages", "prefetch") if name in row}
        whole: Row = {"split_chunks": 0, "split_if_longest_exceeds": 0, **form, **changes}
        found.append((made, dataclasses.replace(module.default_config(made, H100), **whole)))
    return found


chunk = Variants(_CHUNK_AXES, _chunk_problem, _chunk_code, _CONFIG_AXES, _is_chunk_config, _chunk_config, _chunk_cost)
chunk_summary = Variants(
    _SUMMARY_AXES,
    _summary_problem,
    # 20 products of mma.sync on purpose: those of 16 x 16 blocks in the inverse.
    always(Expectation({"HGMMA": 4, "UTMALDG|UBLKCP": 2}, none_of=("QGMMA",), at_most={"HMMA": 20})),
)
recurrent = Variants(_RECURRENT_AXES, _recurrent_problem, _recurrent_code)
