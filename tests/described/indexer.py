"""The indexer's queries, keys and cache: calls, what their arguments may be, their results."""

import torch

from gdn.ops.indexer.reference import page_views
from tests.described import Described
from tests.ops.spoiling import kinds
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.live import null_slot
from tests.ops.spoiling.verdict import ERROR, SAME, TYPE, VALUE

FP8 = torch.float8_e4m3fn
CACHE_DTYPES = (torch.uint8, FP8, torch.bfloat16, torch.float16, torch.float32)
_POSITIONS: kinds.Kind = kinds.INDEX | {
    "a position beyond cos_sin": VALUE,
    "a position of 2**33 + 1": VALUE,
    "a negative position": VALUE,
}  # fmt: skip
_ROPE: dict[str, kinds.Kind] = {
    "positions": _POSITIONS,
    "cos_sin": kinds.INPUT | {"dtype float64": TYPE},
    "rotary_dim": kinds.COUNT,
    "k_norm": kinds.PARAMETER | {"dtype float64": TYPE},
}
_SLOT_MAPPING: kinds.Kind = kinds.INDEX | {
    "a row beyond the cache": VALUE,
    "a row of 2**33 + 1": VALUE,
    "null as -7": SAME,
    "null as -2**33 + 1": SAME,
    "one row twice": VALUE,
}
HEAD_WEIGHTS: kinds.Kind = kinds.INPUT | kinds.MATRIX


def pages_of(draw: Draw, pages: int, page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, str]:
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
    shape, dim = draw.pick((draw.tokens(3, 1),), (2, 3), (1, 2, 2)), draw.size(16, 8, served=128)
    call.give("x", draw.rows(draw.floats(*shape, dim, dtype=draw.any_float()), lead=1), "~ " * len(shape) + "~")
    if draw.maybe():
        call.arguments["group_size"] = draw.size(4, 8, 128, served=128)
    return call


def write(draw: Draw) -> Call:
    call = Call("write_indexer_cache")
    tokens, kv_heads, dim, page_size = draw.tokens(0, 1, 3, 5), draw.pick(1, 2), draw.size(16, 8, served=64), draw.pick(16, 4)
    cache, dims = pages_of(draw, 3, page_size, kv_heads, dim, draw.pick(*CACHE_DTYPES))
    k, k_dims = _keys(draw, tokens, kv_heads, dim, draw.any_float(), flat=kv_heads == 1 and draw.maybe())
    call.give("k", k, k_dims)
    call.give("cache", cache, dims)
    call.give("slot_mapping", _slot_mapping(draw, tokens, 3 * page_size), "T")
    call.ties["KH"] = ("k", "cache")
    return call


def _rope(draw: Draw, call: Call, tokens: int, dim: int, positions: list[int], longest: int) -> None:
    rotary_dim = draw.size(4, dim, served=32)
    call.give("positions", draw.indices(positions), "T")
    call.give("cos_sin", draw.floats(longest, rotary_dim, dtype=draw.any_float()), "~ rotary")
    call.arguments["rotary_dim"] = rotary_dim
    call.ties |= {"rotary": ("rotary_dim",), "D": ("rotary_dim",)}
    if draw.maybe(0.3):
        call.arguments |= {"eps": draw.pick(1e-5, 1e-6), "zero_centred": draw.maybe()}


def prepare(draw: Draw) -> Call:
    call = Call("prepare_indexer")
    tokens, heads = draw.tokens(0, 1, 3), draw.pick(4, 2)
    kv_heads, dim, page_size = draw.pick(1, 2), draw.size(16, 8, served=64), draw.pick(16, 4)
    call.give("q", draw.rows(draw.floats(tokens, heads, dim, dtype=draw.any_float()), lead=1), "T H D")
    weights = draw.rows(draw.floats(tokens, heads, dtype=draw.any_float()), lead=1)
    has_cache = draw.maybe(0.7)
    call.arguments |= dict.fromkeys(("k", "k_norm", "cache", "slot_mapping", "weights", "v", "v_cache"))
    call.give("weights", weights if draw.maybe(0.8) else None, "T H")
    _rope(draw, call, tokens, dim, [draw.random.randrange(12) for _ in range(tokens)], 12)
    call.give("q_norm", draw.floats(dim, dtype=draw.any_float()), "D")
    if has_cache:
        cache, dims = pages_of(draw, 3, page_size, kv_heads, dim, draw.pick(*CACHE_DTYPES))
        k, k_dims = _keys(draw, tokens, kv_heads, dim, draw.any_float(), flat=kv_heads == 1 and draw.maybe())
        call.give("k", k, k_dims)
        call.give("k_norm", draw.floats(dim, dtype=draw.any_float()), "D")
        call.give("cache", cache, dims)
        call.give("slot_mapping", _slot_mapping(draw, tokens, 3 * page_size), "T")
        call.ties["KH"] = ("k", "cache")
        if draw.maybe():
            v_cache, dims = pages_of(draw, 3, page_size, kv_heads, dim, cache.dtype)
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
    kv_heads, dim = draw.pick(1, 2), draw.size(16, 8, served=64)
    ratio, page_size, sequences = draw.pick(4, 2), draw.pick(16, 4), draw.pick(1, 2, 3)
    size = ratio * draw.pick(2, 1)
    dtype = draw.any_float()
    null_slot = draw.pick(-1, 0)
    call.arguments |= {"ratio": ratio} | ({"null_slot": 0} if null_slot == 0 else {})
    rings = draw.distinct(sequences, sequences + 2, start=null_slot + 1)
    positions, ring_slots, mapping = [], [], []
    for n in range(sequences):
        first, count = draw.random.randrange(9), draw.tokens(1, 2, 5)
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
    cache, dims = pages_of(draw, 3, page_size, kv_heads, dim, draw.pick(*CACHE_DTYPES))
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
    kv_heads, dim, page_size, pages = draw.pick(1, 2), draw.size(16, 8, served=64), draw.pick(16, 4), 7
    cache, dims = pages_of(draw, pages, page_size, kv_heads, dim, draw.pick(*CACHE_DTYPES))
    lengths = draw.lengths(2 * page_size, sequences=3)
    call.give("cache", cache, dims)
    call.give("block_tables", draw.tables(lengths, page_size, pages, columns=2), "N ~")
    call.give("cu_seqlens", draw.indices(draw.offsets(lengths)), "N")
    if draw.maybe():
        call.arguments["num_rows"] = sum(lengths) + draw.pick(0, 3)
    return call


def _cache_rows(cache: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Elements of cache rows, whatever the form of the pages."""
    marks = torch.zeros(cache.shape, dtype=torch.uint8)
    views = page_views(marks) if cache.dtype == torch.uint8 else (marks.unsqueeze(2) if marks.dim() == 3 else marks, None)
    page_size = cache.shape[1]
    for view in views:
        if view is not None:
            flat = view.view(torch.uint8)
            for slot in slots:
                if 0 <= slot < cache.shape[0] * page_size:
                    flat[slot // page_size, slot % page_size] = 1
    return marks.bool()


def _changed_by_write(call: Call) -> dict[str, torch.Tensor]:
    caches = {name: call.arguments.get(name) for name in ("cache", "v_cache")}
    rows = call.index("slot_mapping") if isinstance(caches["cache"], torch.Tensor) else []
    return {name: _cache_rows(cache, rows) for name, cache in caches.items() if isinstance(cache, torch.Tensor)}


def _changed_by_compress(call: Call) -> dict[str, torch.Tensor]:
    ring, ratio, null = call.get("ring"), call.arguments.get("ratio", 4), null_slot(call)
    mask = torch.zeros(ring.shape, dtype=torch.bool)
    slots = []
    for slot, position, row in zip(call.index("ring_slots"), call.index("positions"), call.index("slot_mapping"), strict=True):
        if slot < 0 or slot == null or position < 0:
            continue
        mask[slot, position % ring.shape[1]] = True
        if (position + 1) % ratio == 0:
            slots.append(row)
    return {"ring": mask, "cache": _cache_rows(call.get("cache"), slots)}


def expand(draw: Draw) -> Call:
    call = Call("expand_topk_groups")
    tokens, k, ratio = draw.tokens(0, 1, 3), draw.pick(4, 0, 1), draw.pick(4, 1, 2)
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


CALLS = {
    "quantize_fp8": Described(quantize, (("x", None), ("x", None)), {
        "x": kinds.but(kinds.ROWS, "on the meta device", "two dims more", "one shorter", "one longer") | {"dtype float64": TYPE},
    }),
    "write_indexer_cache": Described(write, (), {
        "k": kinds.ROWS | {"dtype float64": TYPE},
        "cache": kinds.WRITTEN_CACHE,
        "slot_mapping": _SLOT_MAPPING,
    }, _changed_by_write),
    "prepare_indexer": Described(prepare, (("T ~ ~", None), ("T ~", None)), _ROPE | {
        "q": kinds.ROWS | {"dtype float64": TYPE},
        "k": kinds.ROWS | {"dtype float64": TYPE, "left out where it must be": ERROR},
        "weights": HEAD_WEIGHTS,
        "q_norm": kinds.PARAMETER | {"dtype float64": TYPE},
        "k_norm": _ROPE["k_norm"] | {"left out where it must be": ERROR},
        "cache": kinds.WRITTEN_CACHE | {"left out where it must be": ERROR},
        "slot_mapping": _SLOT_MAPPING | {"left out where it must be": ERROR},
        "fp8": kinds.OPTIONAL_FLAG | {"against the cache": VALUE},
        "v": kinds.ROWS | {"dtype float64": TYPE, "another 16-bit dtype": TYPE, "left out where it must be": ERROR},
        "v_cache": kinds.WRITTEN_CACHE | {"left out where it must be": ERROR},
    }, _changed_by_write),
    "compress_indexer_keys": Described(compress, (), _ROPE | {
        "raw_k": kinds.ROWS | {"dtype float64": TYPE, "another 16-bit dtype": TYPE},
        "ring": kinds.STATE_POOL | {"misaligned base": SAME, "misaligned rows": SAME, "size no multiple of ratio": VALUE},
        "cache": kinds.WRITTEN_CACHE,
        "k_norm": _ROPE["k_norm"],
        "positions": kinds.but(_ROPE["positions"], "a negative position", "a position of 2**33 + 1") | {
            "anything at skipped tokens": SAME, "positions that skip their tokens": SAME,
        },
        "ring_slots": kinds.INDEX | {
            "a ring beyond the ring buffer": VALUE, "a slot of 2**33 + 1": VALUE, "null as -7": SAME,
            "null as -2**33 + 1": SAME,
        },
        "slot_mapping": _SLOT_MAPPING | {"anything at tokens that end no group": SAME},
    }, _changed_by_compress),
    "gather_indexer_cache": Described(gather, (("gathered ~ ~", None), ("gathered ~", None)), {
        "cache": kinds.but(kinds.READ_CACHE, "one shorter", "one longer"),
        "block_tables": kinds.TABLES,
        "cu_seqlens": kinds.but(kinds.OFFSETS, "ends beyond the tokens") | {"longer than its block table": VALUE},
        "num_rows": kinds.OPTIONAL_COUNT | {"too small": VALUE},
        "*": kinds.WHOLE,
    }),
    "expand_topk_groups": Described(expand, (("T expanded", None),), {
        "group_indices": kinds.INDEX | kinds.MATRIX | {"none as -9": SAME},
        "positions": kinds.INDEX | {"none as -9": SAME},
        "out": kinds.INDEX_OUT,
        "*": kinds.WHOLE,
    }),
}  # fmt: skip
