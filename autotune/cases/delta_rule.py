"""The delta rule as cases: prompts in chunks, decode steps by the token recurrence, on a pool of states."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

import gdn
from autotune.cases.base import Call, WrongResult, launch_of
from autotune.shapes import Shape
from gdn.problems import ChunkProblem, RecurrentProblem
from gdn.runtime import Prepared
from gdn.testing import compare, inputs, oracle


class DeltaRuleCase:
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
            tensors = inputs.chunk_tensors(self._problem, arguments, workspace)
            return tensors, tensors[-4]
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


def peer_arguments(shape: Shape, device: torch.device, seed: int) -> dict[str, Any]:
    """Arguments of the public operator from which another library's are made: tensors without gaps."""
    problem = shape.problem
    if isinstance(problem, ChunkProblem):
        return inputs.chunk_inputs(problem, device, seed, lengths=shape.lengths)
    assert isinstance(problem, RecurrentProblem)
    return inputs.recurrent_inputs(problem, device, seed, lengths=shape.lengths)
