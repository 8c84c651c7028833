"""Expected results of the operators' calls, in float64 and independent of the references.

The reference computes in float32; this module decodes rows, loops over sequences, or uses torch's own functions. Each function
takes a call that has run, with its arguments from before, and returns pairs: a tensor that the call returned or updated, and its
expected content.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from gdn.ops.delta_rule.oracle import brought_up_to_date, live_places, oracle_delta_rule, without_new
from gdn.ops.indexer.inputs import MqaInputs, PagedInputs
from gdn.ops.indexer.oracle import ExactLogits, exact_mqa_logits, exact_paged_mqa_logits
from gdn.testing.compare import after_summary

Tensor = torch.Tensor
Arguments = dict[str, Any]

_FP8_MAX = 448.0
_FP8 = 5e-2  # limit of a result in e4m3
_SCORES, _FP8_SCORES = 1e-4, 5e-3  # limits of selected scores: sums of FP8 products keep about 14 bits
_PART_BYTES = 2**28  # of scores of attention at a time


@dataclass
class Call:
    """One operator call that has run.

    Attributes
    ----------
    operator : str
        Name of the public function.
    before, after : dict of str to Any
        Arguments by name: copies from before of those that it updates, and the same arguments afterwards.
    result : Any
    """

    operator: str
    before: Arguments
    after: Arguments
    result: Any


class Pair(NamedTuple):
    """A tensor and its expected content; limit: largest accepted relative error of a row, 0 = every element is equal."""

    got: Tensor
    expected: Tensor
    limit: float


Pairs = list[Pair]


def _once(x: Tensor) -> float:
    """Limit of a result that is rounded once to the dtype of x."""
    return 1e-5 if x.dtype == torch.float32 else 1e-2


def _often(x: Tensor) -> float:
    """Limit of a result with several roundings to the dtype of x inside."""
    return 3 * _once(x)


def pairs(call: Call) -> Pairs:
    """Values that the call returned or updated, each with its expected content."""
    return _EXPECTED[call.operator](call, call.before)


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
    return [Pair(call.result, out, _once(before["x"])), Pair(call.after["conv_states"].double(), windows, 0.0)]


def _delta_rule(call: Call, before: Arguments) -> Pairs:
    """The token recurrence."""
    exact = oracle_delta_rule(**before)
    assert exact.state is not None
    # o [1, tokens, heads, V] is compared head by head.
    output = Pair(call.result[0][0].transpose(0, 1), exact.o[0].transpose(0, 1), _often(before["q"]))
    return [output, Pair(call.after["initial_state"], exact.state, _often(before["q"]))]


def _prefill_step(call: Call, before: Arguments) -> Pairs:
    """Convolution, token recurrence and gated norm of a part of a prompt of each sequence."""
    x = before["mixed_qkv"]
    mixed, windows = _convolved(x, before["state_indices"], before["conv_weight"], before)
    names = ("has_initial_state", "state_indices", "checkpoint_offsets", "checkpoint_slots")
    given = {"cu_seqlens": before["query_start_loc"], **{name: before[name] for name in names}}
    out, states = _after_convolution(mixed, before["z"].flatten(1), before["b"], before["a"], before, given)
    found = [Pair(call.result, out, _often(x)), Pair(call.after["conv_states"].double(), windows, 0.0)]
    return [*found, Pair(call.after["ssm_state"], states, _often(x))]


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


def _ends(*sizes: int) -> list[int]:
    """Ends of columns of the given numbers, one after the other."""
    return list(itertools.accumulate(sizes))


def _summary(call: Call, before: Arguments) -> Pairs:
    """The token recurrence from zeros, and from the identity without values; judged by what they make of a random state."""
    h, P = call.result
    identity = torch.eye(P.shape[-1], device=P.device, dtype=torch.float64).expand(P.shape).contiguous()
    zeros = torch.zeros(*before["v"].shape[:-1], P.shape[-1], dtype=torch.float32, device=P.device)
    runs = (oracle_delta_rule(**before), oracle_delta_rule(**before | {"v": zeros, "initial_state": identity}))
    exact = [one.state for one in runs]
    assert exact[0] is not None and exact[1] is not None
    v_first = before["state_v_first"]
    return [Pair(after_summary(h, P, v_first), after_summary(exact[0], exact[1], v_first), _often(before["q"]))]


def _decode_step(call: Call, before: Arguments) -> Pairs:
    """Convolution, token recurrence and gated norm of one or some tokens of each sequence; concatenated projections."""
    weight, windows = before["conv_weight"], before["conv_state"].double()
    heads = len(before["A_log"])
    x, z, b, a, _ = before["mixed_qkv"].tensor_split(_ends(len(weight), heads * before["head_v_dim"], heads, heads), dim=1)
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
    found = [Pair(call.result, out, _often(x)), Pair(call.after["conv_state"].double(), windows, 0.0), *rings]
    return [*found, Pair(states, exact, _often(x))]


def _folded(call: Call, before: Arguments) -> Pairs:
    """The states of all layers after all of their entries, and the counts."""
    found, counts = [], before["state_tokens"].clone()
    for layer, (states, ring) in enumerate(zip(before["ssm_state"], before["ring"], strict=True)):
        phase = (before["fold_phase"] + layer) % before["fold_every"]
        places, _ = live_places(before, phase, [1] * len(before["state_indices"]))
        exact = brought_up_to_date(states, ring, places, before["num_k_heads"], v_first=before["state_v_first"])
        found.append(Pair(call.after["ssm_state"][layer], exact, _once(states)))
        for place in places:
            counts[place.slot] = place.end
    return [*found, Pair(call.after["state_tokens"], counts, 0.0)]


def _gated_norm(call: Call, before: Arguments) -> Pairs:
    x, z, weight = (before[name].double() for name in ("x", "z", "weight"))
    normed = functional.rms_norm(x, x.shape[-1:], weight, before["eps"])
    return [Pair(call.result, normed * _gate(z, before["activation"]), _once(before["x"]))]


def _add_norm(call: Call, before: Arguments) -> Pairs:
    total, residual, scale = before["x"].double(), before["residual"], before["layer_scale"]
    if residual is not None:
        total = residual.double() + (total if scale is None else total * (1 + scale.double()))
    gain = before["weight"].double() + float(before["zero_centred"])
    normed = functional.rms_norm(total, total.shape[-1:], gain, before["eps"])
    return [Pair(call.result[0], normed, _often(before["x"])), Pair(call.result[1], total, _once(before["x"]))]


def _rotated(x: Tensor, norm: Tensor, positions: Tensor, before: Arguments) -> Tensor:
    """x [tokens, heads, D] normalised and rotated: pairs (i, i + half) as complex numbers, turned by their angles."""
    gain = norm.double() + float(before["zero_centred"])
    normed = functional.rms_norm(x.double(), x.shape[-1:], gain, before["eps"])
    half = before["rotary_dim"] // 2
    table = before["cos_sin"][positions.long()].double()[:, None]
    turn = torch.complex(table[..., :half], table[..., half:])
    turned = torch.complex(normed[..., :half], normed[..., half : 2 * half]) * turn
    return torch.cat([turned.real, turned.imag, normed[..., 2 * half :]], dim=-1)


def _stored(cache: Tensor) -> Tensor:
    """Bytes of each row of a cache [pages, page_size, heads, ...], as [pages * page_size, ...].

    An FP8 row with a scale has one head; a page holds the values of all its rows first, then their scales.
    """
    if cache.dtype != torch.uint8:
        return cache.contiguous().view(torch.uint8).flatten(0, 1).flatten(1)
    pages, page_size, _, row = cache.shape
    parts = cache.reshape(pages, page_size * row).split([page_size * (row - 4), page_size * 4], dim=1)
    return torch.cat([part.reshape(pages * page_size, -1) for part in parts], dim=1)


def _keys(rows: Tensor, cache: Tensor) -> tuple[Tensor, Tensor | None]:
    """Stored rows of a cache as keys [n, heads * D] and, with FP8, their float32 scales [n, 1]."""
    if cache.dtype != torch.uint8:
        return rows.view(cache.dtype), None
    return rows[:, :-4].contiguous().view(torch.float8_e4m3fn), rows[:, -4:].contiguous().view(torch.float32)


def _decoded(cache: Tensor) -> Tensor:
    """The keys of a cache in float64 [pages * page_size, heads * D]."""
    keys, scales = _keys(_stored(cache), cache)
    return keys.double() if scales is None else keys.double() * scales.double()


def _written(call: Call, before: Arguments, slots: Tensor, rows: Tensor, name: str = "cache") -> Pairs:
    """The cache of a call that wrote rows [n, heads, D] to slots: these rows, and the bytes of all others as they were."""
    cache, limit = before[name], _once(before[name]) if before[name].element_size() > 1 else _FP8
    kept = slots >= 0
    slots = slots[kept].long()
    expected = _decoded(cache)
    expected[slots] = rows[kept].flatten(1).double()
    others = torch.ones(expected.shape[0], dtype=torch.bool, device=slots.device).index_fill_(0, slots, False)
    untouched = Pair(_stored(call.after[name])[others], _stored(cache)[others], 0.0)
    return [Pair(_decoded(call.after[name]), expected, limit), untouched]


def _prepared(call: Call, before: Arguments) -> Pairs:
    got, got_weights = call.result
    dim, positions, weights = before["q"].shape[-1], before["positions"], before["weights"]
    q = _rotated(before["q"], before["q_norm"], positions, before)
    found, is_fp8 = [], got.element_size() == 1
    got = got.double()
    if is_fp8 and got_weights is not None:  # quantised with scales, which are in the weights
        scale = q.abs().amax(dim=-1).clamp(min=1e-4) / _FP8_MAX
        got, weights = got * scale[..., None], weights.double() * scale * dim**-0.5
        found.append(Pair(got_weights, weights, _once(before["q"])))
    elif weights is not None:
        found.append(Pair(got_weights, weights, 0.0))
    found.append(Pair(got, q, _FP8 if is_fp8 else _once(before["q"])))
    if before["k"] is not None:
        k = _rotated(before["k"].view(len(q), -1, dim), before["k_norm"], positions, before)
        found += _written(call, before, before["slot_mapping"], k)
    if before["v"] is not None:
        found += _written(call, before, before["slot_mapping"], before["v"].view(len(q), -1, dim), "v_cache")
    return found


def _compressed(call: Call, before: Arguments) -> Pairs:
    """Sequence by sequence: the raw keys of its unfinished group, then those of the call, in groups."""
    ratio, ring = before["ratio"], before["ring"].clone()
    raw, slots, positions = before["raw_k"], before["ring_slots"].tolist(), before["positions"].tolist()
    raw = raw.view(len(raw), *ring.shape[2:])
    size, rows, places, starts = ring.shape[1], [], [], []
    for t in [t for t, slot in enumerate(slots) if slot >= 0 and slot != before["null_slot"]]:
        if t == 0 or slots[t] != slots[t - 1]:
            first = positions[t] // ratio * ratio
            line = [ring[slots[t], position % size] for position in range(first, positions[t])]
        line.append(raw[t])
        if (positions[t] + 1) % ratio == 0:
            rows.append(torch.stack(line[-ratio:]))
            places.append(t)
            starts.append(positions[t] + 1 - ratio)
    for t, slot in enumerate(slots):
        if slot >= 0 and slot != before["null_slot"]:
            ring[slot, positions[t] % size] = raw[t]
    found = [Pair(call.after["ring"], ring, 0.0)]
    device = raw.device
    none = torch.empty(0, ratio, *ring.shape[2:], dtype=raw.dtype, device=device)
    groups = torch.stack(rows) if rows else none
    at = torch.tensor(starts, dtype=torch.int64, device=device)
    keys = _rotated(groups.double().mean(dim=1), before["k_norm"], at, before)
    return found + _written(call, before, before["slot_mapping"][torch.tensor(places, dtype=torch.int64, device=device)], keys)


def _groups(call: Call, before: Arguments) -> tuple[Tensor, Pairs]:
    """Selected columns [rows, topk], and where they are groups of tokens the listed tokens, row by row on the host."""
    ratio, k, width = before["ratio"], before["topk"], call.result.shape[1]
    if ratio == 1:
        return call.result.long(), []
    columns, rows = [], []
    for listed, position in zip(call.result.tolist(), before["positions"].tolist(), strict=True):
        tail = range((position + 1) // ratio * ratio, position + 1)
        count = (sum(token >= 0 for token in listed) - len(tail)) // ratio
        groups = [token // ratio for token in listed[: count * ratio : ratio]]
        tokens = [group * ratio + i for group in groups for i in range(ratio)] + [*tail]
        columns.append(groups + [-1] * (k - count))
        rows.append(tokens + [-1] * (width - len(tokens)))
    groups_of, expected = (torch.tensor(one, dtype=torch.int64, device=call.result.device) for one in (columns, rows))
    return groups_of, [Pair(call.result, expected.int(), 0.0)]


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
    found = [Pair(got_keys.reshape(keys.shape).view(torch.uint8), keys.view(torch.uint8), 0.0)]
    return found if scales is None else [*found, Pair(got_scales.view(-1, 1), scales, 0.0)]


def _ragged_selection(call: Call, before: Arguments) -> Pairs:
    given = {name: before[name] for name in ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke")}
    k, k_scale = before["k"], before["k_scale"]
    inputs = MqaInputs(k=k.view(len(k), 1, -1), k_scale=None if k_scale is None else k_scale.view(-1, 1), **given)
    longest = int((before["cu_seqlen_ke"] - before["cu_seqlen_ks"]).max())
    return _selection(call, exact_mqa_logits(inputs, scale=before["scale"], max_seqlen_k=longest))


def _paged_selection(call: Call, before: Arguments) -> Pairs:
    longest = int(before["context_lens"].max())
    given = {name: before[name] for name in ("q", "cache", "weights", "context_lens", "block_tables")}
    slots = _slots(before, longest)
    keys, scales = _keys(_stored(given["cache"])[slots.flatten()], given["cache"])
    rows, row_scales = keys.view(*slots.shape, 1, given["q"].shape[-1]), None if scales is None else scales.view(*slots.shape, 1)
    page_size = given["cache"].shape[1]
    inputs = PagedInputs(**given, max_context_len=longest, page_size=page_size, rows=rows, row_scales=row_scales)
    return _selection(call, exact_paged_mqa_logits(inputs, scale=before["scale"]))


def _selection(call: Call, exact: ExactLogits) -> Pairs:
    """Rows of distinct visible columns in ascending order, and their scores next to the best ones.

    The scores rather than the columns are compared: where two are nearly equal, rounding decides which is selected.
    """
    got, tokens = _groups(call, call.before)
    k = got.shape[1]
    scores = exact.values.masked_fill(~exact.visible, -torch.inf)
    scores = functional.pad(scores, (0, max(0, k - scores.shape[1])), value=-torch.inf)
    best = scores.topk(k, dim=1).values
    is_listed = got >= 0
    columns = got.clamp(min=0, max=scores.shape[1] - 1)
    found = scores.gather(1, columns).masked_fill(~is_listed, -torch.inf)
    # A column that is not visible has no finite score.
    ascending = ((got[:, 1:] > got[:, :-1]) | (got[:, 1:] == -1)).all(dim=1)
    is_right = ascending & (is_listed == torch.isfinite(found)).all(dim=1)
    chosen, expected = (one.sort(dim=1).values.masked_fill(torch.isinf(best.flip(1)), 0) for one in (found, best))
    counts = is_listed.sum(dim=1)
    limit = _FP8_SCORES if call.before["q"].element_size() == 1 else _SCORES
    return [
        Pair(is_right, torch.ones_like(is_right), 0.0),
        Pair(counts, torch.isfinite(best).sum(dim=1), 0.0),
        Pair(chosen, expected, limit),
        *tokens,
    ]


def _attention(call: Call, before: Arguments) -> Pairs:
    """Softmax over all positions of each sequence, masked: those after the query, and those not selected; then the gate."""
    q, caches, selected = before["q"], before["kv_cache"], before.get("topk_indices")
    bounds, lengths, block_size = before["query_start_loc"].tolist(), before["seq_lens"].tolist(), caches[0].shape[1]
    scale = q.shape[2] ** -0.5 if before["scale"] is None else before["scale"]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for n, (start, end, length) in enumerate(zip(bounds[:-1], bounds[1:], lengths, strict=True)):
        if start == end:
            continue
        positions = torch.arange(length, device=q.device)
        rows = before["block_tables"][n].long()[positions // block_size] * block_size + positions % block_size
        groups = q.shape[1] // caches[0].shape[2]
        keys, values = (one.flatten(0, 1)[rows].double().repeat_interleave(groups, dim=1).transpose(0, 1) for one in caches)
        step = max(1, _PART_BYTES // (8 * q.shape[1] * length))
        for low in range(start, end, step):
            part = slice(low, min(low + step, end))
            own = torch.arange(part.start, part.stop, device=q.device) - end + length
            hidden = positions > own[:, None]
            if selected is not None:
                index = selected[part].long()
                listed = torch.zeros(len(index), length + 1, dtype=torch.bool, device=q.device)
                hidden |= ~listed.scatter_(1, torch.where(index < 0, length, index), True)[:, :length]
            scores = (q[part].double().transpose(0, 1) @ keys.mT * scale).masked_fill(hidden, -torch.inf)
            out[part] = (scores.softmax(dim=-1).nan_to_num(0.0) @ values).transpose(0, 1)
    if before["gate"] is not None:
        out = out * before["gate"].double().sigmoid()
    return [Pair(call.result.flatten(0, 1), out.flatten(0, 1), _often(q))]


_EXPECTED: dict[str, Callable[[Call, Arguments], Pairs]] = {
    "fused_gdn_prefill": _prefill_step, "fused_gdn_decode": _decode_step, "causal_conv1d_fn": _convolution,
    "fold_states": _folded, "chunk_gated_delta_rule": _delta_rule, "chunk_summary": _summary, "rms_norm_gated": _gated_norm,
    "add_rms_norm": _add_norm, "prepare_indexer": _prepared,
    "compress_indexer_keys": _compressed, "gather_indexer_cache": _gathered,
    "indexer_topk": _ragged_selection, "paged_indexer_topk": _paged_selection, "sparse_attention": _attention,
    "attention": _attention,
}  # fmt: skip
