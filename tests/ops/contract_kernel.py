"""A stand-in for kernels of the delta rule, behind the whole host path: packing, constants, allocation, argument order."""

from typing import Any

import torch

from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem, RecurrentParams, RecurrentProblem
from gdn.problem import Problem
from tests.ops.stand_in import StandIn
from tests.references import reference

WORKSPACE_BYTES = 1024


class ContractKernel(StandIn):
    backend, workspace_bytes = "tilelang", WORKSPACE_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.problem: Any = None  # of the last launch, as are the tensors
        self.tensors: dict[str, Any] = {}

    def launch(self, problem: Problem, params: Any) -> None:
        self.problem = problem
        (self.chunk if isinstance(problem, ChunkProblem) else self.recurrent)(params)

    def chunk(self, params: ChunkParams) -> None:
        problem = self.problem
        assert isinstance(problem, ChunkProblem) and isinstance(params, ChunkParams)
        (
            q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, has_initial_state, final_state, final_state_indices,
            cu_seqlens, checkpoint_offsets, checkpoint_slots, checkpoint_states, out, workspace, scale, null_slot,
        ) = params  # fmt: skip
        assert workspace.dtype == torch.uint8 and workspace.numel() >= WORKSPACE_BYTES
        assert problem.has_mask == (has_initial_state is not None)
        assert problem.has_checkpoints == (checkpoint_offsets is not None) == (checkpoint_slots is not None)
        if has_initial_state is not None:
            assert has_initial_state.dtype == torch.bool and has_initial_state.is_contiguous()
        if checkpoint_offsets is not None:
            assert checkpoint_offsets.dtype == torch.int32
            assert str(checkpoint_slots.dtype) == f"torch.{problem.checkpoint_index_dtype}"
        self._is_kept(checkpoint_states, problem.checkpoint_state_dtype)
        self._common(q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, final_state, final_state_indices,
                     cu_seqlens, out, scale, null_slot)  # fmt: skip
        count = problem.num_sequences
        o, state = reference.chunk_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, problem.has_final_state, problem.use_qk_l2norm, cu_seqlens,
            state_v_first=problem.state_v_first, use_gate_in_kernel=problem.use_gate, A_log=A_log, dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=problem.use_beta_sigmoid, state_indices=state_indices,
            has_initial_state=has_initial_state, final_state_indices=final_state_indices,
            checkpoint_offsets=None if checkpoint_offsets is None else checkpoint_offsets[:count],
            checkpoint_slots=None if checkpoint_slots is None else checkpoint_slots[:count], checkpoint_states=checkpoint_states,
            null_slot=null_slot,
        )  # fmt: skip
        self._finish(o, state, out, final_state)

    def recurrent(self, params: RecurrentParams) -> None:
        problem = self.problem
        (
            q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, num_accepted_tokens, final_state, final_state_indices,
            cu_seqlens, parent_token, rounding_seed, kept, kept_rows, ring, state_tokens, num_computed_tokens, out, scale,
            null_slot, fold_phase,
        ) = params  # fmt: skip
        assert isinstance(problem, RecurrentProblem)
        assert problem.has_accepted == (num_accepted_tokens is not None)
        assert problem.has_parent == (parent_token is not None)
        assert problem.has_rounding == (rounding_seed is not None)
        assert (ring is None) == (problem.ring_rows is None) == (problem.fold_every is None) == (fold_phase is None)
        if ring is not None:
            assert problem.pooled and ring.shape[1] == problem.ring_rows and num_computed_tokens.dtype == torch.int32
            assert ring.stride(2) == 1 and not any(number % 4 for number in (*ring.stride()[:2], ring.data_ptr() // 4))
        self._is_kept(kept, problem.intermediate_dtype)
        assert kept is None or (not problem.has_final_state and str(kept_rows.dtype) == f"torch.{problem.index_dtype}")
        if problem.pooled:
            assert problem.write_every_token == (state_indices.dim() == 2)
        if num_accepted_tokens is not None:
            assert num_accepted_tokens.dtype == torch.int32
        assert not (problem.pooled and final_state is not None)
        written = initial_state if problem.pooled and problem.has_final_state else final_state
        self._common(q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, written, final_state_indices,
                     cu_seqlens, out, scale, null_slot)  # fmt: skip
        o, state = reference.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta, scale,
            initial_state, None, cu_seqlens, state_indices, num_accepted_tokens, problem.use_qk_l2norm,
            state_v_first=problem.state_v_first, use_gate_in_kernel=problem.use_gate, A_log=A_log, dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=problem.use_beta_sigmoid, output_final_state=problem.has_final_state,
            final_state_indices=final_state_indices, disable_state_update=not problem.has_final_state,
            parent_token=parent_token, rounding_seed=rounding_seed, intermediate_states=kept, intermediate_indices=kept_rows,
            ring=ring, state_tokens=state_tokens, num_computed_tokens=num_computed_tokens, fold_every=problem.fold_every,
            fold_phase=fold_phase or 0, null_slot=null_slot,
        )  # fmt: skip
        self._finish(o, state, out, final_state)

    def _is_kept(self, states: Any, dtype: str | None) -> None:
        """A tensor of the caller that takes copies of states."""
        assert (states is None) == (dtype is None)
        if states is not None:
            assert str(states.dtype) == f"torch.{dtype}" and states.data_ptr() % 16 == 0
            assert states.flatten(0, -4)[0].is_contiguous()

    def _common(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, initial_state: Any, state_indices: Any,
        final_state: Any, final_state_indices: Any, cu_seqlens: Any, out: Any, scale: Any, null_slot: Any,
    ) -> None:  # fmt: skip
        p = self.problem
        self.tensors = {
            "q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens, "initial_state": initial_state, "out": out,
        }  # fmt: skip
        length, heads = q.shape[1], p.num_state_heads
        assert length == p.num_tokens > 0 and cu_seqlens.shape == (p.num_sequences + 1,) and p.num_sequences > 0
        assert q.shape == (1, length, p.num_q_heads, p.head_k_dim) and k.shape == (1, length, p.num_k_heads, p.head_k_dim)
        assert v.shape == (1, length, p.num_v_heads, p.head_v_dim) and out.shape == (1, length, heads, p.head_v_dim)
        for x in (q, k, v, out):
            assert str(x.dtype) == f"torch.{p.dtype}" and x.stride(-1) == 1
            assert x.data_ptr() % 16 == 0
            access = 16 if x.shape[-1] * x.element_size() % 16 == 0 else 8
            assert all(x.stride(i) * x.element_size() % access == 0 for i in (1, 2) if x.shape[i] > 1)
        for x, dtype in ((g, p.gate_dtype), (beta, p.beta_dtype)):
            assert (x is None) == (dtype is None)
            if x is not None:
                assert x.shape == (1, length, heads) and str(x.dtype) == f"torch.{dtype}"
        for x in (A_log, dt_bias):
            assert (x is not None) == p.use_gate
            if x is not None:
                assert x.shape == (heads,) and x.dtype == torch.float32 and x.is_contiguous()
        assert str(cu_seqlens.dtype) == f"torch.{p.cu_seqlens_dtype}" and cu_seqlens.is_contiguous()
        assert (initial_state is not None) == p.has_initial_state and (final_state is not None) == p.has_final_state
        inner = (p.head_v_dim, p.head_k_dim) if p.state_v_first else (p.head_k_dim, p.head_v_dim)
        if initial_state is not None:
            assert str(initial_state.dtype) == f"torch.{p.state_dtype}" and initial_state.shape[1:] == (heads, *inner)
            assert initial_state[0].is_contiguous() and initial_state.data_ptr() % 16 == 0
        assert (state_indices is not None) == p.pooled and (final_state_indices is not None) == p.has_final_indices
        for x in (state_indices, final_state_indices):
            if x is not None:
                assert str(x.dtype) == f"torch.{p.index_dtype}" and x.shape[0] >= p.num_sequences
        if p.has_final_state and p.pooled:
            assert final_state is initial_state
        elif p.has_final_state:
            assert final_state.shape == (p.num_sequences, heads, *inner) and final_state.dtype == torch.float32
        assert isinstance(scale, float) and isinstance(null_slot, int)

    def _finish(self, o: Any, state: Any, out: Any, final_state: Any) -> None:
        out.copy_(o)
        if final_state is not None and final_state is not state:
            final_state.copy_(state)
