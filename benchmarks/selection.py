"""Share of the float32 selection that the indexer's rounded scores find: random rows, through the public operators.

Projections are bfloat16, like a model's. The float32 scores normalise, rotate and multiply them without rounding again;
the indexer rounds q and k to bfloat16 after norm and rotation, and quantises those, with one scale for each query
head and each row of the cache. Every query sees every key, so that the number of keys is the length of the context.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import gdn
from gdn.ops.indexer import reference
from gdn.ops.indexer.reference import rms_norm, rope

Tensor = torch.Tensor

KEYS = (4096, 32768, 131072)
BF16, BF16_OUT, FP8, FP8_EXACT = "bf16", "bf16, scores too", "FP8", "FP8, exact sums"
# Least shares. The indexer's own scores are float32 in both modes; the other two columns separate the rounding of inputs from
# later rounding: in scores of 16 bits, and in the tensor cores' sums.
DEMANDED = {BF16: 0.995, FP8: 0.97}

_HEADS, _DIM, _ROTARY, _PAGE = 16, 128, 64, 64


@dataclass(frozen=True)
class Agreement:
    """Share of the float32 selection that each kind of scores finds, averaged over the rows."""

    keys: int
    shares: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(self.shares[kind] >= least for kind, least in DEMANDED.items())


def measure(keys: int, rows: int, topk: int, device: torch.device, backend: str | None = None, seed: int = 0) -> Agreement:
    """Shares for one context length. backend: the same as in gdn.indexer_topk."""
    maker = _Layer(keys, rows, device, seed)
    starts = torch.zeros(rows, dtype=torch.int32, device=device)
    ranges = starts, torch.full_like(starts, keys)

    def selected(scores: Tensor) -> Tensor:
        found: Tensor = gdn.topk_indices(scores, topk, *ranges, backend="reference" if backend == "reference" else None)
        return found

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # products of float32 matrices in float32, not in TF32
    try:
        exact = reference.mqa_logits(*maker.exact(), *ranges, scale=_DIM**-0.5)
        expected = reference.topk_indices(exact, topk, *ranges)
        q, k, weights, scale = maker.prepared(torch.bfloat16)
        options: dict[str, Any] = {"scale": _DIM**-0.5, "backend": backend}
        found = {
            BF16: selected(gdn.mqa_logits(q, k, weights, *ranges, **options)),
            BF16_OUT: selected(gdn.mqa_logits(q, k, weights, *ranges, out_dtype=torch.bfloat16, **options)),
        }
        q, k, weights, scale = maker.prepared(torch.uint8)
        options = {"backend": backend}
        found[FP8] = selected(gdn.mqa_logits(q, k, weights, *ranges, k_scale=scale, **options))
        found[FP8_EXACT] = selected(reference.mqa_logits(q, k, weights, *ranges, k_scale=scale))
    finally:
        torch.set_float32_matmul_precision(precision)
    return Agreement(keys, {kind: share(indices, expected, keys) for kind, indices in found.items()})


def share(found: Tensor, expected: Tensor, keys: int) -> float:
    """Share of the entries of `expected` that `found` has, in any order: int [rows, k] each, -1 = no entry."""
    listed = torch.zeros(expected.shape[0], keys + 1, dtype=torch.bool, device=expected.device)
    listed.scatter_(1, torch.where(found >= 0, found.long(), keys), True)
    real = expected >= 0
    hits = listed.gather(1, expected.long().clamp(min=0)) & real
    return float(hits.sum() / real.sum())


class _Layer:
    """Random projections and norm weights of an indexer, with the exact and the prepared operands."""

    def __init__(self, keys: int, rows: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, factor: float = 1.0) -> Tensor:
            return (torch.randn(*shape, dtype=torch.float32, device=device, generator=generator) * factor).to(torch.bfloat16)

        self._keys, self._device = keys, device
        self._q, self._k, self._weights = normal(rows, _HEADS, _DIM), normal(keys, 1, _DIM), normal(rows, _HEADS)
        self._q_norm, self._k_norm = normal(_DIM, factor=0.1), normal(_DIM, factor=0.1)
        self._key_positions = torch.arange(keys, device=device)
        power = torch.arange(_ROTARY // 2, dtype=torch.float32, device=device) / (_ROTARY // 2)
        angle = self._key_positions[:, None] / 10000.0**power
        self._table = torch.cat([angle.cos(), angle.sin()], dim=1)
        self._q_positions = torch.full((rows,), keys - 1, device=device)

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        given = (self._q, self._q_norm, self._q_positions), (self._k, self._k_norm, self._key_positions)
        q, k = (rope(rms_norm(x, norm, 1e-6, True), positions, self._table, _ROTARY) for x, norm, positions in given)
        return q, k, self._weights.float()

    def prepared(self, cache_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, weights and k_scale for the logits; the keys go through a cache of this dtype."""
        is_fp8 = cache_dtype == torch.uint8
        pages = -(-self._keys // _PAGE)
        cache = torch.zeros(pages, _PAGE, _DIM + (4 if is_fp8 else 0), dtype=cache_dtype, device=self._device)
        prepare: Callable[..., tuple[Tensor, Tensor | None]] = gdn.prepare_indexer
        # The operator prepares queries and keys of the same tokens; the queries of this call are not used.
        prepare(
            self._k, self._k, None, self._key_positions, self._table, self._q_norm, self._k_norm, cache, self._key_positions,
            rotary_dim=_ROTARY,
        )  # fmt: skip
        q, weights = prepare(
            self._q, None, self._weights, self._q_positions, self._table, self._q_norm, None, None, None,
            rotary_dim=_ROTARY, fp8=is_fp8,
        )  # fmt: skip
        tables = torch.arange(pages, dtype=torch.int32, device=self._device)[None]
        bounds = torch.tensor([0, self._keys], dtype=torch.int32, device=self._device)
        k, scale = gdn.gather_indexer_cache(cache, tables, bounds, num_rows=self._keys)
        return q, k, weights, scale
