"""Good calls of the indexer: quantisation, cache, logits, top-k and the attention over the selection."""

import torch

from tests.ops.spoiling.call import Call, Draw

FP8 = torch.float8_e4m3fn
CACHE_DTYPES = (torch.uint8, FP8, torch.bfloat16, torch.float16, torch.float32)
TIES_OF_PAGES = ("block_tables", "context_lens")


def _cache(draw: Draw, pages: int, page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, str]:
    """Pages of any of the three forms, filled with keys, and their dims."""
    if dtype == torch.uint8:
        keys = draw.floats(pages, page_size * kv_heads * dim).to(FP8).view(torch.uint8)
        scales = torch.rand(pages, page_size * kv_heads, generator=draw.generator) + 0.5
        cache = torch.cat([keys, scales.view(torch.uint8)], dim=1).view(pages, page_size, kv_heads, dim + 4)
    else:
        cache = draw.floats(pages, page_size, kv_heads, dim).to(dtype)
    if kv_heads == 1 and draw.maybe():
        return draw.pool(cache[:, :, 0].contiguous()), "~ ~ D"
    return draw.pool(cache), "~ ~ KH D"


def _keys(draw: Draw, tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, *, flat: bool) -> tuple[torch.Tensor, str]:
    keys = draw.rows(draw.floats(tokens, kv_heads, dim, dtype=dtype), lead=1)
    return (keys[:, 0], "T D") if flat else (keys, "T KH D")


def _slot_mapping(draw: Draw, tokens: int, rows: int) -> torch.Tensor:
    slots = [-1 if draw.maybe(0.2) else slot for slot in draw.distinct(tokens, rows)]
    return draw.indices(slots)


def quantize(draw: Draw) -> Call:
    call = Call("quantize_fp8")
    shape, dim = draw.pick((3,), (2, 3), (1, 2, 2)), draw.pick(8, 16)
    call.give("x", draw.rows(draw.floats(*shape, dim, dtype=draw.any_float()), lead=1), "~ " * len(shape) + "~")
    if draw.maybe():
        call.arguments["group_size"] = draw.pick(4, 8, 128)
    return call


def write(draw: Draw) -> Call:
    call = Call("write_indexer_cache")
    tokens, kv_heads, dim, page_size = draw.pick(0, 1, 3, 5), draw.pick(1, 2), 8, draw.pick(4, 16)
    cache, dims = _cache(draw, 3, page_size, kv_heads, dim, draw.pick(*CACHE_DTYPES))
    k, k_dims = _keys(draw, tokens, kv_heads, dim, draw.any_float(), flat=kv_heads == 1 and draw.maybe())
    call.give("k", k, k_dims)
    call.give("cache", cache, dims)
    call.give("slot_mapping", _slot_mapping(draw, tokens, 3 * page_size), "T")
    call.ties["KH"] = ("k", "cache")
    return call


def _rope(draw: Draw, call: Call, tokens: int, dim: int, positions: list[int], longest: int) -> None:
    rotary_dim = draw.pick(4, dim)
    call.give("positions", draw.indices(positions), "T")
    call.give("cos_sin", draw.floats(longest, rotary_dim, dtype=draw.any_float()), "~ rotary")
    call.arguments["rotary_dim"] = rotary_dim
    call.ties |= {"rotary": ("rotary_dim",), "D": ("rotary_dim",)}
    if draw.maybe(0.3):
        call.arguments |= {"eps": draw.pick(1e-5, 1e-6), "zero_centred": draw.maybe()}


def prepare(draw: Draw) -> Call:
    call = Call("prepare_indexer")
    tokens, heads, kv_heads, dim, page_size = draw.pick(0, 1, 3), draw.pick(2, 4), draw.pick(1, 2), 8, draw.pick(4, 16)
    call.give("q", draw.rows(draw.floats(tokens, heads, dim, dtype=draw.any_float()), lead=1), "T H D")
    weights = draw.rows(draw.floats(tokens, heads, dtype=draw.any_float()), lead=1)
    has_cache = draw.maybe(0.7)
    call.arguments |= dict.fromkeys(("k", "k_norm", "cache", "slot_mapping", "weights", "v", "v_cache"))
    call.give("weights", weights if draw.maybe(0.8) else None, "T H")
    _rope(draw, call, tokens, dim, [draw.random.randrange(12) for _ in range(tokens)], 12)
    call.give("q_norm", draw.floats(dim, dtype=draw.any_float()), "D")
    if has_cache:
        cache, dims = _cache(draw, 3, page_size, kv_heads, dim, draw.pick(*CACHE_DTYPES))
        k, k_dims = _keys(draw, tokens, kv_heads, dim, draw.any_float(), flat=kv_heads == 1 and draw.maybe())
        call.give("k", k, k_dims)
        call.give("k_norm", draw.floats(dim, dtype=draw.any_float()), "D")
        call.give("cache", cache, dims)
        call.give("slot_mapping", _slot_mapping(draw, tokens, 3 * page_size), "T")
        call.ties["KH"] = ("k", "cache")
        if draw.maybe():
            v_cache, dims = _cache(draw, 3, page_size, kv_heads, dim, cache.dtype)
            v, v_dims = _keys(draw, tokens, kv_heads, dim, k.dtype, flat=k.dim() == 2)
            call.give("v", v, v_dims)
            call.give("v_cache", v_cache, dims)
            call.ties["KH"] = ("k", "cache", "v", "v_cache")
        if draw.maybe(0.3):
            call.arguments["fp8"] = cache.dtype in (torch.uint8, FP8)
    elif draw.maybe():
        call.arguments["fp8"] = draw.maybe()
    return call


def compress(draw: Draw) -> Call:
    call = Call("compress_indexer_keys")
    kv_heads, dim, ratio, page_size, sequences = draw.pick(1, 2), 8, draw.pick(2, 4), draw.pick(4, 16), draw.pick(1, 2, 3)
    size = ratio * draw.pick(1, 2)
    dtype = draw.any_float()
    null_slot = draw.pick(-1, 0)
    call.arguments |= {"ratio": ratio} | ({"null_slot": 0} if null_slot == 0 else {})
    rings = draw.distinct(sequences, sequences + 2, start=null_slot + 1)
    positions, ring_slots, mapping = [], [], []
    for n in range(sequences):
        first, count = draw.random.randrange(9), draw.pick(1, 2, 5)
        skipped = draw.maybe(0.15)
        for position in range(first, first + count):
            positions.append(position)
            ring_slots.append(null_slot if skipped else rings[n])
            mapping.append(-1 if draw.maybe(0.1) else 4 * n + position // ratio % 4)
    mapping = [slot if (position + 1) % ratio == 0 else -1 for slot, position in zip(mapping, positions, strict=True)]
    mapping = _without_repeats(mapping)
    tokens = len(positions)
    flat = kv_heads == 1 and draw.maybe()
    raw_k, k_dims = _keys(draw, tokens, kv_heads, dim, dtype, flat=flat)
    ring = draw.floats(sequences + 2, size, kv_heads, dim, dtype=dtype)
    cache, dims = _cache(draw, 3, page_size, kv_heads, dim, draw.pick(*CACHE_DTYPES))
    call.give("raw_k", raw_k, k_dims)
    call.give("ring", draw.pool(ring[:, :, 0].contiguous() if flat else ring), "~ ring D" if flat else "~ ring KH D")
    call.give("cache", cache, dims)
    _rope(draw, call, tokens, dim, positions, 24)
    call.give("k_norm", draw.floats(dim, dtype=draw.any_float()), "D")
    call.give("ring_slots", draw.indices(ring_slots), "T")
    call.give("slot_mapping", draw.indices(mapping), "T")
    call.ties |= {"KH": ("raw_k", "cache", "ring"), "ring": ("ratio",)}
    return call


def _without_repeats(slots: list[int]) -> list[int]:
    seen: set[int] = set()
    return [-1 if slot in seen or seen.add(slot) else slot for slot in slots]  # type: ignore[func-returns-value]


def gather(draw: Draw) -> Call:
    call = Call("gather_indexer_cache")
    kv_heads, dim, page_size, pages = draw.pick(1, 2), 8, draw.pick(4, 16), 6
    cache, dims = _cache(draw, pages, page_size, kv_heads, dim, draw.pick(*CACHE_DTYPES))
    lengths = [draw.random.randint(0, 2 * page_size) for _ in range(draw.pick(1, 2, 3))]
    call.give("cache", cache, dims)
    call.give("block_tables", _tables(draw, lengths, page_size, pages, columns=2), "N ~")
    call.give("cu_seqlens", draw.indices(draw.offsets(lengths)), "N")
    if draw.maybe():
        call.arguments["num_rows"] = sum(lengths) + draw.pick(0, 3)
    return call


def _tables(draw: Draw, lengths: list[int], page_size: int, pages: int, columns: int) -> torch.Tensor:
    """A page of each page_size rows; what no row is in may be anything."""
    table = [
        [draw.random.randrange(pages) if column * page_size < length else draw.pick(-1, 0, 10**6) for column in range(columns)]
        for length in lengths
    ]
    tables = torch.tensor(table, dtype=torch.int32).reshape(len(lengths), columns)
    return draw.rows(tables, lead=1)


def _weights(draw: Draw, rows: int, heads: int) -> torch.Tensor | None:
    return draw.rows(draw.floats(rows, heads, dtype=draw.any_float()), lead=1) if draw.maybe(0.8) else None


def _ranges(draw: Draw, call: Call, rows: int, keys: int) -> None:
    """Some empty, some reversed, some beyond the keys."""
    starts = [draw.random.randint(0, keys) for _ in range(rows)]
    ends = [start + draw.random.randint(-2, keys) for start in starts]
    call.give("cu_seqlen_ks", draw.indices(starts), "M")
    call.give("cu_seqlen_ke", draw.indices(ends), "M")


def mqa_logits(draw: Draw) -> Call:
    call = _ragged(draw, "mqa_logits")
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


def _ragged(draw: Draw, operator: str) -> Call:
    """Arguments that mqa_logits and indexer_topk share."""
    call = Call(operator)
    rows, keys, kv_heads, dim = draw.pick(0, 1, 3, 5), draw.pick(0, 1, 4, 9), draw.pick(1, 2), draw.pick(8, 16)
    heads = kv_heads * draw.pick(2, 4)
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
    rows, keys, heads, dim = draw.pick(0, 1, 3, 5), draw.pick(0, 1, 4, 9), draw.pick(2, 4), 8
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


def _paged(draw: Draw, operator: str, dtypes: tuple[torch.dtype, ...], next_ns: tuple[int, ...] = (1, 2, 3)) -> tuple[Call, int]:
    """A call over pages, and the longest context that its block tables can address."""
    call = Call(operator)
    batch, next_n, kv_heads, dim = draw.pick(1, 2, 3), draw.pick(*next_ns), draw.pick(1, 2), draw.pick(8, 16)
    heads, page_size, pages, columns = kv_heads * draw.pick(2, 4), draw.pick(4, 16), 6, 2
    cache_dtype = draw.pick(*dtypes)
    dtype = FP8 if cache_dtype in (torch.uint8, FP8) else cache_dtype
    cache, dims = _cache(draw, pages, page_size, kv_heads, dim, cache_dtype)
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
    call.give("block_tables", _tables(draw, lengths, page_size, pages, columns), "B ~")
    return call, addressed


def paged_mqa_logits(draw: Draw) -> Call:
    call, addressed = _paged(draw, "paged_mqa_logits", CACHE_DTYPES)
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
    call, addressed = _paged(draw, "fp8_paged_mqa_logits", (torch.uint8,))
    if call.arguments["weights"] is None:
        rows = call.arguments["q"].shape[:2].numel()
        call.give("weights", draw.floats(rows, call.arguments["q"].shape[2]), "rows H")
    if draw.maybe():
        call.arguments["max_context_len"] = addressed + 1
    if draw.maybe():
        call.arguments["clean_logits"] = True
    return call


def topk_indices(draw: Draw) -> Call:
    call = Call("topk_indices")
    rows, columns, k = draw.pick(0, 1, 3, 5), draw.pick(0, 1, 6, 20), draw.pick(0, 1, 3, 8)
    call.give("logits", draw.rows(draw.floats(rows, columns, dtype=draw.any_float()), lead=1), "M ~")
    call.arguments["k"] = k
    if draw.maybe(0.7):
        call.give("row_starts", draw.indices([draw.random.randint(0, columns) for _ in range(rows)]), "M")
    if draw.maybe(0.7):
        call.give("row_ends", draw.indices([draw.random.randint(0, columns + 2) for _ in range(rows)]), "M")
    if draw.maybe():
        call.arguments["sorted_by"] = draw.pick("index", "score")
    _picked(draw, call, rows, k)
    return call


def _picked(draw: Draw, call: Call, rows: int, k: int, name: str = "k", rows_dim: str = "M") -> None:
    """out of a selection."""
    if draw.maybe(0.5):
        out = torch.full((rows, k), 77, dtype=torch.int32)
        call.give("out", draw.rows(out, lead=1), f"{rows_dim} k")
        call.ties |= {"k": (name,), "M": ("q", "logits")}


def indexer_topk(draw: Draw) -> Call:
    call = _ragged(draw, "indexer_topk")
    rows, keys = call.arguments["q"].shape[0], call.arguments["k"].shape[0]
    call.arguments["topk"] = draw.pick(1, 3, 8)
    if draw.maybe(0.4):
        call.arguments["workspace_bytes"] = draw.pick(4, 12, 1000) * (keys + 1)
    if draw.maybe(0.3):
        call.arguments["max_seqlen_k"] = keys
    _picked(draw, call, rows, call.arguments["topk"], "topk")
    return call


def paged_indexer_topk(draw: Draw) -> Call:
    call, addressed = _paged(draw, "paged_indexer_topk", CACHE_DTYPES)
    rows = call.arguments["q"].shape[:2].numel()
    call.arguments["topk"] = draw.pick(1, 3, 8)
    if draw.maybe(0.4):
        call.arguments["workspace_bytes"] = 4 * 3 * addressed * draw.pick(1, 10)
    if draw.maybe(0.3):
        call.arguments["max_context_len"] = addressed
    _picked(draw, call, rows, call.arguments["topk"], "topk", rows_dim="rows")
    return call


def expand(draw: Draw) -> Call:
    call = Call("expand_topk_groups")
    tokens, k, ratio = draw.pick(0, 1, 3), draw.pick(0, 1, 4), draw.pick(1, 2, 4)
    groups = [[draw.random.randint(-1, 9) for _ in range(k)] for _ in range(tokens)]
    dtype = draw.pick(torch.int32, torch.int64)
    call.give("group_indices", draw.rows(torch.tensor(groups, dtype=dtype).reshape(tokens, k), lead=1), "T ~")
    call.give("positions", draw.indices([draw.random.randint(-1, 40) for _ in range(tokens)]), "T")
    call.arguments["ratio"] = ratio
    if draw.maybe():
        out = torch.full((tokens, k * ratio + ratio - 1), 77, dtype=torch.int32)
        call.give("out", draw.rows(out, lead=1), "T listed")
        call.ties["listed"] = ("ratio", "group_indices")
    return call


def sparse_attention(draw: Draw) -> Call:
    call = Call("sparse_attention")
    kv_heads, dim, block_size, blocks, k = draw.pick(1, 2), draw.pick(8, 16), draw.pick(4, 16), 5, draw.pick(3, 6)
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
    call.give("block_tables", _tables(draw, totals, block_size, blocks, columns=2), "N ~")
    call.give("query_start_loc", draw.indices(offsets), "N")
    call.give("seq_lens", draw.indices(totals), "N")
    if draw.maybe():
        call.give("topk_length", draw.indices([draw.random.randint(0, k) for _ in range(tokens)]), "T")
    _attention_options(draw, call, (tokens, heads, dim), dtype)
    return call


def attention(draw: Draw) -> Call:
    """Dense attention: decode rows, then prefill rows of which some have equal lengths."""
    call = Call("attention")
    kv_heads, dim, block_size, blocks = draw.pick(1, 2), draw.pick(8, 16), draw.pick(4, 8), 9
    heads = kv_heads * draw.pick(1, 2, 4)
    lengths = draw.lengths(4, sequences=2) + [draw.pick(9, 12)] * draw.pick(0, 1, 2) + draw.lengths(3, sequences=1)
    offsets = draw.offsets(lengths)
    tokens = offsets[-1] + draw.pick(0, 1)
    dtype = draw.any_float()
    cached = draw.pick(0, 3)
    totals = [length + cached for length in lengths]
    call.give("q", draw.rows(draw.floats(tokens, heads, dim, dtype=dtype), lead=1), "T H D")
    _kv_cache(draw, call, (blocks, block_size, kv_heads, dim), dtype)
    call.give("block_tables", _tables(draw, totals, block_size, blocks, columns=4), "N ~")
    call.give("query_start_loc", draw.indices(offsets), "N")
    call.give("seq_lens", draw.indices(totals), "N")
    call.ties["N"] = ("seq_lens_host", "query_lens_host")
    if draw.maybe(0.7):
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
