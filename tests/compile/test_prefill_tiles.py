"""Tiles of the sparse prefill: the function that finds a tile's tokens, run on the host, and the sizes of the workspace."""

import importlib
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from gdn.device import H100
from gdn.ops.attention.problem import SparsePrefillProblem
from tests.compile.variants.base import example

pytest.importorskip("cutlass", reason="needs the CuTe DSL")


class Params(NamedTuple):
    q: Any
    query_start_loc: Any
    seq_lens: Any


def tiles_of(lengths: list[int], prefixes: list[int], padding: int, queries: int) -> list[list[int]]:
    """(sequence, first token, number of queries, first position) of each tile, by the kernel's own function."""
    importlib.import_module("kernels_cute.common.build")
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    shape, of_tile = (importlib.import_module(f"kernels_cute.attention.{name}") for name in ("prefill.shape", "tile"))

    @cute.jit
    def find(q: cute.Tensor, query_start_loc: cute.Tensor, seq_lens: cute.Tensor, found: cute.Tensor, count: cutlass.Int32):
        sizes = cutlass.const_expr(SimpleNamespace(queries=queries))
        for tile in cutlass.range(count, unroll=1):
            words = of_tile.tile_of(sizes, Params(q, query_start_loc, seq_lens), tile)
            for word in cutlass.range_constexpr(4):
                found[tile, word] = words[word]

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([a + b for a, b in zip(lengths, prefixes, strict=True)], dtype=torch.int32)
    tokens = int(bounds[-1]) + padding
    count = shape.num_tiles(128 // queries, tokens, len(lengths))
    found = torch.full((count, 4), -99, dtype=torch.int32)
    find(*(from_dlpack(x) for x in (torch.zeros(tokens), bounds, seq_lens, found)), cutlass.Int32(count))
    return found.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_in_one_tile_of_its_own_sequence(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2):
        lengths = [rng.choice((0, 1, 2, 15, 16, 17, 31, 32, 33, 100)) for _ in range(rng.randrange(1, 9))]
        prefixes, padding = [rng.randrange(50) for _ in lengths], rng.choice((0, 1, 40))
        owner = [s for s, length in enumerate(lengths) for _ in range(length)] + [len(lengths)] * padding
        starts = [sum(lengths[:s]) for s in range(len(lengths) + 1)]
        seen = []
        for sequence, first, count, position in tiles_of(lengths, prefixes, padding, 16):
            assert 0 <= count <= 16
            for token in range(first, first + count):
                assert owner[token] == sequence
                real = sequence < len(lengths)
                assert position + token - first == prefixes[sequence] + token - starts[sequence] if real else position < -16
            seen += range(first, first + count)
        assert sorted(seen) == list(range(len(owner)))


def problem(**fields: Any) -> SparsePrefillProblem:
    one: SparsePrefillProblem = example("sparse_attention_prefill", **fields)
    return one


def test_workspace() -> None:
    """Workspace for 4096 queries of a long context: 48 MiB, 1.5 times their indices; for any number of them at most 256."""
    prefill = importlib.import_module("kernels_cute.attention.prefill")

    def mib(**fields: Any) -> float:
        one = problem(**fields)
        return prefill.workspace_bytes(one, prefill.default_config(one, H100)) / 2**20

    assert 48 <= mib() < 49
    assert mib(num_tokens=2**18) <= 256
    assert mib(num_tokens=2**18, num_heads=2, k=4096, max_context_len=2**20) <= 256
    assert mib(num_tokens=16, max_context_len=64) < 0.01
    assert mib(k=16, max_context_len=2**20) < 1


def test_launch_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile is listed and attended once, lists before products."""
    prefill = importlib.import_module("kernels_cute.attention.prefill")
    monkeypatch.setattr(prefill, "MOST_BYTES", 2**20)
    one = problem(num_tokens=1000, num_sequences=3, k=2048, max_context_len=32768)
    calls: list[tuple[str, int, int]] = []
    functions = {name: lambda *args, name=name: calls.append((name, *args[-2:])) for name in (prefill.UNIONS, prefill.ATTEND)}
    empty = torch.empty(0)
    shapes = {
        "q": (1000, 16, 256), "k_cache": (4, 16, 2, 256), "topk_indices": (1000, 2048), "block_tables": (3, 2048),
        "seq_lens": (3,),
    }  # fmt: skip
    params = SimpleNamespace(**{name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    params_of = type("P", (), {"__getattr__": lambda _, name: getattr(params, name), "__iter__": lambda _: iter([empty])})()
    prefill.launch(SimpleNamespace(functions=functions), params_of)
    assert [name for name, _, _ in calls] == [prefill.UNIONS, prefill.ATTEND] * (len(calls) // 2) and len(calls) > 2
    tiles = [tile for name, first, count in calls if name == prefill.ATTEND for tile in range(first, first + count)]
    assert tiles == list(range(1000 // 16 + 3 + 1))
    assert calls[0::2] == [(prefill.UNIONS, *rest) for _, *rest in calls[1::2]]
    assert prefill.workspace_bytes(one, prefill.default_config(one, H100)) <= 2**20


def test_refusals() -> None:
    prefill = importlib.import_module("kernels_cute.attention.prefill")
    assert prefill.refusal(problem()) is None
    for fields, word in (
        ({"head_dim": 64}, "head_dim"), ({"num_heads": 34}, "query heads"), ({"rows_aligned": False}, "16 bytes"),
        ({"dtype": "float32"}, "float16"), ({"num_heads": 3}, "query heads"),
    ):  # fmt: skip
        assert word in prefill.refusal(problem(**fields)), fields
    for one in (problem(), problem(head_dim=128), problem(num_heads=2)):
        assert prefill.default_config(one, H100) in prefill.configs(one, H100)
