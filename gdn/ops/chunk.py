"""Public operator: the gated delta rule over whole prompts, in chunks of 64 tokens."""

from typing import Any

import torch

from gdn.ops import _delta_rule, _values
from gdn.ops._call import NEW, always, launch, make, new, operator, prepare, reads_values, run_reference
from gdn.ops._checks import bad_value, check_tensor
from gdn.ops._modes import is_empty
from gdn.problems import ChunkParams, ChunkProblem
from gdn.reference import delta_rule as reference

Tensor = torch.Tensor


def _is_pooled(arguments: dict[str, Any]) -> bool:
    return arguments["state_indices"] is not None


def _returns(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    state = "initial_state" if _is_pooled(arguments) else NEW
    return ("out" if arguments["out"] is not None else NEW), (state if arguments["output_final_state"] else None)


@operator(
    reference=reference.chunk_gated_delta_rule,
    writes={"out": always, "initial_state": _is_pooled},
    returns=_returns,
    memo=True,
    varies=("q", "cu_seqlens"),
    contiguous=("q", "k", "v"),
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
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule for prefill, with a state pool.

    Per state head, token by token, S [K, V] (the chunk form that runs is equal to it up to rounding):

        S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q * scale

    Inference only: no gradient is recorded, whatever requires one, and autocast has no influence. `B` rows of `T` tokens each,
    or, with cu_seqlens, B = 1 and packed sequences.
    `HS = max(Hq, HV)` state heads; state head s reads q head s // (HS // Hq), k head s // (HS // Hk), v head s // (HS // HV).

    Arguments:
        q, k [B, T, Hq | Hk, K], v [B, T, HV, V]: bfloat16 or float16 (float32, float64: reference), one dtype, any strides;
            Hq = Hk and HV = r Hk, or Hk = HV and Hq = r Hk. Where the last dim is not contiguous, or address or strides are
            not multiples of 16 bytes, one contiguous copy is made and logged once. Kernels serve K = V of every multiple of 4 up
            to 256: 64 and 128 as they are, less as the next of the two, more token by token; else the reference.
        g [B, T, HS]: natural log of the decay, <= 0, any float dtype and strides; None = no decay. With
            use_gate_in_kernel it is the raw gate a, and the log decay is -exp(A_log) softplus(a + dt_bias);
            A_log, dt_bias [HS], any float dtype, dt_bias None = 0.
        beta [B, T, HS]: any float dtype and strides; None = 1. With use_beta_sigmoid_in_kernel it is the raw b, and
            beta = sigmoid(b).
        scale: None = K**-0.5. use_qk_l2norm_in_kernel divides q and k by sqrt(sum of squares + 1e-6) first.
        cu_seqlens [N + 1] int32 or int64: token offsets, starting at 0, never decreasing. Equal neighbours are an empty
            sequence. Tokens at or beyond cu_seqlens[-1] are padding: their rows of o are zero.
        initial_state [N, HS, K, V], or [N, HS, V, K] with state_v_first: float32 or bfloat16; None = zeros.
        output_final_state: return the states after the last tokens.
        has_initial_state [>= N] bool: False = that sequence starts from zero; None = all True.
        out [B, T, HS, V]: where o is written, last dim contiguous; it shares no element with any other argument, v included.
        backend: "tilelang" | "cute" | "reference" is an order, None leaves the choice to switches and tables.
    State pool, with state_indices [>= N] (int32 or int64, any stride):
        initial_state is the pool [slots, HS, K, V] (or V first) and is updated in place; inner three dims contiguous, slot
        stride and address multiples of 16 bytes. Sequence n starts from slot state_indices[n] and leaves its last state
        there, or in slot final_state_indices[n] (a null one = not stored). A slot index <= null_slot is padding: rows of o
        are zero, no slot is read or written. An empty sequence touches no slot. All other slots keep their bits.
        checkpoint_offsets, checkpoint_slots [>= N, C]: the state after that many tokens of this call (multiples of 64;
        0 = none; beyond the sequence = none) also goes to that slot.
    The caller's duty: two live sequences never share a slot, slots that are written are not read by others in the same
    call, and indices lie within the pool. Checked on the CPU always, on a GPU with GDN_VALIDATE=1.

    Returns (o, final_state): o [B, T, HS, V] in the dtype of v; final_state: the pool itself with state_indices, else a new
    float32 tensor [N, HS, ...]; None without output_final_state. The state is float32 within a call; only what is stored in
    a bfloat16 pool is rounded.

    Raises TypeError or ValueError, naming the argument, before anything is launched or written.
    """
    _refuse_head_first(head_first)
    sizes = _delta_rule.check_tokens(
        q, k, v, g, beta, cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, null_slot, out
    )
    _check_states(
        sizes, q, initial_state, state_v_first, state_indices, has_initial_state, final_state_indices, checkpoint_offsets,
        checkpoint_slots,
    )  # fmt: skip
    if reads_values(q.device):
        _check_values(
            sizes, initial_state, cu_seqlens, state_indices, has_initial_state, final_state_indices, checkpoint_offsets,
            checkpoint_slots, null_slot,
        )  # fmt: skip
    if initial_state is None:
        has_initial_state = None  # every state starts from zero already

    is_pooled = state_indices is not None
    index_dtype = _delta_rule.common_dtype(state_indices, final_state_indices, checkpoint_slots)
    problem = ChunkProblem(
        **_delta_rule.static_fields(sizes, q, g, beta, initial_state, cu_seqlens, index_dtype if is_pooled else None),
        state_v_first=state_v_first,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_gate=use_gate_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        has_final_state=is_pooled or output_final_state,
        has_final_indices=final_state_indices is not None,
        has_mask=has_initial_state is not None,
        has_checkpoints=checkpoint_offsets is not None,
    )
    prepared = prepare(problem, q.device, backend)
    if prepared.launch is None:
        run_reference()

    device = q.device
    final_state: Tensor | None = None
    if is_pooled:
        final_state = initial_state
    elif output_final_state:
        shape = (sizes.num_sequences, *sizes.state_shape(state_v_first))
        final_state = new(torch.float64 if q.dtype == torch.float64 else torch.float32, device, *shape)
    returned = final_state if output_final_state else None
    o, written = _delta_rule.output(sizes, v, out)
    if is_empty(sizes.num_tokens, sizes.num_sequences):
        o.zero_()
        if not is_pooled:
            _delta_rule.pass_through(initial_state, has_initial_state, final_state, sizes.num_sequences)
        return o, returned

    tokens = _delta_rule.pack(sizes, q, k, v, g, beta, cu_seqlens, use_gate_in_kernel, A_log, dt_bias)
    if state_indices is not None:
        state_indices = _delta_rule.widened(state_indices, index_dtype)
        if final_state_indices is not None:
            final_state_indices = _delta_rule.widened(final_state_indices, index_dtype)
        if checkpoint_offsets is not None and checkpoint_slots is not None:
            checkpoint_offsets = make(_delta_rule.as_int32, checkpoint_offsets).contiguous()
            checkpoint_slots = _delta_rule.widened(checkpoint_slots, index_dtype).contiguous()
    elif initial_state is not None:
        initial_state = _delta_rule.aligned_state(initial_state)
    workspace: Tensor | None = None
    if prepared.workspace_bytes:
        workspace = new(torch.uint8, device, prepared.workspace_bytes)
    params = ChunkParams(
        q=tokens.q,
        k=tokens.k,
        v=tokens.v,
        g=tokens.g,
        beta=tokens.beta,
        A_log=tokens.A_log,
        dt_bias=tokens.dt_bias,
        initial_state=initial_state,
        state_indices=state_indices,
        has_initial_state=None if has_initial_state is None else has_initial_state.contiguous(),
        final_state=final_state,
        final_state_indices=final_state_indices,
        cu_seqlens=tokens.cu_seqlens,
        checkpoint_offsets=checkpoint_offsets,
        checkpoint_slots=checkpoint_slots,
        out=written,
        workspace=workspace,
        scale=sizes.k_dim**-0.5 if scale is None else scale,
        null_slot=null_slot,
    )
    launch(prepared, params, (o, returned), aligned=(q, k, v, initial_state, out))
    if out is not None:
        _delta_rule.finish(o, written)
    return o, returned


def _refuse_head_first(head_first: bool) -> None:
    if head_first:
        bad_value("head_first", "False (tokens before heads: [B, T, H, D])", head_first)


def _check_states(
    sizes: _delta_rule.Sizes,
    q: Tensor,
    initial_state: Tensor | None,
    state_v_first: bool,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    final_state_indices: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
) -> None:
    count, device = sizes.num_sequences, q.device
    if state_indices is not None:
        _delta_rule.check_indices("state_indices", state_indices, count, device, ranks=(1,))
        _delta_rule.check_pool("initial_state", initial_state, sizes, state_v_first, q)
    elif initial_state is not None:
        _delta_rule.check_state("initial_state", initial_state, sizes, state_v_first, q)
    if has_initial_state is not None:
        _delta_rule.check_per_sequence("has_initial_state", has_initial_state, count, device, (torch.bool,))
    if final_state_indices is not None:
        if state_indices is None:
            bad_value("final_state_indices", "None without state_indices", "a tensor")
        _delta_rule.check_indices("final_state_indices", final_state_indices, count, device, ranks=(1,))
    if (checkpoint_offsets is None) != (checkpoint_slots is None):
        missing = "checkpoint_offsets" if checkpoint_offsets is None else "checkpoint_slots"
        bad_value(missing, "checkpoint_offsets and checkpoint_slots together", "None")
    if checkpoint_offsets is not None and checkpoint_slots is not None:
        if state_indices is None:
            bad_value("checkpoint_offsets", "None without state_indices", "a tensor")
        _delta_rule.check_indices("checkpoint_offsets", checkpoint_offsets, count, device, ranks=(2,))
        check_tensor(
            "checkpoint_slots", checkpoint_slots, shape=checkpoint_offsets.shape, dtypes=_delta_rule.INDEX_DTYPES, device=device
        )


def _check_values(
    sizes: _delta_rule.Sizes,
    pool: Tensor | None,
    cu_seqlens: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    final_state_indices: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
    null_slot: int,
) -> None:
    if cu_seqlens is not None:
        _values.check_offsets("cu_seqlens", cu_seqlens, sizes.num_tokens)
    if state_indices is None or pool is None:
        return
    bounds = _values.token_bounds(cu_seqlens, sizes.batch, sizes.length, state_indices.device)
    touched = _values.prefill_slots(
        "state_indices", bounds, state_indices, null_slot, has_initial_state=has_initial_state,
        final_indices=final_state_indices, checkpoint_offsets=checkpoint_offsets, checkpoint_slots=checkpoint_slots,
    )  # fmt: skip
    if checkpoint_offsets is not None:
        _values.check_checkpoint_offsets("checkpoint_offsets", checkpoint_offsets, touched.is_live, multiple=64)
    _values.check_slots(touched, pool.shape[0], null_slot)
    _values.check_unshared(touched, pool.shape[0])
