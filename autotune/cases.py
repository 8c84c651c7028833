"""A shape as work on a device: inputs, the exact answer, a verdict on a kernel's result, and calls to time.

Inputs rotate: as many sets as it takes that none is found in the L2 cache. The set that is checked is never timed, so
that timing, which updates states in place, cannot change what is checked.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

import gdn
from autotune import indexer, steps
from autotune._case import Call, Case, WrongResult, launch_of
from autotune.decode import DecodeCase
from autotune.shapes import Shape
from gdn import reference
from gdn.device import DeviceSpec
from gdn.problems import (
    ChunkProblem,
    GdnDecodeProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    RecurrentProblem,
    TopkProblem,
)
from gdn.runtime import Prepared
from gdn.testing import compare, inputs, inputs_logits, oracle, oracle_logits, timing

__all__ = ["Call", "Case", "WrongResult", "make"]


def make(shape: Shape, device: torch.device, spec: DeviceSpec) -> Case:
    copies = timing.copies_beyond_l2(shape.problem.bytes_moved(), spec.l2_bytes)
    problem = shape.problem
    if isinstance(problem, ChunkProblem | RecurrentProblem):
        return _DeltaCase(shape, problem, device, copies)
    if isinstance(problem, MqaLogitsProblem | PagedMqaLogitsProblem):
        return _LogitsCase(shape, problem, device, copies)
    if isinstance(problem, TopkProblem):
        return _TopkCase(problem, device, copies)
    if isinstance(problem, GdnDecodeProblem):
        return DecodeCase(problem, shape.lengths, device, copies)
    if isinstance(problem, steps.PROBLEMS):
        return steps.StepCase(problem, shape.lengths, device, copies)
    if isinstance(problem, indexer.PROBLEMS):
        return indexer.IndexerCase(problem, shape.lengths, device, copies)
    raise TypeError(f"shape.problem: expected one of an operator with a case, got {type(problem).__name__}")


class _DeltaCase:
    # Largest accepted relative error of a head: of outputs by their dtype (bf16 tensor-core operands reach 5e-3 in the
    # chunk form), of states by how they are stored.
    _OUTPUT_LIMIT = {"chunk": {"bfloat16": 1e-2, "float16": 3e-3}, "recurrent": {"bfloat16": 4e-3, "float16": 6e-4}}
    _STATE_LIMIT = {"chunk": {"float32": 1e-2, "bfloat16": 1e-2}, "recurrent": {"float32": 1e-4, "bfloat16": 4e-3}}

    def __init__(self, shape: Shape, problem: ChunkProblem | RecurrentProblem, device: torch.device, copies: int) -> None:
        self._shape, self._problem, self._device, self._copies = shape, problem, device, copies

    def _arguments(self, seed: int) -> dict[str, Any]:
        problem, lengths = self._problem, self._shape.lengths
        if isinstance(problem, ChunkProblem):
            arguments = inputs.chunk_inputs(problem, self._device, seed, lengths=lengths, strided=True)
        else:
            arguments = inputs.recurrent_inputs(problem, self._device, seed, lengths=lengths, strided=True)
        # Engines hand over gates as rows of one projection: their heads are neighbours.
        return arguments | {name: arguments[name].contiguous() for name in ("g", "beta") if name in arguments}

    @cached_property
    def _checked(self) -> dict[str, Any]:
        return self._arguments(seed=0)

    @cached_property
    def _expected(self) -> oracle.DeltaRuleResult:
        return oracle.oracle_of(self._checked)

    @cached_property
    def _timed(self) -> list[dict[str, Any]]:
        return [self._arguments(seed=1 + copy) for copy in range(self._copies)]

    def _tensors(self, arguments: dict[str, Any], prepared: Prepared) -> tuple[tuple[Any, ...], torch.Tensor]:
        """Positional tensors of a launch, and which of them is out."""
        if isinstance(self._problem, ChunkProblem):
            workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=self._device)
            params = inputs.chunk_tensors(self._problem, arguments, workspace)
            return params, params.out
        tensors = inputs.recurrent_tensors(self._problem, arguments)
        return tensors, tensors[-3]

    def check(self, prepared: Prepared) -> float:
        if not (self._problem.pooled and self._problem.has_final_state):
            raise ValueError(f"shape: expected a pool that is updated, got {self._problem.static_key()}")
        before = self._checked["initial_state"]
        arguments = self._checked | {"initial_state": before.clone()}
        tensors, out = self._tensors(arguments, prepared)
        launch_of(prepared, tensors)()
        expected, after = self._expected, arguments["initial_state"]
        written = sorted(expected.written_slots)
        untouched = sorted(set(range(before.shape[0])) - expected.written_slots)
        if not compare.same_bits(after[untouched], before[untouched]):
            raise WrongResult("a slot that belongs to no sequence was changed")
        assert expected.state is not None
        output = compare.token_error(out, expected.o, expected.offsets)
        state = compare.error(after[written], expected.state[written], groups=2)
        op, problem = self._problem.op, self._problem
        for what, found, limit in (
            ("output", output, self._OUTPUT_LIMIT[op][problem.dtype]),
            ("state", state, self._STATE_LIMIT[op][problem.state_dtype]),
        ):
            if not found.l2 <= limit:  # NaN too
                raise WrongResult(f"{what} error {found.l2:.1e} at {found.where}, allowed {limit:.0e}")
        return max(output.l2, state.l2)

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, self._tensors(arguments, prepared)[0]) for arguments in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        function: Callable[..., object]
        function = getattr(
            gdn, "chunk_gated_delta_rule" if isinstance(self._problem, ChunkProblem) else "fused_recurrent_gated_delta_rule"
        )

        def call(arguments: dict[str, Any]) -> Call:
            return lambda: function(**arguments, backend=backend)

        return [call(arguments) for arguments in self._timed]


class _LogitsCase:
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


class _TopkCase:
    """Rows of sums over heads of rectified products, as the indexer's logits are; every row whole."""

    def __init__(self, problem: TopkProblem, device: torch.device, copies: int) -> None:
        self._problem, self._device, self._copies = problem, device, copies

    def _inputs(self, seed: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        problem = self._problem
        generator = torch.Generator(self._device).manual_seed(seed)
        shape = (problem.num_rows, problem.num_columns)
        logits = torch.zeros(shape, device=self._device)
        for _ in range(4):
            logits += torch.randn(shape, device=self._device, generator=generator).relu_()
        ends = torch.full((problem.num_rows,), problem.num_columns, dtype=torch.int32, device=self._device)
        starts = None if problem.starts_dtype is None else torch.zeros_like(ends)
        return logits.to(getattr(torch, problem.dtype)), starts, ends

    @cached_property
    def _checked(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        return self._inputs(seed=0)

    @cached_property
    def _expected(self) -> torch.Tensor:
        logits, starts, ends = self._checked
        return reference.topk_indices(logits, self._problem.k, starts, ends, sorted_by=self._problem.sorted_by)

    @cached_property
    def _timed(self) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        return [self._inputs(seed=1 + copy) for copy in range(self._copies)]

    def _out(self) -> torch.Tensor:
        return torch.full((self._problem.num_rows, self._problem.k), -2, dtype=torch.int32, device=self._device)

    def check(self, prepared: Prepared) -> float:
        out = self._out()
        launch_of(prepared, (*self._checked, out))()
        wrong = int((out != self._expected).sum())
        if wrong:
            raise WrongResult(f"{wrong} of {out.numel()} indices are not the reference's")
        return 0.0

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, (*made, self._out())) for made in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        def call(made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]) -> Call:
            return lambda: gdn.topk_indices(
                made[0], self._problem.k, made[1], made[2], sorted_by=self._problem.sorted_by, backend=backend
            )

        return [call(made) for made in self._timed]
