"""torch.compile(dynamic=True): another number of tokens is the same graph, with the results of eager calls."""

from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.ops.library_calls import BY_TOKENS, REGISTERED, check_same, compiled

# No size among the fixed ones of these calls: sizes that are equal at first are taken to be equal always.
COUNTS = (6, 8, 7)


@pytest.mark.parametrize("name", REGISTERED)
def test_one_graph_for_all_numbers_of_tokens(name: str) -> None:
    function: Any = getattr(gdn, name)
    graph = compiled(function, dynamic=True)
    for count in COUNTS:
        arguments, others = BY_TOKENS[name](count), BY_TOKENS[name](count)
        check_same(graph(**arguments), arguments, function(**others), others)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_sizes_that_are_read_from_a_tensor() -> None:
    """gather_indexer_cache without num_rows, followed by the logits of its rows, is one graph for every number of rows."""

    def scores(cache: torch.Tensor, tables: torch.Tensor, cu_seqlens: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        k, k_scale = gdn.gather_indexer_cache(cache, tables, cu_seqlens)
        starts = torch.zeros(q.shape[0], dtype=torch.int32)
        return gdn.mqa_logits(q, k, None, starts, starts + 9, k_scale=k_scale)

    generator = torch.Generator().manual_seed(0)
    cache = torch.zeros(5, 16, 20, dtype=torch.uint8)
    gdn.write_indexer_cache(torch.randn(80, 16, generator=generator), cache, torch.arange(80))
    q = torch.randn(3, 4, 16, generator=generator).to(torch.float8_e4m3fn)
    tables = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    graph = compiled(scores)
    for bounds in ([0, 20, 23], [0, 1, 31], [0, 0, 12]):
        arguments = (cache, tables, torch.tensor(bounds), q)
        assert same_bits(graph(*arguments), scores(*arguments))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_both_phases_of_sparse_attention_are_one_graph() -> None:
    """Eight tokens a sequence are a step of decode, nine are prefill: two switches, one program."""
    graph = compiled(gdn.sparse_attention, dynamic=True)
    for count in (6, 11):
        arguments = BY_TOKENS["sparse_attention"](count)
        assert same_bits(graph(**arguments), gdn.sparse_attention(**arguments))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
