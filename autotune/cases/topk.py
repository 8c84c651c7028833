"""Top-k as a case: rows of sums over heads of rectified products, like the indexer's logits."""

from dataclasses import replace
from functools import cached_property

import torch

import gdn
from autotune.cases.base import Call, Shape, Tunable, WrongResult, example, launch_of
from gdn import reference
from gdn.problems import TopkParams, TopkProblem
from gdn.runtime import Prepared


class TopkCase:
    """Rows of sums over heads of rectified products; the range of every row is the whole row."""

    def __init__(self, shape: Shape, device: torch.device, copies: int) -> None:
        assert isinstance(shape.problem, TopkProblem)
        self._problem, self._device, self._copies = shape.problem, device, copies

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
        launch_of(prepared, TopkParams(*self._checked, out))()
        wrong = int((out != self._expected).sum())
        if wrong:
            raise WrongResult(f"{wrong} of {out.numel()} indices are not the reference's")
        return 0.0

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, TopkParams(*made, self._out())) for made in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        def call(made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]) -> Call:
            return lambda: gdn.topk_indices(
                made[0], self._problem.k, made[1], made[2], sorted_by=self._problem.sorted_by, backend=backend
            )

        return [call(made) for made in self._timed]


def _rows(num_rows: int, num_columns: int, k: int = 2048, dtype: str = "float32", starts: bool = True) -> Shape:
    """starts=False: rows begin at column 0, like those of paged logits."""
    problem = example(
        "topk",
        dtype=dtype,
        starts_dtype="int32" if starts else None,
        k=k,
        num_rows=num_rows,
        num_columns=num_columns,
    )
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype] + ("" if starts else ", no starts")
    return Shape(f"{num_rows} x {num_columns}, k {k}, {kind}", problem)


def _small(shape: Shape) -> Shape:
    assert isinstance(shape.problem, TopkProblem)
    return replace(shape, problem=replace(shape.problem, num_rows=5, num_columns=70, k=9))


topk = Tunable(
    TopkCase,
    shapes=(
        _rows(4096, 8192),
        _rows(4096, 8192, 512),
        _rows(4096, 32768),
        _rows(64, 65536),
        _rows(64, 131072),
        _rows(1024, 131072),
        _rows(4096, 32768, dtype="bfloat16"),
    ),
    tuned_only=(_rows(64, 65536, starts=False), _rows(64, 131072, starts=False)),
    small=_small,
)
