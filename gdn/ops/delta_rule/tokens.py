"""Tokens of a delta-rule call in plain torch, with norm, scale and gates applied, and states in their slots.

Stochastic rounding of a bfloat16 state: definition of its noise, which every backend reproduces bit for bit.

The noise of an element depends on the seed, the pool slot it is written to, its state head and its place in the head, and
on nothing else: not on the layout of the state, the order of work or the batch. All arithmetic is modulo 2**32:

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    key      = mix(mix(mix(mix(seed & 0xffffffff) ^ (seed >> 32)) ^ slot) ^ head)          one per (slot, head)
    noise    = mix(key ^ (k_index * V + v_index)) >> 16                                    16 bits, one per element
    stored   = upper 16 bits of (bits of the float32 value + noise)

`seed >> 32` is the upper half of the 64 bits, `slot` the low 32 bits of the row index of the pool, `k_index * V + v_index`
the same for both state layouts. Adding noise uniform in [0, 2**16) to the bits and cutting the low half rounds the
magnitude up with a probability equal to the fraction that is cut, so the rounded value is right on average. An infinity
or NaN is stored as ordinary rounding stores it.

It pays off where a step changes the state by less than half a unit in the last place, at least 2**-9 of a value: rounding to
nearest then stores the old value again in every step, and a head that should forget a fraction of 2**-12 per token forgets
nothing. Where every step changes more than that, rounding to nearest has the smaller error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.reference_modes import compute_dtype, ranges

_MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser above, on int64 tensors that hold values in [0, 2**32)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK  # wraps in int64; the low 32 bits are right
    return x ^ (x >> 16)


def noise(seed: int, slot: int, num_heads: int, k_dim: int, v_dim: int, device: torch.device) -> Tensor:
    """[heads, K, V] int64 in [0, 2**16)."""
    key = torch.tensor(seed & _MASK, dtype=torch.int64, device=device)
    key = mix(mix(mix(key) ^ ((seed >> 32) & _MASK)) ^ (slot & _MASK))
    head = torch.arange(num_heads, dtype=torch.int64, device=device).view(-1, 1, 1)
    element = torch.arange(k_dim * v_dim, dtype=torch.int64, device=device).view(1, k_dim, v_dim)
    return mix(mix(key ^ head) ^ element) >> 16


def stochastic_bfloat16(state: Tensor, seed: int, slot: int) -> Tensor:
    """state [heads, K, V], rounded to bfloat16 with the noise of (seed, slot)."""
    value = state.to(torch.float32)
    bits = value.view(torch.int32).to(torch.int64) & _MASK
    num_heads, k_dim, v_dim = state.shape
    bits = (bits + noise(seed, slot, num_heads, k_dim, v_dim, state.device)) & 0xFFFF0000
    signed = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    return torch.where(value.isfinite(), signed.view(torch.float32), value).to(torch.bfloat16)


L2_NORM_EPS = 1e-6  # added to the sum of squares


@dataclass
class Tokens:
    """Tokens of a call: `rows` returns a range of them with norm, scale and gates applied and heads expanded."""

    q: Tensor  # [B, T, Hq, K]
    k: Tensor  # [B, T, Hk, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None  # [B, T, HS]
    beta: Tensor | None  # [B, T, HS]
    scale: float | None
    use_qk_l2norm: bool
    use_gate: bool
    A_log: Tensor | None  # [HS]
    dt_bias: Tensor | None  # [HS]
    use_beta_sigmoid: bool

    def __post_init__(self) -> None:
        self.dtype = compute_dtype(self.q)
        self.num_heads = max(self.q.shape[2], self.v.shape[2])

    def rows(self, b: int, start: int, end: int) -> tuple[Tensor, ...]:
        """q, k [HS, T, K], v [HS, T, V], g (log decay), beta [HS, T] of tokens start..end."""
        q, k, v = (self._expanded(x[b, start:end]) for x in (self.q, self.k, self.v))
        if self.use_qk_l2norm:
            q = q * (q.square().sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt()
            k = k * (k.square().sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt()
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        g, beta = q.new_zeros(self.num_heads, end - start), q.new_ones(self.num_heads, end - start)
        if self.g is not None:
            g = self._log_decay(self.g[b, start:end].to(self.dtype)).t()
        if self.beta is not None:
            beta = self.beta[b, start:end].to(self.dtype).t()
            beta = beta.sigmoid() if self.use_beta_sigmoid else beta
        return q * scale, k, v, g, beta

    def key_factors(self, b: int, start: int, end: int) -> Tensor:
        """1 / |k| [HS, T] of tokens start..end, 1 without the norm."""
        squares = self._expanded(self.k[b, start:end]).square().sum(-1)
        return (squares + L2_NORM_EPS).rsqrt() if self.use_qk_l2norm else torch.ones_like(squares)

    def _expanded(self, x: Tensor) -> Tensor:
        """[T, heads, D] -> [HS, T, D]: state head s reads head s // (HS // heads)."""
        return x.to(self.dtype).repeat_interleave(self.num_heads // x.shape[1], dim=1).transpose(0, 1)

    def _log_decay(self, g: Tensor) -> Tensor:
        if not self.use_gate:
            return g
        assert self.A_log is not None  # checked by the operator
        a = g if self.dt_bias is None else g + self.dt_bias.to(self.dtype)
        return -self.A_log.to(self.dtype).exp() * torch.nn.functional.softplus(a, beta=1.0, threshold=20.0)

    def zero_output(self) -> Tensor:
        """[B, T, HS, V]: rows that no live sequence owns stay zero."""
        return self.v.new_zeros(*self.q.shape[:2], self.num_heads, self.v.shape[-1])

    def zero_state(self) -> Tensor:
        return self.q.new_zeros(self.num_heads, self.q.shape[-1], self.v.shape[-1], dtype=self.dtype)

    def new_state(self, num_sequences: int, state_v_first: bool) -> Tensor:
        k_dim, v_dim = self.q.shape[-1], self.v.shape[-1]
        inner = (v_dim, k_dim) if state_v_first else (k_dim, v_dim)
        return self.q.new_zeros(num_sequences, self.num_heads, *inner, dtype=self.dtype)


def sequences_of(q: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(batch row, first token, end) of every sequence; a length below zero counts as empty."""
    if cu_seqlens is None:
        return [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    return [(0, start, end) for start, end in ranges(cu_seqlens)]


def columns_of(indices: Tensor) -> list[list[int]]:
    return (indices[:, None] if indices.dim() == 1 else indices).tolist()


def load_state(pool: Tensor, slot: int, state_v_first: bool, dtype: torch.dtype) -> Tensor:
    """Copy of the state in a slot, as [HS, K, V]: a draft tree needs it again after the slot has been written."""
    state = pool[slot].to(dtype, copy=True)
    return state.mT if state_v_first else state


def store_state(pool: Tensor, slot: int, state: Tensor, state_v_first: bool, seed: int | None = None) -> None:
    """Stores state [HS, K, V] in a slot, rounded to the pool's dtype: to nearest, or stochastically with a seed."""
    if seed is not None and pool.dtype == torch.bfloat16:
        state = stochastic_bfloat16(state, seed, slot)
    pool[slot].copy_(state.mT if state_v_first else state)
