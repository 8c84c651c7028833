"""Names that `gdn explain` takes in NAME=VALUE: fields of a problem, and the public function's arguments.

An argument sets the fields that it decides in a call: a flag its field, a tensor the field of its dtype (`none`: not given), an
optional tensor the field that says whether it is there (`given` or `none`). Arguments that decide nothing are accepted.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_args

import gdn
from gdn.problem import DTYPE_BYTES, Problem

Fields = dict[str, Any]

# Argument -> the field with its value; of several fields, the problem has one.
_FLAGS: dict[str, tuple[str, ...]] = {
    "use_qk_l2norm_in_kernel": ("use_qk_l2norm", "use_k_l2norm"), "use_gate_in_kernel": ("use_gate",),
    "use_beta_sigmoid_in_kernel": ("use_beta_sigmoid",), "clean_logits": ("clean",), "topk": ("k",), "group_size": ("group_dim",),
    "num_heads_qk": ("num_k_heads",), "num_heads_v": ("num_v_heads",), "head_qk": ("head_k_dim",), "head_v": ("head_v_dim",),
    "max_seqlen": ("longest",),
}  # fmt: skip
# Tensor argument -> the field with its dtype.
_DTYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "v", "x", "mixed_qkv", "mixed_qkvz", "raw_k", "logits", "kv_cache"), ("dtype",)),
    **dict.fromkeys(("cu_seqlens", "query_start_loc"), ("cu_seqlens_dtype",)),
    **dict.fromkeys(("state_indices", "ssm_state_indices", "cache_indices", "conv_state_indices"), ("index_dtype",)),
    **dict.fromkeys(("conv_state", "conv_states"), ("conv_dtype", "state_dtype")),
    **dict.fromkeys(("conv_weight", "weight"), ("weight_dtype",)), **dict.fromkeys(("conv_bias", "bias"), ("bias_dtype",)),
    **{name: (f"{name}_dtype",) for name in ("beta", "z", "a", "b", "A_log", "dt_bias")},
    **{name: (f"{name}_dtype",) for name in ("weights", "cos_sin", "q_norm", "k_norm")},
    "k": ("k_dtype", "dtype"), "g": ("gate_dtype",), "ssm_state": ("state_dtype",), "norm_weight": ("norm_dtype",),
    "mixed_ba": ("ba_dtype",), "layer_scale": ("layer_scale_dtype",), "positions": ("position_dtype",), "cache": ("cache_dtype",),
    "slot_mapping": ("slot_dtype",), "ring_slots": ("ring_slot_dtype",), "group_indices": ("group_dtype",),
    "topk_indices": ("index_dtype",), "row_starts": ("starts_dtype",), "row_ends": ("ends_dtype",),
    "checkpoint_slots": ("checkpoint_dtype",), "checkpoint_states": ("checkpoint_state_dtype",),
    "checkpoint_windows": ("checkpoint_window_dtype",), "intermediate_states": ("intermediate_dtype",),
}  # fmt: skip
# Optional argument -> the field that says whether it is given.
_GIVEN: dict[str, str] = {
    "num_accepted_tokens": "has_accepted", "parent_token": "has_parent", "rounding_seed": "has_rounding",
    "final_state_indices": "has_final_indices", "has_initial_state": "has_mask", "checkpoint_offsets": "has_checkpoints",
    "checkpoint_slots": "has_checkpoints", "topk_length": "has_topk_length", "gate": "has_gate", "residual": "has_residual",
    "k_scale": "has_k_scale", "v": "has_values", "v_cache": "has_values",
}  # fmt: skip
# Argument -> its words, with the fields that each sets; a problem has some of these fields.
_WORDS: dict[str, dict[str, Fields]] = {
    "projection_layout": {
        word: {layout: word == layout for layout in ("interleaved", "merged", "concatenated")} | dict.fromkeys(parts)
        for word, parts in {
            "flat": (), "interleaved": ("z_dtype", "a_dtype"), "merged": ("z_dtype", "a_dtype"),
            "concatenated": ("z_dtype", "a_dtype", "b_dtype"),
        }.items()
    },
    "activation": {
        "silu": {"silu": True, "sigmoid": False}, "swish": {"silu": True, "sigmoid": False}, "none": {"silu": False},
        "sigmoid": {"sigmoid": True},
    },
    "gate_activation": {"silu": {"gate_sigmoid": False}, "swish": {"gate_sigmoid": False}, "sigmoid": {"gate_sigmoid": True}},
    "sorted_by": {word: {"sorted_by": word} for word in ("index", "score")},
    "fp8": {
        "true": {"q_out_dtype": "float8_e4m3fn", "cache_dtype": "uint8", "folds_weights": True, "weights_dtype": "bfloat16"},
        "false": {"q_out_dtype": "bfloat16", "cache_dtype": "bfloat16", "folds_weights": False, "weights_dtype": None},
    },
}  # fmt: skip

# Arguments that say which rows each form of an operator gets.
_DEALS = ("lengths_host", "query_lens_host", "seq_lens_host", "max_query_len")


def _output_final_state(problem: Any, text: str) -> Fields:
    """States of a pool are written in any case."""
    wanted = _parse("output_final_state", bool, text)
    return {} if problem.index_dtype is not None else {"has_final_state": wanted}


def _inplace_final_state(problem: Any, text: str) -> Fields:
    """Slots say the same; without them each sequence has the slot of its number."""
    wanted = _parse("inplace_final_state", bool, text)
    return {"index_dtype": "int32"} if wanted and problem.index_dtype is None else {}


def _disable_state_update(problem: Any, text: str) -> Fields:
    return {"has_final_state": not _parse("disable_state_update", bool, text)}


def _initial_state(problem: Any, text: str) -> Fields:
    if text.lower() != "none":
        return {"state_dtype": _parse("initial_state", str | None, text), "has_initial_state": True}
    masked = {"has_mask": False} if hasattr(problem, "has_mask") else {}
    return {"state_dtype": "float32", "has_initial_state": False, "index_dtype": None, **masked}


def _paged_cache(problem: Any, text: str) -> Fields:
    """uint8 pages hold FP8 keys with their scales."""
    dtype = _parse("cache", str, text)
    return {"dtype": "float8_e4m3fn" if dtype == "uint8" else dtype, "has_k_scale": dtype == "uint8"}


def _max_seqlen_k(problem: Any, text: str) -> Fields:
    if text.lower() == "none":
        return {"packed": False, "num_columns": problem.num_keys}
    return {"packed": True, "num_columns": _parse("max_seqlen_k", int, text)}


def _parent_token(problem: Any, text: str) -> Fields:
    """Of the fused step."""
    if text.lower() != "none":
        raise ValueError(f"parent_token: expected none (the operators of the single steps take draft trees), got {text!r}")
    return {}


# (field that such a problem has, argument) -> the fields that the argument sets, from the problem and its text.
_RULES: dict[tuple[str, str], Callable[[Any, str], Fields]] = {
    ("has_final_state", "output_final_state"): _output_final_state,
    ("has_final_state", "inplace_final_state"): _inplace_final_state,
    ("has_final_state", "disable_state_update"): _disable_state_update,
    ("has_initial_state", "initial_state"): _initial_state,
    ("page_size", "cache"): _paged_cache,
    ("packed", "max_seqlen_k"): _max_seqlen_k,
    ("concatenated", "parent_token"): _parent_token,
}


def taken(
    problems: Sequence[Problem], assignments: Sequence[str], function: str | None = None, also: Sequence[str] = ()
) -> tuple[list[Any], tuple[str, ...]]:
    """The problems with their fields changed, and notes on arguments that decide nothing.

    An assignment changes every problem that has the field or whose kernel the argument concerns.

    function: the public function whose arguments count; None = fields alone. also: further names for the message.

    Raises ValueError for a name that no problem takes, and for a value of another type.
    """
    changed, notes = list(problems), []
    public = None if function is None else getattr(gdn, function, None)
    arguments = () if public is None else tuple(inspect.signature(public).parameters)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        found = [_fields(problem, name, text, arguments) for problem in changed] if equals else []
        if name == "backend" and function is not None:
            raise ValueError(f"backend: expected as an option, --backend {text}")
        if all(one is None for one in found) and not (equals and name in arguments):
            known = dict.fromkeys([*(field.name for one in changed for field in dataclasses.fields(one)), *also])  # type: ignore[arg-type]
            of_function = "" if function is None else f" or of an argument of {function}"
            raise ValueError(f"fields: expected name=value with a name of {', '.join(known)}{of_function}, got {assignment!r}")
        if not any(found):
            what = "deals the rows to the forms that are listed" if name in _DEALS else "does not decide what runs"
            notes.append(f"{name} {what}")
        changed = [dataclasses.replace(problem, **(one or {})) for problem, one in zip(changed, found, strict=True)]  # type: ignore[type-var]
    for problem in changed:
        _check_ring(problem)
    return changed, tuple(notes)


def _check_ring(problem: Any) -> None:
    """Refuses a ring without the tokens between two folds, or with so many that no token is left."""
    names = ("ring_rows", "fold_every")
    if not all(hasattr(problem, name) for name in names):
        return
    for name, other in (names, names[::-1]):
        if getattr(problem, name) is None and getattr(problem, other) is not None:
            raise ValueError(f"{other}: expected next to {name}, got {other}={getattr(problem, other)} alone")
    if problem.fold_every is None:
        return
    if problem.fold_every < 1:
        raise ValueError(f"fold_every: expected a number of tokens >= 1, got {problem.fold_every}")
    if problem.ring_rows <= problem.fold_every:
        expected = f"at least {problem.fold_every + 1} rows (fold_every + 1)"
        raise ValueError(f"ring_rows: expected {expected}, got {problem.ring_rows}")
    for name in ("has_columns", "write_every_token"):  # of 2-D slots
        if getattr(problem, name, False):
            raise ValueError(f"{name}: expected false with ring_rows, got true")


def _fields(problem: Any, name: str, text: str, arguments: Sequence[str]) -> Fields | None:
    """Fields of the problem that an assignment sets; None where it concerns none of them."""
    declared = {field.name: field.type for field in dataclasses.fields(problem)}
    word, is_argument = text.lower(), name in arguments
    if is_argument and name in _GIVEN and _GIVEN[name] in declared and word in ("given", "none"):
        return {_GIVEN[name]: word == "given"}
    able = {one: own for one, fields in _WORDS.get(name, {}).items() if (own := _of(declared, fields))}
    if is_argument and able:
        if word not in able:
            raise ValueError(f"{name}: expected one of {', '.join(able)}, got {text!r}")
        return able[word]
    if name in declared and not (is_argument and name in {*_DTYPES, *_GIVEN} and word in DTYPE_BYTES):
        return {name: _parse(name, declared[name], text)}
    if not is_argument:
        return None
    for (having, argument), rule in _RULES.items():
        if argument == name and having in declared:
            return rule(problem, text)
    if name in _GIVEN and _GIVEN[name] in declared:
        return {_GIVEN[name]: True if word in DTYPE_BYTES else _parse(name, bool, text)}
    for field in _FLAGS.get(name, ()) + _DTYPES.get(name, ()):
        if field in declared:
            return {field: _parse(name, declared[field], text)}
    return None


def _of(declared: Fields, fields: Fields) -> Fields:
    """Those of the fields that a problem has."""
    return {name: value for name, value in fields.items() if name in declared}


def _parse(name: str, kind: Any, text: str) -> Any:
    word = text.lower()
    if kind is bool and word in ("true", "false", "1", "0"):
        return word in ("true", "1")
    if (kind is int or int in get_args(kind)) and word.isdecimal():
        return int(word)
    if type(None) in get_args(kind) and word == "none":
        return None
    if kind not in (bool, int) and word in DTYPE_BYTES:
        return word
    or_none = " or none" if type(None) in get_args(kind) else ""
    words = {bool: "true or false", int: "a whole number", int | None: "a whole number or none"}
    expected = words.get(kind, f"one of {', '.join(DTYPE_BYTES)}{or_none}")
    raise ValueError(f"{name}: expected {expected}, got {text!r}")
