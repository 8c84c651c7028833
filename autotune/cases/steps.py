"""The steps around the recurrence as cases: both convolutions, the projection split, the gates, the gated norm.

Inputs have a layer's layout: x of a convolution, a and b of the gates are slices of wider projections, and so is the norm's
gate where its problem keeps heads apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

from autotune.cases.base import SeededCase, Shape, Tunable, WrongResult, example, heads_of, launch_of, no_flops
from gdn import reference
from gdn.problems import (
    Conv1dParams,
    Conv1dProblem,
    Conv1dUpdateParams,
    Conv1dUpdateProblem,
    ConvolutionProblem,
    GatingParams,
    GatingProblem,
    RmsNormGatedParams,
    RmsNormGatedProblem,
    SplitParams,
    SplitProblem,
)
from gdn.runtime import Prepared
from gdn.testing import compare

Tensor = torch.Tensor

# Largest accepted relative error of a row, by the dtype of the output: about two roundings of it.
_LIMIT = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 1e-5}


@dataclass(frozen=True)
class Work:
    """One set of inputs, for the public operator and for a launch."""

    function: str  # of the public operator, and of its reference
    arguments: dict[str, Any]  # its arguments
    tensors: tuple[Any, ...]  # the operator's Params
    outputs: tuple[Tensor, ...]  # those of `tensors` that are written, full of NaN
    state: str | None = None  # name of the argument that is updated in place


@dataclass(frozen=True)
class _Expected:
    outputs: tuple[Tensor, ...]
    state: Tensor | None


class StepCase(SeededCase[Work]):
    """Case of one operator, whose inputs `work` makes. is_copy: the outputs are copies, and must be the same bits."""

    def __init__(
        self,
        work: "Callable[[_Maker, Any, Sequence[int]], Work]",
        shape: Shape,
        device: torch.device,
        copies: int,
        *,
        is_copy: bool = False,
    ) -> None:
        super().__init__(shape, device, copies)
        self._make, self._is_copy = work, is_copy

    def _work(self, seed: int) -> Work:
        return self._make(_Maker(self._device, seed), self._problem, self._lengths)

    @cached_property
    def _expected(self) -> _Expected:
        work = self._work(seed=0)
        found = getattr(reference, work.function)(**self._wide(work))
        outputs = found if isinstance(found, tuple) else (found,)
        return _Expected(outputs, None if work.state is None else work.arguments[work.state])

    def _wide(self, work: Work) -> dict[str, Any]:
        """Arguments for the reference: in float64, except tensors that are only copied, which are compared bit for bit."""
        kept = set(work.arguments) if self._is_copy else {work.state}
        wide = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() and name not in kept else value
            for name, value in work.arguments.items()
        }
        return wide | {"out": None} if "out" in wide else wide

    def check(self, prepared: Prepared) -> float:
        expected = self._expected
        work = self._work(seed=0)  # a new set: a launch updates the pool
        launch_of(prepared, work.tensors)()
        if work.state is not None and expected.state is not None:
            if not compare.same_bits(work.arguments[work.state], expected.state):
                raise WrongResult("the pool is not the reference's")
        worst = 0.0
        for number, (output, exact) in enumerate(zip(work.outputs, expected.outputs, strict=True)):
            exact = exact.reshape(output.shape)
            if self._is_copy:
                if not compare.same_bits(output, exact):
                    raise WrongResult(f"output {number} is not the reference's")
                continue
            found = compare.error(output, exact, groups=1)
            limit = _LIMIT[str(output.dtype).removeprefix("torch.")]
            if not found.l2 <= limit:  # NaN too
                raise WrongResult(f"output {number}: error {found.l2:.1e} at {found.where}, allowed {limit:.0e}")
            worst = max(worst, found.l2)
        return worst


class _Maker:
    """Inputs from a seed: the same tensors for the same seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._generator = device, torch.Generator(device).manual_seed(seed)

    def _normal(self, *shape: int, dtype: str) -> Tensor:
        return torch.randn(*shape, device=self._device, generator=self._generator).to(getattr(torch, dtype))

    def _nan(self, *shape: int, dtype: str) -> Tensor:
        return torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=self._device)

    def _integers(self, values: Sequence[Any], dtype: str | None) -> Tensor:
        return torch.tensor(values, dtype=getattr(torch, str(dtype)), device=self._device)

    def _convolution(self, problem: ConvolutionProblem) -> tuple[dict[str, Any], Tensor]:
        """Arguments x (a slice of a projection) and the filter; out."""
        if problem.state_dtype is None or problem.index_dtype is None or not problem.state_channels_contiguous:
            raise ValueError(f"problem: expected indices and a pool with channels together, got {problem.static_key()}")
        num_tokens = problem.sizes()["num_tokens"]
        arguments = {
            "x": self._normal(num_tokens, problem.dim + problem.dim // 2, dtype=problem.dtype)[:, : problem.dim],
            "weight": self._normal(problem.dim, problem.width, dtype=problem.weight_dtype),
            "bias": None if problem.bias_dtype is None else self._normal(problem.dim, dtype=problem.bias_dtype),
            "activation": "silu" if problem.silu else None,
        }
        return arguments, self._nan(num_tokens, problem.dim, dtype=problem.dtype)

    def _pool(self, problem: ConvolutionProblem, slots: int, columns: int) -> Tensor:
        """Windows with values that x can have: the reference in float64 then keeps the same bits."""
        values = self._normal(slots, columns, problem.dim, dtype=problem.dtype)
        return values.to(getattr(torch, str(problem.state_dtype))).mT

    def _order(self, count: int) -> list[int]:
        """Slots in random order; the pool has three more."""
        found: list[int] = torch.randperm(count + 3, device=self._device, generator=self._generator)[:count].tolist()
        return found

    def conv1d(self, problem: Conv1dProblem, lengths: Sequence[int]) -> Work:
        if not problem.has_mask or problem.checkpoint_dtype is not None:
            raise ValueError(f"problem: expected a mask and no checkpoints, got {problem.static_key()}")
        given, out = self._convolution(problem)
        pool = self._pool(problem, len(lengths) + 3, problem.width - 1)
        offsets = self._integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype)
        slots = self._integers(self._order(len(lengths)), problem.index_dtype)
        mask = self._integers([True] * len(lengths), "bool")
        return Work(
            "causal_conv1d_fn",
            {
                **given, "conv_states": pool, "query_start_loc": offsets, "cache_indices": slots, "has_initial_state": mask,
                "out": out,
            },
            Conv1dParams(
                given["x"], given["weight"], given["bias"], pool, offsets, slots, mask.view(torch.uint8), None, None, out, -1
            ),
            (out,),
            "conv_states",
        )  # fmt: skip

    def conv1d_update(self, problem: Conv1dUpdateProblem, lengths: Sequence[int]) -> Work:
        if problem.has_accepted != problem.has_columns or (problem.cu_seqlens_dtype is None) != (max(lengths) == 1):
            raise ValueError(f"problem: expected offsets and accepted counts with drafts alone, got {problem.static_key()}")
        given, out = self._convolution(problem)
        batch, columns = len(lengths), max(lengths) if problem.has_columns else 1
        # A tree keeps a window per node, each in a slot of its own; a line of drafts one long window in its first slot.
        order = self._order(batch * columns)
        pool = self._pool(problem, batch * columns + 3, problem.width - 1 + (0 if problem.has_parent else columns - 1))
        slots = self._integers(order, problem.index_dtype)
        offsets = accepted = parents = None
        if problem.has_columns:
            slots = slots.view(batch, columns)
            accepted = self._integers([1 + n % columns for n in range(batch)], "int32")
        if problem.cu_seqlens_dtype is not None:
            offsets = self._integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype)
        if problem.has_parent:  # two children a node
            parents = self._integers([(i - 1) // 2 if i else -1 for length in lengths for i in range(length)], "int32")
        return Work(
            "causal_conv1d_update",
            {
                **given, "conv_state": pool, "conv_state_indices": slots, "num_accepted_tokens": accepted,
                "query_start_loc": offsets, "parent_token": parents, "out": out,
            },
            Conv1dUpdateParams(
                given["x"], given["weight"], given["bias"], pool, slots, accepted, offsets, parents, out, -1
            ),
            (out,),
            "conv_state",
        )  # fmt: skip

    def split(self, problem: SplitProblem) -> Work:
        rows, heads = problem.num_tokens, problem.num_v_heads
        mixed_qkvz = self._normal(rows, problem.row_elements, dtype=problem.dtype)
        mixed_ba = self._normal(rows, 2 * heads, dtype=problem.ba_dtype)
        values = heads * problem.head_v_dim
        outputs = (
            self._nan(rows, problem.row_elements - values, dtype=problem.dtype),
            self._nan(rows, values, dtype=problem.dtype),
            self._nan(rows, heads, dtype=problem.ba_dtype),
            self._nan(rows, heads, dtype=problem.ba_dtype),
        )
        arguments = {
            "mixed_qkvz": mixed_qkvz, "mixed_ba": mixed_ba, "num_heads_qk": problem.num_k_heads, "num_heads_v": heads,
            "head_qk": problem.head_k_dim, "head_v": problem.head_v_dim,
        }  # fmt: skip
        return Work("fused_qkvzba_split_reshape_cat", arguments, SplitParams(mixed_qkvz, mixed_ba, *outputs), outputs)

    def gating(self, problem: GatingProblem) -> Work:
        rows, heads = problem.num_tokens, problem.num_heads
        A_log, dt_bias = self._normal(heads, dtype=problem.A_log_dtype), self._normal(heads, dtype=problem.dt_bias_dtype)
        b = self._normal(rows, 2 * heads, dtype=problem.b_dtype)[:, :heads]
        a = self._normal(rows, 2 * heads, dtype=problem.a_dtype)[:, heads:]
        outputs = self._nan(rows, heads, dtype="float32"), self._nan(rows, heads, dtype="float32")
        arguments = {"A_log": A_log, "a": a, "b": b, "dt_bias": dt_bias}
        return Work("fused_gdn_gating", arguments, GatingParams(A_log, a, b, dt_bias, *outputs, 1.0, 20.0), outputs)

    def rms_norm_gated(self, problem: RmsNormGatedProblem) -> Work:
        rows, heads, dim = problem.num_tokens, problem.num_heads, problem.head_dim
        x = self._normal(rows, heads, dim, dtype=problem.dtype)
        gap = 0 if heads == 1 else 2 * heads * dim  # elements before z in a row of its projection
        z = self._normal(rows, gap + heads * dim, dtype=problem.z_dtype)[:, gap:].unflatten(1, (heads, dim))
        weight = self._normal(dim, dtype=problem.weight_dtype)
        out = self._nan(rows, heads, dim, dtype=problem.dtype)
        arguments = {"x": x, "z": z, "weight": weight, "activation": "sigmoid" if problem.sigmoid else "silu"}
        return Work("rms_norm_gated", arguments, RmsNormGatedParams(x, z, weight, out, 1e-6), (out,))


# --- shapes ------------------------------------------------------------------------------------------------------------


def _prompts(heads: tuple[int, int], lengths: Sequence[int], label: str) -> Shape:
    problem = example("conv1d", heads_of(*heads), num_tokens=sum(lengths), num_sequences=len(lengths))
    return Shape(f"{heads[0]}/{heads[1]} {label}", problem, lengths=tuple(lengths))


def _decode_steps(heads: tuple[int, int], batch: int, drafts: int = 0, tree: bool = False) -> Shape:
    tokens = 1 + drafts
    problem = example(
        "conv1d_update", heads_of(*heads), cu_seqlens_dtype="int32" if drafts else None, has_columns=drafts > 0,
        has_accepted=drafts > 0, has_parent=tree, num_tokens=batch * tokens, num_sequences=batch,
    )  # fmt: skip
    steps = f", {tokens} tokens each" + (", a tree" if tree else "") if drafts else ""
    return Shape(f"{heads[0]}/{heads[1]} batch {batch}{steps}", problem, lengths=(tokens,) * batch)


def _split(heads: tuple[int, int], num_tokens: int) -> Shape:
    return Shape(f"{heads[0]}/{heads[1]} {num_tokens}", example("split", heads_of(*heads), num_tokens=num_tokens))


def _gating(num_heads: int, num_tokens: int) -> Shape:
    return Shape(f"{num_tokens} x {num_heads}", example("gating", heads_of(num_heads, num_heads), num_tokens=num_tokens))


def _norm(num_tokens: int, num_heads: int, strided: bool = False) -> Shape:
    """strided: the gate is a slice of its projection; otherwise all rows are contiguous and count as rows of one head."""
    heads, rows = (num_heads, num_tokens) if strided else (1, num_tokens * num_heads)
    problem = example("rms_norm_gated", heads_of(num_heads, num_heads), num_heads=heads, num_tokens=rows)
    return Shape(f"{num_tokens} x {num_heads} x 128" + (", gate in its projection" if strided else ""), problem)


def _with(shape: Shape, **fields: int) -> Shape:
    problem: Any = shape.problem
    return replace(shape, problem=replace(problem, **fields))


def _few_channels(shape: Shape, lengths: tuple[int, ...]) -> Shape:
    return replace(_with(shape, dim=64, num_tokens=sum(lengths), num_sequences=len(lengths)), lengths=lengths)


conv1d = Tunable(
    partial(StepCase, lambda maker, problem, lengths: maker.conv1d(problem, lengths)),
    shapes=(
        _prompts((16, 32), [8192], "8192"),
        _prompts((16, 32), [1024] * 8, "8 x 1024"),
        _prompts((16, 32), [64] * 128, "128 x 64"),
        _prompts((16, 32), [1024], "1024"),
        _prompts((4, 8), [8192], "8192"),
    ),
    useful_flops=no_flops,
    small=lambda shape: _few_channels(shape, (70, 5)),
)

conv1d_update = Tunable(
    partial(StepCase, lambda maker, problem, lengths: maker.conv1d_update(problem, lengths)),
    shapes=(
        *(_decode_steps((16, 32), batch) for batch in (1, 32, 128, 512)),
        _decode_steps((16, 32), 128, drafts=3),
        _decode_steps((16, 32), 128, drafts=3, tree=True),
    ),
    useful_flops=no_flops,
    small=lambda shape: _few_channels(shape, shape.lengths[:3]),
)

split = Tunable(
    partial(StepCase, lambda maker, problem, lengths: maker.split(problem), is_copy=True),
    shapes=(_split((16, 32), 8192), _split((16, 32), 128), _split((4, 8), 8192)),
    small=lambda shape: _with(shape, num_k_heads=2, num_v_heads=4, num_tokens=5),
)

gating = Tunable(
    partial(StepCase, lambda maker, problem, lengths: maker.gating(problem)),
    shapes=(_gating(32, 8192), _gating(32, 128)),
    small=lambda shape: _with(shape, num_tokens=5),
)

rms_norm_gated = Tunable(
    partial(StepCase, lambda maker, problem, lengths: maker.rms_norm_gated(problem)),
    shapes=(_norm(8192, 32), _norm(128, 32), _norm(8192, 32, strided=True), _norm(128, 32, strided=True)),
    small=lambda shape: _with(shape, num_tokens=5),
)
