"""Dense attention of prefill by its kernel on a Hopper GPU, against float64 softmax over the same positions.

Outputs are NaN before a launch, and so are cache rows after a sequence's last token, blocks of nobody, and what a padded cache
has between its rows.
"""

import importlib
from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.core.check import dtype_name
from gdn.device import H100
from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem
from gdn.runtime import registry
from gdn.testing.compare import same_bits
from tests.gpu.attention import Inputs, Variant, exact, head_errors, make_inputs, of_torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

Tensor = torch.Tensor
Found = tuple[Tensor, Tensor]
FP16 = torch.float16

VARIANTS = {
    "16/2": Variant(16, 2),
    "24/2, gate": Variant(24, 2, has_gate=True),  # 10 queries of 12 heads: 8 rows of a tile are empty
    "12/1, FP16, pages of 272": Variant(12, 1, dtype=FP16, block_size=272),
    "6/1, packed": Variant(6, 1, block_size=1344, layout="packed"),
    "5/5, padded": Variant(5, 5, dim=128, block_size=48, layout="padded"),
    "64/4, FP16": Variant(64, 4, dim=128, dtype=FP16, block_size=96, layout="pair", has_gate=True),
    "128/1": Variant(128, 1, block_size=80),  # a query a tile
}
# Tokens of each sequence, and new ones among them.
BATCHES = {
    "ragged": ([1, 80, 81, 0, 300, 64], [1, 79, 40, 0, 17, 64]),
    "one long": ([700], [260]),
    "few new": ([400, 9, 16, 33], [2, 9, 1, 16]),
    "equal": ([160, 160], [160, 160]),
}


def problem_of(inputs: Inputs) -> AttentionPrefillProblem:
    q, k_cache = inputs.arguments["q"], inputs.arguments["kv_cache"][0]
    return AttentionPrefillProblem(
        num_heads=q.shape[1], num_kv_heads=k_cache.shape[2], head_dim=q.shape[2], dtype=dtype_name(q.dtype),
        block_size=k_cache.shape[1], index_dtype=None, has_topk_length=False, has_gate=inputs.arguments["gate"] is not None,
        heads_adjacent=k_cache.shape[2] == 1, rows_aligned=True, num_tokens=len(q),
        num_sequences=len(inputs.arguments["seq_lens"]),
        max_context_len=inputs.arguments["block_tables"].shape[1] * k_cache.shape[1],
    )  # fmt: skip


def params_of(inputs: Inputs, *, out: Tensor | None = None, scale: float | None = None) -> AttentionPrefillParams:
    arguments, q = inputs.arguments, inputs.arguments["q"]
    return AttentionPrefillParams(
        q, *arguments["kv_cache"], arguments["block_tables"], arguments["query_start_loc"], arguments["seq_lens"],
        arguments["gate"], torch.full_like(q, torch.nan) if out is None else out,
        torch.full(q.shape[:2], torch.nan, device="cuda"), q.shape[2] ** -0.5 if scale is None else scale,
    )  # fmt: skip


def run(inputs: Inputs, config: Any = None, **options: Any) -> Found:
    params = params_of(inputs, **options)
    prepared = runtime.prepare(problem_of(inputs), torch.device("cuda"), "cute", config=config)
    assert prepared.launch is not None
    prepared.launch(params)
    return params.out, params.lse


def check(inputs: Inputs, found: Found) -> None:
    """o within twice of what torch makes of the same rows in the same dtype, per head; the log-sum-exp, -inf in padding."""
    (out, lse), (exact_out, exact_lse) = found, exact(inputs)
    allowed = (2 * head_errors(of_torch(inputs), exact_out)).clamp(min=1e-3)
    errors = head_errors(out, exact_out)
    assert bool((errors <= allowed).all()), f"errors {errors.tolist()}, allowed {allowed.tolist()}"
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=2e-4, rtol=1e-5)


def check_graph(inputs: Inputs, config: Any = None) -> None:
    """A captured launch, replayed with other numbers of new tokens of three sequences, has the bits of launches of its own."""
    params = params_of(inputs)
    prepared = runtime.prepare(problem_of(inputs), torch.device("cuda"), "cute", config=config)
    assert prepared.launch is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch(params)
    for new in ([90, 60, 10], [3, 100, 20], [0, 0, 1]):
        inputs.arguments["query_start_loc"].copy_(torch.tensor([0, *new]).cumsum(0))
        graph.replay()
        fresh = run(inputs, config)
        assert same_bits(params.out, fresh[0]) and same_bits(params.lse, fresh[1])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_batches(variant: str, batch: str) -> None:
    inputs = make_inputs(VARIANTS[variant], *BATCHES[batch], 8, dense=True, seed=len(batch))
    found = run(inputs)
    check(inputs, found)
    assert all(same_bits(one, other) for one, other in zip(found, run(inputs), strict=True))


def configurations(dim: int) -> list[Any]:
    module = importlib.import_module(registry.operator("attention_prefill").modules["cute"])
    inputs = make_inputs(Variant(16, 2, dim=dim), *BATCHES["ragged"], 8, dense=True)
    found: list[Any] = module.configs(problem_of(inputs), H100)
    return found


@pytest.mark.parametrize("batch", ["ragged", "one long"])
@pytest.mark.parametrize("dim", [256, 128])
def test_every_configuration(dim: int, batch: str) -> None:
    inputs = make_inputs(Variant(16, 2, dim=dim), *BATCHES[batch], 8, dense=True)
    for config in configurations(dim):
        found = run(inputs, config)
        check(inputs, found)
        assert all(same_bits(one, other) for one, other in zip(found, run(inputs, config), strict=True))


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_split_tiles(splits: int) -> None:
    """Gates, fewer steps than blocks, empty rows of a tile, values that are not finite, a graph with other lengths."""
    variant = VARIANTS["24/2, gate"]
    config = next(one for one in configurations(256) if one.splits == splits)
    for batch in BATCHES:
        inputs = make_inputs(variant, *BATCHES[batch], 8, dense=True, seed=splits)
        check(inputs, run(inputs, config))
    inputs = make_inputs(variant, [300, 100, 40], [90, 60, 10], 8, dense=True)
    out, _ = run(inputs, config)
    value = inputs.arguments["kv_cache"][1]
    block = inputs.arguments["block_tables"][0, 280 // 16]
    value[block, 280 % 16, 1] = torch.nan  # the head of 12 to 23, from the row of position 280 on
    found, _ = run(inputs, config)
    spoilt = found.isnan().any(2)
    assert spoilt[70:90, 12:].all() and not spoilt[:70].any() and not spoilt[:, :12].any() and not spoilt[90:].any()
    assert same_bits(found[90:], out[90:])
    value[block, 280 % 16, 1] = 0.0
    check_graph(inputs, config)


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    lengths, new = BATCHES["ragged"]
    inputs = make_inputs(VARIANTS["16/2"], lengths, new, 8, dense=True)
    out, lse = run(inputs)
    starts = inputs.arguments["query_start_loc"].tolist()
    for n in range(len(lengths)):
        own = slice(starts[n], starts[n + 1])
        alone = dict(inputs.arguments)
        alone |= {name: alone[name][n : n + 1] for name in ("block_tables", "seq_lens")}
        alone |= {"q": alone["q"][own], "query_start_loc": torch.tensor([0, new[n]], device="cuda", dtype=torch.int32)}
        if new[n]:
            found = run(Inputs(alone, inputs.positions[own]))
            assert same_bits(found[0], out[own]) and same_bits(found[1], lse[own])


@pytest.mark.parametrize("name", ["kv_cache", "q"])
def test_what_is_not_finite_stays_in_the_rows_that_see_it(name: str) -> None:
    """A NaN in the key or the value of a position, or an infinite query: rows before it are as they were."""
    inputs = make_inputs(VARIANTS["24/2, gate"], [300], [200], 8, dense=True)
    out, _ = run(inputs)
    arguments = inputs.arguments
    if name == "q":
        arguments["q"][50, 3] = torch.inf
        found, _ = run(inputs)
        assert found[50, 3].isnan().all() and same_bits(found[:50], out[:50]) and same_bits(found[51:], out[51:])
        return
    for cache in arguments["kv_cache"]:
        block, size = arguments["block_tables"][0, 150 // 16], 16
        before = cache[block, 150 % size, 1].clone()
        cache[block, 150 % size, 1] = torch.nan
        found, _ = run(inputs)
        spoilt = found.isnan().any(2)
        assert not spoilt[:, :12].any() and not spoilt[:50, 12:].any() and spoilt[50:200, 12:].all()
        torch.testing.assert_close(found[:50].double(), exact(inputs)[0][:50].double(), atol=2e-2, rtol=2e-2)
        cache[block, 150 % size, 1] = before


def test_out_may_have_any_strides() -> None:
    inputs = make_inputs(VARIANTS["16/2"], *BATCHES["ragged"], 8, dense=True)
    out, lse = run(inputs)
    tokens, heads, dim = out.shape
    wide = torch.full((tokens, heads + 1, dim + 1), torch.nan, dtype=out.dtype, device="cuda")
    found, found_lse = run(inputs, out=wide[:, :-1, :-1])
    assert same_bits(found, out) and same_bits(found_lse, lse)
    assert wide[:, -1].isnan().all() and wide[..., -1].isnan().all()


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.7])
def test_scales(scale: float) -> None:
    inputs = make_inputs(VARIANTS["16/2"], *BATCHES["ragged"], 8, dense=True)
    out, _ = run(inputs, scale=scale)
    given = Inputs(inputs.arguments | {"scale": scale}, inputs.positions)
    torch.testing.assert_close(out.double(), exact(given)[0].double(), atol=3e-2, rtol=3e-2)


def test_a_graph_serves_other_lengths() -> None:
    variant = VARIANTS["16/2"]
    inputs = make_inputs(variant, [300, 100, 40], [90, 60, 10], 8, dense=True)
    run(inputs)
    check_graph(inputs)


def test_two_streams_at_once() -> None:
    calls = [make_inputs(VARIANTS["16/2"], [500, 70], [300, 70], 8, dense=True, seed=seed) for seed in (1, 2)]
    alone = [run(inputs) for inputs in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found: list[list[Found]] = [[], []]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(run(calls[n]))
    torch.cuda.synchronize()
    for n, one in enumerate(alone):
        assert all(same_bits(out, one[0]) and same_bits(lse, one[1]) for out, lse in found[n])


def test_a_long_prompt() -> None:
    """The shapes of the benchmark, some rows of them in float64."""
    for tokens, context in ((8192, 8192), (2048, 32768)):
        g = torch.Generator("cuda").manual_seed(context)
        blocks = context // 16
        caches = tuple(torch.randn(blocks, 16, 2, 256, device="cuda", generator=g).bfloat16() for _ in range(2))
        q = torch.randn(tokens, 16, 256, device="cuda", generator=g).bfloat16()
        order = torch.randperm(blocks, device="cuda", generator=g).int()[None]
        bounds = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
        length = torch.tensor([context], device="cuda", dtype=torch.int32)
        arguments = {
            "q": q, "kv_cache": caches, "block_tables": order, "query_start_loc": bounds, "seq_lens": length, "gate": None
        }  # fmt: skip
        out, lse = run(Inputs(arguments, []))
        keys, values = (cache[order[0].long()].flatten(0, 1).double() for cache in caches)
        for token in (0, 1, 17, 100, tokens // 2, tokens - 1):
            seen = context - tokens + token + 1
            for head in (0, 7, 8, 15):
                score = keys[:seen, head // 8] @ q[token, head].double() / 16
                expected = score.softmax(0) @ values[:seen, head // 8]
                error = (out[token, head].double() - expected).norm() / expected.norm()
                assert error < 1e-2, (context, token, head, float(error))
                assert abs(float(lse[token, head]) - float(score.logsumexp(0))) < 2e-4
