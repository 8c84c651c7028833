"""The attention layer on paged caches against dense attention with a mask, in float64: every form of indexer, prefill, prefill
with a cached prefix, decode, drafts, lengths on the host or on the device alone, and padding."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gdn.layers.attention_runs import MOST_DECODE_TOKENS
from gdn.layers.sparse_attention import SparseAttention
from tests.layers import oracle
from tests.layers.attention_cases import CASES, config, deviation, layer_of, prompts
from tests.layers.paged import Batch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [180, 5, 66, 1, 33]
NEAR_TIES = 1e-5  # a smaller gap between a selected and a left out score is not decided by float32
LEFT_OUT: dict[str, tuple[int, ...]] = {}  # case -> seeds with a smaller gap
LIMIT = 2e-5


def seed_of(case: str) -> int:
    return next(seed for seed in range(10) if seed not in LEFT_OUT.get(case, ()))


@functools.cache
def made(case: str) -> tuple[SparseAttention, list[Tensor], list[oracle.Result]]:
    seed = seed_of(case)
    chosen = config(case)
    layer = layer_of(chosen, seed)
    rows = prompts(LENGTHS, chosen.hidden_size, seed)
    weights = dict(layer.named_parameters())
    want = [oracle.attention(weights, one, chosen) for one in rows]
    assert min(one.margin for one in want) >= NEAR_TIES, "a near tie: add the seed to LEFT_OUT"
    return layer, rows, want


def batch_of(case: str, **options: object) -> Batch:
    return Batch(made(case)[0], config(case), len(LENGTHS), 192, **options)  # type: ignore[arg-type]


def check(got: list[Tensor], want: list[oracle.Result]) -> None:
    for one, expected in zip(got, want, strict=True):
        assert deviation(one.double(), expected.out) < LIMIT


@pytest.mark.parametrize("case", CASES)
def test_most_rows_select(case: str) -> None:
    _, rows, want = made(case)
    if config(case).index_topk:
        visible = torch.cat([torch.arange(1, len(one) + 1) for one in rows])
        assert int((torch.cat([one.mask.sum(1) for one in want]) < visible).sum()) > len(visible) / 2


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_one_pass(case: str, on_host: bool) -> None:
    layer, rows, want = made(case)
    check(batch_of(case).step(rows, on_host=on_host, padding=3), want)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("block_size", [48, 272])
@pytest.mark.parametrize("case", ["no indexer", "token-wise", "compressed"])
def test_block_sizes_of_hybrid_caches(case: str, block_size: int, on_host: bool) -> None:
    _, rows, want = made(case)
    batch = batch_of(case, block_size=block_size)
    first = batch.step([one[: len(one) // 3] for one in rows], on_host=on_host)
    last = batch.step([one[len(one) // 3 :] for one in rows], on_host=on_host)
    check([torch.cat(parts) for parts in zip(first, last, strict=True)], want)


@pytest.mark.parametrize("threshold", [0, 10, 40, 2048])
@pytest.mark.parametrize("case", ["token-wise, no gate", "compressed"])
def test_dense_threshold(case: str, threshold: int, switch) -> None:
    """Short sequences attend densely, in runs between those that select: the same result whatever the threshold."""
    layer, rows, want = made(case)
    order = [0, 2, 4, 1, 3]
    switch(VLLM_DSA_USE_DENSE_PREFILL_THRESHOLD=str(threshold))
    batch = batch_of(case)
    assert layer.indexer is not None
    below = layer.indexer.dense_below()
    assert below == min(threshold, config(case).index_topk)
    seen: list[Tensor] = []
    hook = layer.indexer.register_forward_hook(lambda module, arguments, result: seen.append(result))
    got = batch.step([rows[i] for i in order])
    hook.remove()
    check(got, [want[i] for i in order])
    for one, selected in zip(got, seen[0].split([len(one) for one in got]), strict=True):
        is_dense = MOST_DECODE_TOKENS < len(one) < below
        assert bool((selected < 0).all() if is_dense else (selected[:, 0] >= 0).all())
    check(batch.step([rows[i][:0] for i in order]), [dataclasses.replace(want[i], out=want[i].out[:0]) for i in order])


@pytest.mark.parametrize("case", ["token-wise", "compressed"])
def test_dense_sequences_alone_select_nothing_and_write_their_keys(case: str) -> None:
    layer, rows, want = made(case)
    batch = Batch(layer, config(case), 2, 48)
    assert layer.indexer is not None
    seen: list[Tensor | None] = []
    hook = layer.indexer.register_forward_hook(lambda module, arguments, result: seen.append(result))
    first = batch.step([rows[0][:10], rows[2][:12]])
    second = batch.step([rows[0][10:40], rows[2][12:40]])
    hook.remove()
    assert seen[0] is None and seen[1] is not None
    for i, one, other in zip((0, 2), first, second, strict=True):
        assert deviation(torch.cat([one, other]).double(), want[i].out[:40]) < LIMIT


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_chunks_with_a_cached_prefix_and_decode(case: str, on_host: bool) -> None:
    """Prompts in uneven chunks, some sequences idle, then token by token: as one pass."""
    _, rows, want = made(case)
    batch = batch_of(case, block_size=32)
    parts: list[list[Tensor]] = [[] for _ in rows]
    shares = [[111, 5, 3, 0, 9], [29, 0, 47, 1, 10], [8, 0, 0, 0, 0], [0, 0, 11, 0, 1]]
    for queries in shares:
        new = [one[old : old + count] for one, old, count in zip(rows, batch.lengths, queries, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: queries[i] == 0)  # those without new tokens come last
        for kept, one in zip(parts, _in_order(batch, new, order, on_host=on_host), strict=True):
            kept.append(one)
    while any(old < len(one) for old, one in zip(batch.lengths, rows, strict=True)):
        new = [one[old : old + 1] for one, old in zip(rows, batch.lengths, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: len(new[i]) == 0)
        for kept, one in zip(parts, _in_order(batch, new, order, on_host=on_host), strict=True):
            kept.append(one)
    check([torch.cat(one) for one in parts], want)


def _in_order(batch: Batch, new: list[Tensor], order: list[int], **options: object) -> list[Tensor]:
    """A step whose sequences are permuted, with as many rows of padding as sequences without a token."""
    padding = sum(len(one) == 0 for one in new)
    tables, slots, lengths = batch.block_tables, batch.slots, batch.lengths
    batch.block_tables, batch.slots, batch.lengths = tables[order], slots[order], [lengths[i] for i in order]
    got = batch.step([new[i] for i in order], padding=padding, **options)
    back = [order.index(i) for i in range(len(order))]
    batch.block_tables, batch.slots, batch.lengths = tables, slots, [batch.lengths[i] for i in back]
    return [got[i] for i in back]


@pytest.mark.parametrize("case", ["no indexer", "token-wise", "compressed"])
def test_a_sequence_without_tokens_between_others(case: str) -> None:
    """A step has as many rows as sequences, one token at most each, and yet row 1 is not of sequence 1."""
    _, rows, want = made(case)
    batch = batch_of(case)
    first = batch.step([one[:-1] if len(one) > 1 else one for one in rows])
    assert len(rows[3]) == 1  # nothing is left of this one
    last = batch.step([one[-1:] if len(one) > 1 else one[:0] for one in rows], padding=1)
    check([torch.cat(parts) for parts in zip(first, last, strict=True)], want)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("case", ["no indexer", "token-wise", "compressed"])
def test_drafts_that_are_rejected_leave_no_trace(case: str, on_host: bool) -> None:
    _, rows, want = made(case)
    batch = batch_of(case, num_drafts=3)
    parts = [[one] for one in batch.step([one[: len(one) // 2] for one in rows], on_host=on_host)]
    generator = torch.Generator().manual_seed(1)
    while any(old < len(one) for old, one in zip(batch.lengths, rows, strict=True)):
        left = [len(one) - old for old, one in zip(batch.lengths, rows, strict=True)]
        keep = [min(int(torch.randint(1, 5, (), generator=generator)), count) for count in left]
        drafts = [torch.randn(4, rows[0].shape[1], generator=generator) for _ in rows]
        for i, (one, old) in enumerate(zip(rows, batch.lengths, strict=True)):
            drafts[i][: keep[i]] = one[old : old + keep[i]]
        got = batch.step(drafts, on_host=on_host, keep=keep)
        for kept, one, count in zip(parts, got, keep, strict=True):
            kept.append(one[:count])
    check([torch.cat(one) for one in parts], want)


@pytest.mark.parametrize("case", ["no indexer", "token-wise", "compressed"])
def test_no_value_is_read_without_host_lengths(case: str) -> None:
    """Fake tensors have no values: a host read raises."""
    layer, rows, _ = made(case)
    batch = batch_of(case)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for queries in ([40, 3, 1, 1, 2], [1, 1, 1, 1, 1]):
        metadata = batch.metadata(queries, on_host=False, padding=2)
        tensors = {name: value for name, value in vars(metadata).items() if isinstance(value, Tensor)}
        faked = dataclasses.replace(metadata, **{name: mode.from_tensor(value) for name, value in tensors.items()})
        caches = [None if one is None else mode.from_tensor(one) for one in (*batch.kv, batch.keys, batch.ring)]
        tokens = sum(queries) + 2
        with mode:
            hidden, positions = torch.empty(tokens, rows[0].shape[1]), torch.empty(tokens, dtype=torch.int64)
            out = layer(hidden, positions, faked, (caches[0], caches[1]), *caches[2:])
            assert out.shape == hidden.shape
            with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
                int(positions[0])


E4M3 = torch.float8_e4m3fn
BAD: list[tuple[str, dict[str, object], type[Exception], str]] = [
    ("token-wise", {"keys": None}, ValueError, "indexer_cache: expected the pages of a layer with an indexer, got None"),
    ("compressed", {"ring": None}, ValueError, "indexer_ring: expected the ring of raw keys with index_ratio 4, got None"),
    ("compressed", {"keys": torch.zeros(62, 4, 1, 36, dtype=torch.uint8)}, TypeError, "indexer_cache: .*, got torch.uint8"),
    ("compressed", {"keys": torch.zeros(62, 4, 1, 32, dtype=E4M3)}, TypeError, "indexer_cache: .*, got torch.float8_e4m3fn"),
    ("token-wise", {"keys": torch.zeros(62, 16, 1, 36, dtype=torch.uint8)}, TypeError, "indexer_cache: .*, got torch.uint8"),
    ("token-wise", {"keys": torch.zeros(62, 16, 1, 32, dtype=E4M3)}, TypeError, "indexer_cache: .*, got torch.float8_e4m3fn"),
]


@pytest.mark.parametrize(("case", "changes", "error", "message"), BAD)
def test_refusals(case: str, changes: dict[str, object], error: type[Exception], message: str) -> None:
    _, rows, _ = made(case)
    batch = batch_of(case)
    for name, value in changes.items():
        setattr(batch, name, value)
    before = batch.kv[0].clone()
    with pytest.raises(error, match=f"^{message}"):
        batch.step(rows)
    assert torch.equal(batch.kv[0], before)


@pytest.mark.parametrize(("case", "wrong"), [("token-wise", torch.float32), ("token-wise", E4M3), ("compressed", torch.uint8)])
def test_caches_of_another_form_are_refused_with_fp8(case: str, wrong: torch.dtype) -> None:
    layer = layer_of(config(case), use_fp8=True)
    batch = Batch(layer, config(case), 1, 16, cache_dtype=wrong)
    with pytest.raises(TypeError, match=r"^indexer_cache: expected torch\.\w+ \(use_fp8=True\), got"):
        batch.step(prompts([5], 48))
