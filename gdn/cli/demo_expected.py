"""Expected results of the demo's calls, in float64 and independent of gdn.reference.

The reference works on whole tensors in float32; this module loops over sequences, pages and rows, or uses torch's own
functions. Each function takes a call that has run, with its arguments from before, and returns pairs: a tensor that the call
returned or updated, and its expected content.
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


# --- the GDN layer ---------------------------------------------------------------------------------------------------


def _split(call: Call, before: Arguments) -> Pairs:
    """Column by column: a key head's group holds [q | k | v of its value heads | z of them], and [b | a]."""
    key_heads, ratio = before["num_heads_qk"], before["num_heads_v"] // before["num_heads_qk"]
    key_dim, value_dim = before["head_qk"], before["head_v"]
    width = 2 * key_dim + 2 * ratio * value_dim

    def columns(first: int, count: int, group: int) -> list[int]:
        return [head * group + first + column for head in range(key_heads) for column in range(count)]

    qkvz, ba = before["mixed_qkvz"], before["mixed_ba"]
    values = ratio * value_dim
    mixed = columns(0, key_dim, width) + columns(key_dim, key_dim, width) + columns(2 * key_dim, values, width)
    z = qkvz[:, columns(2 * key_dim + values, values, width)].view(-1, key_heads * ratio, value_dim)
    b, a = ba[:, columns(0, ratio, 2 * ratio)], ba[:, columns(ratio, ratio, 2 * ratio)]
    return list(zip(call.result, (qkvz[:, mixed], z, b, a), strict=True))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _windows(line: Tensor, weight: Tensor) -> Tensor:
    """line [dim, width - 1 + T] -> [dim, T]: each window of `width` columns times the weights."""
    return _silu((line.unfold(1, weight.shape[1], 1) @ weight.double()[:, :, None])[..., 0])


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
        out[bounds[n] : bounds[n + 1]] = _windows(line, weight).T
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


# --- the indexer -----------------------------------------------------------------------------------------------------


def _rotated(x: Tensor, norm: Tensor, before: Arguments) -> Tensor:
    """x [tokens, heads, D] normalised and rotated: pairs (i, i + half) as complex numbers, turned by their angles."""
    normed = functional.rms_norm(x.double(), x.shape[-1:], 1 + norm.double(), 1e-6)
    half = before["rotary_dim"] // 2
    table = before["cos_sin"][before["positions"].long()].double()[:, None]
    turn = torch.complex(table[..., :half], table[..., half:])
    turned = torch.complex(normed[..., :half], normed[..., half : 2 * half]) * turn
    return torch.cat([turned.real, turned.imag, normed[..., 2 * half :]], dim=-1)


def _cache_rows(cache: Tensor) -> tuple[Tensor, Tensor | None]:
    """Stored keys [pages * page_size, D] of a cache [pages, page_size, 1, ...], and with FP8 their float32 scales.

    An FP8 page holds the values of all its rows first, then their scales.
    """
    if cache.dtype != torch.uint8:
        return cache.flatten(0, 2), None
    pages, page_size, _, row = cache.shape
    flat = cache.reshape(pages, page_size * row)
    values, scales = flat[:, : page_size * (row - 4)], flat[:, page_size * (row - 4) :]
    keys = values.contiguous().view(torch.float8_e4m3fn).view(pages * page_size, row - 4)
    return keys, scales.contiguous().view(torch.float32).flatten()


def _rows(keys: Tensor, slots: list[int]) -> Tensor:
    """keys[slots]; torch cannot index FP8 on every device."""
    return keys.view(torch.uint8)[slots].view(keys.dtype)


def _row_bytes(cache: Tensor) -> Tensor:
    """Stored bytes of each row, values and scale: [pages * page_size, ...]."""
    keys, scales = _cache_rows(cache)
    parts = [keys] if scales is None else [keys, scales[:, None]]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _decoded(cache: Tensor) -> Tensor:
    """The keys of a cache in float64 [pages * page_size, D]."""
    keys, scales = _cache_rows(cache)
    return keys.double() if scales is None else keys.double() * scales.double()[:, None]


def _prepared(call: Call, before: Arguments) -> Pairs:
    q_out, weights_out = call.result
    dim = before["q"].shape[-1]
    q = _rotated(before["q"], before["q_norm"], before)
    k = _rotated(before["k"].view(-1, 1, dim), before["k_norm"], before)[:, 0]
    cache = _decoded(before["cache"])
    slots = before["slot_mapping"].long()
    cache[slots] = k
    untouched = torch.ones(cache.shape[0], dtype=torch.bool, device=cache.device).index_fill_(0, slots, False)
    kept = (_row_bytes(call.arguments["cache"])[untouched], _row_bytes(before["cache"])[untouched])
    weights = before["weights"].double()
    got = q_out.double()
    if before["fp8"]:
        scale = q.abs().amax(dim=-1).clamp(min=1e-4) / _FP8_MAX
        got, weights = got * scale[..., None], weights * scale * dim**-0.5
    return [(got, q), (weights_out, weights), (_decoded(call.arguments["cache"]), cache), kept]


def _slots(table: list[int], length: int, page_size: int) -> list[int]:
    """Rows of a cache that hold a sequence's keys, in order."""
    return [table[position // page_size] * page_size + position % page_size for position in range(length)]


def _gathered(call: Call, before: Arguments) -> Pairs:
    """Row by row, the stored bytes as they are."""
    bounds, tables = before["cu_seqlens"].tolist(), before["block_tables"].tolist()
    keys, scales = _cache_rows(before["cache"])
    page_size = before["cache"].shape[1]
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    slots = [slot for table, length in zip(tables, lengths, strict=True) for slot in _slots(table, length, page_size)]
    got_keys, got_scales = call.result
    got_keys = got_keys.reshape(-1, keys.shape[1])
    if scales is None:
        return [(got_keys, keys[slots])]
    return [(got_keys.view(torch.uint8), _rows(keys, slots).view(torch.uint8)), (got_scales.flatten(), scales[slots])]


def _ragged_scores(call: Call, before: Arguments) -> Pairs:
    given = {name: before[name] for name in ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke")}
    k, k_scale = before["k"], before["k_scale"]
    inputs = MqaInputs(
        k=k if k.dim() == 3 else k[:, None], k_scale=k_scale if k_scale is None or k_scale.dim() == 2 else k_scale[:, None],
        **given,
    )  # fmt: skip
    return _scores(call, exact_mqa_logits(inputs, scale=before.get("scale", 1.0)))


def _paged_scores(call: Call, before: Arguments) -> Pairs:
    cache, tables, longest = before["cache"], before["block_tables"], before["max_context_len"]
    keys, scales = _cache_rows(cache)
    lengths = before["context_lens"].tolist()
    rows = torch.zeros(len(lengths), longest, 1, keys.shape[1], device=keys.device).to(keys.dtype)
    row_scales = None if scales is None else torch.zeros(len(lengths), longest, 1, device=keys.device)
    for n, length in enumerate(lengths):
        slots = _slots(tables[n].tolist(), length, cache.shape[1])
        rows[n, :length, 0] = _rows(keys, slots)
        if row_scales is not None and scales is not None:
            row_scales[n, :length, 0] = scales[slots]
    given = {name: before[name] for name in ("q", "cache", "weights", "context_lens", "block_tables", "max_context_len")}
    inputs = PagedInputs(**given, page_size=cache.shape[1], rows=rows, row_scales=row_scales)
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
