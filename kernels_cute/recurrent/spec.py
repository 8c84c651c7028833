"""Compile-time constants of the recurrent kernel."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gdn.problems import RecurrentProblem
from gdn.recurrent_tiles import Config, writes_new_state
from kernels_cute.common.memory import CUTE_DTYPES
from kernels_cute.common.state_sums import parts_floats
from kernels_cute.common.state_tile import StateTile


@dataclass(frozen=True)
class Spec:
    """A problem, a configuration, and what follows from them."""

    problem: RecurrentProblem
    config: Config

    @cached_property
    def tile(self) -> StateTile:
        return StateTile(self.problem, self.config)

    @cached_property
    def heads(self) -> int:
        """Number of state heads."""
        return self.problem.num_state_heads

    @cached_property
    def v_blocks(self) -> int:
        """Blocks of a head."""
        return -(-self.problem.head_v_dim // self.config.block_v)

    @cached_property
    def q_group(self) -> int:
        """State heads that read one head of q."""
        return self.heads // self.problem.num_q_heads

    @cached_property
    def k_group(self) -> int:
        """State heads that read one head of k."""
        return self.heads // self.problem.num_k_heads

    @cached_property
    def v_group(self) -> int:
        """State heads that read one head of v."""
        return self.heads // self.problem.num_v_heads

    @cached_property
    def dtype(self) -> Any:
        return CUTE_DTYPES[self.problem.dtype]

    @cached_property
    def gate_dtype(self) -> Any:
        return CUTE_DTYPES[self.problem.gate_dtype or "float32"]

    @cached_property
    def beta_dtype(self) -> Any:
        return CUTE_DTYPES[self.problem.beta_dtype or "float32"]

    @cached_property
    def has_gate(self) -> bool:
        return self.problem.gate_dtype is not None

    @cached_property
    def has_beta(self) -> bool:
        return self.problem.beta_dtype is not None

    @cached_property
    def use_gate(self) -> bool:
        """Whether g is the raw gate."""
        return self.problem.use_gate and self.has_gate

    @cached_property
    def writes_pool(self) -> bool:
        return self.problem.has_final_state and self.problem.pooled

    @cached_property
    def writes_every_token(self) -> bool:
        return self.writes_pool and self.problem.write_every_token

    @cached_property
    def writes_last_token(self) -> bool:
        """Whether the pool takes the state after the last token alone."""
        return self.writes_pool and not self.problem.write_every_token

    @cached_property
    def writes_new(self) -> bool:
        return writes_new_state(self.problem)

    @cached_property
    def stores_after_loop(self) -> bool:
        """Whether a state is stored after the loop over tokens."""
        return self.writes_new or self.writes_last_token

    @cached_property
    def stores_meanwhile(self) -> bool:
        """Without a prefetch, whether a token's state leaves while the inputs of the next one are under way, for which the
        gates wait: K first."""
        return not self.problem.state_v_first and self.writes_every_token

    @cached_property
    def num_sums(self) -> int:
        """Sums of a thread: S k and S q of each column; k q; with norms k k and q q."""
        return 2 * self.config.v_per_thread + (3 if self.problem.use_qk_l2norm else 1)

    @cached_property
    def shared_floats(self) -> int:
        """Floats of shared memory, for the sums that warps exchange."""
        return parts_floats(self.tile, 1 if self.problem.has_parent else 2)
