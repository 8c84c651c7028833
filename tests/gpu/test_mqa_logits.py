"""Ragged logits on a Hopper GPU, each backend against exact float64 products of the same values.

Each row of VARIANTS is one compiled kernel per backend (some seconds); every test reuses those. Together they cover all
pairs of what the formats, heads and flags can be in the served region. Outputs are poisoned with NaN and their rows end
in a margin that must stay NaN; keys outside every range are NaN.
"""

import dataclasses
import importlib

import pytest
import torch

import gdn
from gdn import runtime
from gdn.device import H100
from gdn.ops.indexer.inputs import MqaInputs, make_mqa_inputs
from gdn.ops.indexer.oracle import exact_mqa_logits, logits_error
from gdn.ops.indexer.problem import MqaLogitsParams, MqaLogitsProblem
from gdn.runtime import registry
from tests.gpu import graphs
from tests.gpu.twins import check_repeats

pytestmark = pytest.mark.gpu

BACKENDS = tuple(registry.operator("mqa_logits").modules)
FP8, BF16 = "float8_e4m3fn", "bfloat16"
RANGES = ("causal", "full", "random", "hard", "sequences")
SCALE = 0.088

# heads, kv_heads, head_dim, dtype, k_scale, weights, relu, clean, out, packed
VARIANTS = {
    "h64-fp8": (64, 1, 128, FP8, True, "float32", True, True, "float32", False),
    "h32-fp8-packed-bf16": (32, 1, 128, FP8, True, BF16, True, True, BF16, True),
    "h16-fp8-unclean": (16, 1, 128, FP8, True, "float32", True, False, "float32", False),
    "h16-bf16": (16, 1, 128, BF16, False, BF16, True, True, "float32", False),
    "h4-cast-packed": (4, 1, 128, FP8, False, None, True, True, "float32", True),
    "h4-bf16-linear-d64": (4, 1, 64, BF16, False, None, False, True, BF16, False),
    "h8-fp8-linear-packed-unclean-d64": (8, 1, 64, FP8, True, "float32", False, False, "float32", True),
    "h64-bf16-packed-d64": (64, 1, 64, BF16, False, "float32", True, True, "float32", True),
    "h8-cast-d64-bf16-out": (8, 1, 64, FP8, False, BF16, True, False, BF16, False),
    "h1-fp8": (1, 1, 128, FP8, True, "float32", True, True, "float32", False),
    "h16-kv2-fp8-packed": (16, 2, 128, FP8, True, "float32", True, True, "float32", True),
    "h32-kv2-bf16-linear-unclean-d64": (32, 2, 64, BF16, False, BF16, False, False, BF16, False),
    "h10-fp8": (10, 1, 128, FP8, True, "float32", True, True, "float32", False),  # groups of queries end inside of a half
    "h63-fp8-bf16-weights": (63, 1, 128, FP8, True, BF16, True, True, "float32", False),
    "h5-bf16-linear-packed-d64": (5, 1, 64, BF16, False, "float32", False, True, "float32", True),
    "h64-kv4-fp8": (64, 4, 128, FP8, True, "float32", True, True, "float32", False),
    "h15-kv5-bf16-bf16-out": (15, 5, 128, BF16, False, None, True, True, BF16, False),
    "h6-kv6-fp8-packed-unclean": (6, 6, 128, FP8, True, "float32", True, False, "float32", True),
    "h64-kv64-bf16": (64, 64, 128, BF16, False, "float32", True, True, "float32", False),
}
# What a backend refuses, and a word of its refusal. A kernel that learns to serve one of these fails here: move it up.
REFUSED = {backend: {"h64-kv64-bf16": "shared memory"} for backend in BACKENDS}
SERVED = [(b, v) for b in BACKENDS for v in VARIANTS if v not in REFUSED.get(b, {})]


def problem_of(variant: str, num_queries: int, num_keys: int) -> MqaLogitsProblem:
    *fields, packed = VARIANTS[variant]
    columns = num_keys * 3 // 4 if packed else num_keys  # shorter than the longest range: the rest is cut off
    return MqaLogitsProblem(*fields, packed=packed, num_queries=num_queries, num_keys=num_keys, num_columns=columns)


def poisoned(problem: MqaLogitsProblem, margin: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """out [M, columns] in rows that end in a margin, and the whole."""
    dtype = getattr(torch, problem.out_dtype)
    whole = torch.full((problem.num_queries, problem.num_columns + margin), torch.nan, dtype=dtype, device="cuda")
    return whole[:, : problem.num_columns], whole[:, problem.num_columns :]


def run(problem: MqaLogitsProblem, inputs: MqaInputs, backend: str, out: torch.Tensor | None = None) -> torch.Tensor:
    return gdn.mqa_logits(
        inputs.q,
        inputs.k,
        inputs.weights,
        inputs.cu_seqlen_ks,
        inputs.cu_seqlen_ke,
        k_scale=inputs.k_scale,
        scale=SCALE,
        relu=problem.relu,
        max_seqlen_k=problem.num_columns if problem.packed else None,
        clean_logits=problem.clean,
        out_dtype=getattr(torch, problem.out_dtype),
        out=out,
        backend=backend,
    )


def error_of(problem: MqaLogitsProblem, inputs: MqaInputs, got: torch.Tensor) -> str | None:
    packed = problem.num_columns if problem.packed else None
    exact = exact_mqa_logits(inputs, scale=SCALE, relu=problem.relu, max_seqlen_k=packed)
    return logits_error(got, exact, fp8=problem.dtype == FP8, clean=problem.clean)


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize(("backend", "variant"), SERVED)
def test_exact(backend, variant, ranges):
    for num_queries, num_keys in ((67, 65), (130, 1000), (257, 2049)):
        problem = problem_of(variant, num_queries, num_keys)
        inputs = make_mqa_inputs(problem, "cuda", seed=num_keys, ranges=ranges)
        out, margin = poisoned(problem)
        assert run(problem, inputs, backend, out) is out
        assert error_of(problem, inputs, out) is None, (num_queries, num_keys)
        assert bool(margin.isnan().all()), "wrote beyond a row"


@pytest.mark.parametrize(("backend", "variant"), [(b, v) for b in REFUSED for v in REFUSED[b] if b in BACKENDS])
def test_refusals_are_told(backend, variant):
    problem = problem_of(variant, 8, 64)
    out, _ = poisoned(problem)
    with pytest.raises(ValueError, match=REFUSED[backend][variant]):
        run(problem, make_mqa_inputs(problem, "cuda"), backend, out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8", "h64-kv4-fp8", "h1-fp8"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 515), (3, 64), (5, 0), (0, 5), (9, 63), (8, 127)])
def test_few_rows_and_keys(backend, num_queries, num_keys, variant):
    problem = problem_of(variant, num_queries, num_keys)
    inputs = make_mqa_inputs(problem, "cuda", ranges="full")
    out, margin = poisoned(problem)
    run(problem, inputs, backend, out)
    assert error_of(problem, inputs, out) is None
    assert bool(margin.isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranges_empty(backend):
    problem = problem_of("h64-fp8", 70, 300)
    inputs = make_mqa_inputs(problem, "cuda")
    inputs = dataclasses.replace(inputs, cu_seqlen_ke=inputs.cu_seqlen_ks)
    out, _ = poisoned(problem)
    run(problem, inputs, backend, out)
    assert bool((out == -torch.inf).all())


ONE_SET = {"accumulator_sets": 1, "pass_turn_at_issue": False}
OLD = ONE_SET | {"steps_in_flight_at_turn": 1, "relu_as_add_abs": False, "balanced_fraction": 0, "tiles_per_item": 32}


@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("h64-fp8", OLD | {"tiles_per_item": 1}),
        ("h64-fp8", {"accumulator_sets": 2, "pass_turn_at_issue": True, "balanced_fraction": 8, "tiles_per_item": 1}),
        ("h64-fp8", {"accumulator_sets": 2, "pass_turn_at_issue": False, "balanced_fraction": 1, "tiles_per_item": 3}),
        ("h32-fp8-packed-bf16", {"accumulator_sets": 2, "balanced_fraction": 1, "store_width": 32, "key_stages": 6}),
        ("h16-bf16", OLD | {"steps_in_flight_at_turn": 0, "balanced_fraction": 8, "tiles_per_item": 2}),
        ("h16-fp8-unclean", {"balanced_fraction": 1, "relu_as_add_abs": True, "tiles_per_item": 2}),
        ("h4-cast-packed", OLD | {"balanced_fraction": 8, "tiles_per_item": 2133, "store_width": 32, "key_stages": 6}),
        ("h4-cast-packed", OLD | {"relu_as_add_abs": True}),
        ("h64-fp8", {"balanced_fraction": 8, "pass_turn_at_issue": False, "tiles_per_item": 3}),
        ("h4-bf16-linear-d64", OLD | {"balanced_fraction": 1, "store_width": 32, "key_stages": 4}),
        ("h64-kv4-fp8", {"balanced_fraction": 8, "tiles_per_item": 3}),
        ("h5-bf16-linear-packed-d64", {"balanced_fraction": 8, "store_width": 32, "key_stages": 4}),
    ],
)
def test_configurations_of_cute(variant, fields):
    """Configurations that no default has here: both numbers of accumulator sets, deals and stores next to each other."""
    module = importlib.import_module(registry.operator("mqa_logits").modules["cute"])
    cases = (300, 2049, "hard"), (300, 2049, "sequences"), (1, 1000, "full"), (4099, 100, "random"), (2000, 3000, "causal")
    for num_queries, num_keys, ranges in cases:
        problem = problem_of(variant, num_queries, num_keys)
        config = dataclasses.replace(module.default_config(problem_of(variant, 4096, 32768), H100), **fields)
        assert module.fits(problem, config, H100)
        inputs = make_mqa_inputs(problem, "cuda", seed=num_keys, ranges=ranges)
        out, margin = poisoned(problem)
        weights = inputs.weights.contiguous() if inputs.weights is not None else None
        prepared = runtime.prepare(problem, torch.device("cuda"), "cute", config=config)
        ranges_of = (inputs.cu_seqlen_ks, inputs.cu_seqlen_ke)
        prepared.launch(MqaLogitsParams(inputs.q, inputs.k, inputs.k_scale, weights, *ranges_of, out, SCALE))
        assert error_of(problem, inputs, out) is None, (num_queries, num_keys, ranges)
        assert bool(margin.isnan().all()), "wrote beyond a row"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_far_apart(backend):
    """Work is dealt by what the ranges hold: here by a few rows among thousands that see nothing."""
    problem = problem_of("h64-fp8", 9001, 1000)
    inputs = make_mqa_inputs(problem, "cuda", ranges="full", poison=False)
    for rows in ([0, 9000], [4711], [8, 2500, 2501, 8999]):
        starts = torch.full_like(inputs.cu_seqlen_ks, 5)
        ends = torch.zeros_like(starts)
        ends[rows] = torch.tensor([1000 - 7 * index for index in range(len(rows))], dtype=torch.int32, device="cuda")
        here = dataclasses.replace(inputs, cu_seqlen_ks=starts, cu_seqlen_ke=ends)
        out, _ = poisoned(problem)
        run(problem, here, backend, out)
        assert error_of(problem, here, out) is None, rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranges", ["causal", "sequences"])
def test_a_long_prefill(backend, ranges):
    problem = problem_of("h64-fp8", 2048, 8192)
    inputs = make_mqa_inputs(problem, "cuda", ranges=ranges)
    out, _ = poisoned(problem)
    run(problem, inputs, backend, out)
    assert error_of(problem, inputs, out) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_2_31_scores(backend):
    """Offsets into out need 64 bits; a sample of rows, the last among them, is compared."""
    problem = problem_of("h64-fp8", 16_500, 131_072)
    assert problem.num_queries * problem.num_columns > 2**31
    inputs = make_mqa_inputs(problem, "cuda")
    out = torch.full((problem.num_queries, problem.num_columns), torch.nan, device="cuda")
    run(problem, inputs, backend, out)
    sample = torch.tensor([0, 1, 8191, 16_383, 16_384, 16_385, 16_498, 16_499], device="cuda")
    part = MqaInputs(
        inputs.q.view(torch.uint8)[sample].view(inputs.q.dtype),
        inputs.k,
        inputs.k_scale,
        inputs.weights[sample],
        inputs.cu_seqlen_ks[sample],
        inputs.cu_seqlen_ke[sample],
    )
    assert error_of(problem, part, out[sample]) is None
    masked = sum(int((out[low : low + 500] == -torch.inf).sum()) for low in range(0, problem.num_queries, 500))
    visible = int((inputs.cu_seqlen_ke - inputs.cu_seqlen_ks).sum())
    assert masked == out.numel() - visible


@pytest.mark.parametrize("balanced_fraction", [1, 8])
def test_more_tiles_than_costs_can_count(balanced_fraction):
    """Nothing is dealt by cost from 2**30 tiles on. Each row sees keys of its own, so parts of the problem give its scores."""
    rows, num_keys, columns, apart = 2**17, 2**22, 128, 250
    problem = MqaLogitsProblem(64, 1, 128, FP8, False, None, True, True, "float32", True, rows, num_keys, columns)
    generator = torch.Generator("cuda").manual_seed(1)

    def values(*shape):  # finite, of both signs
        bits = torch.randint(0, 0x60, shape, dtype=torch.uint8, device="cuda", generator=generator)
        bits[..., ::2] |= 0x80
        return bits

    q, k = values(rows, 64, 128), values(num_keys, 1, 128)
    row = torch.arange(rows, dtype=torch.int32, device="cuda")
    starts = row // 8 * apart + row % 8
    ends = starts + row % (columns + 1)
    module = importlib.import_module(registry.operator("mqa_logits").modules["cute"])
    config = dataclasses.replace(module.default_config(problem, H100), balanced_fraction=balanced_fraction, tiles_per_item=64)
    out, margin = poisoned(problem)
    prepared = runtime.prepare(problem, torch.device("cuda"), "cute", config=config)
    fp8 = torch.float8_e4m3fn
    prepared.launch(MqaLogitsParams(q.view(fp8), k.view(fp8), None, None, starts, ends, out, SCALE))
    assert bool(margin.isnan().all()), "wrote beyond a row"
    for first in range(0, rows, 1024):
        part, low = slice(first, first + 1024), first // 8 * apart
        keys = k[low : low + 128 * apart + 8].view(torch.float8_e4m3fn)
        want = gdn.mqa_logits(
            q[part].view(torch.float8_e4m3fn), keys, None, starts[part] - low, ends[part] - low, scale=SCALE,
            max_seqlen_k=columns, backend="cute",
        )  # fmt: skip
        assert torch.equal(out[part], want), first


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8", "h4-cast-packed", "h64-kv4-fp8"])
def test_the_same_bits_every_time(backend, variant):
    problem = problem_of(variant, 257, 2049)
    inputs = make_mqa_inputs(problem, "cuda", ranges="hard")
    check_repeats(run, {"problem": problem, "inputs": inputs}, backend=backend)


@pytest.mark.parametrize("sizes", [(130, 1000), (1500, 4000)])  # the larger one has rounds before the even end of the deal
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_follows_changed_ranges_and_contents(backend, sizes, device):
    problem = problem_of("h64-fp8", *sizes)
    first, *others = (
        make_mqa_inputs(problem, device, seed=seed, ranges=ranges, poison=seed > 0)
        for seed, ranges in enumerate(("causal", "hard", "random", "full", "sequences"))
    )
    for other in others:
        assert error_of(problem, other, run(problem, other, backend)) is None

    def logits(out, **contents):
        return run(problem, MqaInputs(**contents), backend, out)

    graphs.check(logits, vars(first) | {"out": poisoned(problem)[0]}, (), [vars(other) for other in others], device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_converted_arguments(backend):
    """Query rows out of a wider tensor, int64 ranges, float16 and float64 weights: what the operator brings into form."""
    problem = problem_of("h64-fp8", 67, 300)
    inputs = make_mqa_inputs(problem, "cuda")
    wide = torch.zeros(67, 80, 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[:, 3:67]
    wide.view(torch.uint8).copy_(inputs.q.view(torch.uint8))
    strided = dataclasses.replace(
        inputs, q=wide, cu_seqlen_ks=inputs.cu_seqlen_ks.long(), cu_seqlen_ke=inputs.cu_seqlen_ke.long()
    )
    for dtype in (torch.float16, torch.float64):
        converted = dataclasses.replace(strided, weights=inputs.weights.to(dtype))
        assert error_of(problem, converted, run(problem, converted, backend)) is None
