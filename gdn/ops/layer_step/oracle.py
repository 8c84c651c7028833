"""Exact results of a Gated DeltaNet layer's operators, in float64 and independent of the references."""

import itertools

import torch
from torch import Tensor
from torch.nn import functional

from gdn.ops.delta_rule.oracle import brought_up_to_date, live_places, oracle_delta_rule, without_new
from gdn.testing.expected import Arguments, Call, Expected, Pair, Pairs, often, once


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gate(x: Tensor, activation: str) -> Tensor:
    return torch.sigmoid(x) if activation == "sigmoid" else _silu(x)


def _convolve(line: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the sums over each window of `width` columns of a line [dim, width - 1 + tokens]: [tokens, dim]."""
    return _silu((line.unfold(1, weight.shape[1], 1) @ weight.double()[:, :, None])[..., 0]).T


def _convolved(x: Tensor, slots: Tensor, weight: Tensor, before: Arguments) -> tuple[Tensor, Tensor]:
    """Convolution of a part of a prompt of each sequence: its result, zero in rows of padding, and the pool of windows."""
    windows, width = before["conv_states"].double(), weight.shape[1] - 1
    bounds, live, mask = before["query_start_loc"].tolist(), slots.tolist(), before["has_initial_state"]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if start == end or live[n] <= before["null_slot"]:
            continue
        own = windows[live[n], :, :width]
        history = own.clone() if mask is None or bool(mask[n]) else torch.zeros_like(own)
        line = torch.cat([history, x[start:end].double().T], dim=1)
        out[start:end] = _convolve(line, weight)
        own.copy_(line[:, -width:])
    return out, windows


def _convolution(call: Call, before: Arguments) -> Pairs:
    out, windows = _convolved(before["x"], before["cache_indices"], before["weight"], before)
    return [Pair(call.result, out, once(before["x"])), Pair(call.after["conv_states"].double(), windows, 0.0)]


def _prefill_step(call: Call, before: Arguments) -> Pairs:
    """Convolution, token recurrence and gated norm of a part of a prompt of each sequence."""
    x = before["mixed_qkv"]
    mixed, windows = _convolved(x, before["state_indices"], before["conv_weight"], before)
    names = ("has_initial_state", "state_indices", "checkpoint_offsets", "checkpoint_slots")
    given = {"cu_seqlens": before["query_start_loc"], **{name: before[name] for name in names}}
    out, states = _after_convolution(mixed, before["z"].flatten(1), before["b"], before["a"], before, given)
    found = [Pair(call.result, out, often(x)), Pair(call.after["conv_states"].double(), windows, 0.0)]
    return [*found, Pair(call.after["ssm_state"], states, often(x))]


def _after_convolution(
    mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, before: Arguments, slots: Arguments
) -> tuple[Tensor, Tensor]:
    """Token recurrence and gated norm: the result of a fused step, and the states. slots: arguments of the recurrence."""
    keys, dims = before["num_k_heads"], (before["head_k_dim"], before["head_v_dim"])
    q, k, v = mixed.split([keys * dims[0], keys * dims[0], mixed.shape[1] - 2 * keys * dims[0]], dim=1)
    exact = oracle_delta_rule(
        q.unflatten(1, (keys, -1))[None], k.unflatten(1, (keys, -1))[None], v.unflatten(1, (-1, dims[1]))[None],
        a[None], b[None], scale=before["scale"], initial_state=before["ssm_state"],
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=before["A_log"], dt_bias=before["dt_bias"],
        use_beta_sigmoid_in_kernel=True, null_slot=before["null_slot"], state_v_first=before["state_v_first"], **slots,
    )  # fmt: skip
    assert exact.state is not None
    normed = functional.rms_norm(exact.o[0], dims[1:], before["norm_weight"].double(), before["eps"])
    return normed.flatten(1) * _gate(z.double(), before["gate_activation"]), exact.state


def _decode_step(call: Call, before: Arguments) -> Pairs:
    """Convolution, token recurrence and gated norm of one or some tokens of each sequence; concatenated projections."""
    weight, windows = before["conv_weight"], before["conv_state"].double()
    heads = len(before["A_log"])
    ends = list(itertools.accumulate((len(weight), heads * before["head_v_dim"], heads, heads)))
    x, z, b, a, _ = before["mixed_qkv"].tensor_split(ends, dim=1)
    slots, offsets, accepted = before["state_indices"], before["query_start_loc"], before["num_accepted_tokens"]
    if offsets is None:
        offsets = torch.arange(x.shape[0] + 1, device=x.device)
    bounds, rows, width = offsets.tolist(), slots.reshape(len(slots), -1).tolist(), weight.shape[1] - 1
    mixed = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        first = 0 if accepted is None else int(accepted[n]) - 1
        if start == end or rows[n][0] <= before["null_slot"]:
            continue
        own = windows[rows[n][0]]
        line = torch.cat([own[:, first : first + width], x[start:end].double().T], dim=1)
        mixed[start:end] = _convolve(line, weight)
        kept = line[:, 1:] if slots.dim() == 2 or accepted is not None else line[:, -width:]
        own[:, : kept.shape[1]] = kept[:, : own.shape[1]]
    given, states, rings = {"cu_seqlens": offsets, "ssm_state_indices": slots}, call.after["ssm_state"], []
    if before["ring"] is None:
        given["num_accepted_tokens"] = accepted
    else:
        # The recurrence starts from the state after all entries, and the call leaves the state after all of its tokens.
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        places, new = live_places(before, before["fold_phase"], lengths)
        options: Arguments = {"key_heads": before["num_k_heads"], "v_first": before["state_v_first"]}
        states = brought_up_to_date(states, call.after["ring"], new, **options)
        counts = [length for length, own in zip(lengths, rows, strict=False) if length and own[0] > before["null_slot"]]
        rings = [Pair(without_new(call.after["ring"], new, counts), without_new(before["ring"], new, counts), 0.0)]
        before = before | {"ssm_state": brought_up_to_date(before["ssm_state"], before["ring"], places, **options)}
    out, exact = _after_convolution(mixed, z, b, a, before, given)
    found = [Pair(call.result, out, often(x)), Pair(call.after["conv_state"].double(), windows, 0.0), *rings]
    return [*found, Pair(states, exact, often(x))]


def _gated_norm(call: Call, before: Arguments) -> Pairs:
    x, z, weight = (before[name].double() for name in ("x", "z", "weight"))
    normed = functional.rms_norm(x, x.shape[-1:], weight, before["eps"])
    return [Pair(call.result, normed * _gate(z, before["activation"]), once(before["x"]))]


def _add_norm(call: Call, before: Arguments) -> Pairs:
    total, residual, scale = before["x"].double(), before["residual"], before["layer_scale"]
    if residual is not None:
        total = residual.double() + (total if scale is None else total * (1 + scale.double()))
    gain = before["weight"].double() + float(before["zero_centred"])
    normed = functional.rms_norm(total, total.shape[-1:], gain, before["eps"])
    return [Pair(call.result[0], normed, often(before["x"])), Pair(call.result[1], total, once(before["x"]))]


EXPECTED: Expected = {
    "fused_gdn_prefill": _prefill_step,
    "fused_gdn_decode": _decode_step,
    "causal_conv1d_fn": _convolution,
    "rms_norm_gated": _gated_norm,
    "add_rms_norm": _add_norm,
}
