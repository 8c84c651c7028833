"""Seeded arguments for the delta-rule operators, made from a problem, for tests and the autotuner.

`chunk_problem` and `recurrent_problem` make a small problem; `chunk_inputs` and `recurrent_inputs` return the keyword
arguments of the public operator (and of the reference and the oracle); `chunk_tensors` and `recurrent_tensors` turn those
into the arguments of a kernel's launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gdn.problems import ChunkParams, ChunkProblem, DeltaRuleProblem, RecurrentParams, RecurrentProblem

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
CASES: tuple[Case, ...] = (
    "random", "no_decay", "total_decay", "mixed_decay", "correlated_90", "correlated_99", "equal_keys", "large_norm", "zero_norm",
)  # fmt: skip


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
    given = InputOptions(**options)
    null_slot = given.null_slot
    gen = _Generator(problem, device, seed)
    lengths = _lengths(problem.num_tokens, problem.num_sequences, given.lengths)
    arguments = gen.tokens(lengths, given.case, given.strided, given.padded_tokens)
    arguments["output_final_state"] = problem.has_final_state
    count = len(lengths)
    if problem.pooled:
        num_checkpoints = 2 if problem.has_checkpoints else 0
        groups = 1 + int(problem.has_final_indices) + num_checkpoints
        slots = gen.slots(count * groups, null_slot).view(groups, count)
        slots[0, list(given.null_sequences)] = null_slot
        arguments["initial_state"] = gen.pool(slots[0], null_slot, count * groups + null_slot + 3, given.slot_gap)
        arguments["state_indices"] = slots[0].to(gen.index_dtype)
        arguments["null_slot"] = null_slot
        if problem.has_final_indices:
            arguments["final_state_indices"] = slots[1].to(gen.index_dtype)
        if problem.has_checkpoints:
            reach = torch.tensor([length // 64 * 64 for length in lengths], dtype=torch.int32, device=gen.device)
            arguments["checkpoint_offsets"] = torch.stack([reach.clamp(max=64), reach], dim=1)
            repeated = reach <= 64  # one offset twice would write two slots with one state: legal, but 0 covers "none"
            arguments["checkpoint_offsets"][repeated, 1] = 0
            arguments["checkpoint_slots"] = slots[-2:].t().to(gen.index_dtype)
    elif problem.has_initial_state:
        arguments["initial_state"] = gen.states(count)
    if problem.has_mask:
        arguments["has_initial_state"] = torch.arange(count, device=gen.device) % 3 != 1
    return arguments


def recurrent_inputs(
    problem: RecurrentProblem,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    num_columns: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of gdn.fused_recurrent_gated_delta_rule, made like those of `chunk_inputs`.

    num_columns: columns of 2-D indices; None = tokens of the longest sequence. options: the fields of InputOptions.
    """
    given = InputOptions(**options)
    null_slot = given.null_slot
    gen = _Generator(problem, device, seed)
    lengths = _lengths(problem.num_tokens, problem.num_sequences, given.lengths)
    arguments = gen.tokens(lengths, given.case, given.strided, given.padded_tokens)
    count = len(lengths)
    if problem.pooled:
        columns = max([1, *lengths]) if num_columns is None else num_columns
        columns = columns if problem.write_every_token else 1
        groups = 1 + int(problem.has_final_indices)
        slots = gen.slots(groups * count * columns, null_slot).view(groups, count, columns)
        slots[0, list(given.null_sequences)] = null_slot
        accepted = torch.ones(count, dtype=torch.int32, device=gen.device)
        if problem.has_accepted:
            accepted = torch.arange(count, dtype=torch.int32, device=gen.device) % columns + 1
            arguments["num_accepted_tokens"] = accepted
        read = slots[0].gather(1, (accepted.long() - 1)[:, None])[:, 0]
        arguments["initial_state"] = gen.pool(read, null_slot, groups * count * columns + null_slot + 3, given.slot_gap)
        shaped = slots if problem.write_every_token else slots[:, :, 0]
        arguments["ssm_state_indices"] = shaped[0].to(gen.index_dtype)
        arguments["null_slot"] = null_slot
        if problem.has_final_indices:
            arguments["final_state_indices"] = shaped[1].to(gen.index_dtype)
        arguments["disable_state_update"] = not problem.has_final_state
    else:
        arguments["output_final_state"] = problem.has_final_state
        if problem.has_initial_state:
            arguments["initial_state"] = gen.states(count)
    if problem.has_parent:
        # The parent of node i is i // 2 - 1: -1, -1, 0, 0, 1, 1, ... a binary tree with two roots.
        parents = [i // 2 - 1 for length in lengths for i in range(length)] + [-1] * given.padded_tokens
        arguments["parent_token"] = torch.tensor(parents, dtype=torch.int32, device=gen.device)
    if problem.has_rounding:
        arguments["rounding_seed"] = torch.tensor([0x1234_5678_9ABC + seed], dtype=torch.int64, device=gen.device)
    return arguments


def chunk_tensors(problem: ChunkProblem, arguments: Mapping[str, Any], workspace: torch.Tensor | None = None) -> ChunkParams:
    """The Params of a launch, with a NaN-filled out; the pool is the one in arguments. workspace: may be empty."""
    final_state, out = _targets(problem, arguments)
    given: dict[str, Any] = {name: arguments.get(name) for name in ChunkParams._fields}
    return ChunkParams(
        **given
        | {
            "final_state": final_state,
            "out": out,
            "workspace": workspace if workspace is not None and workspace.numel() else None,
            "scale": problem.head_k_dim**-0.5,
            "null_slot": arguments.get("null_slot", -1),
        }
    )


def recurrent_tensors(problem: RecurrentProblem, arguments: Mapping[str, Any]) -> RecurrentParams:
    """The arguments of a recurrent kernel's launch, with a NaN-filled out; the pool is the one in arguments."""
    final_state, out = _targets(problem, arguments)
    given: dict[str, Any] = {name: arguments.get(name) for name in RecurrentParams._fields}
    own = {
        "state_indices": arguments.get("ssm_state_indices"), "final_state": None if problem.pooled else final_state, "out": out,
        "scale": problem.head_k_dim**-0.5, "null_slot": arguments.get("null_slot", -1),
    }  # fmt: skip
    return RecurrentParams(**given | own)


_PER_TOKEN = ("q", "k", "v", "g", "beta")


def _targets(problem: DeltaRuleProblem, arguments: Mapping[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """final_state and out of a launch; new tensors are full of NaN, so that an element that is never written shows."""
    v = arguments["v"]
    out = torch.full((1, v.shape[1], problem.num_state_heads, problem.head_v_dim), torch.nan, dtype=v.dtype, device=v.device)
    if not problem.has_final_state:
        return None, out
    if problem.pooled:
        return arguments["initial_state"], out
    shape = (arguments["cu_seqlens"].shape[0] - 1, *_state_shape(problem))
    return torch.full(shape, torch.nan, dtype=torch.float32, device=v.device), out


def _state_shape(problem: DeltaRuleProblem) -> tuple[int, int, int]:
    k_dim, v_dim = problem.head_k_dim, problem.head_v_dim
    return (problem.num_state_heads, *((v_dim, k_dim) if problem.state_v_first else (k_dim, v_dim)))


def _lengths(num_tokens: int, num_sequences: int, lengths: Sequence[int] | None) -> list[int]:
    if lengths is not None:
        return list(lengths)
    return [num_tokens * (n + 1) // num_sequences - num_tokens * n // num_sequences for n in range(num_sequences)]


class _Generator:
    def __init__(self, problem: DeltaRuleProblem, device: torch.device | str, seed: int) -> None:
        self.problem = problem
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.index_dtype: torch.dtype = getattr(torch, problem.index_dtype or "int32")

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device) * (high - low) + low

    def tokens(self, lengths: Sequence[int], case: Case, strided: bool, padded_tokens: int) -> dict[str, Any]:
        p = self.problem
        live = sum(lengths)
        total = live + padded_tokens
        offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
        q = self.normal(live, p.num_q_heads, p.head_k_dim)
        k = self._keys(live, case)
        v = self.normal(live, p.num_v_heads, p.head_v_dim)
        if case == "large_norm":
            q, k = q * 1e3 / q.norm(dim=-1, keepdim=True), k * 1e3
        if case == "zero_norm":
            q[::2] = 0
            k[::2] = 0
        q, k, v = (self._padded(x, total).to(self.dtype) for x in (q, k, v))
        if strided:
            q, k, v = _slices_of_one_buffer(q, k, v)
        arguments: dict[str, Any] = {
            "q": q[None], "k": k[None], "v": v[None],
            "cu_seqlens": offsets.to(self.device, getattr(torch, p.cu_seqlens_dtype)),
            "state_v_first": p.state_v_first,
            "use_qk_l2norm_in_kernel": p.use_qk_l2norm,
            "use_gate_in_kernel": p.use_gate,
            "use_beta_sigmoid_in_kernel": p.use_beta_sigmoid,
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
        p = self.problem
        heads = p.num_state_heads
        a = self.normal(live, heads)
        if p.use_gate:
            arguments["A_log"] = self.uniform(0.5, 8.0, heads).log()
            arguments["dt_bias"] = self.uniform(-5.0, -1.0, heads)
            if case in ("total_decay", "no_decay"):
                arguments["A_log"] = torch.zeros(heads, device=self.device)
                a = torch.full_like(a, 52.0 if case == "total_decay" else -40.0)
            return a
        if case == "no_decay":
            return torch.zeros_like(a)
        if case == "total_decay":
            return torch.full_like(a, -50.0)
        if case == "mixed_decay":
            forgets = (torch.arange(live, device=self.device) % 3 == 0)[:, None]
            return torch.where(forgets, -50.0, 0.0).expand_as(a).clone()
        return -self.uniform(0.1, 2.0, heads) * torch.nn.functional.softplus(a - 2.0)

    def _beta(self, live: int, case: Case) -> torch.Tensor:
        b = self.normal(live, self.problem.num_state_heads)
        if case == "equal_keys":
            b = torch.full_like(b, 40.0)
        return b if self.problem.use_beta_sigmoid else b.sigmoid()

    def _padded(self, x: torch.Tensor, total: int) -> torch.Tensor:
        rest = torch.full((total - x.shape[0], *x.shape[1:]), torch.nan, device=self.device)
        return torch.cat([x, rest])

    def states(self, count: int) -> torch.Tensor:
        state = 0.3 * self.normal(count, *_state_shape(self.problem))
        return state.to(getattr(torch, self.problem.state_dtype))

    def slots(self, count: int, null_slot: int) -> torch.Tensor:
        """Distinct live slots, none of them the last slot (which nobody owns) or null."""
        order = torch.randperm(count + 1, generator=self.generator, device=self.device)
        return torch.add(order[:count], null_slot + 1)

    def pool(self, read_slots: torch.Tensor, null_slot: int, num_slots: int, gap: int) -> torch.Tensor:
        """Random states in the slots that are read, NaN everywhere else, between the slots too."""
        shape = _state_shape(self.problem)
        inner = shape[0] * shape[1] * shape[2]
        dtype: torch.dtype = getattr(torch, self.problem.state_dtype)
        buffer = torch.full((max(num_slots, 1), inner + gap), torch.nan, dtype=dtype, device=self.device)
        pool: torch.Tensor = buffer[:, :inner].unflatten(1, shape)
        live = read_slots[read_slots > null_slot]
        pool[live] = self.states(live.shape[0])
        return pool


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
