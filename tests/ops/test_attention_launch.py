"""The Params that sparse attention hands to a kernel, held against its problem.py by a stand-in kernel on the CPU."""

from typing import Any

import pytest
import torch

import gdn
from gdn.core.tensors import is_aligned
from gdn.ops.attention.inputs import random_positions
from gdn.ops.attention.problem import SparseDecodeParams, SparseDecodeProblem, SparsePrefillParams, SparsePrefillProblem
from gdn.ops.attention.sparse_attention import attend
from gdn.testing.compare import same_bits
from tests.ops.stand_in import StandIn
from tests.references import reference

INT32 = torch.int32
WORKSPACE = 48


class Kernels(StandIn):
    backend, workspace_bytes = "tilelang", WORKSPACE

    def launch(self, p: Any, params: Any) -> None:
        assert isinstance(params, SparseDecodeParams if isinstance(p, SparseDecodeProblem) else SparsePrefillParams)
        tokens, heads, dim = params.q.shape
        assert (tokens, heads, dim) == (p.num_tokens, p.num_heads, p.head_dim) and params.q.is_contiguous()
        assert params.k_cache.shape[1:] == params.v_cache.shape[1:] == (p.block_size, p.num_kv_heads, p.head_dim)
        strides = (params.k_cache.stride(2), params.v_cache.stride(2))
        assert p.heads_adjacent == (p.num_kv_heads == 1 or strides == (dim, dim))
        assert p.rows_aligned == (is_aligned(params.k_cache) and is_aligned(params.v_cache))
        assert params.block_tables.dtype == INT32 and params.block_tables.stride(1) == 1
        assert params.query_start_loc.dtype == params.seq_lens.dtype == INT32
        assert params.seq_lens.shape[0] == p.num_sequences == params.query_start_loc.shape[0] - 1
        assert (params.topk_length is not None) == p.has_topk_length and (params.gate is not None) == p.has_gate
        if params.gate is not None:
            assert params.gate.shape == params.q.shape and params.gate.dtype == params.q.dtype and is_aligned(params.gate)
        assert params.topk_length is None or params.topk_length.dtype == INT32
        assert params.lse.shape == (tokens, heads) and params.lse.dtype == torch.float32 and params.lse.is_contiguous()
        assert params.workspace.shape == (WORKSPACE,) and params.workspace.dtype == torch.uint8
        most = params.block_tables.shape[1] * p.block_size
        if isinstance(p, SparsePrefillProblem):
            assert p.max_context_len == most
        else:
            assert p.dense == (params.topk_indices is None) == (p.index_dtype is None)
        if params.topk_indices is None:
            assert p.k == most
        else:
            assert params.topk_indices.shape == (tokens, p.k) and params.topk_indices.stride(1) == 1
            assert str(params.topk_indices.dtype) == f"torch.{p.index_dtype}"
        o, lse = reference.sparse_attention(
            params.q, (params.k_cache, params.v_cache), params.topk_indices, params.block_tables, params.query_start_loc,
            params.seq_lens, topk_length=params.topk_length, scale=params.scale, return_lse=True, gate=params.gate,
        )  # fmt: skip
        params.out.copy_(o)
        params.lse.copy_(lse)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return Kernels().put(monkeypatch)


def arguments_of(tokens: int) -> Any:
    """Two sequences of one and `tokens` - 1 new tokens, in blocks of four."""
    g = torch.Generator().manual_seed(3)
    kv = torch.randn(2, 9, 4, 2, 16, generator=g).bfloat16()
    ends = torch.tensor([5, *range(21 - tokens, 20)])
    indices = random_positions(ends, 6, 1, g)
    return {
        "q": torch.randn(tokens, 4, 16, generator=g).bfloat16(), "kv_cache": kv, "topk_indices": indices,
        "block_tables": torch.randperm(9, generator=g)[None, :8].expand(2, 8).contiguous().int()[:, :5],
        "query_start_loc": torch.tensor([0, 1, tokens]), "seq_lens": torch.tensor([5, 19]),
    }  # fmt: skip


@pytest.mark.parametrize("tokens", [3, 18])
def test_gate(stand_in: StandIn, tokens: int) -> None:
    """A gate next to the place of o, one whose rows are not aligned, one whose last dimension is not contiguous."""
    arguments = arguments_of(tokens)
    o, wanted_lse = gdn.sparse_attention(**arguments, return_lse=True)
    heads = torch.randn(tokens, 4, 32).bfloat16()
    gate = heads[..., 16:]
    wanted = torch.nn.functional.glu(torch.cat([o, gate], dim=-1))
    odd = torch.zeros(tokens, 4, 17).bfloat16()[..., :16].copy_(gate)
    for one in (odd, gate.mT.contiguous().mT, gate):
        out = heads[..., :16] if one is gate else None
        for _ in range(2):
            found, lse = gdn.sparse_attention(**arguments, gate=one, out=out, return_lse=True)
            torch.testing.assert_close(found, wanted)
            assert same_bits(lse, wanted_lse)
    assert [problem.has_gate for problem in stand_in.problems[:2]] == [False, True]
    assert stand_in.problems[1].bytes_moved() - stand_in.problems[0].bytes_moved() == gate.numel() * 2
    before = heads.clone()
    with pytest.raises(ValueError, match="^out: expected memory of its own, got elements that it shares with gate"):
        gdn.sparse_attention(**arguments, gate=gate, out=heads[..., 8:24])
    assert same_bits(heads, before)


def test_max_query_len_decides_the_phase(stand_in: StandIn) -> None:
    """Where it is not given, the number of tokens does."""
    for tokens, longest in ((12, 8), (12, 9), (16, None), (17, None)):
        gdn.sparse_attention(**arguments_of(tokens), max_query_len=longest)
    assert [type(problem) for problem in stand_in.problems] == [SparseDecodeProblem, SparsePrefillProblem] * 2


def test_no_indices_are_all_positions(stand_in: StandIn) -> None:
    arguments = arguments_of(18)
    k_cache, v_cache = arguments["kv_cache"]
    rest = [arguments[name] for name in ("block_tables", "query_start_loc", "seq_lens")]
    o, lse = attend(arguments["q"], k_cache, v_cache, None, *rest, *[None] * 6)
    (problem,) = stand_in.problems
    assert isinstance(problem, SparseDecodeProblem) and problem.dense and problem.k == 20
    every = torch.arange(20, dtype=INT32).expand(18, 20)
    wanted = reference.sparse_attention(**arguments | {"topk_indices": every}, return_lse=True)
    assert same_bits(o, wanted[0]) and same_bits(lse, wanted[1])  # type: ignore[index]
    with pytest.raises(TypeError, match="^topk_indices: "):
        gdn.sparse_attention(**arguments | {"topk_indices": None})
    with pytest.raises(ValueError, match="^topk_length: expected None"):
        lengths = torch.zeros(18, dtype=INT32)
        attend(arguments["q"], k_cache, v_cache, None, *rest, lengths, *[None] * 5)


def test_nothing_is_launched_where_there_is_nothing(stand_in: StandIn) -> None:
    arguments = arguments_of(3)
    o, lse = gdn.sparse_attention(**arguments | {"topk_indices": arguments["topk_indices"][:, :0]}, return_lse=True)
    assert bool((o == 0).all()) and bool((lse == -torch.inf).all()) and stand_in.launches == 0


def test_rows_that_are_not_aligned_are_named(stand_in: StandIn) -> None:
    arguments = arguments_of(3)
    odd = torch.zeros(9, 4, 2, 17).bfloat16()[..., :16]
    gdn.sparse_attention(**arguments | {"kv_cache": (odd, odd.clone())})
    assert not stand_in.problems[0].rows_aligned
