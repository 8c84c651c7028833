"""The fused decode step as a case: outputs of projections as slices of wide rows, pools whose slots have no order."""

from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

import gdn
from autotune.cases.base import Call, Shape, Tunable, WrongResult, example, heads_of, launch_of
from gdn import reference
from gdn.problems import GdnDecodeParams, GdnDecodeProblem
from gdn.runtime import Prepared
from gdn.testing import compare

Tensor = torch.Tensor
POOLS = ("conv_state", "ssm_state")
_OUTPUT_LIMIT = {"bfloat16": 4e-3, "float16": 6e-4}  # relative, of the worst row
_STATE_LIMIT = {"float32": 1e-5, "bfloat16": 4e-3}  # relative, of the worst head


class DecodeCase:
    """One decode step of a layer, with drafts or without."""

    def __init__(self, shape: Shape, device: torch.device, copies: int) -> None:
        problem, lengths = shape.problem, shape.lengths
        assert isinstance(problem, GdnDecodeProblem)
        if problem.interleaved or problem.has_rounding or not problem.conv_channels_contiguous:
            raise ValueError(f"problem: expected flat rows, windows with channels together, no noise, got {problem.static_key()}")
        if problem.has_accepted != problem.has_columns or (problem.cu_seqlens_dtype is None) != (max(lengths) == 1):
            raise ValueError(f"problem: expected offsets and accepted counts with drafts alone, got {problem.static_key()}")
        self._problem, self._lengths, self._device, self._copies = problem, lengths, device, copies

    def _arguments(self, seed: int) -> dict[str, Any]:
        """Keyword arguments of gdn.fused_gdn_decode."""
        problem, device = self._problem, self._device
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: str) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(getattr(torch, dtype))

        def integers(values: Any, dtype: str) -> Tensor:
            return torch.as_tensor(values, dtype=getattr(torch, dtype), device=device)

        heads, K, V = problem.num_v_heads, problem.head_k_dim, problem.head_v_dim
        rows, batch, columns = sum(self._lengths), len(self._lengths), max(self._lengths) if problem.has_columns else 1
        inner = (V, K) if problem.state_v_first else (K, V)
        slots = torch.randperm(batch * columns + 3, device=device, generator=generator)[: batch * columns]
        slots = integers(slots, problem.index_dtype)
        qkv = normal(rows, problem.dim + heads * V, dtype=problem.dtype)[:, : problem.dim]
        z = normal(rows, problem.dim + heads * V, dtype=str(problem.z_dtype))[:, problem.dim :].unflatten(1, (heads, V))
        window = normal(batch * columns + 3, problem.width - 2 + columns, problem.dim, dtype=problem.dtype)
        offsets = accepted = None
        if problem.cu_seqlens_dtype is not None:
            offsets = integers([0, *accumulate(self._lengths)], problem.cu_seqlens_dtype)
        if problem.has_accepted:
            accepted = integers([1 + n % columns for n in range(batch)], "int32")
        return {
            "mixed_qkv": qkv, "z": z, "b": normal(rows, 2 * heads, dtype=problem.b_dtype)[:, :heads],
            "a": normal(rows, 2 * heads, dtype=str(problem.a_dtype))[:, heads:],
            "conv_state": window.to(getattr(torch, problem.conv_dtype)).mT,
            "conv_weight": normal(problem.dim, problem.width, dtype=problem.weight_dtype),
            "conv_bias": None if problem.bias_dtype is None else normal(problem.dim, dtype=problem.bias_dtype),
            "A_log": normal(heads, dtype=problem.A_log_dtype), "dt_bias": normal(heads, dtype=problem.dt_bias_dtype),
            "norm_weight": normal(V, dtype=problem.norm_dtype),
            "ssm_state": normal(batch * columns + 3, heads, *inner, dtype=problem.state_dtype),
            "state_indices": slots.view(batch, columns) if problem.has_columns else slots, "query_start_loc": offsets,
            "num_accepted_tokens": accepted, "num_k_heads": problem.num_k_heads, "head_k_dim": K, "head_v_dim": V,
            "activation": "silu" if problem.silu else None,
            "gate_activation": "sigmoid" if problem.gate_sigmoid else "silu", "state_v_first": problem.state_v_first,
            "out": torch.full((rows, heads * V), torch.nan, dtype=getattr(torch, problem.dtype), device=device),
        }  # fmt: skip

    def _params(self, arguments: dict[str, Any]) -> GdnDecodeParams:
        """Arguments of a launch."""
        problem = self._problem
        out = arguments["out"].view(-1, problem.num_v_heads, problem.head_v_dim)
        given: dict[str, Any] = {name: arguments.get(name) for name in GdnDecodeParams._fields}
        own = {"cu_seqlens": arguments["query_start_loc"], "out": out, "scale": problem.head_k_dim**-0.5, "eps": 1e-6}
        return GdnDecodeParams(**given | own | {"null_slot": -1})

    @cached_property
    def _expected(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Exact output and pools, computed in float64; the pools keep their dtypes."""
        arguments: dict[str, Any] = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() and name not in POOLS else value
            for name, value in self._arguments(seed=0).items()
        }
        o = reference.fused_gdn_decode(**arguments | {"out": None})
        return o, {name: arguments[name] for name in POOLS}

    @cached_property
    def _timed(self) -> list[dict[str, Any]]:
        return [self._arguments(seed=1 + copy) for copy in range(self._copies)]

    def check(self, prepared: Prepared) -> float:
        exact, pools = self._expected
        before, arguments = self._arguments(seed=0), self._arguments(seed=0)  # a launch updates the pools
        launch_of(prepared, self._params(arguments))()
        if not compare.same_bits(arguments["conv_state"], pools["conv_state"]):
            raise WrongResult("the windows are not the reference's")
        found, wanted, old = arguments["ssm_state"], pools["ssm_state"], before["ssm_state"]
        written = [slot for slot in range(len(old)) if not compare.same_bits(wanted[slot], old[slot])]
        untouched = sorted(set(range(len(old))) - set(written))
        if not compare.same_bits(found[untouched], old[untouched]):
            raise WrongResult("a slot that belongs to no sequence was changed")
        output = compare.error(arguments["out"], exact, groups=1)
        state = compare.error(found[written], wanted[written], groups=2)
        for what, error, limit in (
            ("output", output, _OUTPUT_LIMIT[self._problem.dtype]),
            ("state", state, _STATE_LIMIT[self._problem.state_dtype]),
        ):
            if not error.l2 <= limit:  # NaN too
                raise WrongResult(f"{what} error {error.l2:.1e} at {error.where}, allowed {limit:.0e}")
        return max(output.l2, state.l2)

    def launches(self, prepared: Prepared) -> list[Call]:
        return [launch_of(prepared, self._params(arguments)) for arguments in self._timed]

    def public_calls(self, backend: str | None) -> list[Call]:
        def call(arguments: dict[str, Any]) -> Call:
            return lambda: gdn.fused_gdn_decode(**arguments, backend=backend)

        return [call(arguments) for arguments in self._timed]


def _steps(heads: tuple[int, int], batch: int, state_dtype: str = "float32", drafts: int = 0) -> Shape:
    tokens = 1 + drafts
    problem = example(
        "gdn_decode", heads_of(*heads), state_dtype=state_dtype, cu_seqlens_dtype="int32" if drafts else None,
        has_columns=drafts > 0, has_accepted=drafts > 0, num_tokens=batch * tokens, num_sequences=batch,
    )  # fmt: skip
    steps = f", {tokens} tokens each" if drafts else ""
    kind = {"float32": "f32", "bfloat16": "bf16"}[state_dtype]
    return Shape(f"{heads[0]}/{heads[1]} batch {batch} {kind}{steps}", problem, lengths=(tokens,) * batch)


def _small(shape: Shape) -> Shape:
    problem: Any = shape.problem
    lengths = shape.lengths[:3]
    sizes = {"num_tokens": sum(lengths), "num_sequences": len(lengths)}
    problem = replace(problem, num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32, **sizes)
    return replace(shape, lengths=lengths, problem=problem)


gdn_decode = Tunable(
    DecodeCase,
    shapes=(
        *(_steps((16, 32), batch) for batch in (1, 8, 32, 128, 512)),
        *(_steps((16, 32), batch, "bfloat16") for batch in (128, 512)),
        *(_steps((4, 8), batch) for batch in (1, 8, 32, 128)),
        *(_steps((16, 32), batch, drafts=3) for batch in (32, 128)),
    ),
    small=_small,
)
