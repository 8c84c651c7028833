"""flash-linear-attention (fla-core): a backend of its chunk function, and functions with its signatures to import.

FLA's dispatcher stands outside of `torch.compile`: a call through it breaks the graph. Who compiles calls `gdn` directly.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.integrations import _handle, _hosts, _points
from gdn.integrations._calls import Calls, asking, refused_by, unserved, unserved_state

_RULE = "fla.ops.gated_delta_rule"
_CHUNK = f"{_RULE}.chunk.chunk_gated_delta_rule"
_RECURRENT = f"{_RULE}.fused_recurrent.fused_recurrent_gated_delta_rule"
_OTHER_PLACES = (
    f"{_RULE}.fused_recurrent.fused_recurrent_gdn",
    *(f"{place}.{name}" for place in (_RULE, "fla.ops") for name in ("fused_recurrent_gated_delta_rule", "fused_recurrent_gdn")),
    "fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule",
)
_CHUNK_KEYWORDS = {"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout"}
_RECURRENT_KEYWORDS = {"transpose_state_layout"}
_LARGEST_DIM = 256


def _unserved_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor | None, neg_sigmoid: bool
) -> str | None:
    """What both forms of the rule refuse: shapes and dtypes.

    neg_sigmoid: allow_neg_eigval without the sigmoid, which is an error of FLA's.
    """
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v differ in dtype"
    for dim in (q.shape[-1], v.shape[-1]):
        if dim % 4 or dim > _LARGEST_DIM:
            return f"head dim {dim} has no kernel"
    if v.shape[2] % q.shape[2]:
        return f"{v.shape[2]} value heads are no multiple of {q.shape[2]} key heads"
    if q.is_cuda and any(gate is not None and gate.dtype == torch.float64 for gate in (g, beta)):
        return "g or beta is float64, which has no kernel"
    if beta is not None and beta.dim() != 3:
        return "beta is not [B, T, HV]"
    if neg_sigmoid:
        return "allow_neg_eigval without use_beta_sigmoid_in_kernel"
    return unserved_state(state)


def _unserved_keywords(given: Mapping[str, Any], known: set[str], state_v_first: bool) -> str | None:
    unknown = sorted(given.keys() - known)
    if unknown:
        return f"keyword {unknown[0]}"
    if state_v_first and "transpose_state_layout" in given:
        return "both state_v_first and its old name transpose_state_layout"
    return None


def _write_strength(beta: Tensor | None, sigmoid: bool, allow_neg_eigval: bool) -> tuple[Tensor | None, bool]:
    """beta, and whether it is still the raw one."""
    if beta is None or not (sigmoid and allow_neg_eigval):
        return beta, bool(sigmoid) and beta is not None
    return 2.0 * beta.float().sigmoid(), False


def _refuse_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool, state_v_first: bool, cp_context: object, kwargs: Mapping[str, Any], allow_reference: bool,
) -> str | None:  # fmt: skip
    A_log, dt_bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    if reason := unserved(q, (k, v, g, beta, initial_state, A_log, dt_bias), allow_reference):
        return reason
    if cp_context is not None:
        return "context parallelism (cp_context)"
    if kwargs.get("chunk_size", 64) != 64:
        return "chunk_size is not 64"
    if reason := _unserved_keywords(kwargs, _CHUNK_KEYWORDS, state_v_first):
        return reason
    if q.shape[-1] != v.shape[-1]:
        return "key and value head dims differ"
    return _unserved_rule(q, k, v, g, beta, initial_state, allow_neg_eigval and not use_beta_sigmoid_in_kernel)


@refused_by(_refuse_chunk)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule for prefill with FLA's signature, by `gdn.chunk_gated_delta_rule`. Inference only.

    Parameters
    ----------
    q, k, v : Tensor [B, T, H, K], [B, T, H, K], [B, T, HV, K]
        Queries, keys and values, bfloat16 or float16. K a multiple of 4 up to 256; HV a multiple of H.
    g, beta : Tensor [B, T, HV]
        Log decay (with `use_gate_in_kernel` the raw gate) and write strength (with `use_beta_sigmoid_in_kernel` the raw one).
    scale : float, optional
        Factor of the queries. None = K**-0.5.
    initial_state : Tensor [N, HV, K, K], optional
        State of each sequence, float32 or bfloat16, K first unless `state_v_first`. It is only read.
    output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, state_v_first : bool
        As in FLA.
    allow_neg_eigval : bool
        The write strength is 2 sigmoid(beta), computed before the kernel; needs `use_beta_sigmoid_in_kernel`.
    cu_seqlens : Tensor [N + 1], optional
        Offsets of packed sequences, with B = 1.
    cu_seqlens_cpu : Tensor [N + 1], optional
        The offsets on the host: with them one long sequence among short ones is faster.
    chunk_indices
        Accepted and not needed.
    cp_context : None
        Only None is served.
    **kwargs
        use_gate_in_kernel, A_log [HV], dt_bias [HV], chunk_size (64), transpose_state_layout (old name of `state_v_first`).

    Returns
    -------
    o : Tensor [B, T, HV, K]
        Output in the dtype of `v`.
    final_state : Tensor or None
        New float32 tensor, laid out as `initial_state`; None without `output_final_state`.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.chunk_gated_delta_rule`.
    """
    beta_or_raw, raw = _write_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    # Callers hand on flags of theirs that are None, such as `use_cache`.
    gate = bool(kwargs.get("use_gate_in_kernel", False))
    longest = None
    if cu_seqlens_cpu is not None and cu_seqlens_cpu.is_cpu and cu_seqlens_cpu.numel() > 1 and not torch.compiler.is_compiling():
        longest = int(cu_seqlens_cpu.diff().max())
    return gdn.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta_or_raw,
        scale=scale,
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
        cu_seqlens=cu_seqlens,
        max_seqlen=longest,
        state_v_first=bool(kwargs.get("transpose_state_layout", state_v_first)),
        use_gate_in_kernel=gate,
        A_log=kwargs.get("A_log") if gate else None,
        dt_bias=kwargs.get("dt_bias") if gate else None,
        use_beta_sigmoid_in_kernel=raw,
    )


def _refuse_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gk: Tensor | None, gv: Tensor | None, beta: Tensor | None,
    initial_state: Tensor | None, use_gate_in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, state_v_first: bool, kwargs: Mapping[str, Any],
    allow_reference: bool,
) -> str | None:  # fmt: skip
    if reason := unserved(q, (k, v, g, beta, initial_state, A_log, dt_bias), allow_reference):
        return reason
    if gk is not None or gv is not None:
        return "gates by key or value channel (gk, gv)"
    if use_gate_in_kernel and (g is None or A_log is None):
        return "use_gate_in_kernel without g and A_log"
    if reason := _unserved_keywords(kwargs, _RECURRENT_KEYWORDS, state_v_first):
        return reason
    return _unserved_rule(q, k, v, g, beta, initial_state, allow_neg_eigval and not use_beta_sigmoid_in_kernel)


@refused_by(_refuse_recurrent)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule token by token with FLA's signature, by `gdn.fused_recurrent_gated_delta_rule`. Inference only.

    Parameters
    ----------
    q, k, v : Tensor [B, T, H, K], [B, T, H, K], [B, T, HV, V]
        Queries, keys and values, bfloat16 or float16. K and V multiples of 4 up to 256; HV a multiple of H.
    g, beta : Tensor [B, T, HV] or None
        Log decay (None = none) and write strength (None = 1), raw with the flags below.
    gk, gv : None
        Only None is served.
    scale : float, optional
        Factor of the queries. None = K**-0.5.
    initial_state : Tensor [N, HV, K, V], optional
        State of each sequence, float32 or bfloat16, K first unless `state_v_first`. It is only read.
    output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, state_v_first : bool
        As in FLA; `output_final_state` is False unless given.
    A_log, dt_bias : Tensor [HV] or None
        Decay rate and bias of the raw gate; ignored without `use_gate_in_kernel`.
    allow_neg_eigval : bool
        The write strength is 2 sigmoid(beta), computed before the kernel; needs `use_beta_sigmoid_in_kernel`.
    cu_seqlens : Tensor [N + 1], optional
        Offsets of packed sequences, with B = 1.
    **kwargs
        transpose_state_layout, the old name of `state_v_first`.

    Returns
    -------
    o : Tensor [B, T, HV, V]
        Output in the dtype of `v`.
    final_state : Tensor or None
        New float32 tensor, laid out as `initial_state`; None without `output_final_state`.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.fused_recurrent_gated_delta_rule`.
    """
    beta_or_raw, raw = _write_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return gdn.fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta_or_raw,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
        state_v_first=bool(kwargs.get("transpose_state_layout", state_v_first)),
        use_gate_in_kernel=bool(use_gate_in_kernel),
        A_log=A_log if use_gate_in_kernel else None,
        dt_bias=dt_bias if use_gate_in_kernel else None,
        use_beta_sigmoid_in_kernel=raw,
        output_final_state=bool(output_final_state),
        disable_state_update=not output_final_state,
    )


def _refuse_conv(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, initial_state: Tensor | None,
    cp_context: object, kwargs: Mapping[str, Any], allow_reference: bool,
) -> str | None:  # fmt: skip
    if reason := unserved(x, (weight, bias, initial_state), allow_reference):
        return reason
    if weight is None:
        return "weight is None"
    if residual is not None:
        return "a residual"
    if cp_context is not None:
        return "context parallelism (cp_context)"
    return _unserved_keywords(kwargs, set(), False)


@refused_by(_refuse_conv)
def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution with FLA's signature, by `gdn.causal_conv1d_fn`. Inference only.

    Parameters
    ----------
    x : Tensor [B, T, D]
        Inputs; packed sequences with `cu_seqlens` and B = 1.
    weight, bias : Tensor [D, w], Tensor [D] or None
        Filter, which is required, and bias.
    residual, cp_context : None
        Only None is served.
    initial_state : Tensor [N, D, w], optional
        The last w inputs before each sequence, oldest first. It is only read.
    output_final_state : bool, optional
        Whether to return the last w inputs.
    activation : {"silu", "swish"} or None
        Activation of the sum.
    backend, cu_seqlens_cpu, chunk_indices
        Accepted and not needed.
    cu_seqlens : Tensor [N + 1], optional
        Offsets of packed sequences.

    Returns
    -------
    y : Tensor [B, T, D]
        Result in the dtype of `x`.
    final_state : Tensor [N, D, w] or None
        New tensor in the dtype of `x`; None without `output_final_state`.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.causal_conv1d_fn`.
    """
    assert weight is not None  # else refused
    (batch, length, dim), width = x.shape, weight.shape[1]
    rows = x.reshape(batch * length, dim)
    offsets = cu_seqlens
    if offsets is None:
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length
    count = offsets.shape[0] - 1
    if initial_state is None and not output_final_state:
        y = gdn.causal_conv1d_fn(rows, weight, bias, query_start_loc=offsets, activation=activation)
        return y.view(x.shape), None
    before = x.new_zeros(count, dim, width) if initial_state is None else initial_state.to(x.dtype)
    state = before.clone(memory_format=torch.contiguous_format)
    # Windows here hold w - 1 inputs; the first of FLA's w columns is no input of the next token.
    y = gdn.causal_conv1d_fn(rows, weight, bias, conv_states=state[..., 1:], query_start_loc=offsets, activation=activation)
    if not output_final_state:
        return y.view(x.shape), None
    state[..., 0] = _oldest(rows, before, offsets.long(), width)
    return y.view(x.shape), state


def _oldest(rows: Tensor, before: Tensor, offsets: Tensor, width: int) -> Tensor:
    """The input w tokens before the end of each sequence [N, D], from the state before it where the sequence is shorter."""
    lengths = offsets[1:] - offsets[:-1]
    from_state = before.gather(2, lengths.clamp(max=width - 1)[:, None, None].expand(-1, before.shape[1], 1))[..., 0]
    if rows.shape[0] == 0:
        return from_state
    from_rows = rows.index_select(0, (offsets[1:] - width).clamp(min=0))
    return torch.where((lengths >= width)[:, None], from_rows, from_state)


def _refuse_norm(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, prenorm: bool,
    allow_reference: bool,
) -> str | None:  # fmt: skip
    if reason := unserved(x, (g, weight, bias, residual), allow_reference):
        return reason
    if weight is None:
        return "weight is None"
    if bias is not None:
        return "a bias"
    if residual is not None or prenorm:
        return "a residual"
    return None


@refused_by(_refuse_norm)
def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """RMS norm with an output gate with FLA's signature, by `gdn.rms_norm_gated`. Inference only.

    Parameters
    ----------
    x, g, weight : Tensor [..., V], Tensor [..., V], Tensor [V]
        Values to normalise, input of the gate and gain.
    bias, residual : None
        Only None is served.
    activation : {"swish", "silu", "sigmoid"}
        Activation of `g`.
    prenorm : bool
        Only False is served.
    residual_in_fp32 : bool
        No effect without a residual.
    eps : float
        Added to the mean square.

    Returns
    -------
    Tensor [..., V]
        New tensor in the dtype of `x`.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.rms_norm_gated`.
    """
    assert weight is not None  # else refused
    return gdn.rms_norm_gated(x, g, weight, eps=eps, activation=activation)


def _register(calls: Calls) -> _points.Undo:
    """Registers a backend that FLA's dispatcher asks on every call; it leaves by saying that it is not available."""
    import fla.backends as backends  # type: ignore[import-not-found, unused-ignore]

    if getattr(backends, "_DISPATCH_DISABLED", False):
        raise _points.Unreplaced("FLA_DISABLE_BACKEND_DISPATCH=1: FLA dispatches to no backend")

    serve: Callable[..., tuple[Tensor, Tensor | None]] = inspect.unwrap(chunk_gated_delta_rule)
    ask = asking(_refuse_chunk, serve)

    class GdnBackend(backends.BaseBackend):  # type: ignore[misc, unused-ignore]
        backend_type = "gdn"
        package_name = "gdn"
        priority = 2  # lower goes first; FLA's own are 3 and 5

        @classmethod
        def is_available(cls) -> bool:
            return calls.active

        def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            reason = ask(*args, **kwargs, allow_reference=calls.allow_reference)
            return calls.serves(reason), reason

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            return serve(*args, **kwargs)

    backends.register("gated_delta_rule")(GdnBackend)
    return lambda: None


def enable(*, patch_recurrent: bool = False, strict: bool = False, allow_reference: bool = False) -> _handle.Handle:
    """Registers this project as a backend of FLA's `chunk_gated_delta_rule`.

    Parameters
    ----------
    patch_recurrent : bool
        Replace `fused_recurrent_gated_delta_rule` too, which FLA does not dispatch, where FLA's modules hold it.
    strict : bool
        Raise where a signature is not the recorded one or FLA dispatches nothing, instead of leaving FLA alone.
    allow_reference : bool
        Serve tensors on the CPU, by the plain-torch reference, on any machine. For tests.

    Returns
    -------
    Handle
        Reports; `disable` takes the backend out of use and puts FLA's function back. A second call with the same options
        returns the same handle.

    Raises
    ------
    ValueError
        If it is enabled with other options.
    RuntimeError
        With strict, if something is left alone.
    """
    guards = tuple(name for name in _hosts.FLA.functions if name.startswith("fla.backends.")) + tuple(_hosts.FLA.classes)
    points = [_points.Point(_CHUNK, (_CHUNK, *guards), _register)]
    if patch_recurrent:
        serve = inspect.unwrap(fused_recurrent_gated_delta_rule)
        points.append(_points.attribute(_RECURRENT, _refuse_recurrent, serve, also=_OTHER_PLACES))
    options = {"patch_recurrent": patch_recurrent}
    return _handle.enable(_hosts.FLA, points, strict=strict, allow_reference=allow_reference, options=options)
