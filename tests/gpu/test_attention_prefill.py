"""Dense attention of prefill by its kernel on a Hopper GPU, against float64 softmax over the same positions.

Outputs are NaN before a launch, and so are cache rows after a sequence's last token, blocks of nobody, and what a padded cache
has between its rows.
"""

import dataclasses
import importlib
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.core.check import dtype_name
from gdn.device import H100
from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem
from gdn.runtime import env, registry
from gdn.testing.compare import same_bits
from tests.gpu import graphs
from tests.gpu.attention import Inputs, Variant, exact, head_errors, make_inputs, of_torch
from tests.gpu.test_attention import dense
from tests.gpu.waits import no_waits
from tests.references import reference

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
    prepared = runtime.prepare(problem_of(inputs), torch.device("cuda"), "cute", config=config)
    assert prepared.launch is not None

    def launch(query_start_loc: Tensor) -> Found:
        params = params_of(Inputs(inputs.arguments | {"query_start_loc": query_start_loc}, inputs.positions))
        prepared.launch(params)
        return params.out, params.lse

    changes = [{"query_start_loc": [0, *accumulate(new)]} for new in ([90, 60, 10], [3, 100, 20], [0, 0, 1])]
    start = {"query_start_loc": inputs.arguments["query_start_loc"]}
    graphs.check(launch, start, (), changes, torch.device("cuda"))


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


@pytest.mark.parametrize("variant", ["16/2", "24/2, gate"])
def test_a_sequence_has_the_same_bits_in_any_batch(variant: str, switch: Callable[..., env.Switches]) -> None:
    """Batch-invariant: alone, where a call would deal its tiles to several blocks otherwise, among others, and elsewhere."""
    lengths, new = [5200, 0, 33, 510, 81, 1020, 64], [12, 0, 20, 30, 3, 90, 64]
    inputs = make_inputs(VARIANTS[variant], lengths, new, 8, dense=True)
    starts, given = inputs.arguments["query_start_loc"].tolist(), public(inputs)

    def call(members: list[int]) -> dict[int, Found]:
        rows = torch.cat([torch.arange(starts[n], starts[n + 1]) for n in members]).cuda()
        here = given | {name: given[name][members] for name in ("block_tables", "seq_lens")}
        here |= {name: None if given[name] is None else given[name][rows] for name in ("q", "gate")}
        bounds = [0, *accumulate(new[n] for n in members)]
        here |= {"query_start_loc": torch.tensor(bounds, dtype=torch.int32, device="cuda")}
        here |= {"query_lens_host": [new[n] for n in members], "seq_lens_host": [lengths[n] for n in members]}
        taken.update(splits_of(here))
        o, lse = gdn.attention(**here, return_lse=True)
        return {n: (o[start:end], lse[start:end]) for n, (start, end) in zip(members, pairwise(bounds), strict=True)}

    taken: set[int] = set()
    for n in (0, 3, 5):
        call([n])
    assert taken == {2, 4, 8}
    switch(GDN_BATCH_INVARIANT="1")
    taken.clear()
    every = call(list(range(len(new))))
    for members in (*([n] for n in range(len(new)) if new[n]), [5, 0], [3, 6, 2], list(range(len(new)))[::-1]):
        for n, one in call(members).items():
            assert all(same_bits(x, y) for x, y in zip(one, every[n], strict=True)), (n, members)
    assert taken == {1}


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


def check_two_streams(call: Callable[[Any], Found], given: list[Any]) -> None:
    """Both calls at once, many times, have the bits that each has alone."""
    alone = [call(one) for one in given]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in given]
    found: list[list[Found]] = [[], []]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(call(given[n]))
    torch.cuda.synchronize()
    for n, one in enumerate(alone):
        assert all(same(other, one) for other in found[n])


def test_two_streams_at_once() -> None:
    check_two_streams(run, [make_inputs(VARIANTS["16/2"], [500, 70], [300, 70], 8, dense=True, seed=seed) for seed in (1, 2)])


def test_a_long_prompt() -> None:
    """The shapes of the benchmark, some rows of them in float64."""
    for tokens, context in ((8192, 8192), (2048, 32768), (256, 32768), (16, 131072)):
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
        for token in {0, 1, min(17, tokens - 1), min(100, tokens - 1), tokens // 2, tokens - 1}:
            seen = context - tokens + token + 1
            for head in (0, 7, 8, 15):
                score = keys[:seen, head // 8] @ q[token, head].double() / 16
                expected = score.softmax(0) @ values[:seen, head // 8]
                error = (out[token, head].double() - expected).norm() / expected.norm()
                assert error < 1e-2, (context, token, head, float(error))
                assert abs(float(lse[token, head]) - float(score.logsumexp(0))) < 2e-4


# --- gdn.attention, whose choice is the default --------------------------------------------------------------------------------

# Blocks to a tile -> tokens of each sequence, and new ones among them.
CALLS = {
    1: ([200, 70], [40, 70]),
    2: ([510, 0, 300], [30, 0, 20]),
    4: ([1020, 9, 40], [90, 9, 0]),
    8: ([5200, 33], [12, 20]),
}
every_number_of_blocks = pytest.mark.parametrize("splits", CALLS)


def public(inputs: Inputs, with_host: bool = True) -> dict[str, Any]:
    """Arguments of `gdn.attention`; without lengths on the host with the bound that sends them to the kernel of prefill."""
    given, arguments = inputs.arguments, dense(inputs, with_host)
    return arguments if with_host else arguments | {"max_query_len": int(given["query_start_loc"].diff().max())}


def splits_of(arguments: dict[str, Any]) -> list[int]:
    return [part.config.splits for part in gdn.explain("attention", **arguments).parts if part.op == "attention_prefill"]


def call_of(splits: int, variant: Variant, seed: int = 1) -> tuple[Inputs, dict[str, Any]]:
    """A call that takes this number of blocks to a tile."""
    inputs = make_inputs(variant, *CALLS[splits], 8, dense=True, seed=seed)
    assert splits_of(public(inputs)) == splits_of(public(inputs, with_host=False)) == [splits]
    return inputs, public(inputs)


def attend(arguments: dict[str, Any], **options: Any) -> Found:
    o, lse = gdn.attention(**arguments, return_lse=True, **options)
    return o, lse


def same(one: Found, other: Found) -> bool:
    return same_bits(one[0], other[0]) and same_bits(one[1], other[1])


@pytest.mark.parametrize("with_host", [True, False], ids=["host lengths", "no host lengths"])
@pytest.mark.parametrize("variant", ["16/2", "24/2, gate", "64/4, FP16"])
@every_number_of_blocks
def test_the_public_call(splits: int, variant: str, with_host: bool) -> None:
    inputs = make_inputs(VARIANTS[variant], *CALLS[splits], 8, dense=True, seed=splits)
    arguments = public(inputs, with_host)
    attend(arguments)  # compiles
    torch.cuda.synchronize()
    with no_waits():
        found = attend(arguments)
    check(inputs, found)
    assert same(attend(arguments), found)


@every_number_of_blocks
def test_strided_and_expanded_arguments(splits: int) -> None:
    """One query for all heads, one token's gate for all tokens, caches with gaps, odd strides of all others."""
    inputs, arguments = call_of(splits, Variant(24, 2, has_gate=True, layout="padded"))
    q, gate = arguments["q"][:, :1].expand_as(arguments["q"]), arguments["gate"][:1].expand_as(arguments["gate"])
    want = attend(arguments | {"q": q.contiguous(), "gate": gate.contiguous()})
    tokens, heads, dim = q.shape
    wide = torch.full((tokens, heads + 1, dim + 1), torch.nan, dtype=q.dtype, device="cuda")
    starts, lengths = (arguments[name].long().repeat_interleave(2)[::2] for name in ("query_start_loc", "seq_lens"))
    tables = torch.nn.functional.pad(arguments["block_tables"], (0, 3))[:, :-3]
    strided = arguments | {"q": q, "gate": gate, "query_start_loc": starts, "seq_lens": lengths, "block_tables": tables}
    assert splits_of(strided) == [splits]
    assert same(attend(strided, out=wide[:, :-1, :-1]), want)
    assert wide[:, -1].isnan().all() and wide[..., -1].isnan().all()


@every_number_of_blocks
def test_sequences_that_share_their_pages(splits: int) -> None:
    """An expanded block table: the same queries have the same bits in both sequences."""
    length, new = CALLS[splits][0][0], 12
    inputs = make_inputs(VARIANTS["16/2"], [length, length], [new, new], 8, dense=True)
    arguments = public(inputs)
    arguments["block_tables"] = arguments["block_tables"][:1].expand(2, -1)
    arguments["q"] = arguments["q"][:new].repeat(2, 1, 1)
    assert splits_of(arguments) == [splits]
    o, lse = attend(arguments)
    assert same((o[:new], lse[:new]), (o[new:], lse[new:]))
    want = reference.attention(**_without_host(arguments) | {"q": arguments["q"].double()})
    assert float(head_errors(o, want).max()) < 1e-2


def _without_host(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if not name.endswith("_host")}


@pytest.mark.parametrize("pair", [(8, 8), (8, 2), (4, 2)], ids=str)
def test_public_calls_on_two_streams_at_once(pair: tuple[int, int]) -> None:
    check_two_streams(attend, [call_of(splits, VARIANTS["24/2, gate"], seed)[1] for seed, splits in enumerate(pair, 1)])


@pytest.mark.parametrize("with_host", [True, False], ids=["host lengths", "no host lengths"])
@every_number_of_blocks
def test_a_captured_public_call_serves_other_lengths(splits: int, with_host: bool) -> None:
    """Captured for short contexts, replayed for those of the tables' width: the number of blocks to a tile stays."""
    inputs, arguments = call_of(splits, VARIANTS["16/2"])
    lengths, new = (list(one) for one in CALLS[splits])
    if with_host:  # a third of the contexts, which a call of its own would deal to fewer blocks
        arguments["seq_lens"].copy_(torch.tensor([max(length // 3, count) for length, count in zip(lengths, new, strict=True)]))
    arguments = public(inputs, with_host)
    changes = []
    for count, length in ((new[0], lengths[0]), (9, lengths[0]), (1, lengths[0] // 2), (0, 0)):
        change = {"seq_lens": [length, *lengths[1:]], "query_start_loc": [0, *accumulate([count, *new[1:]])]}
        here = arguments | {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in change.items()}
        given = _without_host(here) | {"q": arguments["q"].double()}
        given.pop("max_query_len", None)
        want, want_lse = reference.attention(**given, return_lse=True)
        found = attend(here)
        assert float(head_errors(found[0], want).max()) < 1e-2
        torch.testing.assert_close(found[1].double(), want_lse.double(), atol=2e-4, rtol=1e-5)
        changes.append(change)
    graphs.check(gdn.attention, arguments, (), changes, torch.device("cuda"), return_lse=True)


@every_number_of_blocks
def test_a_launch_that_fails_is_raised_and_the_next_call_is_right(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After rows of decode, which were launched before it; on another stream, too."""
    (lengths, new), prepare = CALLS[splits], runtime.prepare
    inputs = make_inputs(VARIANTS["24/2, gate"], [100, *lengths], [1, *new], 8, dense=True)
    arguments = public(inputs)
    assert splits_of(arguments) == [splits]
    want = attend(arguments)

    def refuse(*_: Any) -> None:
        raise RuntimeError("the driver refused")

    def failing(problem: Any, *args: Any, **options: Any) -> runtime.Prepared:
        prepared = prepare(problem, *args, **options)
        return dataclasses.replace(prepared, launch=refuse) if problem.op == "attention_prefill" else prepared

    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the driver refused"):
                env.reload()  # drops the plan of an earlier call, which would not ask for a kernel
                patch.setattr(runtime, "prepare", failing)
                attend(arguments)
            found = attend(arguments)
        stream.synchronize()
        assert same(found, want)
