"""Exact indexer logits in float64, and bounds for the error of a float32 or bfloat16 result.

Independent of the reference: every key is dequantised first, heads are processed one by one, and each row's own range is cut
out. It takes the same FP8 or bf16 values as the kernel, so that only the kernel's own rounding is measured.
"""

from dataclasses import dataclass

import torch

from gdn.ops.indexer.inputs import MqaInputs, PagedInputs

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
