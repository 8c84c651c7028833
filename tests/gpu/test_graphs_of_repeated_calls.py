"""CUDA graphs of calls that were made before, which take the shorter way through the operator.

No call waits for the device, and a graph needs nothing but its own pool and its arguments: whatever else is freed and written
over between the capture and a replay. Lengths change between replays.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.testing.compare import same_bits
from tests.gpu import cases, chunk, test_gdn_decode, test_mqa_logits, test_paged_mqa_logits
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.twins import copy_of, twin
from tests.gpu.waits import no_waits

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
Changes = list[dict[str, list[int]]]


def write_over_free_memory(device: torch.device) -> None:
    """Memory that was given back is full of NaN afterwards, in small blocks and in large ones."""
    gc.collect()
    torch.cuda.synchronize()
    for size in (512, 4096, 2**16, 2**20, 2**24):
        kept = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for _ in range(32)]
        del kept
    torch.cuda.synchronize()


def check(
    function: Callable[..., Any],
    arguments: Arguments,
    pools: tuple[str, ...],
    changes: Changes,
    device: torch.device,
    **options: Any,
) -> None:
    """changes: contents of index tensors, one after the other."""
    start = {name: copy_of(arguments[name]) for name in pools}
    live = twin(arguments)
    for _ in range(2):  # compiles, then learns the call
        function(**live, **options)
    torch.cuda.synchronize()
    with no_waits():
        function(**live, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(**live, **options)
    result = found[0] if isinstance(found, tuple) else found
    for change in changes:
        for name, values in change.items():
            live[name].copy_(torch.tensor(values).view(live[name].shape))
        for name in pools:
            live[name].copy_(start[name])
        write_over_free_memory(device)
        expected = twin(live)
        eager = function(**expected, **options)
        allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        with no_waits():
            graph.replay()
        assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == allocated
        assert same_bits(result, eager[0] if isinstance(eager, tuple) else eager), change
        for name in pools:
            assert same_bits(live[name], expected[name]), (name, change)


def offsets(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


@pytest.mark.parametrize("has_out", [True, False])
@pytest.mark.parametrize("backend", backends("chunk"))
def test_chunk(backend: str, has_out: bool, device: torch.device) -> None:
    lengths = [65, 0, 1, 63, 64, 200, 0, 130]
    arguments = chunk.arguments_of(cases.MAIN_CHUNK, device, lengths=lengths)
    arguments["initial_state"].nan_to_num_(0.1)
    for name in chunk.PER_TOKEN:  # rows that are padding now may be tokens later
        arguments[name].nan_to_num_(nan=-0.01)
    if not has_out:
        del arguments["out"]
    changes: Changes = [{"cu_seqlens": offsets(given)} for given in (lengths, [0, 500, 3, 0, 0, 0, 20, 0], [0] * 8, lengths)]
    check(gdn.chunk_gated_delta_rule, arguments, ("initial_state",), changes, device, backend=backend)


@pytest.mark.parametrize("has_out", [True, False])
@pytest.mark.parametrize("spec", [None, 7])
def test_fused_decode(spec: int | None, has_out: bool, device: torch.device) -> None:
    case = test_gdn_decode.Case(spec=spec)
    arguments, _ = test_gdn_decode.make(case, device)
    for name in ("mixed_qkv", "z", "b", "a", *test_gdn_decode.POOLS):
        arguments[name].nan_to_num_(nan=-0.01)
    if not has_out:
        del arguments["out"]
    changes: Changes = [
        {"query_start_loc": offsets(list(given))} for given in (case.lengths, (0, 8, 1, 1, 3, 1, 2, 4), (0,) * 8, case.lengths)
    ]
    check(gdn.fused_gdn_decode, arguments, test_gdn_decode.POOLS, changes, device, backend="cute")


LENGTHS = ([900, 0, 5, 300, 256, 257], [1, 900, 900, 0, 0, 700], [0] * 6, [900] * 6)


@pytest.mark.parametrize("backend", test_paged_mqa_logits.BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h16-fp8-p16-n4"])
def test_paged_logits(variant: str, backend: str, device: torch.device) -> None:
    problem = test_paged_mqa_logits.problem_of(variant, 6, 900)
    inputs = make_paged_inputs(problem, device)

    def logits(context_lens: Tensor) -> Tensor:
        return test_paged_mqa_logits.run(problem, replace(inputs, context_lens=context_lens), backend)

    check(logits, {"context_lens": inputs.context_lens}, (), [{"context_lens": given} for given in LENGTHS], device)


@pytest.mark.parametrize("has_out", [True, False])
@pytest.mark.parametrize("backend", test_paged_mqa_logits.BACKENDS)
def test_paged_indexer_topk(backend: str, has_out: bool, device: torch.device) -> None:
    """The call runs in steps through a workspace, which is of the graph's pool too."""
    problem = test_paged_mqa_logits.problem_of("h8-fp8-linear-p128-d64", 6, 900)
    inputs = make_paged_inputs(problem, device)
    arguments = {
        "q": inputs.q, "cache": inputs.cache, "weights": inputs.weights, "context_lens": inputs.context_lens,
        "block_tables": inputs.block_tables,
    }  # fmt: skip
    if has_out:
        arguments["out"] = torch.empty(6, 256, dtype=torch.int32, device=device)
    options = {"topk": 256, "relu": False, "workspace_bytes": 4 * 900 * 4, "max_context_len": 900, "backend": backend}
    changes: Changes = [{"context_lens": given} for given in LENGTHS]
    check(gdn.paged_indexer_topk, arguments, (), changes, device, **options)
    for given in LENGTHS:
        arguments["context_lens"].copy_(torch.tensor(given))
        found = gdn.paged_indexer_topk(**arguments, **options)
        assert (found >= 0).sum(dim=1).tolist() == [min(256, length) for length in given]


@pytest.mark.parametrize("backend", test_mqa_logits.BACKENDS)
def test_indexer_topk(backend: str, device: torch.device) -> None:
    problem = test_mqa_logits.problem_of("h16-fp8-unclean", 60, 900)
    inputs = make_mqa_inputs(problem, device, ranges="full", poison=False)
    arguments = {
        "q": inputs.q, "k": inputs.k, "weights": inputs.weights, "cu_seqlen_ks": inputs.cu_seqlen_ks,
        "cu_seqlen_ke": inputs.cu_seqlen_ke, "k_scale": inputs.k_scale,
    }  # fmt: skip
    changes: Changes = [
        {"cu_seqlen_ks": [row % 7 for row in range(60)], "cu_seqlen_ke": [min(900, 15 * row * step) for row in range(60)]}
        for step in (1, 0, 3)
    ]
    options = {"topk": 256, "workspace_bytes": 25 * 900 * 4, "backend": backend}
    check(gdn.indexer_topk, arguments, (), changes, device, **options)


@pytest.mark.parametrize("backend", backends("chunk"))
def test_what_a_capture_makes_is_of_the_graph(backend: str, device: torch.device) -> None:
    """The first call of a size is captured: a later eager one of that size must not find what only a replay fills."""
    arguments = chunk.arguments_of(cases.MAIN_CHUNK, device, lengths=[70] * 3, padded_tokens=0)
    gdn.chunk_gated_delta_rule(**twin(arguments), backend=backend)  # compiles
    rows = {name: arguments[name].unflatten(1, (3, 70)).squeeze(0) for name in chunk.PER_TOKEN}
    batch = arguments | rows | {"cu_seqlens": None, "out": None}
    graph = torch.cuda.CUDAGraph()
    live = twin(batch)
    with torch.cuda.graph(graph):
        captured, _ = gdn.chunk_gated_delta_rule(**live, backend=backend)
    packed, _ = gdn.chunk_gated_delta_rule(**twin(arguments), backend=backend)
    eager, _ = gdn.chunk_gated_delta_rule(**twin(batch), backend=backend)
    assert same_bits(eager.view(packed.shape), packed)
    graph.replay()
    assert same_bits(captured, eager)
