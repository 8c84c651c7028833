"""Compile-time constants of the recurrent kernel."""

from gdn.problems import RecurrentProblem
from gdn.recurrent_tiles import Config, writes_new_state
from kernels_cute.common.memory import CUTE_DTYPES
from kernels_cute.common.state_sums import parts_floats
from kernels_cute.common.state_tile import StateTile


class Spec:
    """A problem, a configuration, and what follows from them."""

    def __init__(self, problem: RecurrentProblem, config: Config) -> None:
        self.problem, self.config, self.tile = problem, config, StateTile(problem, config)
        self.heads = problem.num_state_heads
        self.v_blocks = -(-problem.head_v_dim // config.block_v)  # blocks of a head
        # State heads that read one head of q, of k, of v.
        self.q_group, self.k_group = self.heads // problem.num_q_heads, self.heads // problem.num_k_heads
        self.v_group = self.heads // problem.num_v_heads
        self.dtype = CUTE_DTYPES[problem.dtype]
        self.gate_dtype, self.beta_dtype = [CUTE_DTYPES[dtype or "float32"] for dtype in (problem.gate_dtype, problem.beta_dtype)]
        self.has_gate, self.has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
        self.use_gate = problem.use_gate and self.has_gate  # g is the raw gate

        writes_pool = problem.has_final_state and problem.pooled
        self.writes_every_token = writes_pool and problem.write_every_token
        self.writes_last_token = writes_pool and not problem.write_every_token  # the pool takes the last state alone
        self.writes_new = writes_new_state(problem)
        # Without a prefetch, K first: a token's state leaves while the inputs of the next one are under way, for which the gates
        # wait.
        self.stores_meanwhile = not problem.state_v_first and self.writes_every_token

        # Sums of a thread: S k and S q of each column; k q; with norms k k and q q.
        self.num_sums = 2 * config.v_per_thread + (3 if problem.use_qk_l2norm else 1)
        self.shared_floats = parts_floats(self.tile, 1 if problem.has_parent else 2)  # for the sums that warps exchange
