"""Public operator `chunk_gated_delta_rule`: the gated delta rule over whole prompts."""

from typing import Any

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import NEW, always, launch, make, new, operator, prepare, reads_values, validates
from gdn.core.check import bad_value
from gdn.core.modes import is_empty
from gdn.core.tensors import as_int32, as_int64, common_dtype, constant, dtypes_of, given_of
from gdn.ops.delta_rule import checks, reference
from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem
from gdn.runtime.registry import Backend


def _is_pooled(arguments: dict[str, Any]) -> bool:
    return arguments["state_indices"] is not None


def _returns(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    state = "initial_state" if _is_pooled(arguments) else NEW
    return ("out" if arguments["out"] is not None else NEW), (state if arguments["output_final_state"] else None)


@operator(
    reference.chunk_gated_delta_rule,
    writes={"out": always, "initial_state": _is_pooled, "checkpoint_states": always},
    returns=_returns,
    varies=("q", "cu_seqlens"),
    contiguous=("q", "k", "v"),
    hints=("max_seqlen",),
)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    *,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    max_seqlen: int | None = None,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule for prefill, with a state pool.

    For each state head, token by token, with the state S [K, V]:

        S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q * scale

    The tokens are processed in chunks of 64, which equals this recurrence up to rounding. The state is float32 within a call;
    only what is stored in a bfloat16 pool is rounded. Inference only: no gradient is recorded, whatever requires one, and
    autocast has no influence.

    Kernels round to the dtype of q, inside of a chunk: the state, v - S^T k, u (over |k| = sqrt(sum of squares + 1e-6) with
    `use_qk_l2norm_in_kernel`), the products of keys with keys and queries, and the inverse of the former. In float16 each must
    stay within 65504, or the result is not finite, even where o and the final state would fit; ``GDN_VALIDATE=1`` finds it.
    bfloat16 has the range.

    Symbols: B rows of T tokens each, or B = 1 and packed sequences with `cu_seqlens`. N sequences; without `cu_seqlens` N is B,
    and what is [>= N] here has exactly N rows, else those beyond N are ignored.
    HS = max(Hq, HV) state heads; state head s reads q head s // (HS // Hq), k head s // (HS // Hk) and v head s // (HS // HV).

    Parameters
    ----------
    q : Tensor [B, T, Hq, K]
        Queries, bfloat16 or float16 (float32 and float64: reference only). Any strides; copied, and logged once, where the last
        dimension is not contiguous, the address or the strides are not multiples of 16 bytes, or a stride is 0 (`expand`).
    k : Tensor [B, T, Hk, K]
        Keys, as `q`. Either Hq = Hk and HV is a multiple of Hk (GVA), or Hk = HV and Hq is a multiple of Hk (GQA).
    v : Tensor [B, T, HV, V]
        Values, as `q`. Kernels serve K = V for every multiple of 4 up to 256: 64 and 128 natively, smaller ones padded to the
        next of these two, larger ones token by token. Other sizes run on the reference.
    g : Tensor [B, T, HS], optional
        Natural logarithm of the decay, <= 0 (checked where values are); any float dtype and strides. None = no decay. With
        `use_gate_in_kernel` the raw gate a: the log decay is then -exp(A_log) * softplus(a + dt_bias).
    beta : Tensor [B, T, HS], optional
        Write strength, any float dtype and strides. None = 1. With `use_beta_sigmoid_in_kernel` the raw b: beta = sigmoid(b).
    scale : float, optional
        Factor of the queries. None = K**-0.5.
    initial_state : Tensor [N, HS, K, V], optional
        State before the first token of each sequence, float32 or bfloat16; [N, HS, V, K] with `state_v_first`. None = zeros.
        With `state_indices` the state pool [slots, HS, K, V] (or V first), which is required then and updated in place: inner
        three dimensions contiguous, slot stride and address multiples of 16 bytes.
    output_final_state, use_qk_l2norm_in_kernel : bool
        Whether to return the states after the last tokens, and to divide each q and k by sqrt(sum of its squares + 1e-6) first.
    cu_seqlens : Tensor [N + 1], optional
        Token offsets of packed sequences, int32 or int64, on the device: starts at 0, never decreases. Equal neighbours are an
        empty sequence. Tokens at or beyond cu_seqlens[-1] are padding: their rows of o are zero.
    head_first, state_v_first : bool
        Only False is accepted: tokens come before heads (kept for the argument order of other packages); whether states are
        [V, K] per head instead of [K, V].
    use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel : bool, Tensor [HS] or None, Tensor [HS] or None, bool
        Whether `g` is the raw gate; then the logarithm of the decay rate (required) and the bias (None = 0), any float dtype,
        which are refused without it; whether `beta` is the raw b.
    state_indices : Tensor [>= N], optional
        Slot of each sequence in the pool, int32 or int64, any stride. Sequence n starts from slot state_indices[n] and leaves its
        last state there. A slot <= `null_slot` is padding: rows of o are zero, no slot is read or written. An empty sequence
        touches no slot. All other slots keep their bits.
    has_initial_state : Tensor [>= N] of bool, optional
        False = that sequence starts from zero, whatever its slot holds. None = all True.
    final_state_indices : Tensor [>= N], optional
        Slots to store the last states in, instead of state_indices; a null one is not stored. Requires `state_indices`.
    checkpoint_offsets, checkpoint_slots : Tensor [>= N, C], optional
        Token counts, multiples of 64, and slots: the state after that many tokens of this call is also stored in that slot. 0,
        counts beyond the sequence and null slots store nothing. Both require `state_indices` or `checkpoint_states`.
    checkpoint_states : Tensor [rows, HS, K, V], optional
        Where checkpoints go instead of the pool: `checkpoint_slots` are then its rows, and no `state_indices` are needed.
        float32 or bfloat16, whatever the pool is; [rows, HS, V, K] with `state_v_first`; strides and address as those of a pool.
    max_seqlen : int, optional
        Tokens of the longest sequence as the host knows them, or a few more. It chooses how the work is dealt out, and so the
        last bits of a result: one long sequence among short ones is faster if it is given, and so are many sequences of about
        the same length on an H200. Four times the mean length or more counts as one long sequence, so a loose upper bound may
        cost time. None, or more than all tokens: it is not known. Less than the longest has is an error where values are
        checked; elsewhere it may cost time, and results stay right.
    null_slot, out : int, Tensor [B, T, HS, V] or None
        Largest slot index that means padding, >= -1 (vLLM's convention is 0); tensor to write o into, dtype of `v`, last
        dimension contiguous, which shares no element with any other argument, `v` included.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    o : Tensor [B, T, HS, V]
        Output in the dtype of `v`; `out` itself where it is given.
    final_state : Tensor or None
        The pool itself with `state_indices`, else a new float32 tensor [N, HS, K, V] (or V first). None without
        `output_final_state`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written. Whether indices lie within the pool, and no slot that
        one live sequence writes is read or written by another, is checked on the CPU always, on a GPU with ``GDN_VALIDATE=1``
        only (which waits for the device): otherwise the caller makes sure.

    References
    ----------
    .. [1] S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464.
    .. [2] S. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484.
    .. [3] The arguments up to `head_first` are those of ``chunk_gated_delta_rule`` in flash-linear-attention.

    Examples
    --------
    >>> import torch, gdn
    >>> q, k = torch.randn(2, 1, 96, 2, 64).unbind()
    >>> v, g = torch.randn(1, 96, 4, 64), -torch.rand(1, 96, 4)
    >>> pool = torch.zeros(8, 4, 64, 64)
    >>> o, state = gdn.chunk_gated_delta_rule(
    ...     q, k, v, g, initial_state=pool, output_final_state=True, use_qk_l2norm_in_kernel=True,
    ...     cu_seqlens=torch.tensor([0, 70, 96]), state_indices=torch.tensor([5, 2]),
    ...     has_initial_state=torch.tensor([False, True]),
    ... )
    >>> o.shape, state is pool
    (torch.Size([1, 96, 4, 64]), True)
    """
    if head_first:
        bad_value("head_first", "False (tokens before heads: [B, T, H, D])", head_first)
    given = checks.Tokens(q, k, v, g, beta, cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel)
    sizes = checks.check_tokens(given, null_slot, out)
    count, device, is_pooled = sizes.num_sequences, q.device, state_indices is not None
    states = checks.States(
        initial_state, state_indices, has_initial_state, final_state_indices, checkpoint_offsets, checkpoint_slots, state_v_first,
        null_slot, checkpoint_states,
    )  # fmt: skip
    checks.check_states(states, sizes, q, has_offsets=cu_seqlens is not None)
    check.max_seqlen(max_seqlen)
    if reads_values(device):
        checks.check_state_values(states, given, sizes)
        if max_seqlen is not None:
            values.check_max_seqlen(max_seqlen, values.token_bounds("cu_seqlens", cu_seqlens, sizes.batch, sizes.length, device))
        if q.dtype == torch.float16 and validates(device):
            checks.check_float16_range(states, given, scale, use_qk_l2norm_in_kernel)
    if initial_state is None:
        has_initial_state = None  # every sequence starts from zero anyway

    index_dtype = common_dtype(state_indices, final_state_indices, checkpoint_slots)
    problem = problem_of(sizes, given, states, use_qk_l2norm_in_kernel, is_pooled or output_final_state, max_seqlen or 0)
    prepared = prepare(problem, device, backend)
    final_state = initial_state if is_pooled else checks.new_state(sizes, q, state_v_first) if output_final_state else None
    returned = final_state if output_final_state else None
    o, written = checks.output(sizes, v, out)
    if is_empty(sizes.num_tokens, count):
        o.zero_()
        if not is_pooled:
            checks.pass_through(initial_state, has_initial_state, final_state)
        return o, returned

    tokens, cu_seqlens = checks.pack(sizes, given, by_descriptor=True)
    if is_pooled:
        state_indices, final_state_indices = (checks.widened(x, index_dtype) for x in (state_indices, final_state_indices))
    elif initial_state is not None:
        initial_state = constant(initial_state)
    if checkpoint_offsets is not None and checkpoint_slots is not None:
        checkpoint_offsets = make(as_int32, checkpoint_offsets).contiguous()
        if problem.checkpoint_index_dtype == "int64":
            checkpoint_slots = make(as_int64, checkpoint_slots)
        checkpoint_slots = checkpoint_slots.contiguous()
    if has_initial_state is not None:
        has_initial_state = has_initial_state.contiguous()
    workspace = new(torch.uint8, device, prepared.workspace_bytes) if prepared.workspace_bytes else None
    scale = sizes.head_k_dim**-0.5 if scale is None else scale
    params = ChunkParams(
        *tokens, initial_state, state_indices, has_initial_state, final_state, final_state_indices, cu_seqlens,
        checkpoint_offsets, checkpoint_slots, checkpoint_states, written, workspace, scale, null_slot,
    )  # fmt: skip
    launch(prepared, params, (o, returned), aligned=(q, k, v, initial_state, checkpoint_states, out))
    return checks.finish(o, written), returned


def problem_of(
    sizes: checks.Sizes, given: checks.Tokens, states: checks.States, use_qk_l2norm: bool, has_final_state: bool, longest: int = 0
) -> ChunkProblem:
    """The problem of a call."""
    index_dtype = common_dtype(states.state_indices, states.final_state_indices, states.checkpoint_slots)
    is_pooled, initial_state = states.state_indices is not None, states.initial_state
    mask = None if initial_state is None else states.has_initial_state
    return ChunkProblem(
        **checks.static_fields(sizes, given, initial_state, index_dtype if is_pooled else None, states.state_v_first),
        use_qk_l2norm=use_qk_l2norm,
        has_final_state=has_final_state,
        longest=longest,
        **dtypes_of(checkpoint_state=states.checkpoint_states),
        **given_of(final_indices=states.final_state_indices, mask=mask, checkpoints=states.checkpoint_offsets),
    )
