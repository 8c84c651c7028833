"""Kinds of arguments: what is accepted and what refused of every argument of a kind. The table adds what is special."""

from tests.ops.spoiling.verdict import COPIED, SAME, TYPE, VALUE, Verdict

Kind = dict[str, Verdict]


def but(kind: Kind, *names: str) -> Kind:
    """The kind without some rows, which mean nothing for the argument."""
    missing = [name for name in names if name not in kind]
    if missing:
        raise ValueError(f"no rows {missing}")
    return {name: verdict for name, verdict in kind.items() if name not in names}


# ---------------------------------------------------------------------------------------------------------------- tensors

REQUIRED: Kind = {"None instead": TYPE}

_TENSOR: Kind = {
    "its values as a list": TYPE,
    "a numpy array": TYPE,
    "a Fraction instead": TYPE,
    "a str instead": TYPE,
    "1.0 instead": TYPE,
    "sparse COO": TYPE,
    "dtype complex64": TYPE,
    "on the meta device": VALUE,
    "two dims more": VALUE,
    "0-d": VALUE,
    "one shorter": VALUE,
    "an inference tensor": SAME,
}

MATRIX: Kind = {"sparse CSR": TYPE}  # of what is 2-D in some form

_FLOATS: Kind = {
    "dtype int32": TYPE,
    "dtype uint8": TYPE,
    "dtype bool": TYPE,
    "requires grad, a leaf": SAME,
    "requires grad, computed": SAME,
    "an nn.Parameter": SAME,
}

# What is only read has any strides: a copy is made where a kernel needs one.
_READ: Kind = {
    "misaligned base": SAME,
    "misaligned rows": SAME,
    "last dim not contiguous": SAME,
    "reversed in memory order": SAME,
    "part of a larger tensor": SAME,
    "rows of one element each": SAME,
}
_VECTOR: Kind = {"misaligned base": SAME, "last dim not contiguous": SAME, "part of a larger tensor": SAME}

# Gates, logits, weights of heads: [tokens, ...].
INPUT: Kind = _TENSOR | _FLOATS | _READ | {"one longer": VALUE}
# q, k, v, x, z and other large inputs: the copy is worth a warning.
ROWS: Kind = INPUT | {"last dim not contiguous": COPIED}
# Biases and per-head parameters, [HV] or [D].
PARAMETER: Kind = _TENSOR | _FLOATS | _VECTOR | {"one longer": VALUE}
# Filters, [dim, width].
FILTER: Kind = PARAMETER | MATRIX | {"reversed in memory order": SAME, "one tap": VALUE}

_INDEX: Kind = _TENSOR | {
    "dtype float32": TYPE,
    "dtype bool": TYPE,
    "dtype int16": TYPE,
    "dtype uint8": TYPE,
    "misaligned base": SAME,
    "last dim not contiguous": SAME,
    "part of a larger tensor": SAME,
}
# int32 or int64; exactly one entry per row.
INDEX: Kind = _INDEX | {"the other index dtype": SAME, "one longer": VALUE}
# int32 alone.
INT32: Kind = _INDEX | {"dtype int64": TYPE, "one longer": VALUE}
# One entry per sequence; with offsets also more, which are not looked at.
_EXTRA: Kind = {"extra rows of anything": SAME, "extra rows without offsets": VALUE}
PER_SEQUENCE: Kind = _INDEX | {"the other index dtype": SAME} | _EXTRA
MASK: Kind = (
    but(_INDEX, "dtype bool", "dtype uint8")
    | {
        "dtype uint8": TYPE,
        "dtype int32": TYPE,
    }
    | _EXTRA
)
OFFSETS: Kind = but(_INDEX, "one shorter") | {
    "the other index dtype": SAME,
    "starts at 1": VALUE,
    "starts at -1": VALUE,
    "decreases": VALUE,
    "ends beyond the tokens": VALUE,
    "ends beyond 2**32": VALUE,
    "no offset": VALUE,
}

# Slots to read or write in a pool.
SLOTS: Kind = PER_SEQUENCE | {
    "a slot beyond the pool": VALUE,
    "a slot of 2**33 + 1": VALUE,
    "null as -7": SAME,
    "null as -2**33 + 1": SAME,
}

# Memory shared with another argument: never, but disjoint views of one buffer.
_WRITTEN: Kind = {
    "all rows in one place": VALUE,
    "overlapping rows": VALUE,
    "overlaps another argument": VALUE,
    "adjacent to another argument": SAME,
    "interleaved with another argument": SAME,
    "part of a larger tensor": SAME,
}
# Updated in place: nothing may be copied.
POOL: Kind = _TENSOR | _FLOATS | _WRITTEN | {
    "one longer": VALUE,
    "last dim not contiguous": VALUE,
    "misaligned base": VALUE,
    "misaligned rows": VALUE,
}  # fmt: skip
STATE_POOL: Kind = POOL | {"dtype float16": TYPE, "dtype float64": TYPE}
# One state per sequence, only read.
STATES: Kind = INPUT | {"dtype float16": TYPE, "dtype float64": TYPE}
# Windows of the convolution: any strides, since both memory orders are in use, and a cache may hold more columns.
WINDOWS: Kind = POOL | {
    "last dim not contiguous": SAME,
    "misaligned base": SAME,
    "misaligned rows": SAME,
    "too few columns": VALUE,
}
OUT: Kind = _TENSOR | _WRITTEN | {
    "one longer": VALUE,
    "dtype int64": TYPE,
    "dtype float64": TYPE,
    "last dim not contiguous": VALUE,
}  # fmt: skip
# out of the recurrence and the steps.
FLOAT_OUT: Kind = OUT | {
    "another 16-bit dtype": TYPE,
    "misaligned base": SAME,
    "requires grad, a leaf": SAME,
    "requires grad, computed": SAME,
}
INDEX_OUT: Kind = OUT | MATRIX | {"dtype float32": TYPE, "misaligned base": SAME, "misaligned rows": SAME}
LOGITS_OUT: Kind = OUT | MATRIX | {
    "dtype float16": TYPE,
    "misaligned base": SAME,
    "misaligned rows": SAME,
    "requires grad, a leaf": SAME,
    "requires grad, computed": SAME,
}  # fmt: skip

_CACHE: Kind = _TENSOR | {
    "dtype int32": TYPE,
    "dtype float64": TYPE,
    "all rows in one place": VALUE,
    "overlapping rows": VALUE,
    "last dim not contiguous": VALUE,
    "misaligned base": VALUE,
    "misaligned rows": VALUE,
    "part of a larger tensor": SAME,
    "a page size of 6": VALUE,
}
# Indexer pages; "written": by this operator.
READ_CACHE: Kind = _CACHE | {"one longer": VALUE}
WRITTEN_CACHE: Kind = READ_CACHE | {
    "overlaps another argument": VALUE,
    "adjacent to another argument": SAME,
}

SHARED_INPUTS: Kind = {
    "one tensor for two read-only arguments": SAME,
    "overlaps a read-only argument": SAME,
}
QUERY: Kind = ROWS | {"dtype float64": TYPE}  # another 16-bit dtype: as prepare_indexer hands it out
TABLES: Kind = INT32 | MATRIX | {
    "a page beyond the cache": VALUE,
    "a negative page": VALUE,
    "anything where no row is looked at": SAME,
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------------ flags

_NO_SCALAR: Kind = {
    "a list": TYPE,
    "a dict": TYPE,
    "an object": TYPE,
    "a Fraction": TYPE,
    "a Decimal": TYPE,
    "1j": TYPE,
    "a numpy bool": TYPE,
    "a numpy array of one": TYPE,
    "a 0-d tensor": TYPE,
    "a tensor of one": TYPE,
}
FLAG: Kind = but(_NO_SCALAR, "1j") | {"1": TYPE, "0": TYPE, "1.0": TYPE, "a str": TYPE, "an empty str": TYPE, "None": TYPE}
# None is a value of its own.
OPTIONAL_FLAG: Kind = but(FLAG, "None")
OPTIONAL_NUMBER: Kind = _NO_SCALAR | {
    "True": TYPE,
    "a str": TYPE,
    "nan": VALUE,
    "inf": VALUE,
    "10**400": VALUE,
    "an int": SAME,
    "a numpy float32": SAME,
    "a numpy float64": SAME,
    "a numpy int": SAME,
}
NUMBER: Kind = OPTIONAL_NUMBER | {"None": TYPE}
EPS: Kind = NUMBER | {"-1.0": VALUE, "-1": VALUE}
POSITIVE: Kind = EPS | {"0": VALUE}
OPTIONAL_COUNT: Kind = _NO_SCALAR | {"True": TYPE, "1.0": TYPE, "a str": TYPE, "nan": TYPE, "-1": VALUE}
COUNT: Kind = OPTIONAL_COUNT | {"None": TYPE}
# Lengths of the sequences on the host.
LENGTHS: Kind = but(_NO_SCALAR, "a list") | {
    "1": TYPE, "1.0": TYPE, "a str": TYPE, "one length more": VALUE, "a length of -1": VALUE, "a longer first sequence": VALUE,
}  # fmt: skip
AT_LEAST_ONE: Kind = COUNT | {"0": VALUE}
NULL_SLOT: Kind = but(COUNT, "-1") | {"-2": VALUE, "-2**40": VALUE}
OPTIONAL_WORD: Kind = _NO_SCALAR | {
    "1": TYPE,
    "True": TYPE,
    "an unknown word": VALUE,
    "an empty str": VALUE,
    "a word in capitals": VALUE,
}
WORD: Kind = OPTIONAL_WORD | {"None": TYPE}
BACKEND: Kind = OPTIONAL_WORD | {"'reference'": SAME}
OUT_DTYPE: Kind = _NO_SCALAR | {"None": TYPE, "'float32'": TYPE, "torch.float16": TYPE, "torch.int32": TYPE}

# -------------------------------------------------------------------------------------------------------- the whole call

WHOLE: Kind = {
    "nothing": SAME,
    "inside autocast to bfloat16": SAME,
    "inside autocast to float16": SAME,
    "inside inference_mode": SAME,
    "inside inference_mode, with its tensors": SAME,
    "torch's default dtype is float64": SAME,
}
FLOAT_CALL: Kind = WHOLE | {"every float tensor requires grad": SAME}
