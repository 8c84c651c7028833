"""Indexer top-k on the GPU: what one large score matrix gives, in steps through a small workspace, with unscored short rows.

The backend's own logits, all at once, are selected from and short rows listed; the operator's indices must be those.
"""

import pytest
import torch

import gdn
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from gdn.ops.indexer.reference import list_short_rows
from gdn.runtime import registry
from tests.gpu import graphs
from tests.references import reference

pytestmark = pytest.mark.gpu

BACKENDS = tuple(registry.operator("mqa_logits").modules)
K = 512
Tensor = torch.Tensor


def ragged(rows: int, keys: int, ranges: str) -> tuple[Tensor, ...]:
    problem = MqaLogitsProblem(16, 1, 128, "float8_e4m3fn", True, "float32", True, False, "float32", False, rows, keys, keys)
    inputs = make_mqa_inputs(problem, "cuda", ranges=ranges)
    assert inputs.weights is not None and inputs.k_scale is not None
    return inputs.q, inputs.k, inputs.weights, inputs.cu_seqlen_ks, inputs.cu_seqlen_ke, inputs.k_scale


def visible(starts: Tensor, ends: Tensor, keys: int) -> Tensor:
    return (ends.clamp(0, keys) - starts.clamp(0, keys)).clamp(min=0)


def whole_ragged(call: tuple[Tensor, ...], backend: str) -> Tensor:
    *arguments, k_scale = call
    logits = gdn.mqa_logits(*arguments, k_scale=k_scale, clean_logits=False, backend=backend)
    picked = gdn.topk_indices(logits, K, *arguments[3:5])
    return list_short_rows(picked, visible(*arguments[3:5], arguments[1].shape[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "keys", "ranges"), [(300, 2049, "hard"), (1500, 1500, "causal"), (40, 3000, "sequences")])
def test_ragged(rows: int, keys: int, ranges: str, backend: str) -> None:
    call = ragged(rows, keys, ranges)
    *arguments, k_scale = call
    want = whole_ragged(call, backend)
    options = {"k_scale": k_scale, "backend": backend}
    assert torch.equal(gdn.indexer_topk(*arguments, K, **options), want)
    assert torch.equal(gdn.indexer_topk(*arguments, K, workspace_bytes=130 * keys * 4, **options), want)
    assert torch.equal(gdn.indexer_topk(*arguments[:3], *(b.long() for b in arguments[3:]), K, **options), want)
    whole = torch.full((rows, K + 5), -77, dtype=torch.int32, device="cuda")
    out = whole[:, 3 : 3 + K]
    longest = int(visible(*arguments[3:5], keys).max())
    assert gdn.indexer_topk(*arguments, K, max_seqlen_k=longest, out=out, **options) is out
    assert torch.equal(out, want) and bool((whole[:, :3] == -77).all()) and bool((whole[:, 3 + K :] == -77).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_short_rows_need_no_scores(backend: str) -> None:
    """Rows of at most K keys are listed though their weights are NaN; without any other row nothing is scored."""
    call = ragged(700, 700, "causal")
    want = whole_ragged(call, backend)
    q, k, weights, starts, ends, k_scale = call
    short = visible(starts, ends, 700) <= K
    weights = weights.clone()
    weights[short] = torch.nan
    options = {"k_scale": k_scale, "backend": backend}
    got = gdn.indexer_topk(q, k, weights, starts, ends, K, **options)
    assert torch.equal(got, want) and bool((got[short] >= 0).sum(dim=1).eq(visible(starts, ends, 700)[short]).all())
    few = gdn.indexer_topk(q, k[:300], weights, starts, ends, K, **options | {"k_scale": k_scale[:300]})
    counts = visible(starts, ends, 300)[:, None]
    columns = torch.arange(K, device="cuda", dtype=torch.int32)
    assert torch.equal(few, torch.where(columns < counts, columns, -1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("next_n", "per_draft", "relu"), [(1, False, True), (2, False, True), (3, False, True), (2, True, True), (1, False, False)]
)
def test_paged(next_n: int, per_draft: bool, relu: bool, backend: str) -> None:
    lengths = [2000, 0, 5, K, K + 1, 1999, K + 2, 1300]
    given = [[max(0, n - 1), n] for n in lengths] if per_draft else lengths
    heads, dim, page = (16, 128, 64) if relu else (8, 64, 128)  # kernels that tests of the logits compile too
    problem = PagedMqaLogitsProblem(
        heads, 1, dim, "float8_e4m3fn", True, "float32", relu, False, "float32", page, next_n, per_draft, 8, 2000
    )
    inputs = make_paged_inputs(problem, "cuda", lengths=given)
    assert inputs.weights is not None
    arguments = (inputs.q, inputs.cache, inputs.weights, inputs.context_lens, inputs.block_tables)
    fixed = {"relu": relu, "backend": backend}
    logits = gdn.paged_mqa_logits(*arguments, 2000, clean_logits=False, **fixed)
    counts = torch.tensor(lengths, device="cuda")[:, None] - next_n + 1 + torch.arange(next_n, device="cuda")
    counts = counts.reshape(-1).clamp(min=0)
    want = list_short_rows(gdn.topk_indices(logits, K, None, counts), counts)
    for options in ({}, {"max_context_len": 2000, "workspace_bytes": 3 * next_n * 2000 * 4}):
        got = gdn.paged_indexer_topk(*arguments, K, **fixed, **options)
        assert torch.equal(got, want)
        wide = (*arguments[:3], inputs.context_lens.long(), inputs.block_tables)
        assert torch.equal(gdn.paged_indexer_topk(*wide, K, **fixed, **options), want)
    weights = inputs.weights.clone()
    weights[counts <= K] = torch.nan
    got = gdn.paged_indexer_topk(*arguments[:2], weights, *arguments[3:], K, **fixed)
    assert torch.equal(got, want)
    few = gdn.paged_indexer_topk(*arguments, K, max_context_len=400, **fixed)
    columns = torch.arange(K, device="cuda", dtype=torch.int32)
    assert torch.equal(few, torch.where(columns < counts.clamp(max=400)[:, None], columns, -1))


def in_margins(want: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor with margins, and the part of it that takes a result of this shape."""
    whole = torch.full((want.shape[0], want.shape[1] + 5), -77, dtype=torch.int32, device="cuda")
    return whole, whole[:, 3 : 3 + want.shape[1]]


@pytest.mark.parametrize("ratio", [2, 3, 4, 16])
@pytest.mark.parametrize(("rows", "keys", "k"), [(300, 2049, K), (40, 9000, 2048), (5, 12000, 8193), (70, 30, 40), (9, 700, 1)])
def test_groups_are_listed_as_tokens(rows: int, keys: int, k: int, ratio: int) -> None:
    """Tokens are those of the selected groups and of the unfinished one, whether a row is selected from, listed, or empty."""
    q, keys_of, weights, _, _, k_scale = ragged(rows, keys, "random")
    source = torch.Generator().manual_seed(rows + ratio)
    positions = torch.randint(0, keys * ratio, (rows, 2), generator=source).cuda()[:, 0]
    positions[:4] = torch.tensor([0, ratio - 1, keys * ratio - 1, -1], device="cuda")
    starts, ends = torch.zeros(rows, dtype=torch.int32, device="cuda"), ((positions + 1) // ratio).int()
    call = (q, keys_of, weights, starts, ends, k)
    want = reference.expand_topk_groups(gdn.indexer_topk(*call, k_scale=k_scale, backend="cute"), positions, ratio=ratio)
    for given in (positions, positions.int()):
        for options in ({}, {"workspace_bytes": 130 * keys * 4}, {"max_seqlen_k": keys}):
            whole, out = in_margins(want)
            options |= {"k_scale": k_scale, "ratio": ratio, "positions": given, "backend": "cute"}
            assert gdn.indexer_topk(*call, out=out, **options) is out
            assert torch.equal(out, want)
            assert bool((whole[:, :3] == -77).all()) and bool((whole[:, 3 + want.shape[1] :] == -77).all())


@pytest.mark.parametrize(("next_n", "per_draft"), [(1, False), (3, False), (2, True)])
def test_paged_groups_are_listed_as_tokens(next_n: int, per_draft: bool) -> None:
    """With a position for each draft; captured, lengths and positions change between replays."""
    lengths, ratio = [2000, 3, 5, K, K + 1, 1999, K + 2, 1300], 4
    given = [[n] * next_n for n in lengths] if per_draft else lengths
    problem = PagedMqaLogitsProblem(
        16, 1, 128, "float8_e4m3fn", True, "float32", True, False, "float32", 64, next_n, per_draft, 8, 2000
    )
    inputs = make_paged_inputs(problem, "cuda", lengths=given)
    call = {name: getattr(inputs, name) for name in ("q", "cache", "weights", "context_lens", "block_tables")}
    positions = torch.tensor(lengths, device="cuda").repeat_interleave(next_n) * ratio + 1
    steps = [
        {"context_lens": inputs.context_lens.sub(step).clamp(min=0), "positions": positions.sub(step).clamp(min=-1)}
        for step in (0, 1, 3, 703)
    ]
    options = {"topk": K, "backend": "cute"}
    for step in steps:
        groups = gdn.paged_indexer_topk(**call | {"context_lens": step["context_lens"]}, **options)
        want = reference.expand_topk_groups(groups, step["positions"], ratio=ratio)
        _, out = in_margins(want)
        gdn.paged_indexer_topk(**call | step, ratio=ratio, out=out, **options)
        assert torch.equal(out, want)
    arguments = call | {"positions": positions, "out": out}
    graphs.check(gdn.paged_indexer_topk, arguments, (), steps[1:], torch.device("cuda"), ratio=ratio, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_of_any_value(backend: str) -> None:
    """Ranges beyond the keys and beyond int32, scores that start with a row's first key or not; lengths likewise."""
    q, k, weights, _, _, k_scale = ragged(64, 3000, "random")
    low = [0, -5, 17, 2999, 3000, 4000, -(2**31), 2**31 - 1, 100, 700]
    high = [3000, 99999, 530, -1, -(2**31), 2**31 - 1, 1800, 0]
    starts = torch.tensor([low[row % len(low)] for row in range(64)], device="cuda")
    ends = torch.tensor([high[row % len(high)] for row in range(64)], device="cuda")
    far = ends.where(ends < 2**31 - 1, 2**62), starts.where(starts > -(2**31), -(2**62))
    call = (q, k, weights, starts.int(), ends.int(), k_scale)
    want = whole_ragged(call, backend)
    for first, last in ((starts.int(), ends.int()), (far[1], far[0])):
        for options in ({}, {"max_seqlen_k": 3000}, {"max_seqlen_k": 3500, "workspace_bytes": 30 * 3500 * 4}):
            got = gdn.indexer_topk(q, k, weights, first, last, K, k_scale=k_scale, backend=backend, **options)
            assert torch.equal(got, want)
    # Ranges longer than the bound end with it.
    got = gdn.indexer_topk(q, k, weights, starts.int(), ends.int(), K, k_scale=k_scale, max_seqlen_k=1000, backend=backend)
    first = starts.clamp(0, 3000)
    cut = torch.minimum(ends.clamp(0, 3000), first + 1000)
    assert torch.equal(got, whole_ragged((q, k, weights, first.int(), cut.int(), k_scale), backend))
    problem = PagedMqaLogitsProblem(16, 1, 128, "float8_e4m3fn", True, "float32", True, False, "float32", 64, 3, False, 6, 2000)
    inputs = make_paged_inputs(problem, "cuda", lengths=[2000] * 6)
    given = torch.tensor([2**31 - 1, -(2**31), 1, 2001, K + 1, 1000], dtype=torch.int32, device="cuda")
    lengths = given.clamp(-3, 5000).long()
    counts = (lengths[:, None] - 2 + torch.arange(3, device="cuda")).reshape(-1).clamp(0, 2000)
    arguments = (inputs.q, inputs.cache, inputs.weights, lengths.int(), inputs.block_tables)
    logits = gdn.paged_mqa_logits(*arguments, 2000, clean_logits=False, backend=backend)
    want = list_short_rows(gdn.topk_indices(logits, K, None, counts), counts)
    for lens in (lengths.int(), given):
        got = gdn.paged_indexer_topk(*arguments[:3], lens, arguments[4], K, max_context_len=2000, backend=backend)
        assert torch.equal(got, want)


@pytest.mark.parametrize("packed", [False, True])
def test_short_rows_stay_unscored(packed: bool) -> None:
    """No score of a row of at most `skip_rows_up_to` keys is written, and the others' are those of a call without."""
    q, k, weights, starts, ends, k_scale = ragged(400, 3000, "random")
    ends[::7] = starts[::7] + K
    ends[1::7] = starts[1::7] + K + 1
    plain = gdn.mqa_logits(
        q, k, weights, starts, ends, k_scale=k_scale, max_seqlen_k=3000 if packed else None, clean_logits=False, backend="cute",
        out=torch.full((400, 3000), 7.5, device="cuda"),
    )  # fmt: skip
    got = gdn.mqa_logits(
        q, k, weights, starts, ends, k_scale=k_scale, max_seqlen_k=3000 if packed else None, clean_logits=False, backend="cute",
        out=torch.full((400, 3000), 7.5, device="cuda"), skip_rows_up_to=K,
    )  # fmt: skip
    short = visible(starts, ends, 3000) <= K
    assert bool(short.any()) and not bool(short.all())
    # As bits: the ranges made longer reach poisoned keys, whose scores are NaN.
    assert torch.equal(got[~short].view(torch.int32), plain[~short].view(torch.int32)) and bool((got[short] == 7.5).all())


@pytest.mark.parametrize("per_draft", [False, True])
def test_short_sequences_stay_unscored(per_draft: bool) -> None:
    """The same of sequences whose longest draft sees at most `skip_rows_up_to` keys."""
    lengths = [2000, 0, 5, K, K + 1, 1999, K + 2, 1300]
    given = [[max(0, n - 1), n] for n in lengths] if per_draft else lengths
    problem = PagedMqaLogitsProblem(
        16, 1, 128, "float8_e4m3fn", True, "float32", True, False, "float32", 64, 2, per_draft, 8, 2000
    )
    inputs = make_paged_inputs(problem, "cuda", lengths=given)
    arguments = (inputs.q, inputs.cache, inputs.weights, inputs.context_lens, inputs.block_tables, 2000)
    plain, got = (torch.full((16, 2000), 7.5, device="cuda") for _ in range(2))
    gdn.paged_mqa_logits(*arguments, clean_logits=False, out=plain, backend="cute")
    gdn.paged_mqa_logits(*arguments, clean_logits=False, out=got, backend="cute", skip_rows_up_to=K)
    short = torch.tensor([n <= K for n in lengths], device="cuda").repeat_interleave(2)
    assert torch.equal(got[~short], plain[~short]) and bool((got[short] == 7.5).all())
