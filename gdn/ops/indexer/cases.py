"""The steps around the indexer as cases: prepare, quantise, cache write, gather, compressed keys, groups to tokens.

Inputs have a layer's layout: q, k and w are slices of one projection, raw keys too; cache rows are taken in random order.
Operators that neither normalise nor rotate are exact.

Indexer logits as cases: ragged prefill, and decode from cache pages.

Top-k as a case: rows of sums over heads of rectified products, like the indexer's logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

from gdn.core.tunable import (
    Maker,
    SeededCase,
    Shape,
    StepCase,
    Tensor,
    Tunable,
    Work,
    WrongResult,
    example,
    packed,
    params_of,
    resized,
)
from gdn.ops.indexer import inputs as inputs_logits
from gdn.ops.indexer import oracle
from gdn.ops.indexer.problem import (
    CompressIndexerKeysParams,
    CompressIndexerKeysProblem,
    ExpandTopkGroupsParams,
    ExpandTopkGroupsProblem,
    GatherIndexerCacheParams,
    GatherIndexerCacheProblem,
    IndexerCacheProblem,
    MqaLogitsParams,
    PagedMqaLogitsParams,
    PrepareIndexerParams,
    PrepareIndexerProblem,
    QuantizeFp8Params,
    QuantizeFp8Problem,
    TopkParams,
    TopkProblem,
    WriteIndexerCacheParams,
    WriteIndexerCacheProblem,
)
from gdn.runtime import Prepared


class _LogitsCase(SeededCase):
    """Base of both forms: a NaN-filled out, and the verdict on it."""

    def _arguments(self, rows: int, columns: int, **own: Any) -> tuple[dict[str, Any], torch.Tensor]:
        """Arguments of a call, and the out of a launch."""
        problem, dtype = self._problem, getattr(torch, self._problem.out_dtype)
        out = torch.full((rows, columns), torch.nan, dtype=dtype, device=self._device)
        return own | {"relu": problem.relu, "clean_logits": problem.clean, "out_dtype": dtype}, out

    @cached_property
    def _expected(self) -> oracle.ExactLogits:
        raise NotImplementedError

    def check(self, prepared: Prepared) -> float:
        problem, expected, work = self._problem, self._expected, self._work(seed=0)
        work.launch(prepared)()
        out = work.params.out
        wrong = oracle.logits_error(out, expected, fp8=problem.dtype == "float8_e4m3fn", clean=problem.clean)
        if wrong is not None:
            raise WrongResult(wrong)
        return oracle.calc_diff(torch.where(expected.visible, out.double(), expected.values), expected.values)


class RaggedCase(_LogitsCase):
    """Prefill: a range of keys per query."""

    def _inputs(self, seed: int) -> inputs_logits.MqaInputs:
        return inputs_logits.make_mqa_inputs(self._problem, self._device, seed, ranges=self._shape.ranges)

    @cached_property
    def _expected(self) -> oracle.ExactLogits:
        return oracle.exact_mqa_logits(self._inputs(seed=0), relu=self._problem.relu)

    def _work(self, seed: int) -> Work:
        arguments, out = self._arguments(self._problem.num_queries, self._problem.num_columns, **vars(self._inputs(seed)))
        if self._problem.packed:
            arguments["max_seqlen_k"] = self._problem.num_columns
        params = params_of(MqaLogitsParams, arguments, out=out, scale=1.0, skip_rows_up_to=0)
        return Work("mqa_logits", arguments, params)


class PagedCase(_LogitsCase):
    """Decode: the keys are in cache pages."""

    def _inputs(self, seed: int) -> inputs_logits.PagedInputs:
        return inputs_logits.make_paged_inputs(self._problem, self._device, seed)

    @cached_property
    def _expected(self) -> oracle.ExactLogits:
        return oracle.exact_paged_mqa_logits(self._inputs(seed=0), relu=self._problem.relu)

    def _work(self, seed: int) -> Work:
        # Not the rows that the pages were made from, which serve the exact answer alone.
        made, problem = self._inputs(seed), self._problem
        arguments, out = self._arguments(problem.batch * problem.next_n, problem.max_context_len, **made.arguments())
        cache = made.cache.flatten(1)  # a view: only the pages may be apart in memory
        params = params_of(PagedMqaLogitsParams, arguments, cache=cache, out=out, scale=1.0, skip_rows_up_to=0)
        return Work("paged_mqa_logits", arguments, params)


def _ragged(
    num_queries: int, num_keys: int, num_heads: int, ranges: str = "causal", bf16: bool = False, weights: bool = True,
    clean: bool = True,
) -> Shape:  # fmt: skip
    """weights=False: no key scales either, as against the keys of groups. clean=False: the call of indexer_topk."""
    sizes = {"num_queries": num_queries, "num_keys": num_keys, "num_columns": num_keys}
    problem = example("mqa_logits", {"index_num_heads": num_heads}, fp8=not bf16, clean=clean, **sizes)
    if not weights:
        problem = replace(problem, has_k_scale=False, weights_dtype=None)
    kind = ("bf16" if bf16 else "fp8") + ("" if weights else ", no weights") + ("" if clean else ", not clean")
    return Shape(f"{num_queries} x {num_keys}, {num_heads} heads, {kind}, {ranges}", problem, ranges=ranges)


def _useful_flops(shape: Shape) -> int:
    """Operations of the pairs that are asked for: a causal prefill scores fewer than every (query, key)."""
    problem: Any = shape.problem
    if shape.ranges != "causal":
        return int(problem.flops())
    queries, keys = problem.num_queries, problem.num_keys
    pairs = sum(min(max(keys - queries + row + 1, 0), keys) for row in range(queries))
    return int(2 * pairs * problem.num_heads * problem.head_dim)


def paged_shape(batch: int, context: int, num_heads: int, next_n: int = 1, bf16: bool = False) -> Shape:
    sizes = {"next_n": next_n, "batch": batch, "max_context_len": context}
    problem = example("paged_mqa_logits", {"index_num_heads": num_heads}, fp8=not bf16, **sizes)
    kind = "bf16" if bf16 else "fp8"
    return Shape(f"batch {batch}, context {context}, {num_heads} heads, next_n {next_n}, {kind}", problem)


mqa_logits = Tunable(
    RaggedCase,
    shapes=(
        _ragged(2048, 8192, 64, "full"), *(_ragged(4096, 32768, heads) for heads in (64, 32, 16)), _ragged(8192, 8192, 64),
        _ragged(1024, 131072, 64), _ragged(8192, 8192, 16, bf16=True), _ragged(4096, 32768, 16, bf16=True),
        _ragged(4096, 8192, 4, weights=False),
    ),
    tuned_only=(
        _ragged(4096, 32768, 8),
        *(_ragged(queries, 32768, heads, clean=False) for heads in (16, 64) for queries in (2048, 4096)),
    ),
    useful_flops=_useful_flops,
    small=lambda shape: resized(shape, num_queries=70, num_keys=130, num_columns=130),
)  # fmt: skip

paged_mqa_logits = Tunable(
    PagedCase,
    shapes=(
        paged_shape(32, 8192, 64), paged_shape(64, 32768, 64), paged_shape(64, 65536, 64), paged_shape(64, 32768, 32),
        paged_shape(128, 8192, 64, next_n=2), paged_shape(1, 131072, 64), paged_shape(64, 32768, 16),
        paged_shape(64, 32768, 16, bf16=True),
    ),
    measured_only=(paged_shape(64, 65536, 16),),  # a cache as large as that of 64 heads
    small=lambda shape: resized(shape, batch=3, max_context_len=150),
)  # fmt: skip


def _topk(make: Maker, problem: TopkProblem, lengths: Sequence[int]) -> Work:
    """The range of every row is the whole row."""
    shape = (problem.num_rows, problem.num_columns)
    logits = torch.zeros(shape, dtype=torch.float32, device=make.device)
    for _ in range(4):
        logits += torch.randn(shape, dtype=torch.float32, device=make.device, generator=make.generator).relu_()
    ends = torch.full((problem.num_rows,), problem.num_columns, dtype=torch.int32, device=make.device)
    starts = None if problem.starts_dtype is None else torch.zeros_like(ends)
    arguments: dict[str, Any] = {"logits": logits.to(getattr(torch, problem.dtype)), "row_starts": starts, "row_ends": ends}
    out = torch.full((problem.num_rows, problem.k), -2, dtype=torch.int32, device=make.device)
    params = TopkParams(**arguments, positions=None, out=out)
    return Work("topk_indices", arguments | {"k": problem.k, "sorted_by": problem.sorted_by}, params, (out,))


def selection_shape(num_rows: int, num_columns: int, k: int = 2048, dtype: str = "float32", starts: bool = True) -> Shape:
    """starts=False: rows begin at column 0, like those of paged logits."""
    fields: dict[str, Any] = {"dtype": dtype, "starts_dtype": "int32" if starts else None, "k": k}
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype] + ("" if starts else ", no starts")
    problem = example("topk", **fields, num_rows=num_rows, num_columns=num_columns)
    return Shape(f"{num_rows} x {num_columns}, k {k}, {kind}", problem)


topk = Tunable(
    partial(StepCase, _topk, verdict="bits"),
    shapes=(
        selection_shape(4096, 8192), selection_shape(4096, 8192, 512), selection_shape(4096, 32768),
        selection_shape(64, 65536), selection_shape(64, 131072), selection_shape(1024, 131072),
        selection_shape(4096, 32768, dtype="bfloat16"),
    ),
    tuned_only=(selection_shape(64, 65536, starts=False), selection_shape(64, 131072, starts=False)),
    small=lambda shape: resized(shape, num_rows=5, num_columns=70, k=9),
)  # fmt: skip


_PAGE = 64


def _cache(make: Maker, problem: IndexerCacheProblem, rows: int) -> tuple[Tensor, Tensor]:
    """A cache of at least `rows` rows and its pages in flat form; every byte is the same."""
    row = problem.head_dim + (4 if problem.scaled else 0)
    item = 2 if problem.cache_dtype == "bfloat16" else 1
    pages = -(-rows // _PAGE) + 1
    memory = torch.full((pages, _PAGE * problem.num_kv_heads * row * item), 0x3C, dtype=torch.uint8, device=make.device)
    flat = memory.view(getattr(torch, str(problem.cache_dtype)))
    return flat.view(pages, _PAGE, problem.num_kv_heads, row), flat


def _rotation(make: Maker, problem: Any, most: int) -> Tensor:
    half = problem.rotary_dim // 2
    place, power = (torch.arange(count, dtype=torch.float32, device=make.device) for count in (most, half))
    angle = place[:, None] / 10000.0 ** (power / half)
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(getattr(torch, problem.cos_sin_dtype))


def _quantize(make: Maker, problem: QuantizeFp8Problem, lengths: Sequence[int]) -> Work:
    shape = (problem.num_tokens, problem.num_groups, problem.group_dim)
    if problem.num_groups != 1:
        raise ValueError(f"problem: expected contiguous rows, of one group, got {problem.static_key()}")
    x = make.normal(*shape, dtype=problem.dtype)
    outputs = make.poisoned(*shape, dtype="float8_e4m3fn"), make.poisoned(*shape[:2], dtype="float32")
    arguments = {"x": x[:, 0], "group_size": problem.group_dim}
    return Work("quantize_fp8", arguments, QuantizeFp8Params(x, *outputs), outputs)


def _write(make: Maker, problem: WriteIndexerCacheProblem, lengths: Sequence[int]) -> Work:
    tokens = problem.num_tokens
    k = make.normal(tokens, problem.num_kv_heads, problem.head_dim, dtype=problem.dtype)
    cache, flat = _cache(make, problem, tokens)
    slots = make.order(tokens, tokens + _PAGE, problem.slot_dtype)
    arguments = {"k": k, "cache": cache, "slot_mapping": slots}
    return Work("write_indexer_cache", arguments, WriteIndexerCacheParams(k, flat, slots), updated=("cache",))


def _prepare(make: Maker, problem: PrepareIndexerProblem, lengths: Sequence[int]) -> Work:
    tokens, heads, dim = problem.num_tokens, problem.num_heads, problem.head_dim
    if problem.num_kv_heads < 1 or problem.k_dtype != problem.dtype:
        raise ValueError(f"problem: expected keys of q's dtype, got {problem.static_key()}")
    key_heads = problem.num_kv_heads
    widths = (heads * dim, key_heads * dim, key_heads * dim if problem.has_values else 0, heads)
    rows = make.normal(tokens, -(-sum(widths) // 8) * 8, dtype=problem.dtype)
    q, k, v, weights = rows[:, : sum(widths)].split(widths, dim=1)
    most = max(4096, tokens)
    q_norm, k_norm = (make.normal(dim, dtype=dtype) * 0.1 for dtype in (problem.q_norm_dtype, problem.k_norm_dtype))
    cache, flat = _cache(make, problem, tokens)
    arguments = {
        "q": q.unflatten(1, (heads, dim)), "k": k.unflatten(1, (key_heads, dim)),
        "weights": weights if problem.folds_weights else None,
        "positions": make.integers(range(most - tokens, most), problem.position_dtype),
        "cos_sin": _rotation(make, problem, most), "q_norm": q_norm, "k_norm": k_norm, "cache": cache,
        "slot_mapping": make.order(tokens, tokens + _PAGE, problem.slot_dtype), "rotary_dim": problem.rotary_dim,
        "zero_centred": problem.zero_centred,
    }  # fmt: skip
    q_out = make.poisoned(tokens, heads, dim, dtype=problem.q_out_dtype)
    weights_out = make.poisoned(tokens, heads, dtype="float32") if problem.folds_weights else None
    own: dict[str, Any] = {"cache": flat, "q_out": q_out, "weights_out": weights_out}
    updated: tuple[str, ...] = ("cache",)
    if problem.has_values:
        arguments["v"] = v.unflatten(1, (key_heads, dim))
        arguments["v_cache"], own["v_cache"] = _cache(make, problem, tokens)
        updated = (*updated, "v_cache")
    params = params_of(PrepareIndexerParams, arguments, **own, eps=1e-6)
    return Work("prepare_indexer", arguments, params, (q_out, weights_out), updated)


def _compress(make: Maker, problem: CompressIndexerKeysProblem, lengths: Sequence[int]) -> Work:
    """Prompts from their start; steps of a few tokens somewhere after it."""
    heads, dim, ratio = problem.num_kv_heads, problem.head_dim, problem.ratio
    starts = [0 if length > 2 * ratio else 1000 + n for n, length in enumerate(lengths)]
    rows = make.normal(sum(lengths), 2 * heads * dim, dtype=problem.dtype)
    ring = make.normal(len(lengths) + 1, 2 * ratio, heads, dim, dtype=problem.dtype)
    most = max(lengths) + 2000
    share = -(-most // (ratio * _PAGE)) * _PAGE
    cache, flat = _cache(make, problem, share * len(lengths))
    positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    sequences = [n for n, length in enumerate(lengths) for _ in range(length)]
    cache_rows = [n * share + position // ratio for n, position in zip(sequences, positions, strict=True)]
    arguments = {
        "raw_k": rows[:, heads * dim :].unflatten(1, (heads, dim)), "ring": ring, "cache": cache,
        "positions": make.integers(positions, problem.position_dtype), "cos_sin": _rotation(make, problem, most),
        "k_norm": make.normal(dim, dtype=problem.k_norm_dtype) * 0.1,
        "ring_slots": make.integers([1 + n for n in sequences], problem.ring_slot_dtype),
        "slot_mapping": make.integers(cache_rows, problem.slot_dtype), "ratio": ratio, "rotary_dim": problem.rotary_dim,
        "zero_centred": problem.zero_centred,
    }  # fmt: skip
    params = params_of(CompressIndexerKeysParams, arguments, cache=flat, eps=1e-6, null_slot=-1)
    return Work("compress_indexer_keys", arguments, params, updated=("ring", "cache"))


def _gather(make: Maker, problem: GatherIndexerCacheProblem, lengths: Sequence[int]) -> Work:
    rows, heads, dim = problem.num_rows, problem.num_kv_heads, problem.head_dim
    columns = -(-max(lengths) // _PAGE)
    cache, flat = _cache(make, problem, columns * _PAGE * len(lengths))
    raw = flat.view(torch.uint8)
    raw.copy_(torch.randint(0, 0x70, raw.shape, device=make.device, generator=make.generator, dtype=torch.uint8))
    tables = make.order(columns * len(lengths), flat.shape[0], "int32").view(len(lengths), columns)
    bounds = make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype)
    k = make.poisoned(rows, heads * dim, dtype="float8_e4m3fn" if problem.scaled else str(problem.cache_dtype))
    scale = make.poisoned(rows, heads, dtype="float32") if problem.scaled else None
    arguments = {"cache": cache, "block_tables": tables, "cu_seqlens": bounds, "num_rows": rows}
    return Work("gather_indexer_cache", arguments, GatherIndexerCacheParams(flat, tables, bounds, k, scale), (k, scale))


def _expand(make: Maker, problem: ExpandTopkGroupsProblem, lengths: Sequence[int]) -> Work:
    tokens, k, ratio = problem.num_tokens, problem.k, problem.ratio
    groups = make.integers(torch.arange(k, device=make.device).expand(tokens, k), problem.group_dtype).contiguous()
    short = torch.randint(0, k + 1, (tokens,), device=make.device, generator=make.generator)
    short[::2] = k  # rows with fewer groups end in -1
    groups.masked_fill_(torch.arange(k, device=make.device) >= short[:, None], -1)
    positions = make.integers(range(ratio * k, ratio * k + tokens), problem.position_dtype)
    out = torch.full((tokens, k * ratio + ratio - 1), -2, dtype=torch.int32, device=make.device)
    arguments = {"group_indices": groups, "positions": positions, "ratio": ratio}
    return Work("expand_topk_groups", arguments, ExpandTopkGroupsParams(groups, positions, out), (out,))


def _prepared(num_tokens: int, num_heads: int = 16, fp8: bool = True) -> Shape:
    problem = example("prepare_indexer", {"index_num_heads": num_heads}, fp8, num_tokens=num_tokens)
    return Shape(f"{num_tokens} x {num_heads} heads, {'fp8' if fp8 else 'bf16'}", problem)


def _tokens(op: str, label: str, *numbers: int) -> tuple[Shape, ...]:
    return tuple(Shape(f"{number} {label}", example(op, num_tokens=number)) for number in numbers)


prepare_indexer = Tunable(
    partial(StepCase, _prepare, verdict="rounded"),
    shapes=(*(_prepared(tokens) for tokens in (1, 64, 4096, 8192)), _prepared(8192, 64), _prepared(8192, fp8=False)),
    small=lambda shape: resized(shape, num_tokens=5),
)
quantize_fp8 = Tunable(
    partial(StepCase, _quantize, verdict="bits"),
    shapes=_tokens("quantize_fp8", "x 128", 16, 64 * 16, 8192 * 16),
    small=lambda shape: resized(shape, num_tokens=5),
)
write_indexer_cache = Tunable(
    partial(StepCase, _write, verdict="bits"),
    shapes=_tokens("write_indexer_cache", "tokens, fp8", 1, 64, 8192),
    small=lambda shape: resized(shape, num_tokens=5),
)
gather_indexer_cache = Tunable(
    partial(StepCase, _gather, verdict="bits"),
    shapes=tuple(packed("gather_indexer_cache", "{}, fp8", lengths) for lengths in ([64], [8192], [32768] * 4)),
    small=lambda shape: resized(shape, (70, 5)),
)
compress_indexer_keys = Tunable(
    partial(StepCase, _compress, verdict="rounded", copied=("ring",)),
    shapes=tuple(packed("compress_indexer_keys", "{}", lengths) for lengths in ([1] * 64, [4] * 64, [8192])),
    small=lambda shape: resized(shape, (70, 5) if len(shape.lengths) == 1 else shape.lengths[:3]),
)
expand_topk_groups = Tunable(
    partial(StepCase, _expand, verdict="bits"),
    shapes=_tokens("expand_topk_groups", "x 512 groups", 1, 64, 4096, 8192),
    small=lambda shape: resized(shape, num_tokens=5, k=9),
)
