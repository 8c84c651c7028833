"""Summaries of sequences under the gated delta rule: h and P of S' = P S + h. k [1, L, Hk, D], v [1, L, HV, D] -> [N, HS, D, D].

The kernel: split/parts.py. `gdn.ops.delta_rule.problem.ChunkSummaryParams` is the contract of a launch.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import ChunkProblem, ChunkSummaryProblem, unserved_dtypes
from kernels_cute.chunk.barriers import shared_bytes
from kernels_cute.chunk.shape import STAGES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.barriers import summary_fields
from kernels_cute.chunk.split.shape import summary_spec
from kernels_cute.common import choice

_ENTRY = "gdn_cute_chunk_summary"
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Config:
    """Configuration without fields: a pair of blocks, at D = 64 a block, takes a sequence and head."""


def refusal(problem: ChunkSummaryProblem) -> str | None:
    dims = (problem.head_k_dim, problem.head_v_dim)
    if dims[0] != dims[1] or dims[0] not in HEAD_DIMS:
        return f"requires K = V of 64 or 128, got K={dims[0]}, V={dims[1]}"
    for heads in (problem.num_k_heads, problem.num_v_heads):
        if heads < 1 or problem.num_state_heads % heads:
            return f"requires head counts that divide {problem.num_state_heads} state heads, got {heads}"
    return unserved_dtypes(_as_chunk(problem))


def fits(problem: ChunkSummaryProblem, config: Config, device: DeviceSpec) -> bool:
    return shared_bytes(summary_fields(summary_spec(_spec(problem)))) <= device.shared_bytes_per_block


def default_config(problem: ChunkSummaryProblem, device: DeviceSpec) -> Config:
    return Config()


def configs(problem: ChunkSummaryProblem, device: DeviceSpec) -> list[Config]:
    return [Config()]


def workspace_bytes(problem: ChunkSummaryProblem, config: Config) -> int:
    return 0


def _as_chunk(problem: ChunkSummaryProblem) -> ChunkProblem:
    """The problem as the chunk kernel's: as many query heads as state heads, no pool, no state to read or write."""
    shared = {name: getattr(problem, name) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "dtype")}
    shared |= {name: getattr(problem, name) for name in ("gate_dtype", "beta_dtype", "cu_seqlens_dtype", "state_v_first")}
    none = {"has_initial_state": False, "has_final_state": False, "has_final_indices": False, "has_mask": False}
    return ChunkProblem(
        num_q_heads=problem.num_state_heads, **shared, state_dtype="float32", index_dtype=None,
        use_qk_l2norm=problem.use_k_l2norm, use_gate=problem.use_gate, use_beta_sigmoid=problem.use_beta_sigmoid, **none,
        has_checkpoints=False, **problem.sizes(),
    )  # fmt: skip


def _spec(problem: ChunkSummaryProblem) -> ChunkSpec:
    return ChunkSpec(_as_chunk(problem), STAGES, 0, is_persistent=False, has_both_variants=False, is_split=False)


def compile(problem: ChunkSummaryProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.chunk.summaries_library import library

    return library(_ENTRY, problem, _spec(problem))


launch = choice.launch
