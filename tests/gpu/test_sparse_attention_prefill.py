"""Sparse attention of prefill on a Hopper GPU, against float64 softmax over the same positions.

A row of VARIANTS is a compiled kernel. Per head, the largest row error (norm over D) is within twice of what torch makes of
gathered rows in the same dtype. Outputs are NaN before a call, and so are all cache rows that no query of the call selected.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.attention.inputs import kept_positions, own_positions, random_positions
from gdn.runtime import registry
from tests.gpu import graphs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

Tensor = torch.Tensor
BACKENDS = tuple(registry.operator("sparse_attention_prefill").modules)
BF16, FP16 = torch.bfloat16, torch.float16

# heads, kv_heads, head_dim, dtype, block_size, index dtype, topk_length; names with "gate" have one
VARIANTS: dict[str, tuple[int, int, int, torch.dtype, int, torch.dtype, bool]] = {
    "16/2": (16, 2, 256, BF16, 16, torch.int32, False),
    "24/2": (24, 2, 256, BF16, 64, torch.int32, True),  # 10 queries of 12 heads: 8 rows of a tile are empty
    "8/1": (8, 1, 256, FP16, 272, torch.int64, False),
    "6/2": (6, 2, 256, BF16, 16, torch.int32, False),  # 32 queries of 3 heads, masks of 32 bits
    "5/5": (5, 5, 128, FP16, 20, torch.int32, True),
    "16/1": (16, 1, 128, BF16, 16, torch.int64, True),
    "32/2": (32, 2, 128, BF16, 64, torch.int32, False),
    "16/2 gate": (16, 2, 256, BF16, 16, torch.int32, False),
    "5/5 gate": (5, 5, 128, FP16, 20, torch.int64, True),
}
# Query tokens of each sequence, positions before them, k, how positions are chosen
BATCHES: dict[str, tuple[Sequence[int], Sequence[int], int, str]] = {
    "ragged": ((1, 40, 0, 17, 300, 64), (5, 0, 70, 2000, 900, 0), 96, "hard"),
    "kept": ((257,), (3000,), 512, "kept"),
    "few": ((2, 3, 16), (0, 7, 0), 8, "random"),
    "windows": ((33, 20), (110000, 60), 256, "hard"),  # several of the first launch
    "all": ((96,), (0,), 2048, "random"),  # k beyond what any query sees
}


@dataclasses.dataclass
class Call:
    q: Tensor
    kv_cache: tuple[Tensor, Tensor]
    topk_indices: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    topk_length: Tensor | None
    gate: Tensor | None

    def run(self, backend: str, out: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor]:
        if out is None:
            out = torch.full_like(self.q, torch.nan)
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | more
        found, lse = gdn.sparse_attention(**arguments, max_query_len=512, return_lse=True, out=out, backend=backend)
        assert found is out
        return out, lse

    def valid(self) -> Tensor:
        """Mask of the indices that count."""
        own = own_positions(self.query_start_loc, self.seq_lens, len(self.q))
        index = self.topk_indices.long()
        valid = (index >= 0) & (index <= own[:, None])
        if self.topk_length is not None:
            valid &= torch.arange(index.shape[1], device="cuda") < self.topk_length[:, None]
        return valid

    def cache_rows(self) -> Tensor:
        """Row of each entry, over all blocks; 0 where it does not count."""
        block_size = self.kv_cache[0].shape[1]
        sequence = torch.searchsorted(self.query_start_loc.long(), torch.arange(len(self.q), device="cuda"), right=True) - 1
        sequence = sequence.clamp(max=len(self.seq_lens) - 1)[:, None]
        index = torch.where(self.valid(), self.topk_indices.long(), 0)
        return self.block_tables[sequence, index // block_size].long() * block_size + index % block_size

    def gathered(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """o and lse by torch on gathered rows, in a dtype."""
        rows, valid = self.cache_rows(), self.valid()
        kv_heads = self.kv_cache[0].shape[2]
        outputs, sums = [], []
        for part in torch.arange(len(self.q), device="cuda").split(64):
            mask = valid[part]
            k, v = (torch.where(mask[:, :, None, None], x.flatten(0, 1)[rows[part]].to(dtype), 0) for x in self.kv_cache)
            q = self.q[part].to(dtype).unflatten(1, (kv_heads, -1))
            score = torch.einsum("mgrd,mkgd->mgrk", q, k) * self.q.shape[-1] ** -0.5
            score = score.masked_fill(~mask[:, None, None], -torch.inf)
            share = torch.where(mask[:, None, None], torch.softmax(score, -1), 0)
            outputs.append(torch.einsum("mgrk,mkgd->mgrd", share, v).flatten(1, 2))
            sums.append(score.double().logsumexp(-1).flatten(1))
        o = torch.cat(outputs)
        if self.gate is not None:
            o = torch.nn.functional.glu(torch.cat([o, self.gate.to(dtype)], dim=-1))
        return o, torch.cat(sums)

    def check(self, found: tuple[Tensor, Tensor]) -> None:
        (truth, lse), (torchs, _) = self.gathered(torch.float64), self.gathered(self.q.dtype)
        error = (found[0].double() - truth).norm(dim=-1).amax(0)
        allowed = 2 * (torchs.double() - truth).norm(dim=-1).amax(0)
        assert bool((error <= allowed.clamp(min=1e-6)).all()), (error / allowed * 2).tolist()
        torch.testing.assert_close(found[1].double(), lse, atol=2e-4, rtol=1e-5)
        empty = ~self.valid().any(1)
        assert not found[0][empty].any() and bool((found[1][empty] == -torch.inf).all())


def make(variant: str, batch: str, seed: int = 0, padding: int = 3) -> Call:
    heads, kv_heads, dim, dtype, block_size, index_dtype, has_length = VARIANTS[variant]
    queries, prefixes, k, how = BATCHES[batch]
    g = torch.Generator("cuda").manual_seed(seed)
    tokens, sequences = sum(queries) + padding, len(queries)
    bounds = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor([a + b for a, b in zip(queries, prefixes, strict=True)], dtype=torch.int32, device="cuda")
    ends = own_positions(bounds, seq_lens, tokens) + 1
    index = kept_positions(ends, k, 0.9, g) if how == "kept" else random_positions(ends, k, 1, g)
    if how == "hard":  # in any order, -1 anywhere, rows without a position, positions after the query's own
        index = index.gather(1, torch.rand(index.shape, device="cuda", generator=g).argsort(1))
        index = torch.where(torch.rand(index.shape, device="cuda", generator=g) < 0.1, -1, index)
        index[torch.rand(tokens, device="cuda", generator=g) < 0.05] = -1
        last = torch.repeat_interleave(seq_lens, bounds.diff(), output_size=tokens - padding)
        late = torch.nn.functional.pad(ends[: tokens - padding] < last, (0, padding))
        index[:, 0] = torch.where(late, ends, index[:, 0])
    length = torch.randint(0, k + 1, (tokens,), device="cuda", generator=g, dtype=torch.int32) if has_length else None
    blocks = -(-int(seq_lens.max()) // block_size)
    tables = torch.randperm(sequences * blocks, device="cuda", generator=g).to(torch.int32).view(sequences, blocks)
    shape = (sequences * blocks, block_size, kv_heads, dim)
    caches = tuple(torch.randn(shape, device="cuda", generator=g).to(dtype) for _ in range(2))
    q = torch.randn(tokens, heads, dim, device="cuda", generator=g).to(dtype)
    raw = torch.randn(tokens, heads, 2 * dim, device="cuda", generator=g).to(dtype)  # queries, each with its gate
    gate = raw[..., dim:] if "gate" in variant else None
    call = Call(q, caches, index.to(index_dtype), tables, bounds, seq_lens, length, gate)  # type: ignore[arg-type]
    used = torch.zeros(shape[0] * block_size, dtype=torch.bool, device="cuda")
    used[call.cache_rows()[call.valid()]] = True
    for cache in caches:
        cache.flatten(0, 1)[~used] = torch.nan
    return call


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_exact(backend: str, variant: str, batch: str) -> None:
    call = make(variant, batch)
    call.check(call.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_is_torchs_glu(backend: str) -> None:
    """The gate of the same attention, at the limits of sigmoid too; o may take the place next to it."""
    call = make("16/2 gate", "ragged")
    assert call.gate is not None
    plain, lse = call.run(backend, gate=None)
    call.gate[:, 0], call.gate[:, 1], call.gate[:, 2] = torch.nan, torch.inf, -torch.inf
    o, gated_lse = call.run(backend)
    want, empty = torch.nn.functional.glu(torch.cat([plain, call.gate], dim=-1)), lse[:, 0] == -torch.inf
    want[empty] = 0  # whatever the gate is
    torch.testing.assert_close(o, want, equal_nan=True)
    assert bool(empty.any()) and not bool(empty.all())
    assert bool(o[~empty, 0].isnan().all()) and not o[:, 2].any()
    assert torch.equal(o[:, 1], plain[:, 1]) and torch.equal(lse, gated_lse)
    heads = torch.cat([torch.full_like(o, torch.nan), call.gate], dim=-1)
    call.run(backend, heads[..., :256], gate=heads[..., 256:])
    assert torch.equal(heads[:, 1:, :256], o[:, 1:]) and torch.equal(heads[:, 1:, 256:], call.gate[:, 1:])


@pytest.mark.parametrize("variant", ["16/2", "32/2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeats_and_any_order_of_indices_have_the_same_bits(backend: str, variant: str) -> None:
    call = make(variant, "kept")
    first, lse = call.run(backend)
    for _ in range(5):
        again, lse_again = call.run(backend)
        assert torch.equal(first, again) and torch.equal(lse, lse_again)
    order = torch.rand(call.topk_indices.shape, device="cuda").argsort(1)
    shuffled, _ = call.run(backend, topk_indices=call.topk_indices.gather(1, order))
    assert torch.equal(first, shuffled)


@pytest.mark.parametrize("variant", ["16/2", "16/2 gate"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_has_the_same_bits_alone(backend: str, variant: str) -> None:
    call = make(variant, "ragged")
    whole, _ = call.run(backend)
    low, high = (int(x) for x in call.query_start_loc[4:6])
    bounds = torch.tensor([0, high - low], dtype=torch.int32, device="cuda")
    gate = None if call.gate is None else call.gate[low:high]
    one = Call(
        call.q[low:high], call.kv_cache, call.topk_indices[low:high], call.block_tables[4:5], bounds, call.seq_lens[4:5], None,
        gate,
    )  # fmt: skip
    alone, _ = one.run(backend)
    assert torch.equal(alone, whole[low:high])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("variant", ["16/2", "16/2 gate"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_row_spoils_those_that_selected_it_alone(backend: str, variant: str, which: int, value: float) -> None:
    """Queries of a tile share the rows that any of them selected."""
    call = make(variant, "kept")
    before, lse = call.run(backend)
    rows, valid = call.cache_rows(), call.valid()
    bad = int(rows[100, 7])
    call.kv_cache[which].flatten(0, 1)[bad] = value
    after, lse_after = call.run(backend)
    hit = ((rows == bad) & valid).any(1)
    assert 0 < int(hit.sum()) < len(hit)
    assert not bool(after[~hit].isnan().any())
    torch.testing.assert_close(after[~hit], before[~hit], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse_after[~hit], lse[~hit], atol=1e-4, rtol=1e-5)
    assert not bool(after[hit].isfinite().flatten(1).all(1).any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str) -> None:
    """Keys and values in one row, blocks apart from each other, indices in longer rows, an output of any strides."""
    call = make("16/2", "ragged")
    wanted, _ = call.run(backend)
    blocks, block_size, kv_heads, dim = call.kv_cache[0].shape
    packed = torch.full((blocks, block_size + 3, 2, kv_heads, dim), torch.nan, dtype=BF16, device="cuda")
    packed[:, :block_size] = torch.stack(call.kv_cache, dim=2)
    caches = tuple(packed[:, :block_size, i] for i in range(2))
    wide = torch.full((len(call.q), call.topk_indices.shape[1] + 5), 3, dtype=torch.int32, device="cuda")
    wide[:, :-5] = call.topk_indices
    whole = torch.full((len(call.q), 17, 257), torch.nan, dtype=BF16, device="cuda")
    out = whole[:, :16, :256]
    call.run(backend, out, kv_cache=caches, topk_indices=wide[:, :-5])
    assert torch.equal(out, wanted)
    assert bool(whole[:, 16].isnan().all()) and bool(whole[:, :, 256].isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_follows_its_lengths(backend: str, device: torch.device) -> None:
    call = make("16/2", "ragged")
    for cache in call.kv_cache:
        cache.nan_to_num_(0.5)
    shorter = dataclasses.replace(
        call, seq_lens=call.seq_lens - torch.tensor([0, 0, 0, 3, 3, 0], dtype=torch.int32, device=device)
    )
    for one in (call, shorter):
        one.check(one.run(backend))
    changes = [{"seq_lens": one.seq_lens} for one in (call, shorter)]
    arguments = vars(call) | {"out": torch.empty_like(call.q)}
    graphs.check(gdn.sparse_attention, arguments, (), changes, device, max_query_len=512, return_lse=True, backend=backend)
