"""Table of what every public operator accepts and what it refuses: operator, argument, spoiling -> verdict.

To look something up: find the operator, then the argument; its kind (`kinds.py`) has the rows that all arguments of the
kind share, the rest is written here. `python -m tests.ops.spoiling OPERATOR ARGUMENT` prints the rows of an argument, and
with a spoiling and a seed makes that call. The argument "*" is the call as a whole.

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

from collections.abc import Iterator
from dataclasses import dataclass

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
    "q, k": REQUIRED | ROWS | {"another 16-bit dtype": TYPE} | _SHARED_INPUTS,
    "v": REQUIRED | ROWS | {"another 16-bit dtype": TYPE, "overlaps a read-only argument": SAME},
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
    "scale": OPTIONAL_NUMBER,
    "initial_state as a pool": STATE_POOL | {"left out where it must be": ERROR},
    "initial_state to read": STATES,
    "use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, state_v_first, output_final_state": FLAG,
    "cu_seqlens": OFFSETS,
    "null_slot": NULL_SLOT,
    "out": FLOAT_OUT | {"is another argument": VALUE},
    "backend": BACKEND,
    "*": FLOAT_CALL,
}
_FILTERED: dict[str, Kind] = {
    "weight": REQUIRED | FILTER,
    "bias": PARAMETER,
    "activation": OPTIONAL_WORD,
    "null_slot": NULL_SLOT,
    "out": FLOAT_OUT
    | {
        "in place on x": SAME,
        "in place on an equal view of x": SAME,
        "in place on an x whose last dim is not contiguous": VALUE,
        "one row further than x": VALUE,
    },
    "backend": BACKEND,
    "*": FLOAT_CALL,
}
_POSITIONS: Kind = REQUIRED | INDEX | {
    "a position beyond cos_sin": VALUE,
    "a position of 2**33 + 1": VALUE,
    "a negative position": VALUE,
}  # fmt: skip
_ROPE: dict[str, Kind] = {
    "positions": _POSITIONS,
    "cos_sin": REQUIRED | INPUT | {"dtype float64": TYPE},
    "rotary_dim": COUNT,
    "eps": EPS,
    "zero_centred": FLAG,
    "k_norm": PARAMETER | {"dtype float64": TYPE},
    "backend": BACKEND,
    "*": FLOAT_CALL,
}
_SLOT_MAPPING: Kind = INDEX | {
    "a row beyond the cache": VALUE,
    "a row of 2**33 + 1": VALUE,
    "null as -7": SAME,
    "null as -2**33 + 1": SAME,
    "one row twice": VALUE,
}
_QUERY: Kind = REQUIRED | ROWS | {"dtype float64": TYPE}  # another 16-bit dtype: as prepare_indexer hands it out
_HEAD_WEIGHTS: Kind = INPUT | MATRIX
_TABLES: Kind = REQUIRED | INT32 | MATRIX | {
    "a page beyond the cache": VALUE,
    "a negative page": VALUE,
    "anything where no row is looked at": SAME,
}  # fmt: skip
_RANGES: dict[str, Kind] = {
    "cu_seqlen_ks": REQUIRED | INDEX | {"a negative start": SAME} | _SHARED_INPUTS,
    "cu_seqlen_ke": REQUIRED | INDEX | {"ends of 2**33 + 1": SAME, "empty as -2**33 + 1": SAME},
}
_LENGTHS: Kind = REQUIRED | INDEX | {
    "longer than its block table": VALUE,
    "a length of 2**33 + 1": VALUE,
    "empty as -2**33 + 1": SAME,
}  # fmt: skip
_SCORES: dict[str, Kind] = {"scale": NUMBER, "relu": FLAG, "backend": BACKEND, "*": FLOAT_CALL}
_RAGGED: dict[str, Kind] = _SCORES | _RANGES | {
    "q": _QUERY | {"float16, the keys too": SAME, "float32, the keys too": SAME},
    "k": _QUERY | {"another 16-bit dtype": TYPE, "no multiple of the heads": VALUE, "overlaps a read-only argument": SAME},
    "k_scale": INPUT | {"dtype float64": TYPE, "another 16-bit dtype": TYPE},
    "weights": _HEAD_WEIGHTS,
}  # fmt: skip
_PAGED: dict[str, Kind] = _SCORES | {
    "q": _QUERY | {"float16, the keys too": SAME, "float32, the keys too": SAME},
    "cache": REQUIRED | READ_CACHE,
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

TABLE: dict[str, dict[str, Kind]] = {
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
        **{names: _DELTA_RULE[names] for names in ("q, k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "backend", "*")},
        "use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, state_v_first": FLAG,
    },
    "fused_recurrent_gated_delta_rule": _DELTA_RULE | _INTERMEDIATE | _REPLAYED | {
        "ssm_state_indices": SLOTS | _SHARED_SLOTS | {"a slot without a ring": VALUE},
        "final_state_indices": SLOTS | _FINAL_SLOTS | {"given with intermediate states": VALUE},
        "num_accepted_tokens of columns": _ACCEPTED | {"the indices 1-D": VALUE},
        "parent_token": _PARENTS,
        "rounding_seed": _SEED | {"given with intermediate states": VALUE},
        "inplace_final_state": OPTIONAL_FLAG | {"False with indices": VALUE},
        "disable_state_update": FLAG,
    },
    "gated_delta_rule": _DELTA_RULE | {
        **{names: but(_DELTA_RULE[names], "rows of one element each") for names in ("q, k", "v", "g", "beta")},  # always B = 1
        "cu_seqlens": REQUIRED | OFFSETS,
        "lengths_host": LENGTHS,
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
        "disable_state_update": FLAG,
        "initial_state as a pool": but(_DELTA_RULE["initial_state as a pool"], "interleaved with another argument"),
    },
    "fused_gdn_decode": _INTERMEDIATE | _REPLAYED | {
        "mixed_qkv": REQUIRED | ROWS | MATRIX,
        "z": ROWS | {
            "left out where it must be": ERROR, "given with projections in pairs": VALUE, "given without the norm": VALUE,
        },
        "a": INPUT | MATRIX | {"left out where it must be": ERROR, "given with projections in pairs": VALUE},
        "b": INPUT | MATRIX | {"left out where it must be": ERROR, "given with concatenated projections": VALUE},
        "conv_state": REQUIRED | WINDOWS | {"one page buffer for both pools": SAME},
        "ssm_state": REQUIRED | STATE_POOL | {"one page buffer for both pools": SAME},
        "conv_weight": REQUIRED | FILTER,
        "conv_bias": PARAMETER,
        "A_log, dt_bias": REQUIRED | PARAMETER,
        "norm_weight": PARAMETER,
        "state_indices": REQUIRED | SLOTS | _SHARED_SLOTS | {"a slot without a ring": VALUE},
        "query_start_loc": OFFSETS,
        "num_accepted_tokens of columns": _ACCEPTED | {"the indices 1-D": VALUE},
        "rounding_seed": _SEED | {"given with intermediate states": VALUE},
        "num_k_heads, head_k_dim, head_v_dim": AT_LEAST_ONE,
        "scale": OPTIONAL_NUMBER,
        "eps": EPS,
        "activation": OPTIONAL_WORD,
        "gate_activation, projection_layout": WORD,
        "state_v_first": FLAG,
        "null_slot": NULL_SLOT,
        "out": FLOAT_OUT,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "fold_states": {
        "ssm_state": REQUIRED | but(STATE_POOL, "two dims more", "interleaved with another argument"),
        "state_indices": REQUIRED | but(SLOTS, "one shorter", "extra rows of anything", "extra rows without offsets") | {
            "two live sequences, one slot": VALUE, "null slots twice": SAME,
        },
        "ring": REQUIRED | _RING_READ | _SIZES_OF_RING,
        "state_tokens": REQUIRED | but(_COUNTS, "all rows in one place") | but(
            _STATE_TOKENS, "anything where no sequence is live"
        ),
        "num_computed_tokens": REQUIRED | _WITHOUT_OFFSETS | _COMMITTED | {"fewer tokens than its state": VALUE},
        "num_accepted_tokens": _WITHOUT_OFFSETS | _ACCEPTED_OF_RING,
        "final_state_indices": but(SLOTS, "extra rows of anything") | _FINAL_SLOTS,
        "num_k_heads, fold_every": AT_LEAST_ONE,
        "fold_phase": COUNT | {"as long as a period": VALUE},
        "rounding_seed": _SEED,
        "state_v_first": FLAG,
        "null_slot": NULL_SLOT,
        "backend": BACKEND,
        "*": WHOLE,
    },
    "accept_draft_tree": {
        "ring": REQUIRED | _RING,
        "conv_state": but(WINDOWS, "one longer"),
        "state_indices": REQUIRED | _with_offsets(SLOTS) | _SHARED_SLOTS,
        "parent_token": REQUIRED | but(_PARENTS, "the indices 1-D", "one longer"),
        "accepted_nodes": REQUIRED | _with_offsets(but(PER_SEQUENCE, "the other index dtype") | {"dtype int64": TYPE}),
        "num_computed_tokens": REQUIRED | _with_offsets(PER_SEQUENCE) | _COMMITTED,
        "num_accepted_tokens": REQUIRED | _COUNTS,
        "query_start_loc": REQUIRED | OFFSETS,
        "conv_width": AT_LEAST_ONE,
        "null_slot": NULL_SLOT,
        "backend": BACKEND,
        "*": WHOLE,
    },
    "fused_gdn_prefill": {
        "mixed_qkv": REQUIRED | ROWS | MATRIX,
        "z": ROWS | {
            "left out where it must be": ERROR, "given with projections in pairs": VALUE, "given without the norm": VALUE,
        },
        "a": INPUT | MATRIX | {"left out where it must be": ERROR, "given with projections in pairs": VALUE},
        "b": REQUIRED | INPUT | MATRIX,
        "conv_states": REQUIRED | WINDOWS | {"one page buffer for both pools": SAME},
        "ssm_state": REQUIRED | STATE_POOL | {"one page buffer for both pools": SAME},
        "conv_weight": REQUIRED | FILTER,
        "conv_bias": PARAMETER,
        "A_log, dt_bias": REQUIRED | PARAMETER,
        "norm_weight": PARAMETER,
        "state_indices": REQUIRED | _with_offsets(SLOTS) | _SHARED_SLOTS,
        "query_start_loc": REQUIRED | OFFSETS,
        "has_initial_state": _with_offsets(MASK),
        "checkpoint_offsets": _with_offsets(_CHECKPOINT_OFFSETS) | {"no multiple of 64": VALUE},
        "checkpoint_slots": _with_offsets(_CHECKPOINT_SLOTS),
        "checkpoint_states": _KEPT,
        "checkpoint_windows": _KEPT_WINDOWS,
        "num_k_heads, head_k_dim, head_v_dim": AT_LEAST_ONE,
        "scale": OPTIONAL_NUMBER,
        "eps": EPS,
        "activation": OPTIONAL_WORD,
        "gate_activation, projection_layout": WORD,
        "state_v_first": FLAG,
        "null_slot": NULL_SLOT,
        "out": FLOAT_OUT,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "fused_gdn_gating": {
        "A_log, dt_bias": REQUIRED | PARAMETER,
        "a, b": REQUIRED | INPUT | {"one tensor for two read-only arguments": SAME},
        "beta": POSITIVE,
        "threshold": NUMBER,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "fused_qkvzba_split_reshape_cat": {
        "mixed_qkvz": REQUIRED | ROWS | MATRIX,
        "mixed_ba": REQUIRED | INPUT | MATRIX,
        "num_heads_qk, num_heads_v, head_qk, head_v": AT_LEAST_ONE,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "causal_conv1d_fn": _FILTERED | {
        "x": REQUIRED | ROWS | MATRIX | {"[dim, tokens]": VALUE},
        "conv_states": WINDOWS,
        "query_start_loc": OFFSETS,
        "cache_indices": SLOTS | _SHARED_SLOTS,
        "has_initial_state": MASK,
        "checkpoint_offsets": _CHECKPOINT_OFFSETS | {"without conv_states": VALUE},
        "checkpoint_slots": _CHECKPOINT_SLOTS,
        "checkpoint_windows": _KEPT_WINDOWS,
    },
    "causal_conv1d_update": _FILTERED | {
        "x": REQUIRED | ROWS | MATRIX,
        "conv_state": REQUIRED | WINDOWS,
        "query_start_loc": OFFSETS,
        "conv_state_indices": SLOTS | _SHARED_SLOTS,
        "num_accepted_tokens": _ACCEPTED,
        "parent_token": but(_PARENTS, "the indices 1-D"),
        "out": _FILTERED["out"] | {"x in the other memory order": VALUE},
    },
    "add_rms_norm": {
        "x": REQUIRED | ROWS | {"another 16-bit dtype": TYPE, "one tensor for two read-only arguments": SAME},
        "residual": ROWS | {"another 16-bit dtype": TYPE, "one tensor for two read-only arguments": SAME},
        "weight": REQUIRED | PARAMETER,
        "layer_scale": PARAMETER,
        "eps": EPS,
        "zero_centred": FLAG,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "rms_norm_gated": {
        "x, z": REQUIRED | ROWS | {"one tensor for two read-only arguments": SAME},
        "weight": REQUIRED | PARAMETER,
        "eps": EPS,
        "activation": WORD,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "quantize_fp8": {
        "x": REQUIRED | but(ROWS, "on the meta device", "two dims more", "one shorter", "one longer") | {"dtype float64": TYPE},
        "group_size": AT_LEAST_ONE,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "write_indexer_cache": {
        "k": REQUIRED | ROWS | {"dtype float64": TYPE},
        "cache": REQUIRED | WRITTEN_CACHE,
        "slot_mapping": REQUIRED | _SLOT_MAPPING,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "prepare_indexer": _ROPE | {
        "q": REQUIRED | ROWS | {"dtype float64": TYPE},
        "k": ROWS | {"dtype float64": TYPE, "left out where it must be": ERROR},
        "weights": _HEAD_WEIGHTS,
        "q_norm": REQUIRED | PARAMETER | {"dtype float64": TYPE},
        "k_norm": _ROPE["k_norm"] | {"left out where it must be": ERROR},
        "cache": WRITTEN_CACHE | {"left out where it must be": ERROR},
        "slot_mapping": _SLOT_MAPPING | {"left out where it must be": ERROR},
        "fp8": OPTIONAL_FLAG | {"against the cache": VALUE},
        "v": ROWS | {"dtype float64": TYPE, "another 16-bit dtype": TYPE, "left out where it must be": ERROR},
        "v_cache": WRITTEN_CACHE | {"left out where it must be": ERROR},
    },
    "compress_indexer_keys": _ROPE | {
        "raw_k": REQUIRED | ROWS | {"dtype float64": TYPE, "another 16-bit dtype": TYPE},
        "ring": REQUIRED | STATE_POOL | {"misaligned base": SAME, "misaligned rows": SAME, "size no multiple of ratio": VALUE},
        "cache": REQUIRED | WRITTEN_CACHE,
        "k_norm": REQUIRED | _ROPE["k_norm"],
        "positions": but(_ROPE["positions"], "a negative position", "a position of 2**33 + 1") | {
            "anything at skipped tokens": SAME, "positions that skip their tokens": SAME,
        },
        "ring_slots": REQUIRED | INDEX | {
            "a ring beyond the ring buffer": VALUE, "a slot of 2**33 + 1": VALUE, "null as -7": SAME, "null as -2**33 + 1": SAME,
        },
        "slot_mapping": REQUIRED | _SLOT_MAPPING | {"anything at tokens that end no group": SAME},
        "ratio": AT_LEAST_ONE,
        "null_slot": NULL_SLOT,
    },
    "gather_indexer_cache": {
        "cache": REQUIRED | but(READ_CACHE, "one shorter", "one longer"),
        "block_tables": _TABLES,
        "cu_seqlens": REQUIRED | but(OFFSETS, "ends beyond the tokens") | {"longer than its block table": VALUE},
        "num_rows": OPTIONAL_COUNT | {"too small": VALUE},
        "backend": BACKEND,
        "*": WHOLE,
    },
    "expand_topk_groups": {
        "group_indices": REQUIRED | INDEX | MATRIX | {"none as -9": SAME},
        "positions": REQUIRED | INDEX | {"none as -9": SAME},
        "ratio": AT_LEAST_ONE,
        "out": INDEX_OUT,
        "backend": BACKEND,
        "*": WHOLE,
    },
    "mqa_logits": _RAGGED | {
        "max_seqlen_k": OPTIONAL_COUNT,
        "clean_logits": FLAG,
        "out_dtype": OUT_DTYPE,
        "out": LOGITS_OUT,
    },
    "fp8_mqa_logits": _RANGES | {
        "q": _QUERY,
        "kv": {
            "None": TYPE, "a str": TYPE, "a Fraction": TYPE, "a single tensor": TYPE, "three entries": ERROR,
            "the pair as a list": SAME,
        },
        "kv[0]": _QUERY,
        "kv[1]": PARAMETER | {"dtype float64": TYPE},
        "weights": _HEAD_WEIGHTS,
        "max_seqlen_k": OPTIONAL_COUNT,
        "clean_logits": FLAG,
        "*": FLOAT_CALL,
    },
    "paged_mqa_logits": _PAGED | {
        "max_context_len": COUNT,
        "clean_logits": FLAG,
        "out_dtype": OUT_DTYPE,
        "out": LOGITS_OUT,
    },
    "fp8_paged_mqa_logits": but(_PAGED, "scale", "relu", "backend") | {
        "q": _QUERY,
        "max_context_len": OPTIONAL_COUNT,
        "clean_logits": FLAG,
        "indices": {"a 0-d tensor": ERROR, "a list": ERROR},
    },
    "topk_indices": {
        "logits": REQUIRED | INPUT | MATRIX,
        "k": COUNT,
        "row_starts": INDEX | _SHARED_INPUTS,
        "row_ends": INDEX | {"ends of 2**33 + 1": SAME, "empty as -2**33 + 1": SAME},
        "sorted_by": WORD,
        "out": INDEX_OUT,
        "backend": BACKEND,
        "*": FLOAT_CALL,
    },
    "indexer_topk": _RAGGED | {
        "topk": COUNT,
        "workspace_bytes": OPTIONAL_COUNT | {"less than one row": VALUE},
        "max_seqlen_k": OPTIONAL_COUNT,
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
        "topk_indices": REQUIRED | INDEX | MATRIX | {
            "none as -9": SAME, "a position beyond the sequence": VALUE, "a position after the query's own": SAME,
        },
        "block_tables": _TABLES,
        "query_start_loc": REQUIRED | OFFSETS,
        "seq_lens": REQUIRED | INDEX | {
            "fewer than the new tokens": VALUE, "longer than its block table": VALUE, "a length of 2**33 + 1": VALUE,
        },
        "topk_length": INDEX | {"a negative count": VALUE, "more than k": VALUE},
        "scale": OPTIONAL_NUMBER,
        "return_lse": FLAG,
        "gate": ROWS | {"another 16-bit dtype": TYPE},
        "out": FLOAT_OUT,
        "backend": BACKEND,
        "*": FLOAT_CALL,
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
        "query_start_loc": REQUIRED | OFFSETS,
        "seq_lens": REQUIRED | INDEX | {
            "fewer than the new tokens": VALUE, "longer than its block table": VALUE, "a length of 2**33 + 1": VALUE,
        },
        "seq_lens_host, query_lens_host": LENGTHS,
        "max_query_len, max_seq_len": OPTIONAL_COUNT,
        "scale": OPTIONAL_NUMBER,
        "return_lse": FLAG,
        "gate": ROWS | {"another 16-bit dtype": TYPE},
        "out": FLOAT_OUT,
        "backend": but(BACKEND, "'reference'"),  # prefill rows take torch's own attention otherwise
        "*": FLOAT_CALL,
    },
}  # fmt: skip


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
