"""Seeded arguments for the delta-rule operators, made from a problem, for tests and the autotuner.

`chunk_problem` and `recurrent_problem` make a small problem; `chunk_inputs` and `recurrent_inputs` return the keyword
arguments of the public operator (and of the reference and the oracle); `chunk_tensors` and `recurrent_tensors` turn those
into the arguments of a kernel's launch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

import torch

from gdn.ops.delta_rule.problem import (
    ChunkParams,
    ChunkProblem,
    ChunkSummaryParams,
    ChunkSummaryProblem,
    DeltaRuleProblem,
    RecurrentParams,
    RecurrentProblem,
)
from gdn.testing.params import params_of

Case = Literal[
    "random",
    "no_decay",  # g = 0
    "total_decay",  # g = -50
    "mixed_decay",  # every third token forgets everything, the others nothing
    "correlated_90",  # neighbouring keys have a cosine of 0.9
    "correlated_99",
    "equal_keys",  # one key for all tokens, beta 1: each token overwrites the last
    "large_norm",  # |q| = |k| = 1e3; meant for problems with the norm inside
    "zero_norm",  # every other token has q = k = 0
]
CASES: tuple[Case, ...] = get_args(Case)

_DEFAULT_FIELDS: dict[str, Any] = {
    "num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16, "dtype": "float32",
    "state_dtype": "float32", "gate_dtype": "float32", "beta_dtype": "float32", "cu_seqlens_dtype": "int32",
    "index_dtype": None, "state_v_first": False, "use_qk_l2norm": True, "use_gate": False, "use_beta_sigmoid": False,
    "has_initial_state": True, "has_final_state": True, "has_final_indices": False, "num_tokens": 100, "num_sequences": 3,
}  # fmt: skip


@dataclass(frozen=True)
class InputOptions:
    """Options of `chunk_inputs` and `recurrent_inputs`."""

    lengths: Sequence[int] | None = None  # tokens of each sequence; None = the problem's tokens, spread evenly
    case: Case = "random"
    strided: bool = False  # q, k, v are slices of one buffer, g and beta have strides too
    slot_gap: int = 0  # elements between the slots of the pool, a multiple of 16 bytes
    null_slot: int = -1
    null_sequences: Sequence[int] = ()  # sequences whose slot is null_slot
    padded_tokens: int = 0  # rows beyond cu_seqlens[-1]


def chunk_problem(**changes: Any) -> ChunkProblem:
    """A small problem with the given fields changed."""
    return ChunkProblem(**{**_DEFAULT_FIELDS, "has_mask": False, "has_checkpoints": False, **changes})


def recurrent_problem(**changes: Any) -> RecurrentProblem:
    """A small problem with the given fields changed."""
    flags = {"write_every_token": False, "has_accepted": False, "has_parent": False, "has_rounding": False}
    return RecurrentProblem(**{**_DEFAULT_FIELDS, "num_tokens": 6, **flags, **changes})


def chunk_inputs(problem: ChunkProblem, device: torch.device | str = "cpu", seed: int = 0, **options: Any) -> dict[str, Any]:
    """Keyword arguments of gdn.chunk_gated_delta_rule. options: the fields of InputOptions.

    Every slot of the pool that no sequence reads is NaN, and the rows of padding are NaN in q, k, v, g and beta.
    """
    gen = _Generator(problem, device, seed, InputOptions(**options))
    arguments, count = gen.tokens() | {"output_final_state": problem.has_final_state}, len(gen.lengths)
    if problem.pooled:
        groups = 1 + int(problem.has_final_indices) + (2 if problem.has_checkpoints else 0)
        slots = gen.slots(groups, count)
        arguments |= gen.pool(slots[0], count * groups) | {"state_indices": slots[0].to(gen.index_dtype)}
        if problem.has_final_indices:
            arguments["final_state_indices"] = slots[1].to(gen.index_dtype)
        if problem.has_checkpoints:
            reach = torch.tensor([length // 64 * 64 for length in gen.lengths], dtype=torch.int32, device=gen.device)
            arguments["checkpoint_offsets"] = torch.stack([reach.clamp(max=64), reach], dim=1)
            repeated = reach <= 64  # one offset twice would write two slots with one state: legal, but 0 covers "none"
            arguments["checkpoint_offsets"][repeated, 1] = 0
            arguments["checkpoint_slots"] = slots[-2:].t().to(gen.index_dtype)
    elif problem.has_initial_state:
        arguments["initial_state"] = gen.states(count)
    if problem.has_mask:
        arguments["has_initial_state"] = torch.arange(count, device=gen.device) % 3 != 1
    return arguments


def summary_inputs(
    problem: ChunkSummaryProblem, device: torch.device | str = "cpu", seed: int = 0, **options: Any
) -> dict[str, Any]:
    """Keyword arguments of gdn.chunk_summary, as `chunk_inputs`."""
    heads = {
        "num_q_heads": max(problem.num_k_heads, problem.num_state_heads if problem.num_v_heads == problem.num_k_heads else 0)
    }
    shared = {name: value for name, value in vars(problem).items() if name not in ("num_state_heads", "use_k_l2norm")}
    flags = {"use_qk_l2norm": problem.use_k_l2norm, "has_initial_state": False, "has_final_state": False}
    arguments = chunk_inputs(chunk_problem(**shared, **heads, **flags), device, seed, **options)
    del arguments["output_final_state"]
    return arguments


def summary_tensors(problem: ChunkSummaryProblem, arguments: Mapping[str, Any]) -> ChunkSummaryParams:
    """The Params of a launch, with NaN-filled results."""
    k_dim, v_dim = problem.head_k_dim, problem.head_v_dim
    shape = (arguments["cu_seqlens"].shape[0] - 1, problem.num_state_heads)
    inner = (v_dim, k_dim) if problem.state_v_first else (k_dim, v_dim)
    h, P = (arguments["k"].new_full((*shape, *dims), torch.nan, dtype=torch.float32) for dims in (inner, (k_dim, k_dim)))
    return params_of(ChunkSummaryParams, arguments, h=h, P=P)


def recurrent_inputs(
    problem: RecurrentProblem, device: torch.device | str = "cpu", seed: int = 0, *, num_columns: int | None = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of gdn.fused_recurrent_gated_delta_rule, made like those of `chunk_inputs`.

    num_columns: columns of 2-D indices; None = tokens of the longest sequence. options: the fields of InputOptions.
    """
    given = InputOptions(**options)
    gen = _Generator(problem, device, seed, given)
    arguments, count = gen.tokens(), len(gen.lengths)
    if problem.pooled:
        columns = max([1, *gen.lengths]) if num_columns is None else num_columns
        columns = columns if problem.write_every_token else 1
        groups = 1 + int(problem.has_final_indices)
        slots = gen.slots(groups, count, columns)
        accepted = torch.ones(count, dtype=torch.int32, device=gen.device)
        if problem.has_accepted:
            accepted = torch.arange(count, dtype=torch.int32, device=gen.device) % columns + 1
            arguments["num_accepted_tokens"] = accepted
        read = slots[0].gather(1, (accepted.long() - 1)[:, None])[:, 0]
        shaped = (slots if problem.write_every_token else slots[:, :, 0]).to(gen.index_dtype)
        arguments |= gen.pool(read, groups * count * columns) | {"ssm_state_indices": shaped[0]}
        if problem.has_final_indices:
            arguments["final_state_indices"] = shaped[1]
        arguments["disable_state_update"] = not problem.has_final_state
    else:
        arguments["output_final_state"] = problem.has_final_state
        if problem.has_initial_state:
            arguments["initial_state"] = gen.states(count)
    if problem.has_parent:
        # The parent of node i is i // 2 - 1: -1, -1, 0, 0, 1, 1, ... a binary tree with two roots.
        parents = [i // 2 - 1 for length in gen.lengths for i in range(length)] + [-1] * given.padded_tokens
        arguments["parent_token"] = torch.tensor(parents, dtype=torch.int32, device=gen.device)
    if problem.has_rounding:
        arguments["rounding_seed"] = torch.tensor([0x1234_5678_9ABC + seed], dtype=torch.int64, device=gen.device)
    return arguments


def chunk_tensors(problem: ChunkProblem, arguments: Mapping[str, Any], workspace: torch.Tensor | None = None) -> ChunkParams:
    """The Params of a launch, with a NaN-filled out; the pool is the one in arguments. workspace: may be empty."""
    workspace = workspace if workspace is not None and workspace.numel() else None
    return params_of(ChunkParams, arguments, workspace=workspace, **_targets(problem, arguments))


def recurrent_tensors(problem: RecurrentProblem, arguments: Mapping[str, Any]) -> RecurrentParams:
    """The Params of a launch, with a NaN-filled out; the pool is the one in arguments."""
    own = _targets(problem, arguments) | {"state_indices": arguments.get("ssm_state_indices")}
    return params_of(RecurrentParams, arguments, **own | ({"final_state": None} if problem.pooled else {}))


def _targets(problem: DeltaRuleProblem, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs and scalars of a launch; new tensors are full of NaN, so that an element that is never written shows."""
    v, state = arguments["v"], None
    if problem.has_final_state and problem.pooled:
        state = arguments["initial_state"]
    elif problem.has_final_state:
        shape = (arguments["cu_seqlens"].shape[0] - 1, *_state_shape(problem))
        state = torch.full(shape, torch.nan, dtype=torch.float32, device=v.device)
    out = torch.full((1, v.shape[1], problem.num_state_heads, problem.head_v_dim), torch.nan, dtype=v.dtype, device=v.device)
    scalars = {"scale": problem.head_k_dim**-0.5, "null_slot": arguments.get("null_slot", -1)}
    return {"final_state": state, "out": out, **scalars}


def _state_shape(problem: DeltaRuleProblem) -> tuple[int, int, int]:
    k_dim, v_dim = problem.head_k_dim, problem.head_v_dim
    return (problem.num_state_heads, *((v_dim, k_dim) if problem.state_v_first else (k_dim, v_dim)))


def even_lengths(total: int, count: int) -> tuple[int, ...]:
    """Tokens of each sequence, as even as they can be."""
    return tuple(total * (n + 1) // count - total * n // count for n in range(count))


class _Generator:
    def __init__(
        self, problem: ChunkProblem | RecurrentProblem, device: torch.device | str, seed: int, options: InputOptions
    ) -> None:
        self.problem, self.options, self.device = problem, options, torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.index_dtype: torch.dtype = getattr(torch, problem.index_dtype or "int32")
        even = even_lengths(problem.num_tokens, problem.num_sequences)
        self.lengths = list(even if options.lengths is None else options.lengths)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device=self.device)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        drawn = torch.rand(*shape, generator=self.generator, dtype=torch.float32, device=self.device)
        return drawn * (high - low) + low

    def tokens(self) -> dict[str, Any]:
        """Arguments with a row per token, and the flags of the call."""
        p, case, strided = self.problem, self.options.case, self.options.strided
        live = sum(self.lengths)
        total = live + self.options.padded_tokens
        q = self.normal(live, p.num_q_heads, p.head_k_dim)
        k = self._keys(live, case)
        v = self.normal(live, p.num_v_heads, p.head_v_dim)
        if case == "large_norm":
            q, k = q * 1e3 / q.norm(dim=-1, keepdim=True), k * 1e3
        if case == "zero_norm":
            q[::2] = 0
            k[::2] = 0
        q, k, v = (self._padded(x, total).to(getattr(torch, p.dtype)) for x in (q, k, v))
        if strided:
            q, k, v = _slices_of_one_buffer(q, k, v)
        offset_dtype: torch.dtype = getattr(torch, p.cu_seqlens_dtype)
        arguments: dict[str, Any] = {
            "q": q[None], "k": k[None], "v": v[None],
            "cu_seqlens": torch.tensor([0, *accumulate(self.lengths)], dtype=offset_dtype, device=self.device),
            "state_v_first": p.state_v_first, "use_qk_l2norm_in_kernel": p.use_qk_l2norm,
            "use_gate_in_kernel": p.use_gate, "use_beta_sigmoid_in_kernel": p.use_beta_sigmoid,
        }  # fmt: skip
        if p.gate_dtype is not None:
            g = self._padded(self._gate(live, case, arguments), total).to(getattr(torch, p.gate_dtype))
            arguments["g"] = (_spread(g) if strided else g)[None]
        if p.beta_dtype is not None:
            b = self._padded(self._beta(live, case), total).to(getattr(torch, p.beta_dtype))
            arguments["beta"] = (_spread(b) if strided else b)[None]
        return arguments

    def _keys(self, live: int, case: Case) -> torch.Tensor:
        """[live, Hk, K], of length one."""
        p = self.problem
        k = self.normal(live, p.num_k_heads, p.head_k_dim)
        cosine = {"correlated_90": 0.9, "correlated_99": 0.99, "equal_keys": 1.0}.get(case)
        if cosine is not None:
            common = self.normal(1, p.num_k_heads, p.head_k_dim)
            k = cosine**0.5 * common + (1 - cosine) ** 0.5 * k  # any two of them have this cosine on average
        return torch.nn.functional.normalize(k, dim=-1)

    def _gate(self, live: int, case: Case, arguments: dict[str, Any]) -> torch.Tensor:
        """[live, HS]: the log decay, or a raw gate (with its A_log and dt_bias put into arguments)."""
        p, heads = self.problem, self.problem.num_state_heads
        a = self.normal(live, heads)
        if p.use_gate:
            arguments["A_log"] = self.uniform(0.5, 8.0, heads).log()
            arguments["dt_bias"] = self.uniform(-5.0, -1.0, heads)
            if case in ("total_decay", "no_decay"):
                arguments["A_log"] = torch.zeros_like(arguments["A_log"])
                a = torch.full_like(a, 52.0 if case == "total_decay" else -40.0)
            return a
        if case in ("no_decay", "total_decay"):
            return torch.full_like(a, 0.0 if case == "no_decay" else -50.0)
        if case == "mixed_decay":
            forgets = (torch.arange(live, device=self.device) % 3 == 0)[:, None]
            return torch.where(forgets, torch.full_like(a, -50.0), 0.0)
        return -self.uniform(0.1, 2.0, heads) * torch.nn.functional.softplus(a - 2.0)

    def _beta(self, live: int, case: Case) -> torch.Tensor:
        b = self.normal(live, self.problem.num_state_heads)
        if case == "equal_keys":
            b = torch.full_like(b, 40.0)
        return b if self.problem.use_beta_sigmoid else b.sigmoid()

    def _padded(self, x: torch.Tensor, total: int) -> torch.Tensor:
        rest = torch.full((total - x.shape[0], *x.shape[1:]), torch.nan, dtype=x.dtype, device=self.device)
        return torch.cat([x, rest])

    def states(self, count: int) -> torch.Tensor:
        state = 0.3 * self.normal(count, *_state_shape(self.problem))
        return state.to(getattr(torch, self.problem.state_dtype))

    def slots(self, groups: int, *shape: int) -> torch.Tensor:
        """Distinct live slots [groups, *shape], none of them the last slot (which nobody owns); null where options say so."""
        count = groups * math.prod(shape)
        order = torch.randperm(count + 1, generator=self.generator, device=self.device)
        slots = torch.add(order[:count], self.options.null_slot + 1).view(groups, *shape)
        slots[0, list(self.options.null_sequences)] = self.options.null_slot
        return slots

    def pool(self, read_slots: torch.Tensor, count: int) -> dict[str, Any]:
        """A pool of `count` slots and two more: random states where it is read, NaN elsewhere and between the slots."""
        shape, null_slot = _state_shape(self.problem), self.options.null_slot
        inner, dtype = math.prod(shape), getattr(torch, self.problem.state_dtype)
        size = (max(count + null_slot + 3, 1), inner + self.options.slot_gap)
        buffer = torch.full(size, torch.nan, dtype=dtype, device=self.device)
        pool: torch.Tensor = buffer[:, :inner].unflatten(1, shape)
        live = read_slots[read_slots > null_slot]
        pool[live] = self.states(live.shape[0])
        return {"initial_state": pool, "null_slot": null_slot}


def _slices_of_one_buffer(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Copies of [L, heads, D] tensors as column ranges of one [L, sum] buffer, as a fused projection gives them."""
    buffer = torch.cat([part.flatten(1) for part in parts], dim=1)
    columns = buffer.split([part[0].numel() if len(part) else part.shape[1] * part.shape[2] for part in parts], dim=1)
    return [column.unflatten(1, part.shape[1:]) for column, part in zip(columns, parts, strict=True)]


def _spread(x: torch.Tensor) -> torch.Tensor:
    """A copy of [L, heads] whose two strides are both larger than necessary."""
    buffer = torch.full((x.shape[0], x.shape[1] + 3, 2), torch.nan, dtype=x.dtype, device=x.device)
    view = buffer[:, : x.shape[1], 0]
    view.copy_(x)
    return view
