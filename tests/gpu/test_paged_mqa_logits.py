"""Paged logits on a Hopper GPU, each backend against exact float64 products of the rows that were put into the pages.

Each row of VARIANTS is one compiled kernel per backend; every test reuses those. Pages lie shuffled; whatever no row may
see is NaN: pages of nobody, the rest of a last page, bytes between pages. Outputs are poisoned with NaN and their rows
end in a margin that must stay NaN.
"""

import dataclasses

import pytest
import torch

import gdn
from gdn.ops.indexer.inputs import PagedInputs, make_paged_inputs
from gdn.ops.indexer.oracle import exact_paged_mqa_logits, logits_error
from gdn.ops.indexer.problem import PagedMqaLogitsProblem
from gdn.runtime import registry
from tests.gpu import graphs
from tests.gpu.twins import check_repeats

pytestmark = pytest.mark.gpu

BACKENDS = tuple(registry.operator("paged_mqa_logits").modules)
FP8, BF16 = "float8_e4m3fn", "bfloat16"
SCALE = 0.088

# heads, kv_heads, head_dim, dtype, k_scale, weights, relu, clean, out, page_size, next_n, per-draft lengths
VARIANTS = {
    "h64-fp8-p64": (64, 1, 128, FP8, True, "float32", True, True, "float32", 64, 1, False),
    "h64-fp8-p64-n2": (64, 1, 128, FP8, True, "float32", True, True, BF16, 64, 2, True),
    "h16-fp8-p16-n4": (16, 1, 128, FP8, True, BF16, True, True, "float32", 16, 4, False),
    "h16-bf16-p544": (16, 1, 128, BF16, False, BF16, True, True, "float32", 544, 1, False),
    "h4-cast-p272-n2": (4, 1, 128, FP8, False, None, True, True, "float32", 272, 2, True),
    "h4-bf16-linear-p128-n4-d64": (4, 1, 64, BF16, False, None, False, False, BF16, 128, 4, True),
    "h8-fp8-linear-p128-d64": (8, 1, 64, FP8, True, "float32", False, False, "float32", 128, 1, False),
    "h32-fp8-p544-n2-d64": (32, 1, 64, FP8, True, BF16, True, True, BF16, 544, 2, False),
    "h1-fp8-p16": (1, 1, 128, FP8, True, "float32", True, True, "float32", 16, 1, True),
    "h16-kv2-fp8-p64-n2": (16, 2, 128, FP8, True, "float32", True, True, "float32", 64, 2, False),
    "h32-kv2-bf16-p272-d64": (32, 2, 64, BF16, False, "float32", True, False, "float32", 272, 1, True),
    "h4-cast-p68": (4, 1, 128, FP8, False, None, True, True, "float32", 68, 1, True),
    "h64-bf16-p16-n4": (64, 1, 128, BF16, False, "float32", True, True, "float32", 16, 4, False),
    "h32-fp8-p64-n3": (32, 1, 128, FP8, True, "float32", True, True, "float32", 64, 3, False),
    "h64-fp8-p128-n8": (64, 1, 128, FP8, True, "float32", True, True, "float32", 128, 8, True),
    "h6-fp8-p272-n5": (6, 1, 128, FP8, True, "float32", True, True, "float32", 272, 5, False),
    "h6-bf16-p272-n3": (6, 1, 128, BF16, False, BF16, True, True, BF16, 272, 3, True),
    "h63-fp8-p64": (63, 1, 128, FP8, True, BF16, True, True, "float32", 64, 1, False),
    "h5-bf16-linear-p16-n4-d64": (5, 1, 64, BF16, False, "float32", False, True, "float32", 16, 4, True),
    "h64-kv4-fp8-p64": (64, 4, 128, FP8, True, "float32", True, True, "float32", 64, 1, False),
    "h34-kv2-bf16-p64-n8": (34, 2, 128, BF16, False, "float32", True, True, "float32", 64, 8, False),
    "h15-kv5-fp8-p544-n2": (15, 5, 128, FP8, True, None, True, True, BF16, 544, 2, True),
    "h6-kv6-fp8-p4-n3-d64": (6, 6, 64, FP8, True, BF16, True, False, "float32", 4, 3, False),
    "h64-kv64-bf16-p64": (64, 64, 128, BF16, False, "float32", True, True, "float32", 64, 1, False),
}
# What a backend refuses, and a word of its refusal. A kernel that learns to serve one of these fails here: move it up.
REFUSED = {backend: {"h64-kv64-bf16-p64": "shared memory"} for backend in BACKENDS}
SERVED = [(b, v) for b in BACKENDS for v in VARIANTS if v not in REFUSED.get(b, {})]


def problem_of(variant: str, batch: int, max_context_len: int) -> PagedMqaLogitsProblem:
    return PagedMqaLogitsProblem(*VARIANTS[variant], batch=batch, max_context_len=max_context_len)


def lengths_of(problem: PagedMqaLogitsProblem, lengths: list[int]) -> list[int] | list[list[int]]:
    """Lengths as they are, or per draft: each draft one or two keys more or less than its neighbour."""
    if not problem.per_draft_lengths:
        return lengths
    limit = problem.max_context_len
    return [[min(limit, max(0, length + (draft * 5) % 4 - 1)) for draft in range(problem.next_n)] for length in lengths]


def poisoned(problem: PagedMqaLogitsProblem, margin: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = problem.batch * problem.next_n, problem.max_context_len
    dtype = getattr(torch, problem.out_dtype)
    whole = torch.full((rows, columns + margin), torch.nan, dtype=dtype, device="cuda")
    return whole[:, :columns], whole[:, columns:]


def run(problem: PagedMqaLogitsProblem, inputs: PagedInputs, backend: str, out: torch.Tensor | None = None) -> torch.Tensor:
    return gdn.paged_mqa_logits(
        inputs.q,
        inputs.cache,
        inputs.weights,
        inputs.context_lens,
        inputs.block_tables,
        inputs.max_context_len,
        scale=SCALE,
        relu=problem.relu,
        clean_logits=problem.clean,
        out_dtype=getattr(torch, problem.out_dtype),
        out=out,
        backend=backend,
    )


def error_of(problem: PagedMqaLogitsProblem, inputs: PagedInputs, got: torch.Tensor) -> str | None:
    exact = exact_paged_mqa_logits(inputs, scale=SCALE, relu=problem.relu)
    return logits_error(got, exact, fp8=problem.dtype == FP8, clean=problem.clean)


def check(problem: PagedMqaLogitsProblem, inputs: PagedInputs, backend: str) -> None:
    out, margin = poisoned(problem)
    assert run(problem, inputs, backend, out) is out
    assert error_of(problem, inputs, out) is None
    assert bool(margin.isnan().all()), "wrote beyond a row"


@pytest.mark.parametrize("page_pad_bytes", [0, 16, 1040])
@pytest.mark.parametrize(("backend", "variant"), SERVED)
def test_exact(backend, variant, page_pad_bytes):
    page = VARIANTS[variant][9]
    lengths = [0, 1, 63, 64, 65, page - 1, page, page + 1, 0, 2 * page + 7, 1203, 1204]
    problem = problem_of(variant, len(lengths), 1204)
    inputs = make_paged_inputs(problem, "cuda", lengths=lengths_of(problem, lengths), page_pad_bytes=page_pad_bytes)
    check(problem, inputs, backend)


@pytest.mark.parametrize(("backend", "variant"), SERVED)
def test_one_sequence(backend, variant):
    for length in (1, 300, 4097):
        problem = problem_of(variant, 1, length)
        check(problem, make_paged_inputs(problem, "cuda", lengths=lengths_of(problem, [length])), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h16-fp8-p16-n4", "h4-cast-p272-n2", "h16-kv2-fp8-p64-n2"])
def test_more_sequences_than_multiprocessors(backend, variant):
    lengths = [(37 * sequence) % 401 for sequence in range(300)]
    problem = problem_of(variant, 300, 401)
    check(problem, make_paged_inputs(problem, "cuda", lengths=lengths_of(problem, lengths)), backend)


@pytest.mark.parametrize(("backend", "variant"), [(b, v) for b in REFUSED for v in REFUSED[b] if b in BACKENDS])
def test_refusals_are_told(backend, variant):
    problem = problem_of(variant, 2, 64)
    out, _ = poisoned(problem)
    with pytest.raises(ValueError, match=REFUSED[backend][variant]):
        run(problem, make_paged_inputs(problem, "cuda"), backend, out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_long_sequences_then_short_ones(backend):
    """The grid is made for the longest lengths that fit, the work dealt from those that are: both large, and far apart."""
    problem = problem_of("h16-fp8-p16-n4", 16, 65_536)
    inputs = make_paged_inputs(problem, "cuda", lengths=[65_536 - 1000 * sequence for sequence in range(16)])
    check(problem, inputs, backend)
    for lengths in ([65_536] + [0] * 15, [17] * 16, [0] * 15 + [40_000]):
        check(problem, dataclasses.replace(inputs, context_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda")), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h16-bf16-p544"])
def test_beyond_100k_keys(backend, variant):
    problem = problem_of(variant, 2, 131_072)
    check(problem, make_paged_inputs(problem, "cuda", lengths=[131_072, 100_003]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h64-fp8-p64-n2"])
def test_no_keys_and_no_sequences(backend, variant):
    problem = problem_of(variant, 3, 200)
    inputs = make_paged_inputs(problem, "cuda", lengths=[[0] * problem.next_n] * 3 if problem.per_draft_lengths else [0] * 3)
    out, _ = poisoned(problem)
    run(problem, inputs, backend, out)
    assert bool((out == -torch.inf).all())
    empty = problem_of(variant, 0, 200)
    got = gdn.paged_mqa_logits(
        inputs.q[:0], inputs.cache, inputs.weights[:0], inputs.context_lens[:0], inputs.block_tables[:0], 200, backend=backend
    )
    assert got.shape == (empty.batch, 200)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_are_clamped(backend):
    problem = problem_of("h16-fp8-p16-n4", 5, 200)
    inputs = make_paged_inputs(problem, "cuda", lengths=[200] * 5)
    wild = torch.tensor([-7, 2, 2**31 - 1, 201, -(2**31) + 8], dtype=torch.int32, device="cuda")
    check(problem, dataclasses.replace(inputs, context_lens=wild), backend)
    # And to what the block table can address: 208 columns' worth of pages, of which four are left.
    short = dataclasses.replace(inputs, block_tables=inputs.block_tables[:, :4], context_lens=wild)
    check(problem, short, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h4-cast-p272-n2", "h16-kv2-fp8-p64-n2"])
def test_other_table_entries_are_not_followed(backend, variant):
    page = VARIANTS[variant][9]
    lengths = [page, 1, 0, 3 * page - 5]
    problem = problem_of(variant, 4, 4 * page)
    inputs = make_paged_inputs(
        problem, "cuda", lengths=[[n] * problem.next_n for n in lengths] if problem.per_draft_lengths else lengths
    )
    for sequence, length in enumerate(lengths):
        inputs.block_tables[sequence, -(-length // page) :] = 2**30 if sequence % 2 else -1
    check(problem, inputs, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_beyond_4_gib(backend):
    """Page offsets need 64 bits: the pages of a small batch lie 16 MiB apart."""
    problem = problem_of("h64-fp8-p64", 4, 5000)
    inputs = make_paged_inputs(problem, "cuda", page_pad_bytes=16 * 2**20)
    assert inputs.cache.stride(0) * inputs.cache.shape[0] > 2**32
    check(problem, inputs, backend)


@pytest.mark.parametrize("has_out", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h16-fp8-p16-n4", "h4-cast-p272-n2", "h64-fp8-p64-n2"])
def test_a_graph_follows_changed_lengths(backend, variant, has_out, device):
    """Captured once, replayed with other lengths, zero included, as a serving engine does."""
    batch, longest = 40, 900
    problem = problem_of(variant, batch, longest)
    inputs = make_paged_inputs(problem, device)
    generator = torch.Generator().manual_seed(0)
    changes = []
    for step in range(5):
        lengths = torch.randint(0, longest + 1, tuple(inputs.context_lens.shape), generator=generator, dtype=torch.int32)
        lengths[torch.rand(batch, generator=generator) < 0.3] = 0
        if step >= 3:
            lengths.fill_(0 if step == 3 else longest)
        changes.append({"context_lens": lengths.to(device)})
        check(problem, dataclasses.replace(inputs, **changes[-1]), backend)

    def logits(context_lens, out=None):
        return run(problem, dataclasses.replace(inputs, context_lens=context_lens), backend, out)

    out = {"out": poisoned(problem)[0]} if has_out else {}
    graphs.check(logits, {"context_lens": inputs.context_lens, **out}, (), changes, device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h16-bf16-p544", "h4-cast-p272-n2", "h64-kv4-fp8-p64"])
def test_the_same_bits_every_time(backend, variant):
    lengths = [900, 0, 17, 544, 545, 899, 1]
    problem = problem_of(variant, len(lengths), 900)
    inputs = make_paged_inputs(problem, "cuda", lengths=lengths_of(problem, lengths))
    check_repeats(run, {"problem": problem, "inputs": inputs}, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_alone_gives_the_same_bits(backend):
    """A sequence's scores do not depend on what else is in the batch."""
    lengths = [900, 3, 544, 0, 65]
    problem = problem_of("h16-fp8-p16-n4", len(lengths), 900)
    inputs = make_paged_inputs(problem, "cuda", lengths=lengths)
    together = run(problem, inputs, backend)
    for sequence in range(len(lengths)):
        part = slice(sequence, sequence + 1)
        alone = dataclasses.replace(
            inputs,
            q=inputs.q[part],
            weights=inputs.weights[sequence * 4 : sequence * 4 + 4],
            context_lens=inputs.context_lens[part],
            block_tables=inputs.block_tables[part],
        )
        assert torch.equal(run(problem_of("h16-fp8-p16-n4", 1, 900), alone, backend), together[sequence * 4 : sequence * 4 + 4])


@pytest.mark.parametrize("backend", BACKENDS)
def test_deep_gemm_form(backend, switch):
    problem = problem_of("h64-fp8-p64", 3, 700)
    inputs = make_paged_inputs(problem, "cuda", lengths=[700, 0, 129])
    switch(GDN_BACKEND_PAGED_MQA_LOGITS=backend)
    plan = gdn.get_paged_mqa_logits_metadata(inputs.context_lens, 64, 132)
    got = gdn.fp8_paged_mqa_logits(
        inputs.q, inputs.cache, inputs.weights, inputs.context_lens, inputs.block_tables, plan, 700, clean_logits=True
    )
    assert logits_error(got, exact_paged_mqa_logits(inputs), fp8=True) is None
