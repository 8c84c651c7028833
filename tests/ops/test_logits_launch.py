"""The Params that the logits operators hand to a kernel, held against the family's problem.py by a stand-in kernel on the CPU.

The stand-in checks the launch contract (form, order, alignment of every argument) and computes the scores from exactly
those arguments, so that a swapped or missing argument gives wrong scores.
"""

import dataclasses

import pytest
import torch

import gdn
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.ops.indexer.oracle import exact_paged_mqa_logits, logits_error
from gdn.ops.indexer.problem import (
    MqaLogitsParams,
    MqaLogitsProblem,
    PagedMqaLogitsParams,
    PagedMqaLogitsProblem,
    TopkParams,
    TopkProblem,
)
from gdn.ops.indexer.reference import key_range, list_short_rows
from tests.ops.stand_in import StandIn
from tests.references import reference


def contiguous(tensor, shape, dtype):
    assert tuple(tensor.shape) == shape and tensor.dtype == dtype
    assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def weights_form(weights, rows, problem):
    assert (weights is None) == (problem.weights_dtype is None)
    if weights is not None:
        assert tuple(weights.shape) == (rows, problem.num_heads) and weights.stride(1) == 1
        assert str(weights.dtype) == f"torch.{problem.weights_dtype}" and problem.weights_dtype in ("float32", "bfloat16")


class Kernels(StandIn):
    backend = "tilelang"

    def launch(self, problem, params):
        kinds = {MqaLogitsProblem: self.ragged, PagedMqaLogitsProblem: self.paged, TopkProblem: self.topk}
        kinds[type(problem)](problem, params)

    def ragged(self, p, params):
        assert isinstance(params, MqaLogitsParams)
        q, k, k_scale, weights, starts, ends, out, scale, least = params
        assert least == 0 or not p.clean
        assert p.num_queries and p.num_keys and p.num_columns
        contiguous(q, (p.num_queries, p.num_heads, p.head_dim), getattr(torch, p.dtype))
        contiguous(k, (p.num_keys, p.num_kv_heads, p.head_dim), getattr(torch, p.dtype))
        assert (k_scale is not None) == p.has_k_scale
        if k_scale is not None:
            contiguous(k_scale, (p.num_keys, p.num_kv_heads), torch.float32)
        weights_form(weights, p.num_queries, p)
        for bound in (starts, ends):
            assert tuple(bound.shape) == (p.num_queries,) and bound.dtype == torch.int32 and bound.is_contiguous()
        assert tuple(out.shape) == (p.num_queries, p.num_columns) and out.stride(1) == 1
        assert str(out.dtype) == f"torch.{p.out_dtype}" and isinstance(scale, float)
        reference.mqa_logits(
            q, k, weights, starts, ends, k_scale=k_scale, scale=scale, relu=p.relu,
            max_seqlen_k=p.num_columns if p.packed else None, out=out,
        )  # fmt: skip
        first, last = key_range(starts, ends, p.num_keys)
        out[(last - first) <= least] = torch.nan if least else -torch.inf
        self.spoil(p, out)

    def topk(self, p, params):
        assert isinstance(params, TopkParams)
        logits, starts, ends, positions, out, list_short, num_keys, drafts = params
        assert list_short in (0, 1)
        assert p.num_rows and p.k
        assert tuple(logits.shape) == (p.num_rows, p.num_columns) and logits.stride(1) == 1
        assert str(logits.dtype) == f"torch.{p.dtype}"
        for bound, dtype in ((starts, p.starts_dtype), (ends, p.ends_dtype)):
            assert (bound is None) == (dtype is None)
            if bound is not None:
                assert tuple(bound.shape) == (p.num_rows // drafts,) and str(bound.dtype) == f"torch.{dtype}"
        if num_keys != -1:  # ranges of keys
            first, last = key_range(starts, ends, num_keys)
            starts, ends = None, last - first
        if drafts != 1:
            assert starts is None and p.num_rows % drafts == 0
            ends = ends.long().repeat_interleave(drafts) + torch.arange(p.num_rows) % drafts - drafts + 1
        assert tuple(out.shape) == (p.num_rows, p.k * p.ratio + p.ratio - 1) and out.stride(1) == 1 and out.dtype == torch.int32
        assert (positions is None) == (p.ratio == 1) == (p.position_dtype is None)
        if list_short:  # what is listed is not read
            first = torch.zeros(p.num_rows) if starts is None else starts
            first, last = key_range(first, torch.full_like(first, p.num_columns) if ends is None else ends, p.num_columns)
            short = (last - first <= p.k)[:, None]
            logits = torch.where(short, torch.nan, logits)
        picked = reference.topk_indices(logits, p.k, starts, ends, sorted_by=p.sorted_by)
        if list_short:
            picked = list_short_rows(picked, last - first)
        if positions is not None:
            assert tuple(positions.shape) == (p.num_rows,) and str(positions.dtype) == f"torch.{p.position_dtype}"
            picked = reference.expand_topk_groups(picked, positions, ratio=p.ratio)
        out.copy_(picked)

    def paged(self, p, params):
        assert isinstance(params, PagedMqaLogitsParams)
        q, cache, weights, context_lens, block_tables, out, scale, least = params
        assert least == 0 or not p.clean
        contiguous(q, (p.batch, p.next_n, p.num_heads, p.head_dim), getattr(torch, p.dtype))
        row = p.head_dim + 4 if p.has_k_scale else p.head_dim
        assert cache.dtype == (torch.uint8 if p.has_k_scale else getattr(torch, p.dtype))
        assert cache.dim() == 2 and cache.shape[1] == p.page_size * p.num_kv_heads * row
        assert cache.stride(1) == 1 and cache.stride(0) * cache.element_size() % 16 == 0 and cache.data_ptr() % 16 == 0
        weights_form(weights, p.batch * p.next_n, p)
        assert context_lens.dtype == torch.int32 and context_lens.is_contiguous()
        assert tuple(context_lens.shape) == ((p.batch, p.next_n) if p.per_draft_lengths else (p.batch,))
        assert block_tables.dtype == torch.int32 and block_tables.shape[0] == p.batch and block_tables.stride(1) == 1
        assert tuple(out.shape) == (p.batch * p.next_n, p.max_context_len) and out.stride(1) == 1
        assert str(out.dtype) == f"torch.{p.out_dtype}" and isinstance(scale, float)
        pages = cache.as_strided(
            (cache.shape[0], p.page_size, p.num_kv_heads, row), (cache.stride(0), p.num_kv_heads * row, row, 1)
        )
        reference.paged_mqa_logits(
            q, pages, weights, context_lens, block_tables, p.max_context_len, scale=scale, relu=p.relu, out=out
        )
        if least:
            longest = context_lens.amax(dim=1) if p.per_draft_lengths else context_lens
            out.view(p.batch, p.next_n, -1)[longest <= least] = torch.nan
        self.spoil(p, out)

    def spoil(self, p, out):
        """What nobody may read."""
        if not p.clean:
            out[out == -torch.inf] = torch.nan


@pytest.fixture
def stand_in(monkeypatch):
    return Kernels().put(monkeypatch)


def test_a_single_page_and_no_page(stand_in):
    problem = PagedMqaLogitsProblem(4, 1, 64, "float8_e4m3fn", True, None, True, True, "float32", 16, 1, False, 1, 9)
    inputs = make_paged_inputs(problem, spare_pages=0)
    one = inputs.cache[:, :, 0].as_strided((1, 16, 68), (1, 68, 1))  # the stride of a dimension of one says nothing
    got = gdn.paged_mqa_logits(inputs.q, one, None, inputs.context_lens, inputs.block_tables, 9)
    assert logits_error(got, exact_paged_mqa_logits(inputs), fp8=False) is None
    assert stand_in.launches == 1
    for cache, tables in ((inputs.cache[:0], inputs.block_tables), (inputs.cache, inputs.block_tables[:, :0])):
        lengths = inputs.context_lens if tables.shape[1] else torch.zeros_like(inputs.context_lens)
        got = gdn.paged_mqa_logits(inputs.q, cache, None, lengths, tables, 9)
        assert got.shape == (1, 9) and bool((got == -torch.inf).all())
    assert gdn.paged_mqa_logits(inputs.q, one, None, inputs.context_lens, inputs.block_tables, 0).shape == (1, 0)
    assert stand_in.launches == 1


def test_indexer_topk_runs_the_kernel_in_steps(stand_in):
    problem = MqaLogitsProblem(4, 1, 64, "float8_e4m3fn", True, "float32", True, False, "float32", False, 300, 75, 75)
    inputs = make_mqa_inputs(problem, ranges="hard")
    arguments = (inputs.q, inputs.k, inputs.weights, inputs.cu_seqlen_ks, inputs.cu_seqlen_ke)
    got = gdn.indexer_topk(*arguments, 16, k_scale=inputs.k_scale, workspace_bytes=150 * 75 * 4)
    # Steps of 128 rows, not of the 150 that fit: slices of the ranges stay aligned.
    logits = [problem for problem in stand_in.problems if isinstance(problem, MqaLogitsProblem)]
    assert logits == [dataclasses.replace(problem, num_queries=rows) for rows in (128, 128, 44)]
    selections = [problem for problem in stand_in.problems if isinstance(problem, TopkProblem)]
    assert [(one.num_rows, one.num_columns, one.k) for one in selections] == [(rows, 75, 16) for rows in (128, 128, 44)]
    assert torch.equal(got, reference.indexer_topk(*arguments, 16, k_scale=inputs.k_scale))


@pytest.mark.parametrize("ratio", [2, 5])
def test_groups_are_listed_by_the_selection(stand_in, ratio):
    """The selection lists tokens itself, in steps and where a row sees at most as many groups as are selected."""
    problem = MqaLogitsProblem(4, 1, 64, "bfloat16", False, None, True, False, "float32", False, 300, 75, 75)
    inputs = make_mqa_inputs(problem)
    positions = torch.arange(300) * ratio % (75 * ratio) + torch.arange(300) % ratio
    starts, ends = torch.zeros(300, dtype=torch.int32), ((positions + 1) // ratio).int()
    for k, width in ((inputs.k, 75), (inputs.k[:10], 10)):
        given = (inputs.q, k, None, starts, ends.clamp(max=width), 12)
        out = torch.full((300, 13 * ratio), -7, dtype=torch.int32)[:, : 13 * ratio - 1]
        options = {"ratio": ratio, "positions": positions}
        got = gdn.indexer_topk(*given, **options, out=out, workspace_bytes=150 * 75 * 4)
        assert got is out and torch.equal(
            got, reference.expand_topk_groups(reference.indexer_topk(*given), positions, ratio=ratio)
        )
        assert torch.equal(got, reference.indexer_topk(*given, **options))
    assert {problem.ratio for problem in stand_in.problems if isinstance(problem, TopkProblem)} == {ratio}

    pages = PagedMqaLogitsProblem(4, 1, 64, "bfloat16", False, None, True, True, "float32", 16, 2, True, 5, 96)
    lengths = torch.tensor([[96, 96], [0, 1], [17, 18], [12, 12], [40, 41]])
    paged = make_paged_inputs(pages, lengths=lengths.tolist())
    arguments = (paged.q, paged.cache, None, paged.context_lens, paged.block_tables, 12)
    positions = (lengths * ratio + torch.arange(2) % ratio).flatten() - 1
    got = gdn.paged_indexer_topk(*arguments, ratio=ratio, positions=positions.int(), workspace_bytes=2 * 2 * 4 * 160)
    want = reference.expand_topk_groups(reference.paged_indexer_topk(*arguments), positions, ratio=ratio)
    assert torch.equal(got, want)
    assert torch.equal(got, reference.paged_indexer_topk(*arguments, ratio=ratio, positions=positions))


def test_rows_that_see_few_keys_are_not_scored(stand_in, monkeypatch):
    """The logits know of it, and the selection lists them; where no row can see more, nothing is scored."""
    problem = MqaLogitsProblem(4, 1, 64, "float8_e4m3fn", True, None, True, False, "float32", False, 6, 75, 75)
    inputs = make_mqa_inputs(problem)
    starts = torch.tensor([3, -9, 0, 70, 20, 50])
    ends = torch.tensor([19, 99, 17, 3, 37, 66])  # 16, 75 (clamped), 17, none, 17, 16 keys
    ranges, plain = [], stand_in.ragged
    monkeypatch.setattr(stand_in, "ragged", lambda p, params: (ranges.append(params.skip_rows_up_to), plain(p, params)))
    arguments = (inputs.q, inputs.k, None, starts, ends, 16)
    for dtype in (torch.int64, torch.int32):
        given = (*arguments[:3], starts.to(dtype), ends.to(dtype), 16)
        for options in ({}, {"max_seqlen_k": 75}):
            got = gdn.indexer_topk(*given, k_scale=inputs.k_scale, **options)
            assert ranges.pop() == 16
            assert torch.equal(got, reference.indexer_topk(*arguments, k_scale=inputs.k_scale))
            assert [(row >= 0).sum().item() for row in got] == [16, 16, 16, 0, 16, 16]
    launches = stand_in.launches
    for options in ({}, {"max_seqlen_k": 30}):
        k, k_scale = (inputs.k, inputs.k_scale) if options else (inputs.k[:30], inputs.k_scale[:30])
        got = gdn.indexer_topk(inputs.q, k, None, starts, ends, 40, k_scale=k_scale, **options)
        counts = (ends.clamp(0, k.shape[0]) - starts.clamp(0, k.shape[0])).clamp(0, 30)[:, None]
        assert torch.equal(got, torch.where(torch.arange(40) < counts, torch.arange(40), -1).int())
        assert not ranges
    assert stand_in.launches == launches + 2


@pytest.mark.parametrize("per_draft", [False, True])
@pytest.mark.parametrize("next_n", [1, 2, 3])
def test_paged_rows_that_see_few_keys_are_not_scored(stand_in, next_n, per_draft, monkeypatch):
    problem = PagedMqaLogitsProblem(4, 1, 64, "bfloat16", False, None, True, True, "float32", 16, next_n, per_draft, 5, 96)
    lengths = [96, 16, 0, 17, 50]
    inputs = make_paged_inputs(problem, lengths=[[n] * next_n for n in lengths] if per_draft else lengths)
    seen, plain = [], stand_in.paged
    monkeypatch.setattr(stand_in, "paged", lambda p, params: (seen.append(params.skip_rows_up_to), plain(p, params)))
    arguments = (inputs.q, inputs.cache, None, inputs.context_lens, inputs.block_tables)
    for dtype in (torch.int64, torch.int32):
        given = (*arguments[:3], inputs.context_lens.to(dtype), inputs.block_tables)
        got = gdn.paged_indexer_topk(*given, 16, max_context_len=96)
        assert torch.equal(got, reference.paged_indexer_topk(*arguments, 16, max_context_len=96))
        assert seen.pop() == 16 and not seen
    got = gdn.paged_indexer_topk(*arguments, 16, max_context_len=96, workspace_bytes=2 * next_n * 96 * 4)  # 2 at a time
    assert torch.equal(got, reference.paged_indexer_topk(*arguments, 16, max_context_len=96)) and len(seen) == 3
    launches = stand_in.launches
    got = gdn.paged_indexer_topk(*arguments, 16, max_context_len=12)
    assert torch.equal(got, reference.paged_indexer_topk(*arguments, 16, max_context_len=12))
    assert stand_in.launches == launches + 1 and len(seen) == 3
