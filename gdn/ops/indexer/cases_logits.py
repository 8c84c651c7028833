"""Indexer logits as cases: ragged prefill, and decode from cache pages."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from gdn.core.tunable import SeededCase, Shape, Tunable, Work, WrongResult, example, params_of, resized
from gdn.ops.indexer import inputs as inputs_logits
from gdn.ops.indexer import oracle as oracle_logits
from gdn.ops.indexer.problem_logits import MqaLogitsParams, PagedMqaLogitsParams
from gdn.runtime import Prepared


class _LogitsCase(SeededCase):
    """Base of both forms: a NaN-filled out, and the verdict on it."""

    def _arguments(self, rows: int, columns: int, **own: Any) -> tuple[dict[str, Any], torch.Tensor]:
        """Arguments of a call, and the out of a launch."""
        problem, dtype = self._problem, getattr(torch, self._problem.out_dtype)
        out = torch.full((rows, columns), torch.nan, dtype=dtype, device=self._device)
        return own | {"relu": problem.relu, "clean_logits": problem.clean, "out_dtype": dtype}, out

    @cached_property
    def _expected(self) -> oracle_logits.ExactLogits:
        raise NotImplementedError

    def check(self, prepared: Prepared) -> float:
        problem, expected, work = self._problem, self._expected, self._work(seed=0)
        work.launch(prepared)()
        out = work.params.out
        wrong = oracle_logits.logits_error(out, expected, fp8=problem.dtype == "float8_e4m3fn", clean=problem.clean)
        if wrong is not None:
            raise WrongResult(wrong)
        return oracle_logits.calc_diff(torch.where(expected.visible, out.double(), expected.values), expected.values)


class RaggedCase(_LogitsCase):
    """Prefill: a range of keys per query."""

    def _inputs(self, seed: int) -> inputs_logits.MqaInputs:
        return inputs_logits.make_mqa_inputs(self._problem, self._device, seed, ranges=self._shape.ranges)

    @cached_property
    def _expected(self) -> oracle_logits.ExactLogits:
        return oracle_logits.exact_mqa_logits(self._inputs(seed=0), relu=self._problem.relu)

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
    def _expected(self) -> oracle_logits.ExactLogits:
        return oracle_logits.exact_paged_mqa_logits(self._inputs(seed=0), relu=self._problem.relu)

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


def _paged(batch: int, context: int, num_heads: int, next_n: int = 1, bf16: bool = False) -> Shape:
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
        _paged(32, 8192, 64), _paged(64, 32768, 64), _paged(64, 65536, 64), _paged(64, 32768, 32),
        _paged(128, 8192, 64, next_n=2), _paged(1, 131072, 64), _paged(64, 32768, 16), _paged(64, 32768, 16, bf16=True),
    ),
    measured_only=(_paged(64, 65536, 16),),  # a cache as large as that of 64 heads
    small=lambda shape: resized(shape, batch=3, max_context_len=150),
)  # fmt: skip
