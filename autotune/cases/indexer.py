"""The steps around the indexer as cases: prepare, quantise, cache write, gather, compressed keys, groups to tokens.

Inputs have a layer's layout: q, k and w are slices of one projection, raw keys too; cache rows are taken in random order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

from autotune.cases.base import SeededCase, Shape, Tunable, WrongResult, example, launch_of
from gdn import reference
from gdn.problems import (
    CompressIndexerKeysParams,
    CompressIndexerKeysProblem,
    ExpandTopkGroupsParams,
    ExpandTopkGroupsProblem,
    GatherIndexerCacheParams,
    GatherIndexerCacheProblem,
    IndexerCacheProblem,
    PrepareIndexerParams,
    PrepareIndexerProblem,
    QuantizeFp8Params,
    QuantizeFp8Problem,
    WriteIndexerCacheParams,
    WriteIndexerCacheProblem,
)
from gdn.runtime import Prepared
from gdn.testing import compare

Tensor = torch.Tensor

_PAGE = 64
# Largest share of values that may differ from the reference's: a norm's sum in another order rounds a few of them the other
# way, and with them the scales that follow from them. Operators that neither normalise nor rotate are exact.
_DIFFERING = 2e-3


@dataclass(frozen=True)
class Work:
    """One set of inputs, for the public operator and for a launch."""

    function: str  # of the public operator, and of its reference
    arguments: dict[str, Any]
    tensors: tuple[Any, ...]  # the operator's Params
    outputs: tuple[Tensor | None, ...]  # those of `tensors` that are written and returned
    updated: tuple[str, ...] = ()  # names of the arguments that are updated in place


class IndexerCase(SeededCase[Work]):
    """Case of one operator, whose inputs `work` makes. is_rounded: some values may round the other way."""

    def __init__(
        self,
        work: "Callable[[_Maker, Any, Sequence[int]], Work]",
        shape: Shape,
        device: torch.device,
        copies: int,
        *,
        is_rounded: bool = False,
    ) -> None:
        super().__init__(shape, device, copies)
        self._make, self._is_rounded = work, is_rounded

    def _work(self, seed: int) -> Work:
        return self._make(_Maker(self._device, seed), self._problem, self._lengths)

    @cached_property
    def _expected(self) -> list[Tensor]:
        work = self._work(seed=0)
        found = getattr(reference, work.function)(**work.arguments)
        returned = found if isinstance(found, tuple) else () if found is None else (found,)
        expected = [made for made, output in zip(returned, work.outputs, strict=False) if output is not None]
        return expected + [work.arguments[name] for name in work.updated]

    def check(self, prepared: Prepared) -> float:
        expected = self._expected
        work = self._work(seed=0)  # a new set: a launch updates caches and rings
        launch_of(prepared, work.tensors)()
        found = [output for output in work.outputs if output is not None] + [work.arguments[name] for name in work.updated]
        names = [*(f"output {n}" for n in range(len(found) - len(work.updated))), *work.updated]
        worst = 0.0
        for name, output, exact in zip(names, found, expected, strict=True):
            exact = exact.reshape(output.shape)
            if compare.same_bits(output, exact):
                continue
            if not self._is_rounded or name == "ring":
                raise WrongResult(f"{name} is not the reference's")
            share = _differing(output, exact)
            if not share <= _DIFFERING:
                raise WrongResult(f"{name}: {share:.1e} of it is not the reference's, allowed {_DIFFERING:.0e}")
            worst = max(worst, share)
        return worst


def _differing(output: Tensor, exact: Tensor) -> float:
    """Share of values that differ; 1 where one differs by more than a rounding in the other direction explains."""
    if output.dtype == torch.uint8:  # bytes of values and of scales
        return float((output != exact).double().mean())
    got, want = output.double(), exact.double()
    # A scale, and all of its row's values with it, may follow from a 16-bit value that was rounded the other way.
    step = {torch.float8_e4m3fn: 2.0**-3, torch.float32: 2.0**-7}.get(output.dtype, 2.0**-7)
    least = 2.0**-8 if output.dtype == torch.float8_e4m3fn else 1e-3
    wild = ~((got - want).abs() <= step * 1.01 * want.abs() + least)  # NaN too
    tolerance = 1e-6 * want.abs() if output.dtype == torch.float32 else 0.0
    return 1.0 if bool(wild.any()) else float(((got - want).abs() > tolerance).double().mean())


class _Maker:
    """Inputs from a seed: the same tensors for the same seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._generator = device, torch.Generator(device).manual_seed(seed)

    def _normal(self, *shape: int, dtype: str | None) -> Tensor:
        found = torch.randn(*shape, device=self._device, generator=self._generator)
        return found.to(getattr(torch, str(dtype)))

    def _poisoned(self, *shape: int, dtype: str) -> Tensor:
        if dtype == "float8_e4m3fn":
            return torch.full(shape, 0x7F, dtype=torch.uint8, device=self._device).view(torch.float8_e4m3fn)
        return torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=self._device)

    def _order(self, count: int, of: int, dtype: str | None = "int64") -> Tensor:
        order = torch.randperm(of, device=self._device, generator=self._generator)[:count]
        return order.to(getattr(torch, str(dtype)))

    def _cache(self, problem: IndexerCacheProblem, rows: int) -> tuple[Tensor, Tensor]:
        """A cache of at least `rows` rows and its pages in flat form; every byte is the same."""
        row = problem.head_dim + (4 if problem.scaled else 0)
        item = 2 if problem.cache_dtype == "bfloat16" else 1
        pages = -(-rows // _PAGE) + 1
        memory = torch.full((pages, _PAGE * problem.num_kv_heads * row * item), 0x3C, dtype=torch.uint8, device=self._device)
        flat = memory.view(getattr(torch, str(problem.cache_dtype)))
        return flat.view(pages, _PAGE, problem.num_kv_heads, row), flat

    def _rotation(self, problem: Any, most: int) -> Tensor:
        half = problem.rotary_dim // 2
        powers = torch.arange(half, device=self._device) / half
        angle = torch.arange(most, device=self._device)[:, None] / 10000.0**powers
        return torch.cat([angle.cos(), angle.sin()], dim=1).to(getattr(torch, problem.cos_sin_dtype))

    def quantize(self, problem: QuantizeFp8Problem) -> Work:
        shape = (problem.num_tokens, problem.num_groups, problem.group_dim)
        if problem.num_groups != 1:
            raise ValueError(f"problem: expected contiguous rows, of one group, got {problem.static_key()}")
        x = self._normal(*shape, dtype=problem.dtype)
        outputs = self._poisoned(*shape, dtype="float8_e4m3fn"), self._poisoned(*shape[:2], dtype="float32")
        arguments = {"x": x[:, 0], "group_size": problem.group_dim}
        return Work("quantize_fp8", arguments, QuantizeFp8Params(x, *outputs), outputs)

    def write(self, problem: WriteIndexerCacheProblem) -> Work:
        tokens = problem.num_tokens
        k = self._normal(tokens, problem.num_kv_heads, problem.head_dim, dtype=problem.dtype)
        cache, flat = self._cache(problem, tokens)
        slots = self._order(tokens, tokens + _PAGE, problem.slot_dtype)
        arguments = {"k": k, "cache": cache, "slot_mapping": slots}
        return Work("write_indexer_cache", arguments, WriteIndexerCacheParams(k, flat, slots), (), ("cache",))

    def prepare(self, problem: PrepareIndexerProblem) -> Work:
        tokens, heads, dim = problem.num_tokens, problem.num_heads, problem.head_dim
        if problem.num_kv_heads != 1 or problem.k_dtype != problem.dtype:
            raise ValueError(f"problem: expected one key head of q's dtype, got {problem.static_key()}")
        width = -(-(heads * dim + dim + heads) // 8) * 8
        rows = self._normal(tokens, width, dtype=problem.dtype)  # [q | k | w]
        q, k = rows[:, : heads * dim].unflatten(1, (heads, dim)), rows[:, heads * dim : heads * dim + dim].unflatten(1, (1, dim))
        weights = rows[:, heads * dim + dim :][:, :heads] if problem.folds_weights else None
        most = max(4096, tokens)
        table = self._rotation(problem, most)
        positions = torch.arange(most - tokens, most, device=self._device).to(getattr(torch, problem.position_dtype))
        q_norm, k_norm = (self._normal(dim, dtype=dtype) * 0.1 for dtype in (problem.q_norm_dtype, problem.k_norm_dtype))
        cache, flat = self._cache(problem, tokens)
        slots = self._order(tokens, tokens + _PAGE, problem.slot_dtype)
        q_out = self._poisoned(tokens, heads, dim, dtype=problem.q_out_dtype)
        weights_out = self._poisoned(tokens, heads, dtype="float32") if problem.folds_weights else None
        arguments = {
            "q": q, "k": k, "weights": weights, "positions": positions, "cos_sin": table, "q_norm": q_norm, "k_norm": k_norm,
            "cache": cache, "slot_mapping": slots, "rotary_dim": problem.rotary_dim, "zero_centred": problem.zero_centred,
        }  # fmt: skip
        params = PrepareIndexerParams(q, k, weights, positions, table, q_norm, k_norm, flat, slots, q_out, weights_out, 1e-6)
        return Work("prepare_indexer", arguments, params, (q_out, weights_out), ("cache",))

    def compress(self, problem: CompressIndexerKeysProblem, lengths: Sequence[int]) -> Work:
        """Prompts from their start; steps of a few tokens somewhere after it."""
        heads, dim, ratio = problem.num_kv_heads, problem.head_dim, problem.ratio
        starts = [0 if length > 2 * ratio else 1000 + n for n, length in enumerate(lengths)]
        tokens, size, most = sum(lengths), 2 * ratio, max(lengths) + 2000
        rows = self._normal(tokens, 2 * heads * dim, dtype=problem.dtype)
        raw = rows[:, heads * dim :].unflatten(1, (heads, dim))
        ring = self._normal(len(lengths) + 1, size, heads, dim, dtype=problem.dtype)
        share = -(-most // (ratio * _PAGE)) * _PAGE
        cache, flat = self._cache(problem, share * len(lengths))
        position_of = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
        sequence_of = [n for n, length in enumerate(lengths) for _ in range(length)]

        def integers(values: Sequence[int], dtype: str | None) -> Tensor:
            return torch.tensor(values, dtype=getattr(torch, str(dtype)), device=self._device)

        positions = integers(position_of, problem.position_dtype)
        slots = integers([1 + n for n in sequence_of], problem.ring_slot_dtype)
        rows_of = [n * share + position // ratio for n, position in zip(sequence_of, position_of, strict=True)]
        mapping = integers(rows_of, problem.slot_dtype)
        table, k_norm = self._rotation(problem, most), self._normal(dim, dtype=problem.k_norm_dtype) * 0.1
        arguments = {
            "raw_k": raw, "ring": ring, "cache": cache, "positions": positions, "cos_sin": table, "k_norm": k_norm,
            "ring_slots": slots, "slot_mapping": mapping, "ratio": ratio, "rotary_dim": problem.rotary_dim,
            "zero_centred": problem.zero_centred,
        }  # fmt: skip
        params = CompressIndexerKeysParams(raw, ring, flat, positions, table, k_norm, slots, mapping, 1e-6, -1)
        return Work("compress_indexer_keys", arguments, params, (), ("ring", "cache"))

    def gather(self, problem: GatherIndexerCacheProblem, lengths: Sequence[int]) -> Work:
        rows, heads, dim = problem.num_rows, problem.num_kv_heads, problem.head_dim
        columns = -(-max(lengths) // _PAGE)
        cache, flat = self._cache(problem, columns * _PAGE * len(lengths))
        raw = flat.view(torch.uint8)
        raw.copy_(torch.randint(0, 0x70, raw.shape, device=self._device, generator=self._generator, dtype=torch.uint8))
        tables = self._order(columns * len(lengths), flat.shape[0], "int32").view(len(lengths), columns)
        bounds = torch.tensor([0, *accumulate(lengths)], device=self._device).to(getattr(torch, problem.cu_seqlens_dtype))
        k = self._poisoned(rows, heads * dim, dtype="float8_e4m3fn" if problem.scaled else str(problem.cache_dtype))
        scale = self._poisoned(rows, heads, dtype="float32") if problem.scaled else None
        arguments = {"cache": cache, "block_tables": tables, "cu_seqlens": bounds, "num_rows": rows}
        return Work("gather_indexer_cache", arguments, GatherIndexerCacheParams(flat, tables, bounds, k, scale), (k, scale))

    def expand(self, problem: ExpandTopkGroupsProblem) -> Work:
        tokens, k, ratio = problem.num_tokens, problem.k, problem.ratio
        groups = torch.arange(k, device=self._device).expand(tokens, k).to(getattr(torch, problem.group_dtype)).contiguous()
        short = torch.randint(0, k + 1, (tokens,), device=self._device, generator=self._generator)
        short[::2] = k  # rows with fewer groups end in -1
        groups.masked_fill_(torch.arange(k, device=self._device) >= short[:, None], -1)
        positions = (ratio * k + torch.arange(tokens, device=self._device)).to(getattr(torch, problem.position_dtype))
        out = torch.full((tokens, k * ratio + ratio - 1), -2, dtype=torch.int32, device=self._device)
        arguments = {"group_indices": groups, "positions": positions, "ratio": ratio}
        return Work("expand_topk_groups", arguments, ExpandTopkGroupsParams(groups, positions, out), (out,))


# --- shapes ------------------------------------------------------------------------------------------------------------


def _prepare(num_tokens: int, num_heads: int = 16, fp8: bool = True) -> Shape:
    problem = example("prepare_indexer", {"index_num_heads": num_heads}, fp8, num_tokens=num_tokens)
    return Shape(f"{num_tokens} x {num_heads} heads, {'fp8' if fp8 else 'bf16'}", problem)


def _quantize(num_rows: int) -> Shape:
    return Shape(f"{num_rows} x 128", example("quantize_fp8", num_tokens=num_rows))


def _write(num_tokens: int) -> Shape:
    return Shape(f"{num_tokens} tokens, fp8", example("write_indexer_cache", num_tokens=num_tokens))


def _gather(lengths: Sequence[int], label: str) -> Shape:
    problem = example("gather_indexer_cache", num_rows=sum(lengths), num_sequences=len(lengths))
    return Shape(f"{label}, fp8", problem, lengths=tuple(lengths))


def _compress(lengths: Sequence[int], label: str) -> Shape:
    return Shape(label, example("compress_indexer_keys", num_tokens=sum(lengths)), lengths=tuple(lengths))


def _expand(num_tokens: int) -> Shape:
    return Shape(f"{num_tokens} x 512 groups", example("expand_topk_groups", num_tokens=num_tokens))


def _with(shape: Shape, lengths: tuple[int, ...] = (), **sizes: int) -> Shape:
    problem: Any = shape.problem
    return replace(shape, lengths=lengths, problem=replace(problem, **sizes))


def _few_keys(shape: Shape) -> Shape:
    lengths = (70, 5) if len(shape.lengths) == 1 else shape.lengths[:3]
    return _with(shape, lengths, num_tokens=sum(lengths))


prepare_indexer = Tunable(
    partial(IndexerCase, lambda maker, problem, lengths: maker.prepare(problem), is_rounded=True),
    shapes=(*(_prepare(tokens) for tokens in (1, 64, 4096, 8192)), _prepare(8192, 64), _prepare(8192, fp8=False)),
    small=lambda shape: _with(shape, num_tokens=5),
)

quantize_fp8 = Tunable(
    partial(IndexerCase, lambda maker, problem, lengths: maker.quantize(problem)),
    shapes=(_quantize(16), _quantize(64 * 16), _quantize(8192 * 16)),
    small=lambda shape: _with(shape, num_tokens=5),
)

write_indexer_cache = Tunable(
    partial(IndexerCase, lambda maker, problem, lengths: maker.write(problem)),
    shapes=(_write(1), _write(64), _write(8192)),
    small=lambda shape: _with(shape, num_tokens=5),
)

gather_indexer_cache = Tunable(
    partial(IndexerCase, lambda maker, problem, lengths: maker.gather(problem, lengths)),
    shapes=(_gather([64], "64"), _gather([8192], "8192"), _gather([32768] * 4, "4 x 32768")),
    small=lambda shape: _with(shape, (70, 5), num_rows=75, num_sequences=2),
)

compress_indexer_keys = Tunable(
    partial(IndexerCase, lambda maker, problem, lengths: maker.compress(problem, lengths), is_rounded=True),
    shapes=(_compress([1] * 64, "64 x 1"), _compress([4] * 64, "64 x 4"), _compress([8192], "8192")),
    small=_few_keys,
)

expand_topk_groups = Tunable(
    partial(IndexerCase, lambda maker, problem, lengths: maker.expand(problem)),
    shapes=(_expand(1), _expand(64), _expand(4096), _expand(8192)),
    small=lambda shape: _with(shape, num_tokens=5, k=9),
)
