"""Attention over a paged cache: calls of both functions, what their arguments may be, their results."""

import math

import torch

from tests.described import Described
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.kinds import BACKEND, FLOAT_OUT, INDEX, MATRIX, OFFSETS, QUERY, REQUIRED, ROWS, TABLES, Kind, but
from tests.ops.spoiling.verdict import ERROR, SAME, TYPE, VALUE


def sparse_attention(draw: Draw) -> Call:
    call = Call("sparse_attention")
    kv_heads, dim, block_size, blocks, k = draw.pick(2, 1), draw.size(16, 8, served=128), draw.pick(16, 4), 5, draw.pick(3, 6)
    heads = kv_heads * draw.pick(2, 4)
    lengths = draw.lengths(3, sequences=3)
    offsets = draw.offsets(lengths)
    tokens = offsets[-1] + draw.pick(0, 1)
    dtype = draw.any_float()
    totals = [length + draw.random.randint(0, 2 * block_size - length) for length in lengths]
    call.give("q", draw.rows(draw.floats(tokens, heads, dim, dtype=dtype), lead=1), "T H D")
    _kv_cache(draw, call, (blocks, block_size, kv_heads, dim), dtype)
    positions = [[draw.random.randint(-1, totals[0]) - 1 for _ in range(k)] for _ in range(tokens)]
    for n, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        for token in range(start, end):
            distinct = draw.random.sample(range(-1, max(k, totals[n])), k)
            positions[token] = [position if position < totals[n] else -1 for position in distinct]
    selected = torch.tensor(positions, dtype=draw.pick(torch.int32, torch.int64))
    call.give("topk_indices", draw.rows(selected, lead=1), "T k")
    call.give("block_tables", draw.tables(totals, block_size, blocks, columns=2), "N ~")
    call.give("query_start_loc", draw.indices(offsets), "N")
    call.give("seq_lens", draw.indices(totals), "N")
    if draw.maybe():
        call.give("topk_length", draw.indices([draw.random.randint(0, k) for _ in range(tokens)]), "T")
    _attention_options(draw, call, (tokens, heads, dim), dtype)
    return call


def attention(draw: Draw) -> Call:
    """Dense attention: decode rows, then prefill rows of which some have equal lengths."""
    call = Call("attention")
    kv_heads, dim, block_size, blocks = draw.pick(2, 1), draw.size(16, 8, served=128), draw.size(8, 4, served=16), 9
    heads = kv_heads * draw.pick(2, 1, 4)
    lengths = draw.lengths(4, sequences=2) + [draw.pick(9, 12)] * draw.pick(0, 1, 2) + draw.lengths(3, sequences=1)
    offsets = draw.offsets(lengths)
    tokens = offsets[-1] + draw.pick(0, 1)
    dtype = draw.any_float()
    cached = draw.pick(0, 3)
    totals = [length + cached for length in lengths]
    call.give("q", draw.rows(draw.floats(tokens, heads, dim, dtype=dtype), lead=1), "T H D")
    _kv_cache(draw, call, (blocks, block_size, kv_heads, dim), dtype)
    call.give("block_tables", draw.tables(totals, block_size, blocks, columns=4), "N ~")
    call.give("query_start_loc", draw.indices(offsets), "N")
    call.give("seq_lens", draw.indices(totals), "N")
    call.ties["N"] = ("seq_lens_host", "query_lens_host")
    if draw.maybe(0.45):
        call.arguments |= {"query_lens_host": lengths, "seq_lens_host": tuple(totals)}
    if draw.maybe(0.3):
        call.arguments |= {"max_query_len": max(lengths), "max_seq_len": max(totals) + draw.pick(0, 5)}
    _attention_options(draw, call, (tokens, heads, dim), dtype)
    return call


def _attention_options(draw: Draw, call: Call, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if draw.maybe(0.4):
        call.arguments |= {"scale": draw.pick(1, 0.25), "return_lse": draw.maybe()}
    heads = draw.floats(*shape[:2], 2 * shape[2], dtype=dtype)  # a place for o, and its gate
    if draw.maybe(0.4):
        call.give(
            "out", heads[..., : shape[2]] if draw.maybe(0.3) else draw.rows(draw.floats(*shape, dtype=dtype), lead=1), "T H D"
        )
    if draw.maybe(0.5):
        call.give("gate", heads[..., shape[2] :], "T H D")


def _kv_cache(draw: Draw, call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Keys and values [blocks, block_size, kv_heads, D], in one of three layouts."""
    dim = shape[-1]
    both = draw.floats(2, *shape, dtype=dtype)
    form = draw.pick("one", "pair", "packed")
    if form == "one":
        call.give("kv_cache", both, "two ~ ~ ~ D")
        call.ties["two"] = ("kv_cache",)
    else:
        # K and V of a head in one row, as some engines keep them.
        rows = torch.cat([both[0], both[1]], dim=-1)
        pair = (both[0].clone(), both[1].clone()) if form == "pair" else (rows[..., :dim], rows[..., dim:])
        call.give("kv_cache[0]", pair[0], "blocks block_size KH D")
        call.give("kv_cache[1]", pair[1], "blocks block_size KH D")


_BOTH: dict[str, Kind] = {
    "q": QUERY | {"another 16-bit dtype": TYPE},
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
    "block_tables": TABLES,
    "query_start_loc": OFFSETS,
    "seq_lens": INDEX | {
        "fewer than the new tokens": VALUE, "longer than its block table": VALUE, "a length of 2**33 + 1": VALUE,
    },
    "gate": ROWS | {"another 16-bit dtype": TYPE},
    "out": FLOAT_OUT,
}  # fmt: skip
_RESULTS = (("T ~ ~", 0.0), ("T ~", -math.inf))

CALLS = {
    "attention": Described(attention, _RESULTS, _BOTH | {
        "backend": but(BACKEND, "'reference'"),  # prefill rows take torch's own attention otherwise
    }),
    "sparse_attention": Described(sparse_attention, _RESULTS, _BOTH | {
        "topk_indices": INDEX | MATRIX | {
            "none as -9": SAME, "null as -2**33 + 1": SAME, "a position beyond the sequence": VALUE,
            "a position after the query's own": SAME,
        },
        "topk_length": INDEX | {"a negative count": VALUE, "more than k": VALUE},
    }),
}  # fmt: skip
