"""The steps around the indexer on the GPU: prepare, quantise, cache write, gather, compressed keys, groups to tokens.

Every tensor that a kernel may touch lies inside a larger one full of NaN (integers: of a mark), so what must not be read
poisons the result and what must not be written is compared bit for bit. Quantisation is exact: bits are the reference's for
the same 16-bit values. Norm and RoPE are float32 sums in another order: their 16-bit results may differ by one rounding.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.indexer.reference import cast_fp8
from gdn.testing.compare import same_bits
from tests.compile.pairwise import pairwise
from tests.gpu import graphs
from tests.gpu.twins import check_repeats
from tests.references import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
MARK = 0xA5
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place of 1


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, device: Any = "cuda") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def framed(values: Tensor, left: int = 8, right: int = 16) -> Tensor:
    """The same values as the middle of the last dim of a wider tensor of NaN."""
    wide = torch.full((*values.shape[:-1], left + values.shape[-1] + right), torch.nan, device=values.device).to(values.dtype)
    wide[..., left : left + values.shape[-1]] = values
    return wide[..., left : left + values.shape[-1]]


def rows_of(values: Tensor) -> Tensor:
    """[tokens, heads, D] as a slice of a projection's rows."""
    return framed(values.flatten(1)).unflatten(1, values.shape[1:])


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def make_cache(pages: int, page_size: int, kv_heads: int | None, dim: int, dtype: torch.dtype, gap: int = 32) -> Tensor:
    """Marked pages with marked gaps between them; between two marked pages that are not part of it."""
    row = dim + 4 if dtype == torch.uint8 else dim
    item = 2 if dtype == torch.bfloat16 else 1
    heads = 1 if kv_heads is None else kv_heads
    page_bytes = page_size * heads * row * item
    memory = torch.full((pages + 2, page_bytes + gap), MARK, dtype=torch.uint8, device="cuda")
    inner = (row, 1) if kv_heads is None else (heads * row, row, 1)
    shape = (page_size, row) if kv_heads is None else (page_size, heads, row)
    stride = (page_bytes + gap) // item
    typed = memory.view(dtype)
    return torch.as_strided(typed, (pages, *shape), (stride, *inner), stride)


def memory_of(cache: Tensor) -> Tensor:
    """All bytes of the memory that a cache is part of."""
    return torch.as_strided(cache, (cache.untyped_storage().nbytes() // cache.element_size(),), (1,), 0).view(torch.uint8)


def copy_of(cache: Tensor) -> Tensor:
    flat = memory_of(cache).clone().view(cache.dtype)
    return torch.as_strided(flat, cache.shape, cache.stride(), cache.storage_offset())


def on_cpu(cache: Tensor) -> Tensor:
    flat = memory_of(cache).cpu().view(cache.dtype)
    return torch.as_strided(flat, cache.shape, cache.stride(), cache.storage_offset())


def table_of(positions: int, rotary_dim: int, dtype: torch.dtype) -> Tensor:
    angle = torch.arange(positions)[:, None] / 10000.0 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(dtype).cuda()


def slots_of(tokens: int, rows: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Distinct rows in no order, some tokens without one, read with a stride."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:tokens]
    order[1::7] = -1
    order[2::11] = -(2**31)
    wide = torch.full((tokens, 3), 10**6, dtype=dtype)
    wide[:, 1] = order.to(dtype)
    return wide.cuda()[:, 1]


def one_rounding_apart(got: Tensor, want: Tensor) -> None:
    """16-bit results of float32 arithmetic in another order: nearly all bits equal, none more than a unit away."""
    assert got.dtype == want.dtype and got.shape == want.shape
    exact = want.double()
    allowed = 2.1 * UNIT[want.dtype] * exact.abs() + 2e-6 * exact.abs().amax(-1, keepdim=True)
    assert bool(((got.double() - exact).abs() <= allowed).all())
    assert int((got != want).sum()) <= 2 + 2e-3 * got.numel()


# --- quantise ----------------------------------------------------------------------------------------------------------


def hard_rows(rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Random rows of every magnitude, and rows of ties, zeros, one value, the least and the largest, infinity and NaN."""
    x = normal(rows, dim, seed=rows + dim, dtype=torch.float32, device="cpu")
    x *= 10.0 ** torch.linspace(-7, 4, rows)[:, None]
    ties = (torch.arange(dim) % 64 - 32) / 16 * 7 * 2.0**-3  # amax = 448 / 2^k times: every second quotient is a tie
    special = [ties, ties * 448, torch.zeros(dim), torch.full((dim,), -3.0), torch.full((dim,), 1e-6), torch.full((dim,), 6e4)]
    for i, row in enumerate(special[: rows // 2]):
        x[2 * i] = row
    if rows > 20:
        x[13, 5], x[15, 0], x[17, dim - 1], x[19, 3] = torch.inf, -torch.inf, torch.nan, -torch.nan
        x[19, 4] = torch.inf
    return x.to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 5, 300, 20000])
def test_quantize_bit_for_bit(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x = hard_rows(rows, dim, dtype)
    for view in (x, framed(x), framed(x, left=3, right=2), x.t().contiguous().t()):
        values, scale = gdn.quantize_fp8(view, 256, backend="cute")
        want, want_scale = reference.quantize_fp8(x, 256)
        assert values.is_contiguous() and scale.is_contiguous() and scale.shape == (rows, 1)
        assert same_bits(scale.nan_to_num(-1), want_scale.nan_to_num(-1))
        is_nan = want.float().isnan()
        assert torch.equal(is_nan, values.float().isnan())
        assert torch.equal(bytes_of(values)[~is_nan], bytes_of(want)[~is_nan])


def test_quantize_groups(device: torch.device) -> None:
    x = normal(70, 512, seed=1)
    for view in (x, framed(x), x.view(7, 10, 512), framed(x).view(10, 7, 512)):
        values, scale = gdn.quantize_fp8(view, backend="cute")
        want, want_scale = reference.quantize_fp8(view)
        assert values.shape == view.shape and scale.shape == (*view.shape[:-1], 4)
        assert same_bits(values, want) and same_bits(scale, want_scale)
    heads = rows_of(normal(33, 6, 128, seed=2))
    for found, want in zip(gdn.quantize_fp8(heads, backend="cute"), reference.quantize_fp8(heads), strict=True):
        assert same_bits(found, want)


def test_quantize_every_quotient(device: torch.device) -> None:
    """Every pair of a bf16 value and a bf16 peak of [1, 2) x [2, 4): the quotients are those of a true division."""
    mantissas = (torch.arange(128) + 128) / 128
    x = torch.cat([mantissas.repeat(256, 1), torch.zeros(256, 128)], dim=1)
    x[:128, 128], x[128:, 128] = mantissas * 2, -mantissas * 4
    x = x.to(torch.bfloat16).cuda()
    found, want = gdn.quantize_fp8(x, 256, backend="cute"), reference.quantize_fp8(x, 256)
    assert same_bits(found[0], want[0]) and same_bits(found[1], want[1])


# --- cache write -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 37, 3000])
@pytest.mark.parametrize("kv_heads", [None, 1, 2, 3])
@pytest.mark.parametrize("cache_dtype", [torch.uint8, FP8, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 32)])
def test_write_bit_for_bit(
    tokens: int, kv_heads: int | None, cache_dtype: torch.dtype, dtype: torch.dtype, dim: int, device: torch.device
) -> None:
    page_size = 20
    cache = make_cache(tokens // page_size + 9, page_size, kv_heads, dim, cache_dtype)
    k = normal(tokens, kv_heads or 1, dim, seed=tokens, dtype=dtype) * 3
    if tokens > 20:
        k[3, 0, 1], k[5, 0, :] = 3e4, 0.0
    slots = slots_of(tokens, cache.shape[0] * page_size, 3, torch.int64 if dim != 64 else torch.int32)
    want = on_cpu(cache)
    reference.write_indexer_cache(k.cpu().squeeze(1) if kv_heads is None else k.cpu(), want, slots.cpu())
    given = rows_of(k)
    gdn.write_indexer_cache(given[:, 0] if kv_heads is None else given, cache, slots, backend="cute")
    assert torch.equal(memory_of(cache).cpu(), memory_of(want))


# --- prepare -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call of prepare_indexer; everything else follows from the seed."""

    tokens: int = 37
    heads: int = 16
    kv_heads: int | None = None  # None: k and cache without that axis; 0: no keys
    dim: int = 128
    rotary_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.uint8
    weights_dtype: torch.dtype | None = torch.bfloat16
    table_dtype: torch.dtype = torch.float32
    norm_dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int64
    zero_centred: bool = True
    fp8: bool | None = None
    page_size: int = 16
    values: bool = False  # where there are keys


def call_of(case: Case) -> dict[str, Any]:
    dim, tokens = case.dim, case.tokens
    rows = case.kv_heads or 1
    q = normal(tokens, case.heads, dim, seed=1, dtype=case.dtype)
    k = normal(tokens, rows, dim, seed=2, dtype=case.dtype) * 0.3
    if tokens > 8:
        q[3], q[5, 0], k[4] = 0.0, q[5, 0] * 1e3, k[4] * 1e-3
    positions = torch.randint(0, 4000, (tokens, 2), generator=torch.Generator().manual_seed(4)).to(case.index_dtype)
    if tokens > 8:
        positions[1], positions[2] = 0, 10**6  # beyond the table: its last row
    weights = None
    if case.weights_dtype is not None:
        weights = framed(normal(tokens, case.heads, seed=5, dtype=case.weights_dtype), left=1, right=2)
    arguments: dict[str, Any] = {
        "q": rows_of(q), "k": None, "weights": weights, "positions": positions.cuda()[:, 0],
        "cos_sin": framed(table_of(3900, case.rotary_dim, case.table_dtype)),
        "q_norm": normal(dim, seed=6, dtype=case.norm_dtype) * 0.2, "k_norm": None, "cache": None, "slot_mapping": None,
        "rotary_dim": case.rotary_dim, "zero_centred": case.zero_centred, "fp8": case.fp8, "eps": 1e-5,
    }  # fmt: skip
    if case.kv_heads != 0:
        cache = make_cache(tokens // case.page_size + 5, case.page_size, case.kv_heads, dim, case.cache_dtype)
        given = rows_of(k)
        arguments |= {
            "k": given[:, 0] if case.kv_heads is None else given, "cache": cache,
            "k_norm": normal(dim, seed=7, dtype=case.norm_dtype) * 0.2,
            "slot_mapping": slots_of(tokens, cache.shape[0] * case.page_size, 8, case.index_dtype),
        }  # fmt: skip
        if case.values:
            v = rows_of(normal(tokens, rows, dim, seed=9, dtype=case.dtype))
            v_cache = make_cache(tokens // case.page_size + 5, case.page_size, case.kv_heads, dim, case.cache_dtype)
            arguments |= {"v": v[:, 0] if case.kv_heads is None else v, "v_cache": v_cache}
    return arguments


def check_prepared(case: Case) -> None:
    """Checks against the reference in two steps: norm and RoPE through a 16-bit call, then all that follows from its bits."""
    arguments = call_of(case)
    q_out, weights_out = gdn.prepare_indexer(**arguments, backend="cute")
    scaled = case.cache_dtype == torch.uint8 if case.kv_heads != 0 else bool(case.fp8) and case.weights_dtype is not None
    is_fp8 = case.cache_dtype != torch.bfloat16 if case.kv_heads != 0 else bool(case.fp8)

    # The same rows rounded to 16 bits: queries by a call without a cache, keys as queries of their own.
    plain = arguments | dict.fromkeys(("k", "k_norm", "cache", "slot_mapping", "v", "v_cache")) | {"fp8": False}
    q_rotated, _ = gdn.prepare_indexer(**plain, backend="cute")
    want, _ = reference.prepare_indexer(**plain)
    one_rounding_apart(q_rotated, want)

    if scaled:
        want_q, q_scale = reference.quantize_fp8(q_rotated, case.dim)
        folded = q_scale[..., 0] * case.dim**-0.5
        assert same_bits(weights_out, folded if arguments["weights"] is None else arguments["weights"].float() * folded)
    else:
        want_q = cast_fp8(q_rotated) if is_fp8 else q_rotated
        assert weights_out is arguments["weights"]
    assert q_out.is_contiguous() and same_bits(q_out, want_q)

    if case.kv_heads != 0:
        keys = arguments["k"] if case.kv_heads is not None else arguments["k"][:, None]
        as_queries = plain | {"q": keys, "q_norm": arguments["k_norm"], "weights": None}
        k_rotated, _ = gdn.prepare_indexer(**as_queries, backend="cute")
        one_rounding_apart(k_rotated, reference.prepare_indexer(**as_queries)[0])
        expected = make_cache(arguments["cache"].shape[0], case.page_size, case.kv_heads, case.dim, case.cache_dtype)
        expected = on_cpu(expected)
        k_rows = k_rotated.cpu() if case.kv_heads is not None else k_rotated.cpu()[:, 0]
        reference.write_indexer_cache(k_rows, expected, arguments["slot_mapping"].cpu())
        assert torch.equal(memory_of(arguments["cache"]).cpu(), memory_of(expected))
        if case.values:
            expected = on_cpu(make_cache(expected.shape[0], case.page_size, case.kv_heads, case.dim, case.cache_dtype))
            reference.write_indexer_cache(arguments["v"].cpu(), expected, arguments["slot_mapping"].cpu())
            assert torch.equal(memory_of(arguments["v_cache"]).cpu(), memory_of(expected))


AXES: dict[str, Any] = {
    "tokens": [37, 1, 600],
    "heads": [16, 4, 64, 6, 1],
    "keys": [(None, torch.uint8), (2, torch.uint8), (1, FP8), (None, torch.bfloat16), (3, torch.bfloat16), (0, torch.uint8)],
    "dims": [(128, 64), (64, 32), (128, 128), (64, 64), (256, 64), (128, 16), (32, 16)],
    "dtype": [torch.bfloat16, torch.float16],
    "weights_dtype": [torch.bfloat16, torch.float32, None, torch.float16],
    "table_dtype": [torch.float32, torch.bfloat16],
    "norm_dtype": [torch.bfloat16, torch.float32],
    "index_dtype": [torch.int64, torch.int32],
    "zero_centred": [True, False],
    "page_size": [16, 20],
    "fp8": [True, False],  # where there are no keys
    "values": [False, True],
}


def case_of(row: dict[str, Any]) -> Case:
    fields = dict(row)
    fields["kv_heads"], fields["cache_dtype"] = fields.pop("keys")
    fields["dim"], fields["rotary_dim"] = fields.pop("dims")
    if fields["kv_heads"] != 0:
        fields["fp8"] = None
    return Case(**fields)


CASES = [case_of(row) for row in pairwise(AXES)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.tokens}x{c.heads}x{c.dim}-{c.kv_heads}-{c.cache_dtype}-{c.dtype}"[:60])
def test_prepare(case: Case, device: torch.device) -> None:
    check_prepared(case)


def test_prepare_a_prompt(device: torch.device) -> None:
    """A prompt of enough tokens that a warp takes every head at once."""
    for cache_dtype in (torch.uint8, torch.bfloat16):
        check_prepared(Case(tokens=3001, cache_dtype=cache_dtype))


def test_prepare_attention(device: torch.device) -> None:
    """The heads of an attention layer, in a prompt and in decode steps."""
    for tokens in (1, 32, 700):
        check_prepared(Case(tokens, 16, 2, 256, 64, cache_dtype=torch.bfloat16, weights_dtype=None, values=True))


def test_prepare_copies_what_is_not_aligned(device: torch.device) -> None:
    arguments = call_of(Case())
    want = gdn.prepare_indexer(**arguments, backend="cute")
    cache = memory_of(arguments["cache"]).clone()
    odd = arguments | {
        "q": framed(arguments["q"], left=3, right=2), "k": framed(arguments["k"], left=1, right=4),
        "cos_sin": framed(arguments["cos_sin"], left=1, right=0), "k_norm": framed(arguments["k_norm"][None], 1, 2)[0],
    }  # fmt: skip
    for given in (odd, arguments | {"q": arguments["q"].transpose(0, 1).contiguous().transpose(0, 1)}):
        found = gdn.prepare_indexer(**given, backend="cute")
        assert same_bits(found[0], want[0]) and same_bits(found[1], want[1])  # type: ignore[arg-type]
        assert torch.equal(memory_of(arguments["cache"]), cache)


def test_prepare_repeats(device: torch.device) -> None:
    check_repeats(gdn.prepare_indexer, call_of(Case(tokens=700)), backend="cute")


def test_prepare_cache_beyond_32_bits(device: torch.device) -> None:
    """A page that starts more than 2**31 bytes after the first."""
    stride = 2**31 + 4096
    memory = torch.empty(stride + 4096, dtype=torch.uint8, device=device)
    cache = torch.as_strided(memory, (2, 16, 132), (stride, 132, 1))
    small = make_cache(2, 16, None, 128, torch.uint8)
    arguments = call_of(Case(tokens=2)) | {"slot_mapping": torch.tensor([3, 16 + 5], device=device)}
    gdn.prepare_indexer(**arguments | {"cache": small}, backend="cute")
    gdn.prepare_indexer(**arguments | {"cache": cache}, backend="cute")
    for page, row in ((0, 3), (1, 5)):
        for part in (slice(row * 128, row * 128 + 128), slice(16 * 128 + 4 * row, 16 * 128 + 4 * row + 4)):
            assert torch.equal(cache[page].reshape(-1)[part], small[page].reshape(-1)[part])


# --- gather ------------------------------------------------------------------------------------------------------------


def gather_call(lengths: list[int], kv_heads: int | None, dim: int, dtype: torch.dtype, page_size: int) -> dict[str, Any]:
    columns = max([-(-length // page_size) for length in lengths] + [1]) + 1
    pages = len(lengths) * columns + 3
    cache = make_cache(pages, page_size, kv_heads, dim, dtype)
    memory = memory_of(cache)
    memory.copy_(torch.randint(0, 255, memory.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8) & 0x77)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(2))
    tables = torch.full((len(lengths), columns + 2), 10**8, dtype=torch.int32)
    for n, length in enumerate(lengths):
        used = -(-length // page_size)
        tables[n, 1 : 1 + used] = order[n * columns : n * columns + used]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return {"cache": cache, "block_tables": tables.cuda()[:, 1:-1], "cu_seqlens": bounds.to(torch.int32).cuda()}


LENGTHS = [[1], [70], [0, 33, 0, 0, 5, 64, 1, 0], [3000, 1, 4097], [(7 * n) % 40 for n in range(300)]]


@pytest.mark.parametrize("dtype", [torch.uint8, FP8, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "dim", "page_size"), [(None, 128, 64), (2, 64, 16), (1, 32, 20), (3, 128, 544)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: str(x[:5]))
def test_gather_bit_for_bit(
    lengths: list[int], kv_heads: int | None, dim: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    arguments = gather_call(lengths, kv_heads, dim, dtype, page_size)
    total = sum(lengths)
    for num_rows in (None, total, total + 77, max(1, total - 9)):
        k, k_scale = gdn.gather_indexer_cache(**arguments, num_rows=num_rows, backend="cute")
        want, want_scale = reference.gather_indexer_cache(**arguments, num_rows=num_rows)
        assert same_bits(k, want) and (k_scale is None) == (want_scale is None)
        if k_scale is not None and want_scale is not None:
            assert same_bits(k_scale, want_scale)
    wide = arguments | {"cu_seqlens": arguments["cu_seqlens"].long()}
    assert same_bits(gdn.gather_indexer_cache(**wide, backend="cute")[0], reference.gather_indexer_cache(**wide)[0])


# --- compressed keys ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Tokens of one sequence in a call."""

    slot: int
    start: int
    count: int


def compress_call(
    runs: list[Run], ratio: int, size: int, kv_heads: int | None, dim: int, cache_dtype: torch.dtype, dtype: torch.dtype,
    seed: int = 0, index: torch.dtype = torch.int64,
) -> dict[str, Any]:  # fmt: skip
    """The runs with a padding token between them; rows that no group may read are NaN."""
    positions, slots = [], []
    for run in runs:
        positions += [*range(run.start, run.start + run.count), ratio - 1]
        slots += [run.slot] * run.count + [-1]
    tokens, heads = len(slots), kv_heads or 1
    raw = normal(tokens, heads, dim, seed=seed, dtype=dtype)
    raw[torch.tensor(slots) < 0] = torch.nan
    count = 2 + max([run.slot for run in runs] + [0])
    ring = framed(torch.full((count, size, heads * dim), torch.nan, dtype=dtype, device="cuda")).unflatten(2, (heads, dim))
    for run in runs:
        for position in range(run.start // ratio * ratio, run.start):
            ring[run.slot, position % size] = normal(heads, dim, seed=seed + 31 * position, dtype=dtype)
    page_size = 16
    pages = max(positions) // ratio // page_size + 1  # of a sequence
    cache = make_cache(count * pages, page_size, kv_heads, dim, cache_dtype)
    groups = [max(slot, 0) * pages * page_size + position // ratio for slot, position in zip(slots, positions, strict=True)]
    mapping = torch.tensor(groups)
    mapping[5::13] = -1
    given = rows_of(raw)
    if kv_heads is None:
        given, ring = given[:, 0], ring[:, :, 0]
    return {
        "raw_k": given, "ring": ring, "cache": cache, "positions": torch.tensor(positions, dtype=index).cuda(),
        "cos_sin": table_of(9000, dim // 2, torch.float32), "k_norm": normal(dim, seed=9) * 0.2,
        "ring_slots": torch.tensor(slots, dtype=torch.int32).cuda(), "slot_mapping": mapping.to(index).cuda(),
        "ratio": ratio, "rotary_dim": dim // 2,
    }  # fmt: skip


def check_compressed(arguments: dict[str, Any]) -> None:
    """The ring bit for bit; keys through a 16-bit cache within one rounding, and their other forms bit for bit from there."""
    dtype = arguments["raw_k"].dtype
    want_ring, want_cache = copy_of(arguments["ring"]), copy_of(arguments["cache"])
    reference.compress_indexer_keys(**arguments | {"ring": want_ring, "cache": want_cache})
    before = copy_of(arguments["cache"])
    gdn.compress_indexer_keys(**arguments, backend="cute")
    assert same_bits(memory_of(arguments["ring"]), memory_of(want_ring)), "the ring is not what it should be"
    got, want = memory_of(arguments["cache"]), memory_of(want_cache)
    written = want != memory_of(before)
    assert torch.equal(got[~written], want[~written]), "written next to the keys"
    if arguments["cache"].dtype == torch.bfloat16 and dtype == torch.bfloat16:
        one_rounding_apart(arguments["cache"], want_cache)
    # A key that rounds the other way moves a value, or with its scale a row, by one step.
    assert int((got != want).sum()) <= 2 + 1e-2 * int(written.sum())


RUNS = {
    "prompts": [Run(0, 0, 23), Run(2, 0, 4), Run(3, 0, 3), Run(1, 0, 130)],
    "continued": [Run(1, 5, 23), Run(0, 7, 1), Run(4, 3, 70), Run(2, 6, 9), Run(3, 1021, 3)],
    "decode": [Run(n, 3 * n + n % 5, 1 + n % 4) for n in range(60)],
    "across the ring": [Run(n, n, 8 + n % 9) for n in range(30)],
    "long": [Run(0, 2, 3000), Run(1, 0, 2047), Run(2, 4001, 1)],
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    ("ratio", "size", "kv_heads", "dim", "cache_dtype", "dtype"),
    [
        (4, 8, None, 128, FP8, torch.bfloat16),
        (4, 4, 1, 128, torch.bfloat16, torch.bfloat16),
        (4, 12, 2, 64, torch.uint8, torch.float16),
        (2, 4, 5, 128, torch.bfloat16, torch.bfloat16),
        (8, 16, None, 64, torch.bfloat16, torch.bfloat16),
        (3, 6, 1, 128, torch.uint8, torch.bfloat16),
    ],
)
def test_compress(
    name: str,
    ratio: int,
    size: int,
    kv_heads: int | None,
    dim: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    index = torch.int32 if size == 12 else torch.int64
    check_compressed(compress_call(RUNS[name], ratio, size, kv_heads, dim, cache_dtype, dtype, index=index))


def test_compress_null_slot_and_nothing(device: torch.device) -> None:
    arguments = compress_call(RUNS["continued"], 4, 8, None, 128, torch.bfloat16, torch.bfloat16)
    check_compressed(arguments | {"null_slot": 4})
    ring, cache = memory_of(arguments["ring"]).clone(), memory_of(arguments["cache"]).clone()
    dead = arguments | {"ring_slots": torch.full_like(arguments["ring_slots"], -1)}
    gdn.compress_indexer_keys(**dead, backend="cute")
    assert torch.equal(memory_of(arguments["ring"]), ring) and torch.equal(memory_of(arguments["cache"]), cache)


def test_compress_repeats(device: torch.device) -> None:
    runs = [Run(0, 2, 4000), *(Run(n, n, 20) for n in range(1, 60))]
    arguments = compress_call(runs, 4, 8, None, 128, FP8, torch.bfloat16)
    check_repeats(gdn.compress_indexer_keys, arguments, backend="cute")


def test_compress_in_pieces_equals_the_whole(device: torch.device) -> None:
    whole = compress_call([Run(0, 0, 301)], 4, 8, None, 128, torch.bfloat16, torch.bfloat16)
    gdn.compress_indexer_keys(**whole, backend="cute")
    for steps in ([1] * 301, [200, 1, 3, 2, 95], [7, 9, 30, 255]):
        parts = compress_call([Run(0, 0, 301)], 4, 8, None, 128, torch.bfloat16, torch.bfloat16)
        low = 0
        for step in steps:
            piece = {name: parts[name][low : low + step] for name in ("raw_k", "positions", "ring_slots", "slot_mapping")}
            gdn.compress_indexer_keys(**parts | piece, backend="cute")
            low += step
        assert same_bits(memory_of(parts["cache"]), memory_of(whole["cache"]))
        assert same_bits(parts["ring"], whole["ring"])


# --- groups to tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("tokens", "k"), [(1, 512), (70, 512), (2000, 512), (9, 1), (33, 513), (5, 5000), (600, 64), (3, 0)])
def test_expand(tokens: int, k: int, ratio: int, index: torch.dtype, device: torch.device) -> None:
    source = torch.Generator().manual_seed(tokens + k)
    groups = torch.randint(0, 10**6, (tokens, k), generator=source)
    lengths = torch.randint(0, k + 1, (tokens, 1), generator=source)
    lengths[::3] = k
    groups[torch.arange(k) >= lengths] = -1
    holes = torch.rand(tokens, k, generator=source) < 0.2
    groups[1::4] = torch.where(holes[1::4], -1, groups[1::4])
    positions = torch.randint(-2, 10**6, (tokens, 2), generator=source)
    columns = k * ratio + ratio - 1
    whole = torch.full((tokens, columns + 5), 777, dtype=torch.int32, device=device)
    wide = torch.full((tokens, k + 3), 5, dtype=index)
    wide[:, 1 : 1 + k] = groups.to(index)
    given, places = wide.cuda()[:, 1 : 1 + k], positions.to(index).cuda()[:, 0]
    want = reference.expand_topk_groups(given, places, ratio=ratio)
    assert torch.equal(gdn.expand_topk_groups(given, places, ratio=ratio, backend="cute"), want)
    # Positions of another stride are another call.
    assert torch.equal(gdn.expand_topk_groups(given, places.contiguous(), ratio=ratio, backend="cute"), want)
    out = whole[:, 2 : 2 + columns]
    assert gdn.expand_topk_groups(given, places, ratio=ratio, out=out, backend="cute") is out
    assert torch.equal(out, want) and bool((whole[:, :2] == 777).all()) and bool((whole[:, 2 + columns :] == 777).all())


# --- graphs ------------------------------------------------------------------------------------------------------------


def test_a_graph_replays_with_changed_contents(device: torch.device) -> None:
    """Captured once, one step after the other; positions, slots, lengths, tables and values change between replays."""
    first = call_of(Case(tokens=64))
    names = ("q", "k", "weights", "positions", "slot_mapping")

    def contents(lengths: list[int], is_flipped: bool) -> dict[str, Tensor]:
        given = gather_call(lengths, None, 128, torch.uint8, 16)
        table = given["block_tables"][:, :1].expand(4, 6) % first["cache"].shape[0]
        values = {name: first[name].flip(0) if is_flipped else first[name] for name in names}
        return values | {"table": table, "bounds": given["cu_seqlens"]}

    def run(table: Tensor, bounds: Tensor, **given: Any) -> tuple[Tensor, ...]:
        prepared = gdn.prepare_indexer(**given, backend="cute")
        gathered = gdn.gather_indexer_cache(given["cache"], table, bounds, num_rows=64, backend="cute")
        return *prepared, *gathered  # type: ignore[return-value]

    changes = [contents([40, 3, 0, 21], True), contents([1, 0, 50, 9], False), contents([1, 0, 50, 9], True)]
    graphs.check(run, first | contents([0] * 4, False), ("cache",), changes, device)


def test_other_dtypes_run_on_the_reference(device: torch.device) -> None:
    """No kernel takes float32 rows or a rotation of 8 dims: the reference does, unless a kernel was ordered."""
    x = normal(5, 128, seed=1, dtype=torch.float32)
    assert same_bits(gdn.quantize_fp8(x)[0], reference.quantize_fp8(x)[0])
    with pytest.raises(ValueError, match="requires 16-bit or FP8 inputs, got float32"):
        gdn.quantize_fp8(x, backend="cute")
    arguments = call_of(replace(Case(), rotary_dim=8, tokens=3))
    gdn.prepare_indexer(**arguments)
    with pytest.raises(ValueError, match="requires a rotary_dim that is a multiple of 16"):
        gdn.prepare_indexer(**arguments, backend="cute")
