"""Expected results of the demo's calls, in float64 and independent of gdn.reference.

The reference computes in float32; this module decodes rows, loops over sequences, or uses torch's own functions. Each function
takes a call that has run, with its arguments from before, and returns pairs: a tensor that the call returned or updated, and its
expected content.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gdn.cli.demo_block import Call
from gdn.testing.inputs_logits import MqaInputs, PagedInputs
from gdn.testing.oracle import oracle_of
from gdn.testing.oracle_logits import ExactLogits, exact_mqa_logits, exact_paged_mqa_logits

Tensor = torch.Tensor
Pairs = list[tuple[Tensor, Tensor]]
Arguments = dict[str, Any]

_FP8_MAX = 448.0


def pairs(call: Call, before: Arguments) -> Pairs:
    """(got, expected) of all tensors that the call returned or updated. before: its arguments before it ran."""
    return _EXPECTED[call.operator](call, before)


def _split(call: Call, before: Arguments) -> Pairs:
    """A key head's group of columns holds [q | k | v of its value heads | z of them], and [b | a]."""
    heads, num_v_heads, value_dim = before["num_heads_qk"], before["num_heads_v"], before["head_v"]
    values = num_v_heads // heads * value_dim
    groups = before["mixed_qkvz"].unflatten(1, (heads, -1)).split([before["head_qk"]] * 2 + [values] * 2, dim=2)
    q, k, v, z = (part.flatten(1) for part in groups)
    b, a = (part.flatten(1) for part in before["mixed_ba"].unflatten(1, (heads, -1)).chunk(2, dim=2))
    expected = torch.cat([q, k, v], dim=1), z.unflatten(1, (num_v_heads, value_dim)), b, a
    return list(zip(call.result, expected, strict=True))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _convolution(call: Call, before: Arguments) -> Pairs:
    """A prompt of each sequence, or one token of each."""
    is_prefill = call.operator == "causal_conv1d_fn"
    pool, indices = ("conv_states", "cache_indices") if is_prefill else ("conv_state", "conv_state_indices")
    x, weight, states, slots = before["x"], before["weight"], before[pool].double(), before[indices].tolist()
    bounds = before["query_start_loc"].tolist() if is_prefill else range(len(slots) + 1)
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for n, slot in enumerate(slots):
        continues = not is_prefill or bool(before["has_initial_state"][n])
        history = states[slot] if continues else torch.zeros_like(states[slot])
        line = torch.cat([history, x[bounds[n] : bounds[n + 1]].double().T], dim=1)
        # Each window of `width` columns of line [dim, width - 1 + tokens], times the weights.
        out[bounds[n] : bounds[n + 1]] = _silu((line.unfold(1, weight.shape[1], 1) @ weight.double()[:, :, None])[..., 0]).T
        states[slot] = line[:, -states.shape[2] :]
    return [(call.result, out), (call.arguments[pool], states)]


def _delta_rule(call: Call, before: Arguments) -> Pairs:
    """The token recurrence."""
    exact = oracle_of(before)
    assert exact.state is not None
    o, state = call.result
    # o [1, tokens, heads, V] is compared head by head.
    return [(o[0].transpose(0, 1), exact.o[0].transpose(0, 1)), (state, exact.state)]


def _gated_norm(call: Call, before: Arguments) -> Pairs:
    x, z, weight = (before[name].double() for name in ("x", "z", "weight"))
    return [(call.result, functional.rms_norm(x, x.shape[-1:], weight, 1e-6) * _silu(z))]


def _rotated(x: Tensor, norm: Tensor, before: Arguments) -> Tensor:
    """x [tokens, heads, D] normalised and rotated: pairs (i, i + half) as complex numbers, turned by their angles."""
    normed = functional.rms_norm(x.double(), x.shape[-1:], 1 + norm.double(), 1e-6)
    half = before["rotary_dim"] // 2
    table = before["cos_sin"][before["positions"].long()].double()[:, None]
    turn = torch.complex(table[..., :half], table[..., half:])
    turned = torch.complex(normed[..., :half], normed[..., half : 2 * half]) * turn
    return torch.cat([turned.real, turned.imag, normed[..., 2 * half :]], dim=-1)


def _stored(cache: Tensor) -> Tensor:
    """Bytes of each row of a cache [pages, page_size, 1, ...], as [pages * page_size, ...].

    An FP8 row is its values and its scale; a page holds the values of all its rows first, then their scales.
    """
    if cache.dtype != torch.uint8:
        return cache.flatten(0, 2).view(torch.uint8)
    pages, page_size, _, row = cache.shape
    parts = cache.reshape(pages, page_size * row).split([page_size * (row - 4), page_size * 4], dim=1)
    return torch.cat([part.reshape(pages * page_size, -1) for part in parts], dim=1)


def _keys(rows: Tensor, cache: Tensor) -> tuple[Tensor, Tensor | None]:
    """Stored rows of a cache as keys [n, D] and, with FP8, their float32 scales [n, 1]."""
    if cache.dtype != torch.uint8:
        return rows.view(cache.dtype), None
    return rows[:, :-4].contiguous().view(torch.float8_e4m3fn), rows[:, -4:].contiguous().view(torch.float32)


def _decoded(cache: Tensor) -> Tensor:
    """The keys of a cache in float64 [pages * page_size, D]."""
    keys, scales = _keys(_stored(cache), cache)
    return keys.double() if scales is None else keys.double() * scales.double()


def _prepared(call: Call, before: Arguments) -> Pairs:
    q_out, weights_out = call.result
    dim = before["q"].shape[-1]
    q = _rotated(before["q"], before["q_norm"], before)
    k = _rotated(before["k"].view(-1, 1, dim), before["k_norm"], before)[:, 0]
    cache = _decoded(before["cache"])
    slots = before["slot_mapping"].long()
    cache[slots] = k
    untouched = torch.ones(cache.shape[0], dtype=torch.bool, device=cache.device).index_fill_(0, slots, False)
    kept = (_stored(call.arguments["cache"])[untouched], _stored(before["cache"])[untouched])
    weights = before["weights"].double()
    got = q_out.double()
    if before["fp8"]:
        scale = q.abs().amax(dim=-1).clamp(min=1e-4) / _FP8_MAX
        got, weights = got * scale[..., None], weights * scale * dim**-0.5
    return [(got, q), (weights_out, weights), (_decoded(call.arguments["cache"]), cache), kept]


def _slots(before: Arguments, length: int) -> Tensor:
    """Rows of the cache that hold each sequence's first keys, in order: [sequences, length]."""
    page_size, positions = before["cache"].shape[1], torch.arange(length, device=before["cache"].device)
    slots: Tensor = before["block_tables"].long()[:, positions // page_size] * page_size + positions % page_size
    return slots


def _gathered(call: Call, before: Arguments) -> Pairs:
    """Row by row, the stored bytes as they are."""
    lengths = before["cu_seqlens"].diff().tolist()
    slots = torch.cat([own[:length] for own, length in zip(_slots(before, max(lengths)), lengths, strict=True)])
    keys, scales = _keys(_stored(before["cache"])[slots], before["cache"])
    got_keys, got_scales = call.result
    found = [(got_keys.reshape(keys.shape).view(torch.uint8), keys.view(torch.uint8))]
    return found if scales is None else [*found, (got_scales.view(-1, 1), scales)]


def _ragged_scores(call: Call, before: Arguments) -> Pairs:
    given = {name: before[name] for name in ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke")}
    k, k_scale = before["k"], before["k_scale"]
    inputs = MqaInputs(k=k.view(len(k), 1, -1), k_scale=None if k_scale is None else k_scale.view(-1, 1), **given)
    return _scores(call, exact_mqa_logits(inputs, scale=before.get("scale", 1.0)))


def _paged_scores(call: Call, before: Arguments) -> Pairs:
    given = {name: before[name] for name in ("q", "cache", "weights", "context_lens", "block_tables", "max_context_len")}
    slots = _slots(before, given["max_context_len"])
    keys, scales = _keys(_stored(given["cache"])[slots.flatten()], given["cache"])
    rows, row_scales = keys.view(*slots.shape, 1, -1), None if scales is None else scales.view(*slots.shape, 1)
    inputs = PagedInputs(**given, page_size=given["cache"].shape[1], rows=rows, row_scales=row_scales)
    return _scores(call, exact_paged_mqa_logits(inputs, scale=before.get("scale", 1.0)))


def _scores(call: Call, exact: ExactLogits) -> Pairs:
    return [(call.result, exact.values.masked_fill(~exact.visible, -torch.inf))]


def _selected(call: Call, before: Arguments) -> Pairs:
    """A stable sort of each row's range: equal scores keep their order, so the smaller column comes first."""
    logits, k = before["logits"].float() + 0.0, before["k"]  # -0.0 becomes 0.0, which it equals
    starts, ends = before["row_starts"].long()[:, None], before["row_ends"].long()[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    masked = logits.masked_fill((columns < starts) | (columns >= ends), -torch.inf)
    masked = functional.pad(masked, (0, max(0, k - masked.shape[1])), value=-torch.inf)
    scores, order = masked.sort(dim=1, descending=True, stable=True)
    none = torch.iinfo(torch.int64).max
    chosen = (order - starts).masked_fill(torch.isneginf(scores), none)[:, :k].sort(dim=1).values
    return [(call.result, chosen.masked_fill(chosen == none, -1).to(torch.int32))]


_EXPECTED: dict[str, Callable[[Call, Arguments], Pairs]] = {
    "fused_qkvzba_split_reshape_cat": _split, "causal_conv1d_fn": _convolution, "causal_conv1d_update": _convolution,
    "chunk_gated_delta_rule": _delta_rule, "fused_recurrent_gated_delta_rule": _delta_rule, "rms_norm_gated": _gated_norm,
    "prepare_indexer": _prepared, "gather_indexer_cache": _gathered, "mqa_logits": _ragged_scores,
    "paged_mqa_logits": _paged_scores, "topk_indices": _selected,
}  # fmt: skip
