"""Arguments that the indexer's steps hand to a kernel, held against their Params by stand-in kernels on the CPU. A call like an
earlier one takes the short way to the same result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.testing.compare import same_bits
from tests.ops.indexer_kernels import FP8, IndexerKernels
from tests.ops.stand_in import StandIn
from tests.references import reference

Arguments = dict[str, Any]
D = 64


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return IndexerKernels().put(monkeypatch)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cache_of(dtype: torch.dtype, heads: int | None) -> torch.Tensor:
    row = D + 4 if dtype == torch.uint8 else D
    shape = (4, 16, row) if heads is None else (4, 16, heads, row)
    return torch.full(shape, 7.0).to(dtype)


def rotation(tokens: int) -> Arguments:
    return {"positions": torch.arange(3, 3 + tokens), "cos_sin": randn(40, 32, seed=5).float(), "rotary_dim": 32}


def prepare(dtype: torch.dtype | None, heads: int | None = None, weights: bool = True, **more: Any) -> Arguments:
    keys: Arguments = {"k": None, "k_norm": None, "cache": None, "slot_mapping": None}
    if dtype is not None:
        keys = {
            "k": randn(5, D, seed=2) if heads is None else randn(5, heads, D, seed=2), "k_norm": randn(D, seed=3),
            "cache": cache_of(dtype, heads), "slot_mapping": torch.tensor([3, -1, 60, 17, 0]),
        }  # fmt: skip
    given = randn(5, 6, seed=4).float() if weights else None
    return {"q": randn(5, 6, D, seed=1), "weights": given, "q_norm": randn(D, seed=6), **keys, **rotation(5), **more}


def values_of(dtype: torch.dtype, heads: int | None) -> Arguments:
    shape = (5, D) if heads is None else (5, heads, D)
    return {"v": randn(*shape, seed=8), "v_cache": cache_of(dtype, heads)}


def compress(dtype: torch.dtype, heads: int | None = None) -> Arguments:
    raw = randn(7, D) if heads is None else randn(7, heads, D)
    ring = torch.zeros(3, 8, D).bfloat16() if heads is None else torch.zeros(3, 8, heads, D).bfloat16()
    return {
        "raw_k": raw, "ring": ring, "cache": cache_of(dtype, heads), "k_norm": randn(D, seed=3), **rotation(7),
        "ring_slots": torch.full((7,), 1, dtype=torch.int32), "slot_mapping": torch.arange(3, 10) // 4,
    }  # fmt: skip


def gather(dtype: torch.dtype, heads: int | None, **more: Any) -> Arguments:
    tables = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    return {"cache": cache_of(dtype, heads), "block_tables": tables, "cu_seqlens": torch.tensor([0, 20, 23])} | more


def groups(**more: Any) -> Arguments:
    indices = torch.tensor([[3, -1, 0, 1], [0, 1, -1, -1]])
    return {"group_indices": indices, "positions": torch.tensor([6, -1]), **more}


CALLS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "quantize": ("quantize_fp8", lambda: {"x": randn(5, 128)}),
    "quantize heads": ("quantize_fp8", lambda: {"x": randn(5, 192)[:, 32:160].unflatten(1, (2, 64)), "group_size": 64}),
    "quantize groups": ("quantize_fp8", lambda: {"x": randn(5, 192)[:, 32:160], "group_size": 64}),
    "write": ("write_indexer_cache", lambda: {
        "k": randn(3, D), "cache": cache_of(torch.uint8, None), "slot_mapping": torch.tensor([5, -1, 40]),
    }),
    "write heads": ("write_indexer_cache", lambda: {
        "k": randn(3, 2, D), "cache": cache_of(FP8, 2), "slot_mapping": torch.tensor([5, -1, 40], dtype=torch.int32),
    }),
    "prepare scaled": ("prepare_indexer", lambda: prepare(torch.uint8)),
    "prepare scaled without weights": ("prepare_indexer", lambda: prepare(torch.uint8, 2, weights=False)),
    "prepare cast": ("prepare_indexer", lambda: prepare(FP8, 1, fp8=True)),
    "prepare bf16": ("prepare_indexer", lambda: prepare(torch.bfloat16, zero_centred=False)),
    "prepare with values": ("prepare_indexer", lambda: prepare(torch.bfloat16, 2, **values_of(torch.bfloat16, 2))),
    "prepare scaled with values": ("prepare_indexer", lambda: prepare(torch.uint8, **values_of(torch.uint8, None))),
    "prepare queries": ("prepare_indexer", lambda: prepare(None, fp8=True)),
    "prepare queries without weights": ("prepare_indexer", lambda: prepare(None, weights=False)),
    "compress": ("compress_indexer_keys", lambda: compress(FP8)),
    "compress heads": ("compress_indexer_keys", lambda: compress(torch.uint8, 2)),
    "gather": ("gather_indexer_cache", lambda: gather(torch.uint8, None, num_rows=30)),
    "gather heads": ("gather_indexer_cache", lambda: gather(torch.uint8, 3, num_rows=23)),
    "gather bf16": ("gather_indexer_cache", lambda: gather(torch.bfloat16, 2, num_rows=23)),
    "expand": ("expand_topk_groups", groups),
    "expand into": ("expand_topk_groups", lambda: groups(ratio=2, out=torch.zeros(2, 12, dtype=torch.int32)[:, :9])),
}  # fmt: skip


def results(found: Any, arguments: Arguments) -> list[torch.Tensor | None]:
    """Tensors that a call returned or changed."""
    listed = list(found) if isinstance(found, tuple) else [] if found is None else [found]
    return listed + [arguments[name] for name in ("cache", "v_cache", "ring") if name in arguments]


def agree(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert same_bits(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_the_contract_and_the_short_way(stand_in: StandIn, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, make = CALLS[name]
    exact = make()
    want = results(getattr(reference, function)(**exact), exact)
    first = make()
    agree(results(getattr(gdn, function)(**first), first), want)
    assert stand_in.launches == 1 and len(stand_in.problems) == 1 and stand_in.problems[0].op == function
    assert stand_in.problems[0].bytes_moved() > 0 and stand_in.problems[0].flops() == 0

    def forbidden(*arguments: Any) -> None:
        raise AssertionError("the call was not remembered")

    monkeypatch.setattr(runtime, "prepare", forbidden)
    for _ in range(2):
        second = make()
        agree(results(getattr(gdn, function)(**second), second), want)
    assert stand_in.launches == 3


def test_no_rows_launch_nothing(stand_in: StandIn) -> None:
    empty = prepare(torch.uint8)
    for name in ("q", "k", "weights", "positions", "slot_mapping"):
        empty[name] = empty[name][:0]
    q, weights = gdn.prepare_indexer(**empty)
    assert q.shape == (0, 6, D) and q.dtype == FP8 and weights is not None and weights.shape == (0, 6)
    values, scale = gdn.quantize_fp8(randn(0, 128))
    assert values.shape == (0, 128) and scale.shape == (0, 1)
    gdn.write_indexer_cache(randn(0, D), cache_of(torch.uint8, None), torch.empty(0, dtype=torch.int64))
    few = compress(FP8)
    gdn.compress_indexer_keys(**few | {name: few[name][:0] for name in ("raw_k", "positions", "ring_slots", "slot_mapping")})
    k, k_scale = gdn.gather_indexer_cache(**gather(torch.uint8, None, num_rows=0) | {"cu_seqlens": torch.tensor([0, 0, 0])})
    assert k.shape == (0, D) and k_scale is not None and k_scale.shape == (0,)
    assert gdn.expand_topk_groups(torch.zeros(0, 4).int(), torch.zeros(0).int()).shape == (0, 19)
    assert gdn.expand_topk_groups(torch.zeros(2, 0).int(), torch.tensor([2, 3])).tolist() == [[0, 1, 2], [-1, -1, -1]]
    assert stand_in.launches == 0


def test_what_must_have_a_row_says_so() -> None:
    for function, arguments in ((gdn.prepare_indexer, prepare(torch.uint8)), (gdn.compress_indexer_keys, compress(FP8))):
        before = arguments["cache"].clone()
        with pytest.raises(ValueError, match=r"cos_sin: expected shape \[max_positions >= 1, 32\]"):
            function(**arguments | {"cos_sin": torch.zeros(0, 32)})
        assert same_bits(arguments["cache"], before)
    with pytest.raises(ValueError, match="ring: expected at least one sequence"):
        gdn.compress_indexer_keys(**compress(FP8) | {"ring": torch.zeros(0, 8, D).bfloat16()})
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets that never decrease"):
        gdn.gather_indexer_cache(**gather(FP8, None) | {"cu_seqlens": torch.tensor([0, 0, -3])})


def test_rows_off_their_alignment_are_copied(stand_in: StandIn) -> None:
    arguments = prepare(torch.uint8)
    want = gdn.prepare_indexer(**arguments)
    names = ("q", "k", "q_norm", "cos_sin")
    shifted = {name: torch.cat([arguments[name][..., :1], arguments[name]], -1)[..., 1:] for name in names}
    found = gdn.prepare_indexer(**arguments | shifted)
    assert same_bits(found[0], want[0]) and same_bits(found[1], want[1])  # type: ignore[arg-type]
    assert stand_in.launches == 2


def test_a_ring_off_its_alignment_says_so(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = compress(FP8)
    ring = torch.zeros(3, 8, D + 3).bfloat16()[..., 3:]
    caught: list[Any] = []

    def reference_for(problem: Any, device: torch.device, backend: str | None = None) -> runtime.Prepared:
        caught.append(problem)
        return runtime.Prepared("reference", None, 0, None, runtime.Choice(problem.op, "reference"))

    monkeypatch.setattr(runtime, "prepare", reference_for)
    gdn.compress_indexer_keys(**arguments | {"ring": ring})
    assert not caught[0].ring_aligned and bool((ring[1] != 0).any())


def test_gather_reads_the_number_of_rows(stand_in: StandIn) -> None:
    for _ in range(2):
        k, _ = gdn.gather_indexer_cache(**gather(FP8, 2))
        assert k.shape == (23, 2, D)
    assert len(stand_in.problems) == 2  # sized by what was read: no call is like another
