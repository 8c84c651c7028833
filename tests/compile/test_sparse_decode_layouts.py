"""Fragments and merge of the decode kernel: its own functions run on the host, a Python thread for each lane.

The layouts of ldmatrix, movmatrix and mma.sync are stated here, as the PTX manual has them. Addresses, masks, the running
softmax, the places of parts and their merge are the kernel's. The result is compared with the formula.
"""

import ast
import importlib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.compile.emulated_context import run_threads
from tests.compile.test_sparse_decode import problem_of

decode = pytest.importorskip("kernels_cute.attention.decode", reason="needs the CuTe DSL")
specs = pytest.importorskip("kernels_cute.attention.decode.spec", reason="needs the CuTe DSL")
BASE = 1 << 12  # address of shared memory
ROWS, PAIRS = np.arange(32) // 4, np.arange(32) % 4 * 2  # of a lane in an 8 x 8 matrix: its row, the first of its columns


class Float(float):
    inf = math.inf


class Memory:
    """Shared memory: NaN where nothing was written."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)

    def view(self, address: int, count: int, dtype: Any) -> np.ndarray:
        size = count * np.dtype(dtype).itemsize
        first = address - BASE
        assert 0 <= first <= len(self.bytes) - size and address % size == 0, f"{size} bytes at {address}"
        return self.bytes[first : first + size].view(dtype)

    def load(self, count: int) -> Callable[[int], list[float]]:
        return lambda address: [float(x) for x in self.view(address, count, np.float32)]

    def store(self, address: int, *values: float) -> None:
        self.view(address, len(values), np.float32)[:] = values


class Warp:
    """Work that the lanes of a warp do together."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.barrier = memory, threading.Barrier(32, timeout=60)
        self.given: list[Any] = [None] * 32
        self.results: Any = None
        self.thread = threading.local()

    def run(self, function: Callable[[], None]) -> None:
        def body(lane: int) -> None:
            self.thread.lane = lane
            function()

        run_threads(body, 32, [self.barrier])

    def together(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        self.given[self.thread.lane] = value
        if self.barrier.wait() == 0:
            self.results = combine(list(self.given))
        self.barrier.wait()
        return self.results[self.thread.lane]

    def load_matrices(self, address: int, transposed: bool) -> Any:
        def combine(addresses: list[int]) -> Any:
            matrices = np.stack([self.memory.view(at, 8, np.uint16) for at in addresses]).reshape(4, 8, 8)
            return np.stack([_words(x.T if transposed else x) for x in matrices], axis=1)

        return self.together(address, combine)

    def multiply_small(self, dtype: Any, sums: Any, left: Any, right0: Any, right1: Any) -> list[float]:
        def combine(given: list[Any]) -> Any:
            a = [_matrix([one[1][i] for one in given]) for i in range(4)]
            b = [_matrix([one[2 + i] for one in given]).T for i in range(2)]
            found = np.block([[a[0], a[2]], [a[1], a[3]]]).astype(np.float64) @ np.concatenate(b)
            places = [(ROWS + e // 2 * 8, PAIRS + e % 2) for e in range(4)]
            return np.stack([found[place] for place in places], axis=1) + np.array([one[0] for one in given])

        return [float(x) for x in self.together((list(sums), left, right0, right1), combine)]

    def transpose(self, word: Any) -> Any:
        return self.together(word, lambda words: _words(_matrix(words).view(np.uint16).T))

    def shuffle(self, value: float, offset: int) -> float:
        return float(self.together(value, lambda values: [values[lane ^ offset] for lane in range(32)]))


def _words(matrix: np.ndarray) -> np.ndarray:
    """A word for each lane."""
    return matrix[ROWS, PAIRS].astype(np.uint32) | matrix[ROWS, PAIRS + 1].astype(np.uint32) << 16


def _matrix(words: list[Any]) -> np.ndarray:
    """The 8 x 8 float16 of a word for each lane."""
    return np.array(words, np.uint32).view(np.float16).reshape(8, 8)


def _pack(dtype: Any, low: float, high: float) -> int:
    return int(np.array([low, high], np.float16).view(np.uint32)[0])


def _range(*limits: int, **_: Any) -> range:
    return range(*limits)


def _plain(name: str, stubs: dict[str, Any]) -> dict[str, Any]:
    """The names of a file of the kernel, its functions as plain Python over the stubs. From the source: a function that was
    compiled once stays in the hands of the DSL."""
    module = importlib.import_module(f"kernels_cute.attention.decode.{name}")
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    tree.body = list(found)
    for function in found:
        function.decorator_list = []
        for argument in function.args.args:
            argument.annotation = None
    names = {**vars(module), **stubs}
    exec(compile(tree, str(module.__file__), "exec"), names)
    return names


def on_host(warp: Warp, queries: np.ndarray, thread: dict[str, int], results: dict[tuple[int, int], Any]) -> Any:
    """The functions of both files as plain Python over a warp and its memory."""
    memory = warp.memory
    arch = SimpleNamespace(
        lane_idx=lambda: warp.thread.lane, fmax=np.fmax, shuffle_sync_bfly=lambda x, offset: warp.shuffle(x, offset),
        thread_idx=lambda: (thread["index"], 0, 0),
    )  # fmt: skip
    words = queries.reshape(-1).view(np.uint32)
    cute = SimpleNamespace(
        arch=arch, AddressSpace=SimpleNamespace(gmem=None), make_ptr=lambda kind, address, *_, **__: address // 4,
        make_layout=lambda count: count, make_tensor=lambda first, count: words[first : first + count],
    )  # fmt: skip
    cutlass = SimpleNamespace(range_constexpr=range, range=_range, const_expr=lambda x: x, min=min, max=max)
    ptx = SimpleNamespace(
        load_matrices=warp.load_matrices, multiply_small=warp.multiply_small, transpose=warp.transpose, pack=_pack,
        exp2=lambda x: float(np.exp2(x)), store_one=memory.store, store_pair=memory.store, load_pair=memory.load(2),
        load_four=memory.load(4),
    )  # fmt: skip
    stubs = {"cute": cute, "cutlass": cutlass, "ptx": ptx, "Float32": Float, "Int32": int, "Int64": int}
    names = _plain("math", stubs) | (merge := _plain("merge", stubs))
    merge["write"] = lambda spec, params, work, head, d, *found: results.setdefault((head, d), found)
    merge["_load_pair_of_words"] = lambda address: words[address // 4 : address // 4 + 2]  # gates are where the queries are
    return SimpleNamespace(**names)


# heads, D, key heads of a block, readers
SHAPES = [((16, 2), 256, 2, 1), ((24, 2), 128, 2, 2), ((5, 1), 128, 1, 3)]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # unused columns: 0 * inf
@pytest.mark.parametrize(("heads", "dim", "kv_heads", "readers"), SHAPES)
def test_fragments_and_merge(heads: tuple[int, int], dim: int, kv_heads: int, readers: int) -> None:
    problem = problem_of(1, heads, head_dim=dim, dtype="float16")
    spec = specs.Spec(problem, decode.Config(1, kv_heads, 6, readers, 1, 1))
    group, tiles, token = spec.group, 2 * readers + 1, 1
    source = np.random.default_rng(0)
    queries = source.standard_normal((3, heads[0], dim)).astype(np.float16)
    keys, values = source.standard_normal((2, tiles, 16, kv_heads, dim)).astype(np.float16)
    valid = source.random((tiles, 16)) < 0.6
    valid[-1] = False
    valid[-1, 15] = True
    keys[~valid], values[~valid] = np.nan, 0.0
    queries[..., 0] = np.abs(queries[..., 0]) + 1
    keys[0, valid[0], 0, 0] = -np.inf  # scores of the first tile and key head: their weights are 0

    memory = Memory(spec.ring_bytes + 4 * spec.sums_floats)
    ring, sums, scale = BASE, BASE + spec.ring_bytes, 0.1
    work = specs.Work(token, 0, 0)
    pointers = {name: SimpleNamespace(toint=lambda at=at: at) for name, at in (("ring", ring), ("sums", sums))}
    fields = {name: SimpleNamespace(data_ptr=lambda at=at: at) for name, at in pointers.items()}
    storage, params = SimpleNamespace(**fields), SimpleNamespace(q=SimpleNamespace(iterator=SimpleNamespace(toint=lambda: 0)))
    thread: dict[str, int] = {}
    results: dict[tuple[int, int], Any] = {}
    warp = Warp(memory)
    kernel = on_host(warp, queries, thread, results)
    parts = []
    for number in range(spec.math_warps):  # as in math_warp
        kv_head, part, reader = number % spec.sharers // spec.parts, number % spec.parts, number // spec.sharers
        state = [([0] * (2 * spec.steps), [0.0] * (4 * spec.steps), [specs.LOWEST] * 2, [0.0] * 2) for _ in range(32)]

        def attend(kv_head: int = kv_head, part: int = part, state: Any = state, tile: int = -1) -> None:
            mine = state[warp.thread.lane]
            if tile < 0:
                kernel.load_queries(spec, params, work, kv_head, part, mine[0])
            else:
                bits = sum(1 << position for position in range(16) if valid[tile, position])
                kernel.attend_tile(spec, ring + kv_head * spec.head_bytes, bits, scale * math.log2(math.e), *mine)

        warp.run(attend)
        for tile in range(reader, tiles, readers):
            for row, content in enumerate([*keys[tile], *values[tile]]):
                first = row * spec.pitch
                memory.bytes[first : first + spec.row_bytes] = content.reshape(-1).view(np.uint8)
            warp.run(lambda attend=attend, tile=tile: attend(tile=tile))  # type: ignore[misc]
        parts.append(state)
    memory.bytes[:] = 0xFF
    for number, state in enumerate(parts):
        warp.run(lambda number=number, state=state: kernel.store_part(spec, storage, number, *state[warp.thread.lane][1:]))  # type: ignore[misc]
    for index in range(spec.threads):
        thread["index"] = index
        kernel.merge(spec, storage, params, work, None)

    assert set(results) == {(head, d) for head in range(spec.heads) for d in range(0, dim, 4)}
    for head in range(spec.heads):
        k, v = (x[:, :, head // group][valid].astype(np.float64) for x in (keys, values))
        scores = scale * (k @ queries[token, head].astype(np.float64))
        weights = np.exp(scores - scores.max())
        found = [results[head, d] for d in range(0, dim, 4)]
        best, total = found[0][:2]
        assert 0 < total < np.inf
        np.testing.assert_allclose(best * math.log(2), scores.max(), rtol=1e-6)
        np.testing.assert_allclose(total, weights.sum(), rtol=1e-6)
        np.testing.assert_allclose(np.concatenate([one[2] for one in found]) / total, weights @ v / weights.sum(), atol=2e-3)


@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize(("heads", "dim", "kv_heads", "readers"), SHAPES)
def test_a_thread_has_the_gates_of_what_it_writes(
    heads: tuple[int, int], dim: int, kv_heads: int, readers: int, splits: int
) -> None:
    """Gates come in the order in which `merge` walks its units of four entries, between others, as next to raw queries."""
    spec = specs.Spec(
        problem_of(1, heads, head_dim=dim, dtype="float16", has_gate=True), decode.Config(splits, kv_heads, 6, readers, 1, 1)
    )
    gates = np.arange(3 * heads[0] * 2 * dim, dtype=np.uint16).view(np.float16).reshape(3, heads[0], 2, dim)
    thread: dict[str, int] = {}
    kernel = on_host(Warp(Memory(0)), gates, thread, {})
    stride = (heads[0] * 2 * dim, 2 * dim, 1)
    params = SimpleNamespace(gate=SimpleNamespace(iterator=SimpleNamespace(toint=lambda: 2 * dim), stride=stride))
    written = set()
    for kv_set in range(spec.kv_sets):
        for rank in range(splits):
            for index in range(spec.threads):
                thread["index"] = index
                found = [0] * spec.gate_words
                kernel.load_gates(spec, params, specs.Work(1, kv_set, rank), found)
                end = min((rank + 1) * spec.units_each, spec.units)
                for place, unit in enumerate(range(rank * spec.units_each + index, end, spec.threads)):
                    head, d = kv_set * spec.heads + unit * 4 // dim, unit * 4 % dim
                    words = np.array(found[2 * place : 2 * place + 2], np.uint32)
                    assert words.tobytes() == gates[1, head, 1, d : d + 4].tobytes()
                    written.add((head, d))
    assert len(written) == heads[0] * dim // 4
