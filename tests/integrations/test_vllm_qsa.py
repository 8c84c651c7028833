"""Qwen4Exp's sparse attention on vLLM's layouts, against plain loops."""

import sys
from typing import Any

import pytest
import torch

from gdn.integrations import vllm, vllm_qsa
from gdn.integrations._calls import asking
from tests.integrations import fake_vllm, stand_in

Tensor = torch.Tensor
PAGE, PAGES = 16, 5  # keys of a page, pages of a request
REQUESTS, DRAFTS = 3, 2
attend_refusal = asking(vllm_qsa.attend_refusal, vllm_qsa.attend)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tables(blocks: int) -> Tensor:
    """Pages of each request, in any order, a column of a wider table."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))[: REQUESTS * PAGES]
    return order.view(REQUESTS, PAGES).int()


def test_selection() -> None:
    heads, dim, topk, ratio = 4, 64, 24, 4
    q = randn(REQUESTS * DRAFTS, heads, dim)
    cache, table = randn(20, PAGE, 1, dim, seed=2), tables(20)
    visible = torch.tensor([0, 3, 30, 31, 80, 6], dtype=torch.int32)
    found = torch.full((REQUESTS * DRAFTS, topk // ratio), -7, dtype=torch.int32)
    given = (q, cache, table, visible, topk, ratio, DRAFTS, found)
    assert vllm_qsa.select_refusal(*given, allow_reference=True) is None
    vllm_qsa.select(*given)
    for row, count in enumerate(visible.tolist()):
        keys = cache[table[row // DRAFTS].long()].view(-1, dim)[:count]
        scores = torch.einsum("hd,kd->hk", q[row], keys).relu().sum(0)
        best = scores.topk(min(count, topk // ratio)).indices.sort().values
        assert found[row].tolist() == best.tolist() + [-1] * (topk // ratio - len(best))


@pytest.mark.parametrize("given_out", [False, True])
def test_attention(given_out: bool) -> None:
    heads, kv_heads, dim, width, blocks = 4, 2, 128, 11, 20
    cache, table = randn(blocks, kv_heads, PAGE, 2 * dim, seed=3), tables(blocks)
    keys, values = cache.transpose(1, 2).split(dim, dim=-1)  # as the host does
    owner = torch.tensor([0, 0, 2, 1, 1], dtype=torch.int32)
    q, gate = randn(len(owner), heads, dim, seed=4), randn(len(owner), heads * dim, seed=5)
    counts = torch.tensor([11, 3, 0, 7, 1], dtype=torch.int32)
    picked = torch.stack(
        [torch.randperm(PAGE * PAGES, generator=torch.Generator().manual_seed(n))[:width] for n in range(5)]
    ).int()
    picked[3, 2] = -1  # a hole among those that count
    packed = torch.cat([picked, counts[:, None]], dim=1)
    buffer = torch.full((len(owner) + 1, heads, dim), 7.0)
    more: dict[str, Any] = {"output_gate": gate, "out": buffer[:-1] if given_out else None}
    given = (q, keys, values, packed, table, owner, False)
    assert attend_refusal(*given, **more, allow_reference=True) is None
    out = vllm_qsa.attend(*given, **more)
    assert not given_out or (out.data_ptr() == buffer.data_ptr() and (buffer[-1] == 7).all())
    for row, count in enumerate(counts.tolist()):
        places = [place for place in picked[row, :count].tolist() if place >= 0]
        expected = torch.zeros(heads, dim)
        for head in range(heads):
            if places:
                block = [table[owner[row], place // PAGE] for place in places]
                at = [(b, place % PAGE, head // (heads // kv_heads)) for b, place in zip(block, places, strict=True)]
                k, v = (torch.stack([cached[one] for one in at]) for cached in (keys, values))
                expected[head] = ((k @ q[row, head]) * dim**-0.5).softmax(0) @ v
        expected *= gate.view_as(q)[row].sigmoid()
        assert (out[row] - expected).abs().max() < 1e-5


def test_what_is_left_to_the_host() -> None:
    q, index = torch.zeros(2, 4, 128), torch.zeros(2, 3, dtype=torch.int32)
    cache, owner = torch.zeros(4, PAGE, 2, 128), torch.zeros(2, dtype=torch.int32)

    def attending(q: Tensor = q, cache: Tensor = cache, prompts: bool = False) -> str | None:
        given = (q, cache, cache, index, index, owner, prompts)
        return attend_refusal(*given, output_gate=q, allow_reference=True)

    assert attending() is None
    assert attending(prompts=True) == "the batch holds prompts, whose bounds the function is not given"
    assert attending(cache=cache.to(torch.float8_e4m3fn)) == "the cache is float8_e4m3fn, which has no kernel"
    assert attending(q[..., :96], cache[..., :96]) == "4 heads of dim 96 over 2 key heads"

    assert attending(cache=cache[:, :, :1].expand(-1, -1, 3, -1)) == "4 heads of dim 128 over 3 key heads"
    given = (q, cache, cache, index, index, owner, False)
    gate = attend_refusal(*given, output_gate=q.half(), allow_reference=True)
    assert gate == "the gate is float16, which has no kernel"
    result = attend_refusal(*given, q.half(), output_gate=q, allow_reference=True)
    assert result == "the result is float16, which has no kernel"
    table = attend_refusal(*given[:4], index.long(), owner, False, output_gate=q, allow_reference=True)
    assert table == "the block table is int64 [2, 3]"

    def selecting(q: Tensor, cache: Tensor, visible: Tensor = owner, found: Tensor = index) -> str | None:
        return vllm_qsa.select_refusal(q, cache, index, visible, 12, 4, 1, found, allow_reference=True)

    assert selecting(q, cache[:, :, :1]) is None
    assert selecting(q, cache[:, :, :1].bfloat16()) == "the queries are float32, the keys bfloat16"
    assert selecting(q[:, :1].expand(-1, 65, -1), cache[:, :, :1]) == "the indexer has 65 heads"
    assert selecting(q, cache[:, :, :1], index[:, 0].repeat(2)) == "2 rows, 4 lengths and 2 requests of 1 tokens"
    assert selecting(q, cache[:, :, :1], found=index[:, :2]) == "the selection is int32 [2, 2]"
    assert selecting(q[..., :32], cache[:, :, :1, :32]) == "the head dim of the indexer is 32"
    assert selecting(q, cache[:, :8, :1]) == "a page holds 8 keys, which is no multiple of 16"
    fp8 = torch.float8_e4m3fn
    for tokens, keys in ((q, cache), (q.to(fp8), cache.to(fp8))):
        assert vllm_qsa.select_refusal(tokens, keys, index, owner, 12, 4, 1, index) == "the tokens are on cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16])
def test_dtypes_of_the_indexer_with_a_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn.integrations._calls._is_sm90", lambda index: True)
    with torch._subclasses.FakeTensorMode():
        q, cache = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((2, 4, 64), (4, PAGE, 1, 64)))
        table, lengths, found = (torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((2, 3), (2,), (2, 6)))
        reason = vllm_qsa.select_refusal(q, cache, table, lengths, 24, 4, 1, found)
    assert reason == ("the queries are float16, the keys float16" if dtype == torch.float16 else None)


SOURCES = {
    "qsa_indexer": """
def qsa_select_paged_decode(
    q, k_cache, page_table, visible_blocks, token_topk, compress_ratio, decode_query_len, block_indices
):
    return "host"


def warmup_qsa_mqa_paged_decode(
    k_cache, page_table, *, num_heads, head_dim, max_decode_query_len, max_num_reqs, max_num_batched_tokens
):
    return "profiles"
""",
    "qsa": """
def qsa_sparse_paged_attention(
    q, k_cache, v_cache, logical_indices, block_table, token_to_req, use_prefill_config, out=None, k_scale=None, v_scale=None,
    *, output_gate
):
    return "host"


def warmup_qsa_sparse_paged_attention(kv_cache, block_table, *, num_query_heads, selection_width):
    return "warmed"
""",
}


def test_the_host_s_functions_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    modules: dict[str, Any] = {}
    for name, text in SOURCES.items():
        full = f"{vllm_qsa.OPS}.{name}"
        stand_in.put(monkeypatch, {full: {}})
        modules[name] = sys.modules[full]
        exec(text, modules[name].__dict__)
    select, attend = modules["qsa_indexer"], modules["qsa"]
    original = attend.qsa_sparse_paged_attention
    with vllm.enable(allow_reference=True, strict=True) as handle:
        found = torch.zeros(2, 2, dtype=torch.int32)
        lengths = torch.tensor([1, 0], dtype=torch.int32)
        cache, table = randn(4, PAGE, 1, 64), torch.tensor([[1, 2]], dtype=torch.int32)
        assert select.qsa_select_paged_decode(randn(2, 4, 64), cache, table, lengths, 8, 4, 2, found) is None
        assert found.tolist() == [[0, -1], [-1, -1]]
        q, packed = randn(1, 2, 128), torch.tensor([[3, 1]], dtype=torch.int32)
        pages, owner = randn(4, PAGE, 1, 128), torch.zeros(1, dtype=torch.int32)
        call = (q, pages, pages, packed, table, owner)
        assert isinstance(attend.qsa_sparse_paged_attention(*call, False, output_gate=q), torch.Tensor)
        assert attend.qsa_sparse_paged_attention(*call, True, output_gate=q) == "host"
        sizes = {"num_heads": 4, "head_dim": 64, "max_decode_query_len": 2, "max_num_reqs": 3, "max_num_batched_tokens": 8}
        assert select.warmup_qsa_mqa_paged_decode(cache, table, **sizes) == "profiles"
        packed_pages = randn(4, 1, PAGE, 256)
        monkeypatch.setattr(vllm_qsa, "_MOST_ROWS", 3)
        assert attend.warmup_qsa_sparse_paged_attention(packed_pages, table, num_query_heads=2, selection_width=5) == "warmed"
        layers, pages, *sparse = handle.report().points
        assert layers.replaced and pages.replaced and [(point.replaced, point.served) for point in sparse] == [(True, 1)] * 4
        assert dict(sparse[1].left) == {"the batch holds prompts, whose bounds the function is not given": 1}
    assert attend.qsa_sparse_paged_attention is original
