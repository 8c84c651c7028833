"""The indexer's scores: calls, what their arguments may be, their results."""

import torch

from tests.described import Described
from tests.described.indexer import CACHE_DTYPES, FP8, HEAD_WEIGHTS, pages_of
from tests.ops.spoiling import kinds
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.verdict import ERROR, SAME, TYPE, VALUE

_RANGES: dict[str, kinds.Kind] = {
    "cu_seqlen_ks": kinds.INDEX | {"a negative start": SAME} | kinds.SHARED_INPUTS,
    "cu_seqlen_ke": kinds.INDEX | {"ends of 2**33 + 1": SAME, "empty as -2**33 + 1": SAME},
}
_LENGTHS: kinds.Kind = kinds.INDEX | {
    "longer than its block table": VALUE,
    "a length of 2**33 + 1": VALUE,
    "empty as -2**33 + 1": SAME,
}  # fmt: skip
RAGGED: dict[str, kinds.Kind] = _RANGES | {
    "q": kinds.QUERY | {"float16, the keys too": SAME, "float32, the keys too": SAME},
    "k": kinds.QUERY | {"another 16-bit dtype": TYPE, "no multiple of the heads": VALUE, "overlaps a read-only argument": SAME},
    "k_scale": kinds.INPUT | {"dtype float64": TYPE, "another 16-bit dtype": TYPE},
    "weights": HEAD_WEIGHTS,
}  # fmt: skip
PAGED: dict[str, kinds.Kind] = {
    "q": kinds.QUERY | {"float16, the keys too": SAME, "float32, the keys too": SAME},
    "cache": kinds.READ_CACHE,
    "weights": HEAD_WEIGHTS,
    "context_lens": _LENGTHS,
    "block_tables": kinds.TABLES,
}


def mqa_logits(draw: Draw) -> Call:
    call = ragged(draw, "mqa_logits")
    rows, keys = call.arguments["q"].shape[0], call.arguments["k"].shape[0]
    longest = max([0, *(min(e, keys) - s for s, e in zip(call.index("cu_seqlen_ks"), call.index("cu_seqlen_ke"), strict=True))])
    columns = keys
    if draw.maybe(0.4):
        columns = call.arguments["max_seqlen_k"] = longest + draw.pick(0, 2)
    dtype = draw.pick(torch.float32, torch.bfloat16)
    if dtype == torch.bfloat16 or draw.maybe():
        call.arguments["out_dtype"] = dtype
    if draw.maybe(0.4):
        call.give("out", draw.rows(draw.floats(rows, columns, dtype=dtype), lead=1), "M columns")
        call.ties["columns"] = ("k", "max_seqlen_k")
    if draw.maybe(0.2):
        call.arguments["clean_logits"] = True
    return call


def ragged(draw: Draw, operator: str) -> Call:
    """Arguments that mqa_logits and indexer_topk share."""
    call = Call(operator)
    rows, keys, kv_heads, dim = draw.tokens(0, 1, 3, 5), draw.pick(9, 0, 1, 4), draw.pick(1, 2), draw.size(16, 8, served=64)
    heads = kv_heads * draw.pick(4, 2)
    dtype = draw.pick(torch.bfloat16, FP8)
    call.give("q", draw.rows(draw.floats(rows, heads, dim).to(dtype), lead=1), "M H D")
    k = draw.rows(draw.floats(keys, kv_heads, dim).to(dtype), lead=1)
    flat = kv_heads == 1 and draw.maybe()
    call.give("k", k[:, 0] if flat else k, "Nk D" if flat else "Nk KH D")
    call.arguments["weights"] = None
    call.give("weights", _weights(draw, rows, heads), "M H")
    _ranges(draw, call, rows, keys)
    if dtype == FP8 and draw.maybe(0.7):
        k_scale = torch.rand(keys, kv_heads, generator=draw.generator) + 0.5
        call.give("k_scale", k_scale[:, 0] if flat else k_scale, "Nk" if flat else "Nk KH")
    if draw.maybe():
        call.arguments |= {"scale": draw.pick(1, 0.25, dim**-0.5), "relu": draw.maybe()}
    return call


def fp8_mqa_logits(draw: Draw) -> Call:
    call = Call("fp8_mqa_logits")
    rows, keys, heads, dim = draw.tokens(0, 1, 3, 5), draw.pick(0, 1, 4, 9), draw.pick(2, 4), 8
    call.give("q", draw.rows(draw.floats(rows, heads, dim).to(FP8), lead=1), "M H D")
    call.give("kv[0]", draw.floats(keys, dim).to(FP8), "Nk D")
    call.give("kv[1]", torch.rand(keys, generator=draw.generator) + 0.5, "Nk")
    call.give("weights", draw.floats(rows, heads), "M H")
    _ranges(draw, call, rows, keys)
    if draw.maybe():
        call.arguments["max_seqlen_k"] = draw.pick(0, keys + 1)
    if draw.maybe():
        call.arguments["clean_logits"] = True
    return call


def paged(draw: Draw, operator: str, dtypes: tuple[torch.dtype, ...], next_ns: tuple[int, ...] = (1, 2, 3)) -> tuple[Call, int]:
    """A call over pages, and the longest context that its block tables can address."""
    call = Call(operator)
    batch, next_n, kv_heads, dim = draw.tokens(1, 2, 3), draw.pick(*next_ns), draw.pick(1, 2), draw.size(16, 8, served=64)
    heads, page_size, pages, columns = kv_heads * draw.pick(4, 2), draw.pick(16, 4), 7, 2
    cache_dtype = draw.pick(*dtypes)
    dtype = FP8 if cache_dtype in (torch.uint8, FP8) else cache_dtype
    cache, dims = pages_of(draw, pages, page_size, kv_heads, dim, cache_dtype)
    call.give("q", draw.rows(draw.floats(batch, next_n, heads, dim).to(dtype), lead=2), "B next H D")
    call.give("cache", cache, dims)
    call.arguments["weights"] = None
    call.give("weights", _weights(draw, batch * next_n, heads), "rows H")
    call.ties["rows"] = ("q", "context_lens", "block_tables")
    addressed = columns * page_size
    lengths = [draw.random.randint(-1, addressed) for _ in range(batch)]
    if draw.maybe():
        per_draft = [[length if length < next_n else length - next_n + 1 + i for i in range(next_n)] for length in lengths]
        call.give("context_lens", draw.indices(per_draft), "B next")
    else:
        call.give("context_lens", draw.indices(lengths), "B")
    call.give("block_tables", draw.tables(lengths, page_size, pages, columns), "B ~")
    return call, addressed


def paged_mqa_logits(draw: Draw) -> Call:
    call, addressed = paged(draw, "paged_mqa_logits", CACHE_DTYPES)
    rows, columns = call.arguments["q"].shape[:2].numel(), addressed + draw.pick(0, 3)
    call.arguments["max_context_len"] = columns
    dtype = draw.pick(torch.float32, torch.bfloat16)
    if dtype == torch.bfloat16 or draw.maybe():
        call.arguments["out_dtype"] = dtype
    if draw.maybe():
        call.arguments |= {"scale": draw.pick(1, 0.25), "relu": draw.maybe(), "clean_logits": True}
    if draw.maybe(0.4):
        call.give("out", draw.rows(draw.floats(rows, columns, dtype=dtype), lead=1), "rows columns")
        call.ties["columns"] = ("max_context_len",)
    return call


def fp8_paged_mqa_logits(draw: Draw) -> Call:
    call, addressed = paged(draw, "fp8_paged_mqa_logits", (torch.uint8,))
    if call.arguments["weights"] is None:
        rows = call.arguments["q"].shape[:2].numel()
        call.give("weights", draw.floats(rows, call.arguments["q"].shape[2]), "rows H")
    if draw.maybe():
        call.arguments["max_context_len"] = addressed + 1
    if draw.maybe():
        call.arguments["clean_logits"] = True
    return call


def _weights(draw: Draw, rows: int, heads: int) -> torch.Tensor | None:
    return draw.rows(draw.floats(rows, heads, dtype=draw.any_float()), lead=1) if draw.maybe(0.8) else None


def _ranges(draw: Draw, call: Call, rows: int, keys: int) -> None:
    """Some empty, some reversed, some beyond the keys."""
    starts = [draw.random.randint(0, keys) for _ in range(rows)]
    ends = [start + draw.random.randint(-2, keys) for start in starts]
    call.give("cu_seqlen_ks", draw.indices(starts), "M")
    call.give("cu_seqlen_ke", draw.indices(ends), "M")


CALLS = {
    "mqa_logits": Described(mqa_logits, (("M columns", None),), RAGGED | {
        "out": kinds.LOGITS_OUT,
    }),
    "fp8_mqa_logits": Described(fp8_mqa_logits, (("M columns", None),), _RANGES | {
        "q": kinds.QUERY,
        "kv": {
            "None": TYPE, "a str": TYPE, "a Fraction": TYPE, "a single tensor": TYPE, "three entries": ERROR,
            "the pair as a list": SAME,
        },
        "kv[0]": kinds.REQUIRED | kinds.QUERY,
        "kv[1]": kinds.PARAMETER | {"dtype float64": TYPE},
        "weights": HEAD_WEIGHTS,
        "max_seqlen_k": kinds.OPTIONAL_COUNT,
    }),
    "paged_mqa_logits": Described(paged_mqa_logits, (("rows columns", None),), PAGED | {
        "max_context_len": kinds.COUNT,
        "out": kinds.LOGITS_OUT,
    }),
    "fp8_paged_mqa_logits": Described(fp8_paged_mqa_logits, (("rows columns", None),), PAGED | {
        "q": kinds.QUERY,
        "max_context_len": kinds.OPTIONAL_COUNT,
        "indices": {"a 0-d tensor": ERROR, "a list": ERROR},
    }),
}  # fmt: skip
