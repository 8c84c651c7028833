"""The reference logits against exact float64 products, and the inputs' own promises."""

import dataclasses

import pytest
import torch

import gdn
from gdn.ops.indexer import reference as reference_logits
from gdn.ops.indexer.inputs import key_ranges, make_mqa_inputs, make_paged_inputs
from gdn.ops.indexer.oracle import calc_diff, exact_mqa_logits, exact_paged_mqa_logits, logits_error
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from tests.references import reference

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS = [("float8_e4m3fn", True), ("float8_e4m3fn", False), ("bfloat16", False)]
RANGES = ["causal", "full", "random", "hard", "sequences"]


def ragged(dtype="bfloat16", scaled=False, *, heads=4, kv_heads=1, dim=64, weights="float32", packed=None, m=37, n=91, **fields):
    columns = n if packed is None else packed
    values = dict(relu=True, clean=True, out_dtype="float32") | fields
    return MqaLogitsProblem(
        heads,
        kv_heads,
        dim,
        dtype,
        scaled,
        weights,
        **values,
        packed=packed is not None,
        num_queries=m,
        num_keys=n,
        num_columns=columns,
    )


def run_ragged(problem, inputs, **options):
    packed = problem.num_columns if problem.packed else None
    out = torch.full((problem.num_queries, problem.num_columns), torch.nan)
    got = reference.mqa_logits(
        inputs.q, inputs.k, inputs.weights, inputs.cu_seqlen_ks, inputs.cu_seqlen_ke,
        k_scale=inputs.k_scale, max_seqlen_k=packed, relu=problem.relu, out=out, **options,
    )  # fmt: skip
    assert got is out
    return got


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("packed", [None, 40])
@pytest.mark.parametrize(("dtype", "scaled"), FORMS)
def test_ragged_is_exact(dtype, scaled, packed, ranges):
    problem = ragged(dtype, scaled, packed=packed, kv_heads=2)
    inputs = make_mqa_inputs(problem, seed=1, ranges=ranges)
    exact = exact_mqa_logits(inputs, scale=0.125, max_seqlen_k=packed)
    assert logits_error(run_ragged(problem, inputs, scale=0.125), exact, fp8=False) is None


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("weights", [None, "float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (6, 3), (8, 8)])
def test_heads_weights_and_activation(heads, kv_heads, weights, relu):
    problem = ragged("float8_e4m3fn", True, heads=heads, kv_heads=kv_heads, weights=weights, relu=relu)
    inputs = make_mqa_inputs(problem, seed=2)
    exact = exact_mqa_logits(inputs, relu=relu)
    assert logits_error(run_ragged(problem, inputs), exact, fp8=False) is None


def test_the_formula_term_by_term():
    """One score by hand: two key heads, each with its own scale, a negative product cut by the ReLU."""
    q = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [1.0, 1.0]]])  # heads 0, 1 read key head 0; 2, 3 key head 1
    k = torch.tensor([[[3.0, 5.0], [7.0, -11.0]]])
    weights = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    one = torch.tensor([1])
    arguments = dict(k_scale=torch.tensor([[2.0, 4.0]]), scale=0.5)
    got = reference.mqa_logits(q, k, weights, 0 * one, one, **arguments)
    assert got.item() == 0.5 * (2.0 * (1 * 3 + 10 * 10) + 4.0 * (100 * 0 + 1000 * 0))
    got = reference.mqa_logits(q, k, weights, 0 * one, one, relu=False, **arguments)
    assert got.item() == 0.5 * (2.0 * (1 * 3 + 10 * 10) + 4.0 * (100 * -7 + 1000 * -4))


def test_rows_do_not_depend_on_the_block(monkeypatch):
    problem = ragged("bfloat16", m=50)
    inputs = make_mqa_inputs(problem, seed=3, ranges="hard")
    whole = run_ragged(problem, inputs)
    monkeypatch.setattr(reference_logits, "BLOCK_BYTES", 3 * 4 * 91 * 4)  # three rows
    assert logits_error(run_ragged(problem, inputs), exact_mqa_logits(inputs), fp8=False) is None
    assert torch.allclose(run_ragged(problem, inputs), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("m", "n", "packed"), [(0, 5, None), (5, 0, None), (5, 0, 7), (0, 0, None), (3, 4, 0)])
def test_nothing_to_score(m, n, packed):
    problem = ragged(m=m, n=n, packed=packed)
    got = run_ragged(problem, make_mqa_inputs(problem))
    assert got.shape == (m, n if packed is None else packed)
    assert bool((got == -torch.inf).all())


def test_flat_keys_and_bfloat16_out():
    problem = ragged("float8_e4m3fn", True)
    inputs = make_mqa_inputs(problem)
    got = reference.mqa_logits(
        inputs.q, inputs.k[:, 0], inputs.weights, inputs.cu_seqlen_ks, inputs.cu_seqlen_ke,
        k_scale=inputs.k_scale[:, 0], out_dtype=torch.bfloat16,
    )  # fmt: skip
    assert got.dtype == torch.bfloat16
    assert logits_error(got, exact_mqa_logits(inputs), fp8=False) is None


def paged(dtype="bfloat16", scaled=False, *, heads=4, kv_heads=1, page_size=16, next_n=1, per_draft=False, batch=4, longest=300):
    return PagedMqaLogitsProblem(
        heads, kv_heads, 64, dtype, scaled, "float32", True, True, "float32", page_size, next_n, per_draft, batch, longest
    )  # fmt: skip


def run_paged(problem, inputs, **options):
    out = torch.full((problem.batch * problem.next_n, problem.max_context_len), torch.nan)
    return reference.paged_mqa_logits(
        inputs.q,
        inputs.cache,
        inputs.weights,
        inputs.context_lens,
        inputs.block_tables,
        problem.max_context_len,
        out=out,
        **options,
    )


@pytest.mark.parametrize(("page_size", "pad"), [(16, 0), (64, 16), (272, 48)])
@pytest.mark.parametrize(("next_n", "per_draft"), [(1, False), (2, False), (4, True)])
@pytest.mark.parametrize(("dtype", "scaled"), FORMS)
def test_paged_is_exact(dtype, scaled, next_n, per_draft, page_size, pad):
    problem = paged(dtype, scaled, kv_heads=2, page_size=page_size, next_n=next_n, per_draft=per_draft)
    lengths = [0, 300, 17, 1]
    if per_draft:
        lengths = [[max(0, length - draft) for draft in (3, 0, 2, 1)] for length in lengths]
    inputs = make_paged_inputs(problem, seed=4, lengths=lengths, page_pad_bytes=pad)
    exact = exact_paged_mqa_logits(inputs, scale=0.125)
    assert logits_error(run_paged(problem, inputs, scale=0.125), exact, fp8=False) is None


def test_lengths_are_clamped():
    problem = paged(next_n=2, longest=40)
    inputs = make_paged_inputs(problem, lengths=[40] * 4)
    wild = dataclasses.replace(inputs, context_lens=torch.tensor([-3, 1, 2**31 - 1, 41], dtype=torch.int32))
    got = run_paged(problem, wild)
    assert logits_error(got, exact_paged_mqa_logits(wild), fp8=False) is None
    # With next_n 2 and one length per sequence, draft 0 of length 1 sees nothing, draft 1 one key.
    assert (got > -torch.inf).sum(dim=1).tolist() == [0, 0, 0, 1, 40, 40, 40, 40]


def test_columns_beyond_the_block_table_are_masked():
    problem = paged(longest=40)
    inputs = make_paged_inputs(problem, lengths=[40] * 4)
    got = reference.paged_mqa_logits(inputs.q, inputs.cache, inputs.weights, inputs.context_lens, inputs.block_tables[:, :2], 64)
    assert (got > -torch.inf).sum(dim=1).tolist() == [32] * 4


def test_paged_equals_ragged_over_the_same_rows():
    problem = paged("float8_e4m3fn", True, batch=3, longest=70)
    inputs = make_paged_inputs(problem, lengths=[70, 33, 5])
    got = run_paged(problem, inputs)
    k, k_scale = reference.gather_indexer_cache(inputs.cache, inputs.block_tables, torch.tensor([0, 70, 103, 108]))
    ragged_out = reference.mqa_logits(
        inputs.q[:, 0],
        k,
        inputs.weights,
        torch.tensor([0, 70, 103]),
        torch.tensor([70, 103, 108]),
        k_scale=k_scale,
        max_seqlen_k=70,
    )
    assert torch.allclose(got, ragged_out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_nan_is_kept_and_not_selected(dtype, relu):
    source = torch.Generator().manual_seed(0)
    q, k = (torch.randn(*shape, generator=source) for shape in ((3, 4, 16), (9, 16)))
    q[1, 2, 5], k[6, 0] = torch.nan, torch.nan
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32)
    arguments = (q.to(dtype), k.to(dtype), torch.rand(3, 4, generator=source), starts, ends)
    scores = gdn.mqa_logits(*arguments, relu=relu)
    assert scores.isnan().tolist() == [[row == 1 or key == 6 for key in range(9)] for row in range(3)]
    chosen = gdn.indexer_topk(*arguments, 8, relu=relu)
    every = [key for key in range(9) if key != 6]
    assert chosen.tolist() == [every, [-1] * 8, every]


def test_a_wrong_result_is_noticed():
    problem = ragged("float8_e4m3fn", True)
    inputs = make_mqa_inputs(problem, seed=5)
    exact = exact_mqa_logits(inputs)
    good = run_ragged(problem, inputs)
    assert logits_error(good, exact, fp8=True) is None
    unmasked, unwritten, off = good.clone(), good.clone(), good.clone()
    unmasked[0, -1] = 0.0
    unwritten[-1, 3] = torch.nan
    row, column = (exact.visible & (exact.values.abs() > 0.1 * exact.values.abs().max())).nonzero()[0].tolist()
    off[row, column] *= 1.5
    assert "masked wrongly" in logits_error(unmasked, exact, fp8=True)
    assert logits_error(unwritten, exact, fp8=True) is not None
    assert logits_error(off, exact, fp8=True) is not None
    assert logits_error(good.roll(1, dims=0), exact, fp8=True) is not None
    assert calc_diff(torch.ones(5), torch.ones(5)) == 0.0


def test_ranges_hold_what_they_promise():
    generator = torch.Generator().manual_seed(0)
    starts, ends = key_ranges("hard", 70, 90, generator)
    assert bool((starts == ends).any() and (starts > ends).any() and (ends > 90).any() and (starts < 0).any())
    starts, ends = key_ranges("causal", 10, 90, generator)
    assert starts.tolist() == [0] * 10 and ends.tolist() == list(range(81, 91))
    starts, ends = key_ranges("sequences", 40, 90, generator)
    assert len(set(starts.tolist())) == 4 and bool((ends > starts).all()) and bool((ends <= 90).all())
