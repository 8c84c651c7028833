"""Exact indexer logits in float64, and bounds for the error of a float32 or bfloat16 result.

Independent of the reference: every key is dequantised first, heads are processed one by one, and each row's own range is cut
out. It takes the same FP8 or bf16 values as the kernel, so that only the kernel's own rounding is measured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gdn.ops.indexer.inputs import MqaInputs, PagedInputs
from gdn.testing.expected import Arguments, Call, Expected, Pair, Pairs, once

# Limits of calc_diff. FP8 tensor-core sums on Hopper keep about 14 bits; a bf16 output keeps 8.
CALC_DIFF_FLOAT32 = 5e-6
CALC_DIFF_BFLOAT16 = 3e-5
# Limits of |error| / (scale * sum_h |w_h| |q_h| . |k|), element by element, so that a single wrong score shows.
ELEMENT_FP8 = 2.0**-10
ELEMENT_BFLOAT16 = 2.0**-16


@dataclass(frozen=True)
class ExactLogits:
    values: torch.Tensor  # [rows, columns] float64; 0 where nothing is visible
    magnitude: torch.Tensor  # [rows, columns] float64: the same sum over absolute values
    visible: torch.Tensor  # [rows, columns] bool

    @classmethod
    def nothing(cls, rows: int, columns: int, device: torch.device) -> "ExactLogits":
        values = torch.zeros(rows, columns, dtype=torch.float64, device=device)
        return cls(values, torch.zeros_like(values), torch.zeros_like(values, dtype=torch.bool))

    def put(self, row: int, first: int, score: torch.Tensor, size: torch.Tensor) -> None:
        """One row's visible scores, from column `first`."""
        columns = slice(first, first + len(score))
        self.values[row, columns], self.magnitude[row, columns], self.visible[row, columns] = score, size, True


def calc_diff(got: torch.Tensor, want: torch.Tensor) -> float:
    """1 - 2 <x, y> / (|x|^2 + |y|^2) in float64: 0 for equal tensors, about half the squared relative error for close ones."""
    x, y = got.double(), want.double()
    energy = float((x * x + y * y).sum())
    return 0.0 if energy == 0.0 else 1.0 - 2.0 * float((x * y).sum()) / energy


def _dense(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None, weights: torch.Tensor | None, scale: float, relu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [m, H, D], k [n, kv_heads, D], k_scale [n, kv_heads], weights [m, H] -> exact scores and their magnitudes, [m, n]."""
    q, k = q.double(), k.double() if k_scale is None else k.double() * k_scale.double()[..., None]
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    total = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float64, device=q.device)
    magnitude = torch.zeros_like(total)
    for head in range(num_heads):
        key = k[:, head // (num_heads // num_kv_heads)]
        product, size = q[:, head] @ key.T, q[:, head].abs() @ key.abs().T
        weight = torch.ones_like(q[:, head, :1]) if weights is None else weights[:, head, None].double()
        total += (product.relu() if relu else product) * weight
        magnitude += size * weight.abs()
    return total * scale, magnitude * abs(scale)


def exact_mqa_logits(inputs: MqaInputs, *, scale: float = 1.0, relu: bool = True, max_seqlen_k: int | None = None) -> ExactLogits:
    """Exact ragged logits, in the layout of `gdn.mqa_logits`."""
    num_rows, num_keys = inputs.q.shape[0], inputs.k.shape[0]
    # Poisoned keys lie outside every range.
    k, k_scale = (None if x is None else x.double().nan_to_num(0.0) for x in (inputs.k, inputs.k_scale))
    assert k is not None
    columns = num_keys if max_seqlen_k is None else max_seqlen_k
    exact = ExactLogits.nothing(num_rows, columns, k.device)
    ranges = list(zip(inputs.cu_seqlen_ks.tolist(), inputs.cu_seqlen_ke.tolist(), strict=True))
    block = max(1, 2**24 // max(1, num_keys))
    for low in range(0, num_rows, block):
        high = min(low + block, num_rows)
        part = inputs.weights[low:high] if inputs.weights is not None else None
        score, size = _dense(inputs.q[low:high], k, k_scale, part, scale, relu)
        for row in range(low, high):
            start, end = max(0, ranges[row][0]), min(num_keys, ranges[row][1])
            if end <= start:
                continue
            first = 0 if max_seqlen_k is not None else start
            count = min(end - start, columns - first)
            exact.put(row, first, score[row - low, start : start + count], size[row - low, start : start + count])
    return exact


def exact_paged_mqa_logits(inputs: PagedInputs, *, scale: float = 1.0, relu: bool = True) -> ExactLogits:
    """Exact paged logits from the rows that the generator put into the pages (not read back from the cache)."""
    batch, next_n = inputs.q.shape[:2]
    columns = inputs.max_context_len
    exact = ExactLogits.nothing(batch * next_n, columns, inputs.q.device)
    lengths = inputs.context_lens.tolist()
    limit = min(columns, inputs.block_tables.shape[1] * inputs.page_size)
    for sequence in range(batch):
        per_draft = lengths[sequence]
        if isinstance(per_draft, int):
            per_draft = [per_draft - (next_n - 1) + draft for draft in range(next_n)]
        per_draft = [min(limit, max(0, length)) for length in per_draft]
        longest = max(per_draft)
        if longest == 0:
            continue
        k, k_scale = inputs.rows[sequence, :longest], inputs.row_scales
        rows = slice(sequence * next_n, (sequence + 1) * next_n)
        weights = inputs.weights[rows] if inputs.weights is not None else None
        k_scale = None if k_scale is None else k_scale[sequence, :longest]
        score, size = _dense(inputs.q[sequence], k, k_scale, weights, scale, relu)
        for draft, length in enumerate(per_draft):
            exact.put(sequence * next_n + draft, 0, score[draft, :length], size[draft, :length])
    return exact


def logits_error(got: torch.Tensor, exact: ExactLogits, *, fp8: bool, clean: bool = True) -> str | None:
    """None where `got` is right, else one sentence: the mask, then calc_diff, then the worst element."""
    if got.shape != exact.values.shape:
        return f"shape {list(got.shape)}, expected {list(exact.values.shape)}"
    if clean:
        wrong = (got == -torch.inf) == exact.visible
        if bool(wrong.any()):
            where = wrong.nonzero()[0].tolist()
            return f"{int(wrong.sum())} elements masked wrongly or never written, the first at {where}: {got[*where].item()}"
    inside = torch.where(exact.visible, got.double(), exact.values)
    bad = ~torch.isfinite(inside)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        return f"{int(bad.sum())} visible elements are not finite, the first at {where}: {got[*where].item()}"
    narrow = got.dtype == torch.bfloat16
    diff, allowed = calc_diff(inside, exact.values), CALC_DIFF_BFLOAT16 if narrow else CALC_DIFF_FLOAT32
    if diff >= allowed:
        return f"calc_diff {diff:.3e}, allowed {allowed:.0e}"
    bound = exact.magnitude * (ELEMENT_FP8 if fp8 else ELEMENT_BFLOAT16) + 1e-30
    if narrow:
        bound = bound + exact.values.abs() * 2.0**-8
    excess = (inside - exact.values).abs() / bound
    if excess.numel() and float(excess.max()) > 1.0:
        where = list(divmod(int(excess.argmax()), excess.shape[1]))
        want, times = exact.values[*where].item(), float(excess.max())
        return f"element {where} is {got[*where].item()}, expected {want}: {times:.1f} times its bound"
    return None


_FP8_MAX = 448.0
_FP8 = 5e-2  # limit of a result in e4m3
_SCORES, _FP8_SCORES = 1e-4, 5e-3  # limits of selected scores: sums of FP8 products keep about 14 bits


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
    cache, limit = before[name], once(before[name]) if before[name].element_size() > 1 else _FP8
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
        found.append(Pair(got_weights, weights, once(before["q"])))
    elif weights is not None:
        found.append(Pair(got_weights, weights, 0.0))
    found.append(Pair(got, q, _FP8 if is_fp8 else once(before["q"])))
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


EXPECTED: Expected = {
    "prepare_indexer": _prepared,
    "compress_indexer_keys": _compressed,
    "gather_indexer_cache": _gathered,
    "indexer_topk": _ragged_selection,
    "paged_indexer_topk": _paged_selection,
}
