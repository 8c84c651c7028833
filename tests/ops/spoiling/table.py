"""Table of what every public operator accepts and what it refuses: operator, argument, spoiling -> verdict.

To look something up: find the operator, then the argument; its kind (`kinds.py`) has the rows that all arguments of the
kind share, the rest is written here. The kinds of flags, numbers and words follow from the signature, and so does whether an
argument may be left out; the table has what a signature does not say. `python -m tests.ops.spoiling OPERATOR ARGUMENT` prints
the rows of an argument, and with a spoiling and a seed makes that call. The argument "*" is the call as a whole.

Decided here, where the contract is silent:
- A tensor that is only read has any strides and any address; only the large ones (q, k, v, x, z, projections, raw keys)
  say so when they must be copied, on the CPU too. The exception is what is read in place because a copy would be too
  large: caches.
- out of the recurrence, the convolution, the decode step and the attention is aligned to 16 bytes and contiguous in its
  last dim; out of scores and indices needs the last dim alone, as do the rows of a ring.
- Counts, null_slot and flags are Python's int and bool; numbers may also be numpy scalars, never tensors or Fractions.
- A tensor of a dtype that the operator does not take is a TypeError, out_dtype included; a tensor elsewhere or of another
  size is a ValueError; so is an unknown word, while anything but a word is a TypeError.
- A cache that is only read is refused too where its pages overlap: it is an engine's error in any case.
- On the CPU all that GDN_VALIDATE=1 finds elsewhere is found always: starts of ranges below 0, sequences longer than their
  block table (a length beyond max_context_len alone is none), rows written twice. Padding by the operators' contracts stays
  padding, accepted counts out of range included.
- Tensors made under inference_mode are taken outside of it too, written ones included: a kernel could not tell.
- mqa_logits and its relatives take q in all dtypes that prepare_indexer returns: bfloat16 caches then hold the keys.
- Not in the table: one slot that two live sequences read and neither writes (final_state_indices; the contract forbids it, and
  it harms nothing), keys that max_seqlen_k leaves out, FP8 keys without scales in fp8_mqa_logits, numpy integers as counts.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import gdn
from gdn.core.kinds import without_words
from tests.ops.spoiling.kinds import (
    AT_LEAST_ONE,
    BACKEND,
    COUNT,
    EPS,
    FILTER,
    FLAG,
    FLOAT_CALL,
    FLOAT_OUT,
    INDEX,
    INDEX_OUT,
    INPUT,
    INT32,
    LENGTHS,
    LOGITS_OUT,
    MASK,
    MATRIX,
    NULL_SLOT,
    NUMBER,
    OFFSETS,
    OPTIONAL_COUNT,
    OPTIONAL_FLAG,
    OPTIONAL_NUMBER,
    OPTIONAL_WORD,
    OUT_DTYPE,
    PARAMETER,
    PER_SEQUENCE,
    POSITIVE,
    READ_CACHE,
    REQUIRED,
    ROWS,
    SLOTS,
    STATE_POOL,
    STATES,
    WHOLE,
    WINDOWS,
    WORD,
    WRITTEN_CACHE,
    Kind,
    but,
)  # fmt: skip
from tests.ops.spoiling.verdict import ERROR, SAME, TYPE, VALUE, Verdict


def _with_offsets(kind: Kind) -> Kind:
    """The kind of an operator that always has offsets."""
    return but(kind, "extra rows without offsets")


_SHARED_INPUTS: Kind = {
    "one tensor for two read-only arguments": SAME,
    "overlaps a read-only argument": SAME,
}
_SHARED_SLOTS: Kind = {
    "two live sequences, one slot": VALUE,
    "an empty sequence names a live slot": SAME,
    "null slots twice": SAME,
}
_FINAL_SLOTS: Kind = {
    "two live sequences, one slot to write": VALUE,
    "the slot that another live sequence reads": VALUE,
}
_ACCEPTED: Kind = PER_SEQUENCE | {
    "0 accepted": SAME,
    "-3 accepted": SAME,
    "more than the columns": SAME,
    "2**33 + 1 accepted": SAME,
    "-2**33 + 1 accepted": SAME,
}
_PARENTS: Kind = INT32 | {
    "its own parent": VALUE,
    "a parent after it": VALUE,
    "a parent of -2": VALUE,
    "the indices 1-D": VALUE,
}
_SEED: Kind = but(INT32, "dtype int64", "last dim not contiguous") | {"dtype int32": TYPE}
_CHECKPOINT_OFFSETS: Kind = but(PER_SEQUENCE, "extra rows of anything") | {
    "a negative offset": VALUE,
    "an offset beyond the sequence": SAME,
    "an offset of 2**33 + 64": SAME,
    "one row too many of checkpoint offsets": SAME,
    "without checkpoint_slots": VALUE,
}
_CHECKPOINT_SLOTS: Kind = but(PER_SEQUENCE, "extra rows of anything") | {
    "a slot beyond the pool": VALUE,
    "a slot of 2**33 + 1": VALUE,
    "a null slot to save to": SAME,
    "without checkpoint_offsets": VALUE,
}
_KEPT: Kind = but(STATE_POOL, "one longer", "interleaved with another argument") | {
    "without checkpoint_offsets, checkpoint_slots": VALUE,
}
_KEPT_WINDOWS: Kind = but(WINDOWS, "one longer") | {"without checkpoint_offsets, checkpoint_slots": VALUE}
_INTERMEDIATE: dict[str, Kind] = {
    "intermediate_states": but(STATE_POOL, "one longer", "interleaved with another argument") | {
        "the indices 2-D": VALUE, "without intermediate_indices": VALUE,
    },
    "intermediate_indices": SLOTS | {"two live sequences, one slot to write": VALUE, "without intermediate_states": VALUE},
}  # fmt: skip
_DELTA_RULE: dict[str, Kind] = {
    "q, k": ROWS | {"another 16-bit dtype": TYPE} | _SHARED_INPUTS,
    "v": ROWS | {"another 16-bit dtype": TYPE, "overlaps a read-only argument": SAME},
    "g": INPUT
    | {
        "left out where it must be": ERROR,
        "without A_log": ERROR,
        "a positive log decay": VALUE,
        "positive log decays of padding": SAME,
    },
    "beta": INPUT | {"left out where it must be": ERROR},
    "A_log": PARAMETER | {"given without the gate": TYPE},
    "dt_bias": PARAMETER | {"given without the gate": TYPE},
    "initial_state as a pool": STATE_POOL | {"left out where it must be": ERROR},
    "initial_state to read": STATES,
    "cu_seqlens": OFFSETS,
    "out": FLOAT_OUT | {"is another argument": VALUE},
}
_FILTERED: dict[str, Kind] = {
    "weight": FILTER,
    "bias": PARAMETER,
    "out": FLOAT_OUT
    | {
        "in place on x": SAME,
        "in place on an equal view of x": SAME,
        "in place on an x whose last dim is not contiguous": VALUE,
        "one row further than x": VALUE,
    },
}
_POSITIONS: Kind = INDEX | {
    "a position beyond cos_sin": VALUE,
    "a position of 2**33 + 1": VALUE,
    "a negative position": VALUE,
}  # fmt: skip
_ROPE: dict[str, Kind] = {
    "positions": _POSITIONS,
    "cos_sin": INPUT | {"dtype float64": TYPE},
    "rotary_dim": COUNT,
    "k_norm": PARAMETER | {"dtype float64": TYPE},
}
_SLOT_MAPPING: Kind = INDEX | {
    "a row beyond the cache": VALUE,
    "a row of 2**33 + 1": VALUE,
    "null as -7": SAME,
    "null as -2**33 + 1": SAME,
    "one row twice": VALUE,
}
_QUERY: Kind = ROWS | {"dtype float64": TYPE}  # another 16-bit dtype: as prepare_indexer hands it out
_HEAD_WEIGHTS: Kind = INPUT | MATRIX
_TABLES: Kind = INT32 | MATRIX | {
    "a page beyond the cache": VALUE,
    "a negative page": VALUE,
    "anything where no row is looked at": SAME,
}  # fmt: skip
_RANGES: dict[str, Kind] = {
    "cu_seqlen_ks": INDEX | {"a negative start": SAME} | _SHARED_INPUTS,
    "cu_seqlen_ke": INDEX | {"ends of 2**33 + 1": SAME, "empty as -2**33 + 1": SAME},
}
_LENGTHS: Kind = INDEX | {
    "longer than its block table": VALUE,
    "a length of 2**33 + 1": VALUE,
    "empty as -2**33 + 1": SAME,
}  # fmt: skip
_RAGGED: dict[str, Kind] = _RANGES | {
    "q": _QUERY | {"float16, the keys too": SAME, "float32, the keys too": SAME},
    "k": _QUERY | {"another 16-bit dtype": TYPE, "no multiple of the heads": VALUE, "overlaps a read-only argument": SAME},
    "k_scale": INPUT | {"dtype float64": TYPE, "another 16-bit dtype": TYPE},
    "weights": _HEAD_WEIGHTS,
}  # fmt: skip
_PAGED: dict[str, Kind] = {
    "q": _QUERY | {"float16, the keys too": SAME, "float32, the keys too": SAME},
    "cache": READ_CACHE,
    "weights": _HEAD_WEIGHTS,
    "context_lens": _LENGTHS,
    "block_tables": _TABLES,
}

# Counts that a call writes: int32, one for each slot or sequence.
_COUNTS: Kind = but(INT32, "one longer") | {
    "all rows in one place": VALUE, "overlaps another argument": VALUE, "adjacent to another argument": SAME,
}  # fmt: skip
_WITHOUT_OFFSETS: Kind = but(PER_SEQUENCE, "extra rows of anything")
_COMMITTED: Kind = {
    "a count of -1": VALUE, "2**31 committed tokens": VALUE, "2**33 + 1 committed tokens": VALUE,
    "anything where no sequence is live": SAME,
}  # fmt: skip
_ACCEPTED_OF_RING: Kind = dict.fromkeys(
    ("0 accepted", "-3 accepted", "more than the columns", "2**33 + 1 accepted", "-2**33 + 1 accepted"), VALUE
)
_STATE_TOKENS: Kind = {
    "a count of -1": VALUE, "more tokens than are committed": VALUE, "anything where no sequence is live": SAME,
}  # fmt: skip
_RING: Kind = but(STATE_POOL, "dtype float64", "one longer", "one shorter", "interleaved with another argument")
_RING_READ: Kind = but(_RING, "all rows in one place", "overlapping rows", "overlaps another argument") | {"dtype float64": TYPE}
_SIZES_OF_RING: Kind = {"too few rows": VALUE, "rows too short for an entry": VALUE}
_REPLAYED: dict[str, Kind] = {
    "ring": but(STATE_POOL, "one longer", "one shorter") | {"the indices 2-D": VALUE} | _SIZES_OF_RING,
    "state_tokens": but(INT32, "one longer") | {"left out where it must be": ERROR} | _STATE_TOKENS,
    "num_computed_tokens": PER_SEQUENCE | _COMMITTED | {
        "left out where it must be": ERROR, "fewer tokens than its state": VALUE,
    },
    "num_accepted_tokens with a ring": PER_SEQUENCE | _ACCEPTED_OF_RING,
    "fold_every": OPTIONAL_COUNT | {"0": VALUE},
    "fold_phase": COUNT | {"as long as a period": VALUE},
}  # fmt: skip

_SPECIAL: dict[str, dict[str, Kind]] = {
    "chunk_gated_delta_rule": _DELTA_RULE | {
        "state_indices": SLOTS | _SHARED_SLOTS,
        "final_state_indices": SLOTS | _FINAL_SLOTS | {"without state_indices": VALUE},
        "has_initial_state": MASK,
        "checkpoint_offsets": _CHECKPOINT_OFFSETS | {"no multiple of 64": VALUE},
        "checkpoint_slots": _CHECKPOINT_SLOTS,
        "checkpoint_states": _KEPT,
        "head_first": FLAG | {"True": VALUE},
        "initial_state as a pool": but(_DELTA_RULE["initial_state as a pool"], "interleaved with another argument"),
    },
    "chunk_summary": {
        **{names: _DELTA_RULE[names] for names in ("q, k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")},
    },
    "fused_recurrent_gated_delta_rule": _DELTA_RULE | _INTERMEDIATE | _REPLAYED | {
        "ssm_state_indices": SLOTS | _SHARED_SLOTS | {"a slot without a ring": VALUE},
        "final_state_indices": SLOTS | _FINAL_SLOTS | {"given with intermediate states": VALUE},
        "num_accepted_tokens of columns": _ACCEPTED | {"the indices 1-D": VALUE},
        "parent_token": _PARENTS,
        "rounding_seed": _SEED | {"given with intermediate states": VALUE},
        "inplace_final_state": OPTIONAL_FLAG | {"False with indices": VALUE},
    },
    "gated_delta_rule": _DELTA_RULE | {
        **{names: but(_DELTA_RULE[names], "rows of one element each") for names in ("q, k", "v", "g", "beta")},  # always B = 1
        "cu_seqlens": OFFSETS,
        "state_indices": _with_offsets(SLOTS) | _SHARED_SLOTS,
        "ssm_state_indices": _with_offsets(SLOTS) | _SHARED_SLOTS,
        "final_state_indices": _with_offsets(SLOTS) | _FINAL_SLOTS,
        "has_initial_state": _with_offsets(MASK),
        "checkpoint_offsets": _with_offsets(_CHECKPOINT_OFFSETS) | {"no multiple of 64": VALUE},
        "checkpoint_slots": _with_offsets(_CHECKPOINT_SLOTS),
        "num_accepted_tokens": _with_offsets(_ACCEPTED) | {"the indices 1-D": VALUE},
        "parent_token": _PARENTS,
        "rounding_seed": _SEED,
        "inplace_final_state": OPTIONAL_FLAG | {"False with indices": VALUE},
        "initial_state as a pool": but(_DELTA_RULE["initial_state as a pool"], "interleaved with another argument"),
    },
    "fused_gdn_decode": _INTERMEDIATE | _REPLAYED | {
        "mixed_qkv": ROWS | MATRIX,
        "z": ROWS | {
            "left out where it must be": ERROR, "given with projections in pairs": VALUE, "given without the norm": VALUE,
        },
        "a": INPUT | MATRIX | {"left out where it must be": ERROR, "given with projections in pairs": VALUE},
        "b": INPUT | MATRIX | {"left out where it must be": ERROR, "given with concatenated projections": VALUE},
        "conv_state": WINDOWS | {"one page buffer for both pools": SAME},
        "ssm_state": STATE_POOL | {"one page buffer for both pools": SAME},
        "conv_weight": FILTER,
        "conv_bias": PARAMETER,
        "A_log, dt_bias": PARAMETER,
        "norm_weight": PARAMETER,
        "state_indices": SLOTS | _SHARED_SLOTS | {"a slot without a ring": VALUE},
        "query_start_loc": OFFSETS,
        "num_accepted_tokens of columns": _ACCEPTED | {"the indices 1-D": VALUE},
        "rounding_seed": _SEED | {"given with intermediate states": VALUE},
        "out": FLOAT_OUT,
    },
    "fold_states": {
        "ssm_state": but(STATE_POOL, "two dims more", "interleaved with another argument"),
        "state_indices": but(SLOTS, "one shorter", "extra rows of anything", "extra rows without offsets") | {
            "two live sequences, one slot": VALUE, "null slots twice": SAME,
        },
        "ring": _RING_READ | _SIZES_OF_RING,
        "state_tokens": but(_COUNTS, "all rows in one place") | but(
            _STATE_TOKENS, "anything where no sequence is live"
        ),
        "num_computed_tokens": _WITHOUT_OFFSETS | _COMMITTED | {"fewer tokens than its state": VALUE},
        "num_accepted_tokens": _WITHOUT_OFFSETS | _ACCEPTED_OF_RING,
        "final_state_indices": but(SLOTS, "extra rows of anything") | _FINAL_SLOTS,
        "fold_phase": COUNT | {"as long as a period": VALUE},
        "rounding_seed": _SEED,
        "*": WHOLE,
    },
    "accept_draft_tree": {
        "ring": _RING,
        "conv_state": but(WINDOWS, "one longer"),
        "state_indices": _with_offsets(SLOTS) | _SHARED_SLOTS,
        "parent_token": but(_PARENTS, "the indices 1-D", "one longer"),
        "accepted_nodes": _with_offsets(but(PER_SEQUENCE, "the other index dtype") | {"dtype int64": TYPE}),
        "num_computed_tokens": _with_offsets(PER_SEQUENCE) | _COMMITTED,
        "num_accepted_tokens": _COUNTS,
        "query_start_loc": OFFSETS,
        "*": WHOLE,
    },
    "fused_gdn_prefill": {
        "mixed_qkv": ROWS | MATRIX,
        "z": ROWS | {
            "left out where it must be": ERROR, "given with projections in pairs": VALUE, "given without the norm": VALUE,
        },
        "a": INPUT | MATRIX | {"left out where it must be": ERROR, "given with projections in pairs": VALUE},
        "b": INPUT | MATRIX,
        "conv_states": WINDOWS | {"one page buffer for both pools": SAME},
        "ssm_state": STATE_POOL | {"one page buffer for both pools": SAME},
        "conv_weight": FILTER,
        "conv_bias": PARAMETER,
        "A_log, dt_bias": PARAMETER,
        "norm_weight": PARAMETER,
        "state_indices": _with_offsets(SLOTS) | _SHARED_SLOTS,
        "query_start_loc": OFFSETS,
        "has_initial_state": _with_offsets(MASK),
        "checkpoint_offsets": _with_offsets(_CHECKPOINT_OFFSETS) | {"no multiple of 64": VALUE},
        "checkpoint_slots": _with_offsets(_CHECKPOINT_SLOTS),
        "checkpoint_states": _KEPT,
        "checkpoint_windows": _KEPT_WINDOWS,
        "out": FLOAT_OUT,
    },
    "fused_gdn_gating": {
        "A_log, dt_bias": PARAMETER,
        "a, b": INPUT | {"one tensor for two read-only arguments": SAME},
        "beta": POSITIVE,
    },
    "fused_qkvzba_split_reshape_cat": {
        "mixed_qkvz": ROWS | MATRIX,
        "mixed_ba": INPUT | MATRIX,
    },
    "causal_conv1d_fn": _FILTERED | {
        "x": ROWS | MATRIX | {"[dim, tokens]": VALUE},
        "conv_states": WINDOWS,
        "query_start_loc": OFFSETS,
        "cache_indices": SLOTS | _SHARED_SLOTS,
        "has_initial_state": MASK,
        "checkpoint_offsets": _CHECKPOINT_OFFSETS | {"without conv_states": VALUE},
        "checkpoint_slots": _CHECKPOINT_SLOTS,
        "checkpoint_windows": _KEPT_WINDOWS,
    },
    "causal_conv1d_update": _FILTERED | {
        "x": ROWS | MATRIX,
        "conv_state": WINDOWS,
        "query_start_loc": OFFSETS,
        "conv_state_indices": SLOTS | _SHARED_SLOTS,
        "num_accepted_tokens": _ACCEPTED,
        "parent_token": but(_PARENTS, "the indices 1-D"),
        "out": _FILTERED["out"] | {"x in the other memory order": VALUE},
    },
    "add_rms_norm": {
        "x": ROWS | {"another 16-bit dtype": TYPE, "one tensor for two read-only arguments": SAME},
        "residual": ROWS | {"another 16-bit dtype": TYPE, "one tensor for two read-only arguments": SAME},
        "weight": PARAMETER,
        "layer_scale": PARAMETER,
    },
    "rms_norm_gated": {
        "x, z": ROWS | {"one tensor for two read-only arguments": SAME},
        "weight": PARAMETER,
    },
    "quantize_fp8": {
        "x": but(ROWS, "on the meta device", "two dims more", "one shorter", "one longer") | {"dtype float64": TYPE},
    },
    "write_indexer_cache": {
        "k": ROWS | {"dtype float64": TYPE},
        "cache": WRITTEN_CACHE,
        "slot_mapping": _SLOT_MAPPING,
    },
    "prepare_indexer": _ROPE | {
        "q": ROWS | {"dtype float64": TYPE},
        "k": ROWS | {"dtype float64": TYPE, "left out where it must be": ERROR},
        "weights": _HEAD_WEIGHTS,
        "q_norm": PARAMETER | {"dtype float64": TYPE},
        "k_norm": _ROPE["k_norm"] | {"left out where it must be": ERROR},
        "cache": WRITTEN_CACHE | {"left out where it must be": ERROR},
        "slot_mapping": _SLOT_MAPPING | {"left out where it must be": ERROR},
        "fp8": OPTIONAL_FLAG | {"against the cache": VALUE},
        "v": ROWS | {"dtype float64": TYPE, "another 16-bit dtype": TYPE, "left out where it must be": ERROR},
        "v_cache": WRITTEN_CACHE | {"left out where it must be": ERROR},
    },
    "compress_indexer_keys": _ROPE | {
        "raw_k": ROWS | {"dtype float64": TYPE, "another 16-bit dtype": TYPE},
        "ring": STATE_POOL | {"misaligned base": SAME, "misaligned rows": SAME, "size no multiple of ratio": VALUE},
        "cache": WRITTEN_CACHE,
        "k_norm": _ROPE["k_norm"],
        "positions": but(_ROPE["positions"], "a negative position", "a position of 2**33 + 1") | {
            "anything at skipped tokens": SAME, "positions that skip their tokens": SAME,
        },
        "ring_slots": INDEX | {
            "a ring beyond the ring buffer": VALUE, "a slot of 2**33 + 1": VALUE, "null as -7": SAME, "null as -2**33 + 1": SAME,
        },
        "slot_mapping": _SLOT_MAPPING | {"anything at tokens that end no group": SAME},
    },
    "gather_indexer_cache": {
        "cache": but(READ_CACHE, "one shorter", "one longer"),
        "block_tables": _TABLES,
        "cu_seqlens": but(OFFSETS, "ends beyond the tokens") | {"longer than its block table": VALUE},
        "num_rows": OPTIONAL_COUNT | {"too small": VALUE},
        "*": WHOLE,
    },
    "expand_topk_groups": {
        "group_indices": INDEX | MATRIX | {"none as -9": SAME},
        "positions": INDEX | {"none as -9": SAME},
        "out": INDEX_OUT,
        "*": WHOLE,
    },
    "mqa_logits": _RAGGED | {
        "out": LOGITS_OUT,
    },
    "fp8_mqa_logits": _RANGES | {
        "q": _QUERY,
        "kv": {
            "None": TYPE, "a str": TYPE, "a Fraction": TYPE, "a single tensor": TYPE, "three entries": ERROR,
            "the pair as a list": SAME,
        },
        "kv[0]": REQUIRED | _QUERY,
        "kv[1]": PARAMETER | {"dtype float64": TYPE},
        "weights": _HEAD_WEIGHTS,
        "max_seqlen_k": OPTIONAL_COUNT,
    },
    "paged_mqa_logits": _PAGED | {
        "max_context_len": COUNT,
        "out": LOGITS_OUT,
    },
    "fp8_paged_mqa_logits": _PAGED | {
        "q": _QUERY,
        "max_context_len": OPTIONAL_COUNT,
        "indices": {"a 0-d tensor": ERROR, "a list": ERROR},
    },
    "topk_indices": {
        "logits": INPUT | MATRIX,
        "k": COUNT,
        "row_starts": INDEX | _SHARED_INPUTS,
        "row_ends": INDEX | {"ends of 2**33 + 1": SAME, "empty as -2**33 + 1": SAME},
        "out": INDEX_OUT,
    },
    "indexer_topk": _RAGGED | {
        "topk": COUNT,
        "workspace_bytes": OPTIONAL_COUNT | {"less than one row": VALUE},
        "out": INDEX_OUT,
    },
    "paged_indexer_topk": _PAGED | {
        "topk": COUNT,
        "workspace_bytes": OPTIONAL_COUNT | {"less than one row": VALUE},
        "max_context_len": OPTIONAL_COUNT,
        "out": INDEX_OUT,
    },
    "sparse_attention": {
        "q": _QUERY | {"another 16-bit dtype": TYPE},
        "kv_cache": {
            "None": TYPE, "a str": TYPE, "a Fraction": TYPE, "a single tensor": ERROR, "three entries": ERROR,
            "the pair as a list": SAME,
            "two dims more": VALUE, "0-d": VALUE, "dtype float64": TYPE, "last dim not contiguous": VALUE,
            "part of a larger tensor": SAME,
        },
        "kv_cache[0], kv_cache[1]": REQUIRED | but(ROWS, "misaligned base", "misaligned rows", "reversed in memory order",
            "rows of one element each", "part of a larger tensor", "an nn.Parameter") | {
            "last dim not contiguous": VALUE, "all rows in one place": VALUE, "overlapping rows": VALUE,
            "another 16-bit dtype": TYPE, "part of a larger tensor": SAME,
        },
        "topk_indices": INDEX | MATRIX | {
            "none as -9": SAME, "a position beyond the sequence": VALUE, "a position after the query's own": SAME,
        },
        "block_tables": _TABLES,
        "query_start_loc": OFFSETS,
        "seq_lens": INDEX | {
            "fewer than the new tokens": VALUE, "longer than its block table": VALUE, "a length of 2**33 + 1": VALUE,
        },
        "topk_length": INDEX | {"a negative count": VALUE, "more than k": VALUE},
        "gate": ROWS | {"another 16-bit dtype": TYPE},
        "out": FLOAT_OUT,
    },
    "attention": {
        "q": _QUERY | {"another 16-bit dtype": TYPE},
        "kv_cache": {
            "None": TYPE, "a str": TYPE, "a Fraction": TYPE, "a single tensor": ERROR, "three entries": ERROR,
            "the pair as a list": SAME,
            "two dims more": VALUE, "0-d": VALUE, "dtype float64": TYPE, "last dim not contiguous": VALUE,
            "part of a larger tensor": SAME,
        },
        "kv_cache[0], kv_cache[1]": REQUIRED | but(ROWS, "misaligned base", "misaligned rows", "reversed in memory order",
            "rows of one element each", "part of a larger tensor", "an nn.Parameter") | {
            "last dim not contiguous": VALUE, "all rows in one place": VALUE, "overlapping rows": VALUE,
            "another 16-bit dtype": TYPE, "part of a larger tensor": SAME,
        },
        "block_tables": _TABLES,
        "query_start_loc": OFFSETS,
        "seq_lens": INDEX | {
            "fewer than the new tokens": VALUE, "longer than its block table": VALUE, "a length of 2**33 + 1": VALUE,
        },
        "gate": ROWS | {"another 16-bit dtype": TYPE},
        "out": FLOAT_OUT,
        "backend": but(BACKEND, "'reference'"),  # prefill rows take torch's own attention otherwise
    },
}  # fmt: skip

# Kinds of arguments that are no tensors, by annotation; some words of the table are narrower.
_BY_ANNOTATION: dict[Any, Kind] = {
    bool: FLAG, bool | None: OPTIONAL_FLAG, int: AT_LEAST_ONE, int | None: OPTIONAL_COUNT, float: NUMBER,
    float | None: OPTIONAL_NUMBER, str: WORD, str | None: OPTIONAL_WORD, torch.dtype: OUT_DTYPE,
    Sequence[int] | None: LENGTHS,
}  # fmt: skip
_BY_NAME: dict[str, Kind] = {"backend": BACKEND, "null_slot": NULL_SLOT, "eps": EPS, "skip_rows_up_to": COUNT}

_LEFT_OUT = {("fp8_mqa_logits", "weights"), ("fp8_paged_mqa_logits", "weights")}  # annotated as in vLLM, and may be None


def _table(operator: str, special: dict[str, Kind]) -> dict[str, Kind]:
    """All arguments of an operator: the special ones, and those whose kind follows from the signature."""
    parameters = inspect.signature(getattr(gdn, operator)).parameters
    required = {name for name, one in parameters.items() if one.annotation is torch.Tensor and (operator, name) not in _LEFT_OUT}
    found = {name: REQUIRED | kind if name in required else kind for names, kind in special.items() for name in names.split(", ")}
    named = {name.partition(" ")[0] for name in found}
    for name, parameter in parameters.items():
        kind = _BY_NAME.get(name) or _BY_ANNOTATION.get(without_words(parameter.annotation))
        if name not in named and kind is not None:
            found[name] = kind
    return {"*": FLOAT_CALL} | found


TABLE = {operator: _table(operator, special) for operator, special in _SPECIAL.items()}


@dataclass(frozen=True)
class Row:
    operator: str
    argument: str
    spoiling: str
    verdict: Verdict
    use: str = ""  # "as a pool" or "to read", where an argument is both

    def __str__(self) -> str:
        return f"{self.operator} | {f'{self.argument} {self.use}'.strip()} | {self.spoiling}"


def rows(operator: str, argument: str | None = None) -> Iterator[Row]:
    """The rows of an operator, or of one argument of it."""
    for names, kind in TABLE[operator].items():
        for entry in names.split(", "):
            name, _, use = entry.partition(" ")
            if argument in (None, name):
                yield from (Row(operator, name, spoiling, verdict, use) for spoiling, verdict in kind.items())
