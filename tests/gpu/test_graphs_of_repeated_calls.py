"""CUDA graphs of calls that were made before, which take the shorter way through the operator: lengths change between replays."""

import pytest
import torch

import gdn
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.testing.compare import same_bits
from tests.gpu import cases, chunk, graphs, test_mqa_logits, test_paged_mqa_logits
from tests.gpu.delta_rule import backends
from tests.gpu.twins import twin

pytestmark = pytest.mark.gpu


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
    changes = [{"cu_seqlens": offsets(given)} for given in (lengths, [0, 500, 3, 0, 0, 0, 20, 0], [0] * 8, lengths)]
    graphs.check(gdn.chunk_gated_delta_rule, arguments, ("initial_state",), changes, device, backend=backend)


LENGTHS = ([900, 0, 5, 300, 256, 257], [1, 900, 900, 0, 0, 700], [0] * 6, [900] * 6)


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
    changes = [{"context_lens": given} for given in LENGTHS]
    graphs.check(gdn.paged_indexer_topk, arguments, (), changes, device, **options)
    for given in LENGTHS:
        arguments["context_lens"].copy_(torch.tensor(given))
        found = gdn.paged_indexer_topk(**arguments, **options)
        assert (found >= 0).sum(dim=1).tolist() == [min(256, length) for length in given]


@pytest.mark.parametrize("has_out", [True, False])
@pytest.mark.parametrize("backend", test_mqa_logits.BACKENDS)
def test_indexer_topk(backend: str, has_out: bool, device: torch.device) -> None:
    """Short rows and long ones, empty ones, all of them short."""
    problem = test_mqa_logits.problem_of("h16-fp8-unclean", 400, 1600)
    inputs = make_mqa_inputs(problem, device, ranges="full", poison=False)
    arguments = {
        "q": inputs.q, "k": inputs.k, "weights": inputs.weights, "cu_seqlen_ks": inputs.cu_seqlen_ks,
        "cu_seqlen_ke": inputs.cu_seqlen_ke, "k_scale": inputs.k_scale,
    }  # fmt: skip
    if has_out:
        arguments["out"] = torch.empty(400, 512, dtype=torch.int32, device=device)
    changes = [
        {"cu_seqlen_ks": [row % 7 for row in range(400)], "cu_seqlen_ke": [min(1600, 4 * row * step) for row in range(400)]}
        for step in (1, 0, 3)
    ]
    changes += [
        {"cu_seqlen_ks": [low] * 400, "cu_seqlen_ke": [row % max(1, high - low) + low + (high > low) for row in range(400)]}
        for low, high in ((0, 1600), (300, 700), (5, 5), (0, 512))
    ]
    options = {"topk": 512, "workspace_bytes": 130 * 1600 * 4, "backend": backend}
    graphs.check(gdn.indexer_topk, arguments, (), changes, device, **options)


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
