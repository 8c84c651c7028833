"""Public operator `chunk_summary`: what a run of tokens does to any state."""

from typing import Any

import torch
from torch import Tensor

from gdn import runtime
from gdn.core import values
from gdn.core.call import NEW, launch, new, operator, prepare, reads_values, validates
from gdn.core.check import dtype_name
from gdn.core.modes import is_empty
from gdn.core.tensors import dtypes_of
from gdn.ops.delta_rule import checks, reference
from gdn.ops.delta_rule.problem import ChunkSummaryParams, ChunkSummaryProblem
from gdn.runtime.registry import Backend


@operator(reference.chunk_summary, returns=lambda _: (NEW, NEW), varies=("k", "cu_seqlens"), contiguous=("q", "k", "v"))
def chunk_summary(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Summary of each sequence under the gated delta rule: the affine map from the state before it to the state after it.

        S_after = P S_before + h

    h is the final state from zeros, and P the final state from the identity with v = 0. So sequences compose without their
    tokens: ranks that hold the parts of a sequence exchange summaries and know the state that each part starts from. The range
    of float16 is that of `chunk_gated_delta_rule`.

    Parameters
    ----------
    q : Tensor [B, T, Hq, K]
        Queries. Only the number of their heads counts.
    k, v, g, beta : Tensor
        As for `chunk_gated_delta_rule`. Kernels serve K = V of 64 and 128.
    use_qk_l2norm_in_kernel, cu_seqlens : bool, Tensor [N + 1] or None
        As for `chunk_gated_delta_rule`.
    state_v_first, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel : bool, bool, Tensor, Tensor, bool
        As for `chunk_gated_delta_rule`.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    h : Tensor [N, HS, K, V]
        float32 (float64 where q is float64), [N, HS, V, K] with `state_v_first`. Zero of a sequence without tokens.
    P : Tensor [N, HS, K, K]
        In the same dtype, transposed with `state_v_first`: there S_after = S_before P + h. The identity of a sequence without
        tokens.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched.

    References
    ----------
    .. [1] S. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484.

    Examples
    --------
    >>> import torch, gdn
    >>> q, k, v = torch.randn(3, 1, 96, 4, 64).unbind()
    >>> h, P = gdn.chunk_summary(q, k, v, use_qk_l2norm_in_kernel=True)
    >>> h.shape, P.shape
    (torch.Size([1, 4, 64, 64]), torch.Size([1, 4, 64, 64]))
    """
    given = checks.Tokens(q, k, v, g, beta, cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel)
    sizes = checks.check_tokens(given, -1, None)
    if reads_values(q.device):
        bounds = values.token_bounds("cu_seqlens", cu_seqlens, sizes.batch, sizes.length, q.device)
        checks.check_decays(given, bounds)
        if q.dtype == torch.float16 and validates(q.device):
            _check_float16_range(sizes, given, use_qk_l2norm_in_kernel)
    prepared = prepare(problem_of(sizes, given, use_qk_l2norm_in_kernel, state_v_first), q.device, backend)
    h = checks.new_state(sizes, q, state_v_first)
    P = new(h.dtype, q.device, sizes.num_sequences, sizes.num_heads, sizes.head_k_dim, sizes.head_k_dim)
    if is_empty(sizes.num_tokens, sizes.num_sequences):
        h.zero_()
        P.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        return h, P
    packed, offsets = checks.pack(sizes, given, by_descriptor=True)
    launch(prepared, ChunkSummaryParams(*packed[1:], offsets, h, P), (h, P), aligned=(k, v))
    return h, P


def _check_float16_range(sizes: checks.Sizes, given: checks.Tokens, use_k_l2norm: bool) -> None:
    """Checks both runs: from zeros, and from the identity without values. Queries do not count."""
    from_zeros = checks.States(None, None, None, None, None, None, False, -1)
    identity = torch.eye(sizes.head_k_dim, device=given.q.device).expand(sizes.num_sequences, sizes.num_heads, -1, -1)
    no_queries = given._replace(q=torch.zeros_like(given.q))
    no_values = no_queries._replace(v=given.v.new_zeros(*given.v.shape[:3], sizes.head_k_dim))
    for states, tokens in ((from_zeros, no_queries), (from_zeros._replace(initial_state=identity), no_values)):
        checks.check_float16_range(states, tokens, None, use_k_l2norm, "k, v")


def problem_of(sizes: checks.Sizes, given: checks.Tokens, use_k_l2norm: bool, state_v_first: bool) -> ChunkSummaryProblem:
    """The problem of a call."""
    cu_seqlens = given.cu_seqlens
    return ChunkSummaryProblem(
        num_state_heads=sizes.num_heads, **sizes.fields(), dtype=dtype_name(given.q.dtype),
        **dtypes_of(gate=given.g, beta=given.beta),
        cu_seqlens_dtype="int32" if cu_seqlens is None else dtype_name(cu_seqlens.dtype), state_v_first=state_v_first,
        use_k_l2norm=use_k_l2norm, use_gate=given.use_gate, use_beta_sigmoid=given.use_beta_sigmoid,
    )  # fmt: skip


def serves(sizes: checks.Sizes, given: checks.Tokens, use_k_l2norm: bool, backend: Backend | None) -> bool:
    """Whether a call of this backend is worth it: by a kernel, or where all runs on the reference. The layout of the states does
    not matter."""
    device = given.q.device
    if device.type == "cpu" or backend == "reference":
        return True
    problem: Any = problem_of(sizes, given, use_k_l2norm, False)
    if backend is None:
        return runtime.prepare(problem, device).launch is not None
    return runtime.can_run(problem, device, backend)
