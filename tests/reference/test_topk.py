"""Top-k against torch.topk and a plain Python statement of the order; the combined operator against its parts."""

import math

import pytest
import torch

from gdn.ops.indexer import reference as reference_topk
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from tests.references import reference

pytestmark = pytest.mark.usefixtures("one_thread")


def stated(row, k, start, end, sorted_by):
    """The contract, in Python: best score first, ties by column, NaN and -inf never."""
    start, end = max(0, min(start, len(row))), max(0, min(end, len(row)))
    able = [c for c in range(start, end) if not math.isnan(row[c]) and row[c] != -math.inf]
    able.sort(key=lambda c: (-(row[c] + 0.0), c))
    picked = able[:k]
    if sorted_by == "index":
        picked.sort()
    return [c - start for c in picked] + [-1] * (k - len(picked))


def hard_rows(rows, n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-4, 5, (rows, n), generator=generator).to(dtype) / 2  # many ties
    noise = torch.rand(rows, n, generator=generator)
    values[noise < 0.05] = torch.nan
    values[(noise > 0.05) & (noise < 0.1)] = -torch.inf
    values[(noise > 0.1) & (noise < 0.13)] = torch.inf
    values[(noise > 0.13) & (noise < 0.25)] = -0.0
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sorted_by", ["index", "score"])
@pytest.mark.parametrize("k", [0, 1, 7, 64, 200])
def test_against_the_statement(k, sorted_by, dtype):
    rows, n = 24, 100
    logits = hard_rows(rows, n, dtype)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(-5, n + 5, (rows,), generator=generator, dtype=torch.int32)
    ends = torch.randint(-5, n + 5, (rows,), generator=generator, dtype=torch.int32)
    starts[0], ends[0] = 0, n
    got = reference.topk_indices(logits, k, starts, ends, sorted_by=sorted_by)
    assert got.dtype == torch.int32
    for row in range(rows):
        want = stated(logits[row].tolist(), k, int(starts[row]), int(ends[row]), sorted_by)
        assert got[row].tolist() == want


@pytest.mark.parametrize("k", [1, 512, 2048, 2051])
def test_scores_are_those_of_torch_topk(k):
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(2))
    got = reference.topk_indices(logits, k, sorted_by="score").long()
    assert torch.equal(logits.gather(1, got), logits.topk(k, dim=1).values)
    ascending = reference.topk_indices(logits, k).long()
    assert torch.equal(ascending, got.sort(dim=1).values)


def test_blocks_strides_and_out(monkeypatch):
    wide = torch.randn(30, 80, generator=torch.Generator().manual_seed(3))
    logits = wide[:, 8:72]
    want = reference.topk_indices(logits.contiguous(), 10)
    monkeypatch.setattr(reference_topk, "SELECTION_BYTES", 4 * 64 * 7)  # seven rows
    out = torch.full((30, 10), 77, dtype=torch.int32)
    assert reference.topk_indices(logits, 10, out=out) is out
    assert torch.equal(out, want)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty(shape):
    got = reference.topk_indices(torch.empty(shape), 4)
    assert got.shape == (shape[0], 4) and bool((got == -1).all())


@pytest.mark.parametrize("rows_held", [1, 5, 1000])
def test_indexer_topk_is_logits_then_topk(rows_held):
    problem = MqaLogitsProblem(4, 1, 64, "float8_e4m3fn", True, "float32", True, True, "float32", False, 33, 120, 120)
    inputs = make_mqa_inputs(problem, ranges="hard", seed=5)
    ranges = (inputs.cu_seqlen_ks, inputs.cu_seqlen_ke)
    arguments = (inputs.q, inputs.k, inputs.weights, *ranges)
    got = reference.indexer_topk(*arguments, 16, k_scale=inputs.k_scale, workspace_bytes=rows_held * 120 * 4)
    logits = reference.mqa_logits(*arguments, k_scale=inputs.k_scale)
    want = reference.topk_indices(logits, 16, *ranges)
    visible = (ranges[1].clamp(0, 120) - ranges[0].clamp(0, 120)).clamp(min=0)
    assert torch.equal(got[visible > 16], want[visible > 16])
    for row in (visible <= 16).nonzero().flatten().tolist():
        count = int(visible[row])
        assert got[row].tolist() == [*range(count), *[-1] * (16 - count)]


def test_short_rows_are_listed_unscored():
    q, k = torch.full((1, 2, 64), torch.nan), torch.zeros(5, 64)
    got = reference.indexer_topk(q, k, None, torch.tensor([1]), torch.tensor([4]), 6)
    assert got.tolist() == [[0, 1, 2, -1, -1, -1]]
    got = reference.indexer_topk(q, k, None, torch.tensor([0]), torch.tensor([5]), 4)
    assert got.tolist() == [[-1] * 4]  # five keys, all NaN


@pytest.mark.parametrize("per_draft", [False, True])
def test_paged_indexer_topk(per_draft):
    problem = PagedMqaLogitsProblem(4, 1, 64, "bfloat16", False, None, True, True, "float32", 16, 2, per_draft, 3, 90)
    lengths = [[90, 60], [3, 20], [0, 0]] if per_draft else [90, 20, 0]
    inputs = make_paged_inputs(problem, lengths=lengths)
    arguments = (inputs.q, inputs.cache, None, inputs.context_lens, inputs.block_tables)
    got = reference.paged_indexer_topk(*arguments, 8, workspace_bytes=1)
    logits = reference.paged_mqa_logits(*arguments, 90)
    counts = (logits > -torch.inf).sum(dim=1)
    want = reference.topk_indices(logits, 8)
    assert torch.equal(got[counts > 8], want[counts > 8])
    short = [row for row in range(6) if counts[row] <= 8]
    assert short
    for row in short:
        assert got[row].tolist() == [*range(int(counts[row])), *[-1] * (8 - int(counts[row]))]


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_expand_groups_covers_the_prefix_and_the_tail(ratio):
    positions = torch.arange(-1, 20)
    groups = torch.full((21, 6), -1, dtype=torch.int32)
    for row, position in enumerate(positions.tolist()):
        visible = min(6, (position + 1) // ratio)
        groups[row, :visible] = torch.arange(visible)
    got = reference.expand_topk_groups(groups, positions, ratio=ratio)
    assert got.shape == (21, 6 * ratio + ratio - 1) and got.dtype == torch.int32
    for row, position in enumerate(positions.tolist()):
        listed = [*range(min(6, (position + 1) // ratio) * ratio), *range((position + 1) // ratio * ratio, position + 1)]
        assert got[row].tolist() == listed + [-1] * (got.shape[1] - len(listed))


def test_expand_groups_skips_holes():
    got = reference.expand_topk_groups(torch.tensor([[3, -1, 0]]), torch.tensor([14]))
    assert got[0].tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 12, 13, 14, -1, -1, -1, -1]
