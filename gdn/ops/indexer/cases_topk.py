"""Top-k as a case: rows of sums over heads of rectified products, like the indexer's logits."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gdn.core.tunable import Maker, Shape, StepCase, Tunable, Work, example, resized
from gdn.ops.indexer.problem_logits import TopkParams, TopkProblem


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


def _rows(num_rows: int, num_columns: int, k: int = 2048, dtype: str = "float32", starts: bool = True) -> Shape:
    """starts=False: rows begin at column 0, like those of paged logits."""
    fields: dict[str, Any] = {"dtype": dtype, "starts_dtype": "int32" if starts else None, "k": k}
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype] + ("" if starts else ", no starts")
    problem = example("topk", **fields, num_rows=num_rows, num_columns=num_columns)
    return Shape(f"{num_rows} x {num_columns}, k {k}, {kind}", problem)


topk = Tunable(
    partial(StepCase, _topk, verdict="bits"),
    shapes=(
        _rows(4096, 8192), _rows(4096, 8192, 512), _rows(4096, 32768), _rows(64, 65536), _rows(64, 131072), _rows(1024, 131072),
        _rows(4096, 32768, dtype="bfloat16"),
    ),
    tuned_only=(_rows(64, 65536, starts=False), _rows(64, 131072, starts=False)),
    small=lambda shape: resized(shape, num_rows=5, num_columns=70, k=9),
)  # fmt: skip
