"""Indexer logits as cases: ragged prefill, and decode from cache pages."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

import gdn
from autotune.cases.base import Call, Shape, Tunable, WrongResult, example, launch_of
from gdn.problems import MqaLogitsParams, PagedMqaLogitsParams
from gdn.runtime import Prepared
from gdn.testing import inputs_logits, oracle_logits


class _LogitsCase:
    """Base of both forms: a NaN-filled out, and the verdict on it."""

    def __init__(self, shape: Shape, device: torch.device, copies: int) -> None:
        self._shape, self._device, self._copies = shape, device, copies
        self._problem: Any = shape.problem

    def _inputs(self, seed: int) -> Any:
        raise NotImplementedError

    def _params(self, made: Any) -> MqaLogitsParams | PagedMqaLogitsParams:
        """Arguments of a launch with a NaN-filled out."""
        raise NotImplementedError

    def _call(self, made: Any, options: dict[str, Any]) -> Call:
        """The public operator on one set of inputs."""
        raise NotImplementedError

    def _exact(self, made: Any) -> oracle_logits.ExactLogits:
        raise NotImplementedError

    def _out(self, rows: int, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), torch.nan, dtype=getattr(torch, self._problem.out_dtype), device=self._device)

    @cached_property
    def _checked(self) -> Any:
        return self._inputs(seed=0)

    @cached_property
    def _expected(self) -> oracle_logits.ExactLogits:
        return self._exact(self._checked)

    @cached_property
    def _timed(self) -> list[Any]:
        return [self._inputs(seed=1 + copy) for copy in range(self._copies)]

    def check(self, prepared: Prepared) -> float:
        params = self._params(self._checked)
        launch_of(prepared, params)()
        out = params.out
        problem, expected = self._problem, self._expected
        wrong = oracle_logits.logits_error(out, expected, fp8=problem.dtype == "float8_e4m3fn", clean=problem.clean)
        if wrong is not None:
            raise WrongResult(wrong)
        seen = torch.where(expected.visible, out.double(), expected.values)
        return oracle_logits.calc_diff(seen, expected.values)

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, self._params(made)) for made in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        problem = self._problem
        options: dict[str, Any] = {
            "relu": problem.relu,
            "clean_logits": problem.clean,
            "out_dtype": getattr(torch, problem.out_dtype),
            "backend": backend,
        }
        return [self._call(made, options) for made in self._timed]


class RaggedCase(_LogitsCase):
    """Prefill: a range of keys per query."""

    def _inputs(self, seed: int) -> Any:
        return inputs_logits.make_mqa_inputs(self._problem, self._device, seed, ranges=self._shape.ranges)

    def _exact(self, made: Any) -> oracle_logits.ExactLogits:
        return oracle_logits.exact_mqa_logits(made, relu=self._problem.relu)

    def _params(self, made: Any) -> MqaLogitsParams:
        out = self._out(self._problem.num_queries, self._problem.num_columns)
        return MqaLogitsParams(made.q, made.k, made.k_scale, made.weights, made.cu_seqlen_ks, made.cu_seqlen_ke, out, scale=1.0)

    def _call(self, made: Any, options: dict[str, Any]) -> Call:
        if self._problem.packed:
            options = options | {"max_seqlen_k": self._problem.num_columns}
        ragged = (made.q, made.k, made.weights, made.cu_seqlen_ks, made.cu_seqlen_ke)
        return lambda: gdn.mqa_logits(*ragged, k_scale=made.k_scale, **options)


class PagedCase(_LogitsCase):
    """Decode: the keys are in cache pages."""

    def _inputs(self, seed: int) -> Any:
        return inputs_logits.make_paged_inputs(self._problem, self._device, seed)

    @cached_property
    def _timed(self) -> list[Any]:
        made = [self._inputs(seed=1 + copy) for copy in range(self._copies)]
        # The rows that the pages were made from serve the exact answer alone.
        return [replace(one, rows=one.rows.new_empty(0), row_scales=None) for one in made]

    def _exact(self, made: Any) -> oracle_logits.ExactLogits:
        return oracle_logits.exact_paged_mqa_logits(made, relu=self._problem.relu)

    def _params(self, made: Any) -> PagedMqaLogitsParams:
        out = self._out(self._problem.batch * self._problem.next_n, self._problem.max_context_len)
        cache = made.cache.flatten(1)  # a view: only the pages may be apart in memory
        return PagedMqaLogitsParams(made.q, cache, made.weights, made.context_lens, made.block_tables, out, scale=1.0)

    def _call(self, made: Any, options: dict[str, Any]) -> Call:
        paged = (made.q, made.cache, made.weights, made.context_lens, made.block_tables, made.max_context_len)
        return lambda: gdn.paged_mqa_logits(*paged, **options)


# --- shapes ------------------------------------------------------------------------------------------------------------


def _ragged(
    num_queries: int,
    num_keys: int,
    num_heads: int,
    ranges: str = "causal",
    bf16: bool = False,
    weights: bool = True,
    clean: bool = True,
) -> Shape:
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


def _paged(batch: int, context: int, num_heads: int, next_n: int = 1, bf16: bool = False) -> Shape:
    sizes = {"next_n": next_n, "batch": batch, "max_context_len": context}
    problem = example("paged_mqa_logits", {"index_num_heads": num_heads}, fp8=not bf16, **sizes)
    kind = "bf16" if bf16 else "fp8"
    return Shape(f"batch {batch}, context {context}, {num_heads} heads, next_n {next_n}, {kind}", problem)


def _with(shape: Shape, **sizes: int) -> Shape:
    problem: Any = shape.problem
    return replace(shape, problem=replace(problem, **sizes))


mqa_logits = Tunable(
    RaggedCase,
    shapes=(
        _ragged(2048, 8192, 64, "full"),
        _ragged(4096, 32768, 64),
        _ragged(4096, 32768, 32),
        _ragged(4096, 32768, 16),
        _ragged(8192, 8192, 64),
        _ragged(1024, 131072, 64),
        _ragged(8192, 8192, 16, bf16=True),
        _ragged(4096, 32768, 16, bf16=True),
        _ragged(4096, 8192, 4, weights=False),
    ),
    tuned_only=(
        _ragged(4096, 32768, 8),
        *(_ragged(queries, 32768, heads, clean=False) for heads in (16, 64) for queries in (2048, 4096)),
    ),
    useful_flops=_useful_flops,
    small=lambda shape: _with(shape, num_queries=70, num_keys=130, num_columns=130),
)

paged_mqa_logits = Tunable(
    PagedCase,
    shapes=(
        _paged(32, 8192, 64),
        _paged(64, 32768, 64),
        _paged(64, 65536, 64),
        _paged(64, 32768, 32),
        _paged(128, 8192, 64, next_n=2),
        _paged(1, 131072, 64),
        _paged(64, 32768, 16),
        _paged(64, 32768, 16, bf16=True),
    ),
    measured_only=(_paged(64, 65536, 16),),  # a cache as large as that of 64 heads
    small=lambda shape: _with(shape, batch=3, max_context_len=150),
)
