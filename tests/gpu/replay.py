"""Calls of the recurrent operator with a ring: sequences at any position, and NaN in everything that is not to be read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from gdn.ops.delta_rule.problem import entry_width, state_position

Tensor = torch.Tensor
NULL_SLOT = 0
_GAP = 8  # elements between slots of the pool
_WIDER = 8  # elements of a ring's row behind those that are used


@dataclass(frozen=True)
class Member:
    """A sequence of a call; as in gdn.ops.delta_rule.problem."""

    p: int  # committed tokens
    p0: int = 0  # state_tokens of its slot
    a: int = 1  # accepted tokens of its last call
    tokens: int = 1
    is_null: bool = False


@dataclass(frozen=True)
class Scene:
    """What a call is made from."""

    members: Sequence[Member]
    heads: tuple[int, int, int] = (2, 2, 4)  # of q, k, v
    dims: tuple[int, int] = (128, 128)  # K, V
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    v_first: bool = True
    rows: int = 16
    fold_every: int = 15
    phase: int = 0
    has_drafts: bool = False  # num_accepted_tokens is given
    parents: Sequence[int] | None = None
    is_raw: bool = True  # gates and beta come raw
    has_norm: bool = True
    index_dtype: torch.dtype = torch.int32
    padded: int = 3  # rows beyond the last sequence
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # more arguments

    @property
    def state_heads(self) -> int:
        return max(self.heads[0], self.heads[2])

    @property
    def num_slots(self) -> int:
        """Of the pool; the last one has no ring."""
        return 2 * len(self.members) + 4

    def slots(self) -> list[int]:
        """A slot of each sequence, in no order."""
        count = len(self.members)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return [NULL_SLOT if s.is_null else 2 + 2 * n for s, n in zip(self.members, order, strict=True)]

    def arguments(self, device: torch.device | str) -> dict[str, Any]:
        """Arguments of the operator: the pool, the ring and the counts are NaN or out of range where nothing is to be read."""
        make = torch.Generator().manual_seed(self.seed)
        (q_heads, k_heads, v_heads), (K, V), H = self.heads, self.dims, self.state_heads
        lengths = [s.tokens for s in self.members]
        count, slots = sum(lengths) + self.padded, self.slots()

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make)

        width = (q_heads + k_heads) * K + v_heads * V + 8
        mixed = randn(1, count, width).to(self.dtype)
        q, k, v, _ = mixed.split([q_heads * K, k_heads * K, v_heads * V, 8], -1)
        g, beta = randn(1, count, H), randn(1, count, H)
        gates: dict[str, Any] = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        if self.is_raw:
            gates |= {"A_log": randn(H), "dt_bias": randn(H), "g": g.to(self.dtype), "beta": beta.to(self.dtype)}
        else:
            gates = {"g": -g.exp() / 8, "beta": beta.sigmoid()}
        if not self.has_norm:
            q, k = q * K**-0.5, k * K**-0.5

        num_slots = self.num_slots
        inner = (V, K) if self.v_first else (K, V)
        pool = torch.full((num_slots, H * K * V + _GAP), torch.nan, dtype=self.state_dtype)
        pool = pool[:, : H * K * V].unflatten(1, (H, *inner))
        row = entry_width(k_heads, H, K, V)
        ring = torch.full((num_slots - 1, self.rows, _width(row)), torch.nan)
        counts = torch.full((num_slots,), -(2**31), dtype=torch.int32)
        for slot, s in zip(slots, self.members, strict=True):
            if slot == NULL_SLOT:
                continue
            pool[slot] = randn(H, *inner).to(self.state_dtype)
            counts[slot] = s.p0
            for position in range(self.first_live(s), s.p):
                keys = torch.nn.functional.normalize(randn(k_heads, K), dim=-1).flatten()
                entry = [keys, randn(H * V), -randn(H).exp() / 8]
                ring[slot, position % self.rows, :row] = torch.cat(entry)
        null = [slot == NULL_SLOT for slot in slots]
        p = [-(2**31) if is_null else s.p for is_null, s in zip(null, self.members, strict=True)]
        arguments = {
            "q": q.unflatten(-1, (q_heads, K)), "k": k.unflatten(-1, (k_heads, K)), "v": v.unflatten(-1, (v_heads, V)), **gates,
            "initial_state": pool, "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            "ssm_state_indices": torch.tensor(slots, dtype=self.index_dtype), "ring": ring, "state_tokens": counts,
            "num_computed_tokens": torch.tensor(p, dtype=torch.int32),
        }  # fmt: skip
        if self.has_drafts:
            accepted = [-7 if is_null else s.a for is_null, s in zip(null, self.members, strict=True)]
            arguments["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
        if self.parents is not None:
            arguments["parent_token"] = torch.tensor([*self.parents, *[0] * self.padded], dtype=torch.int32)
        return {name: on(value, device) for name, value in arguments.items()} | {
            "fold_every": self.fold_every, "fold_phase": self.phase, "null_slot": NULL_SLOT, "state_v_first": self.v_first,
            "use_qk_l2norm_in_kernel": self.has_norm, **{name: on(value, device) for name, value in self.options.items()},
        }  # fmt: skip

    def first_live(self, s: Member) -> int:
        """Position of the first live entry."""
        return min(state_position(s.p0, s.p - s.a, self.fold_every, self.phase), s.p)

    def folds(self, s: Member) -> bool:
        return state_position(s.p0, s.p, self.fold_every, self.phase) > self.first_live(s)

    def written(self) -> tuple[Tensor, Tensor]:
        """Masks of what a call may write: slots of the pool, and elements of the ring."""
        row = entry_width(self.heads[1], self.state_heads, *self.dims)
        pool = torch.zeros(self.num_slots, dtype=torch.bool)
        ring = torch.zeros(self.num_slots - 1, self.rows, _width(row), dtype=torch.bool)
        for slot, s in zip(self.slots(), self.members, strict=True):
            if slot != NULL_SLOT and s.tokens:
                pool[slot] = self.folds(s)
                for i in range(s.tokens):
                    ring[slot, (s.p + i) % self.rows, :row] = True
        return pool, ring


def _width(used: int) -> int:
    """Elements of a ring's row."""
    return -(-used // 4) * 4 + _WIDER


def on(value: Any, device: torch.device | str) -> Any:
    """A tensor on the device, its strides kept; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    if value.is_contiguous():
        return value.to(device)
    storage = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0).to(device)
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def in_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call for the reference in float64; a state is not rounded there."""
    skipped = ("A_log", "dt_bias")
    found = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value.double() if value.is_floating_point() and name not in skipped else value.clone()
    found.pop("rounding_seed", None)
    return found
