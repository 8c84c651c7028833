"""Indexer logits as cases: ragged prefill, and decode from cache pages."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

import gdn
from autotune.cases.base import Call, WrongResult, launch_of
from autotune.shapes import Shape
from gdn.problems import MqaLogitsProblem, PagedMqaLogitsProblem
from gdn.runtime import Prepared
from gdn.testing import inputs_logits, oracle_logits


class LogitsCase:
    def __init__(
        self, shape: Shape, problem: MqaLogitsProblem | PagedMqaLogitsProblem, device: torch.device, copies: int
    ) -> None:
        self._shape, self._problem, self._device, self._copies = shape, problem, device, copies

    def _inputs(self, seed: int) -> Any:
        if isinstance(self._problem, MqaLogitsProblem):
            return inputs_logits.make_mqa_inputs(self._problem, self._device, seed, ranges=self._shape.ranges)
        return inputs_logits.make_paged_inputs(self._problem, self._device, seed)

    @cached_property
    def _checked(self) -> Any:
        return self._inputs(seed=0)

    @cached_property
    def _expected(self) -> oracle_logits.ExactLogits:
        if isinstance(self._problem, MqaLogitsProblem):
            return oracle_logits.exact_mqa_logits(self._checked, relu=self._problem.relu)
        return oracle_logits.exact_paged_mqa_logits(self._checked, relu=self._problem.relu)

    @cached_property
    def _timed(self) -> list[Any]:
        made = [self._inputs(seed=1 + copy) for copy in range(self._copies)]
        if isinstance(self._problem, PagedMqaLogitsProblem):  # the rows behind the pages serve the exact answer alone
            made = [replace(one, rows=one.rows.new_empty(0), row_scales=None) for one in made]
        return made

    def _tensors(self, made: Any) -> tuple[tuple[Any, ...], torch.Tensor]:
        """Positional tensors of a launch with a NaN-filled out, and that out."""
        problem = self._problem
        dtype = getattr(torch, problem.out_dtype)
        if isinstance(problem, MqaLogitsProblem):
            out = torch.full((problem.num_queries, problem.num_columns), torch.nan, dtype=dtype, device=self._device)
            tensors = (made.q, made.k, made.k_scale, made.weights, made.cu_seqlen_ks, made.cu_seqlen_ke, out, 1.0)
            return tensors, out
        shape = (problem.batch * problem.next_n, problem.max_context_len)
        out = torch.full(shape, torch.nan, dtype=dtype, device=self._device)
        cache = made.cache.flatten(1)  # a view: only the pages may lie apart
        return (made.q, cache, made.weights, made.context_lens, made.block_tables, out, 1.0), out

    def check(self, prepared: Prepared) -> float:
        tensors, out = self._tensors(self._checked)
        launch_of(prepared, tensors)()
        problem, expected = self._problem, self._expected
        wrong = oracle_logits.logits_error(out, expected, fp8=problem.dtype == "float8_e4m3fn", clean=problem.clean)
        if wrong is not None:
            raise WrongResult(wrong)
        seen = torch.where(expected.visible, out.double(), expected.values)
        return oracle_logits.calc_diff(seen, expected.values)

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, self._tensors(made)[0]) for made in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        problem = self._problem
        options: dict[str, Any] = {
            "relu": problem.relu,
            "clean_logits": problem.clean,
            "out_dtype": getattr(torch, problem.out_dtype),
            "backend": backend,
        }
        if isinstance(problem, MqaLogitsProblem) and problem.packed:
            options["max_seqlen_k"] = problem.num_columns

        def call(made: Any) -> Call:
            if isinstance(problem, MqaLogitsProblem):
                ragged = (made.q, made.k, made.weights, made.cu_seqlen_ks, made.cu_seqlen_ke)
                return lambda: gdn.mqa_logits(*ragged, k_scale=made.k_scale, **options)
            paged = (made.q, made.cache, made.weights, made.context_lens, made.block_tables, made.max_context_len)
            return lambda: gdn.paged_mqa_logits(*paged, **options)

        return [call(made) for made in self._timed]
