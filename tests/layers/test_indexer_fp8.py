"""The indexer in FP8: what it selects, next to what exact sums of the same e4m3 values select, and to the float64 selection."""

import pytest
import torch
from torch import Tensor

from gdn.layers.config import HybridConfig
from tests.layers import oracle
from tests.layers.attention_cases import config, deviation, layer_of, prompts
from tests.layers.paged import Batch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [260, 120]
FORMS = {  # cache dtype, and the values of its rows
    "token-wise": (torch.uint8, oracle.scaled_e4m3),
    "token-wise, two key heads": (torch.uint8, oracle.scaled_e4m3),
    "compressed": (torch.float8_e4m3fn, oracle.plain_e4m3),
}


def mask_of(indices: Tensor, tokens: int) -> Tensor:
    """Selected positions [tokens, k], -1 = none, as a mask [tokens, tokens]."""
    columns = torch.where(indices < 0, tokens, indices).long()
    return torch.zeros(tokens, tokens + 1, dtype=torch.bool).scatter_(1, columns, True)[:, :tokens]


def share(found: list[Tensor], wanted: list[Tensor], chosen: HybridConfig) -> float:
    """Part of the wanted positions that is found, over the rows that leave something out."""
    hits = total = 0
    for one, other in zip(found, wanted, strict=True):
        selects = torch.arange(1, len(one) + 1) // chosen.index_ratio > chosen.index_topk // chosen.index_ratio
        hits += int((one & other)[selects].sum())
        total += int(other[selects].sum())
    return hits / total


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("case", FORMS)
def test_selection(case: str, decode: bool, switch, record_property) -> None:
    switch(VLLM_QSA_USE_FP8_INDEXER="1")
    chosen, (cache_dtype, rounded) = config(case), FORMS[case]
    layer, rows = layer_of(chosen), prompts(LENGTHS, chosen.hidden_size)
    weights = dict(layer.named_parameters())
    batch = Batch(layer, chosen, len(rows), 272, cache_dtype=cache_dtype)
    assert layer.indexer is not None and layer.indexer.use_fp8
    found: list[list[Tensor]] = [[] for _ in rows]

    def keep(_: object, __: object, indices: Tensor | None) -> None:
        assert indices is not None
        for kept, one in zip(found, indices.split(queries), strict=True):
            kept.append(one)

    layer.indexer.register_forward_hook(keep)
    count = 20 if decode else 0  # the last tokens one by one, from the pages
    queries = [len(one) - count for one in rows]
    parts = [[one] for one in batch.step([one[:length] for one, length in zip(rows, queries, strict=True)])]
    for _ in range(count):
        queries = [1 for _ in rows]
        new = batch.step([one[old : old + 1] for one, old in zip(rows, batch.lengths, strict=True)], on_host=False)
        for kept, one in zip(parts, new, strict=True):
            kept.append(one)

    ours = [mask_of(torch.cat(one), len(row)) for one, row in zip(found, rows, strict=True)]
    exact = [oracle.select(oracle.scores(weights, one, chosen, rounded), chosen)[0] for one in rows]
    best = [oracle.select(oracle.scores(weights, one, chosen), chosen)[0] for one in rows]
    reached, possible = share(ours, best, chosen), share(exact, best, chosen)
    record_property("share of the float64 selection", f"{reached:.4f}, exact sums of e4m3 values {possible:.4f}")
    assert reached >= possible - 2e-3
    assert 0.9 < possible < 1.0, "e4m3 changes some choices, and few"
    assert share(ours, exact, chosen) > 0.999
    for kept, row, mask in zip(parts, rows, ours, strict=True):
        assert deviation(torch.cat(kept).double(), oracle.attention(weights, row, chosen, mask).out) < 2e-5


def test_the_switch_and_the_argument(switch) -> None:
    assert [layer_of(config("token-wise"), use_fp8=flag).indexer.use_fp8 for flag in (None, True)] == [False, True]
    switch(VLLM_QSA_USE_FP8_INDEXER="1")
    assert [layer_of(config("token-wise"), use_fp8=flag).indexer.use_fp8 for flag in (None, False)] == [True, False]
