"""Calls of `fold_states` and `accept_draft_tree`: sequences at any position, and NaN in every entry and slot not to be read."""

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gdn.ops.delta_rule.problem import entry_width, most_tokens, state_position

Tensor = torch.Tensor
NULL_SLOT = 0


@dataclass(frozen=True)
class Fold:
    """What a call of `fold_states` is made from; sequences are drawn."""

    sequences: int = 9
    layers: int | None = 3  # None: tensors without a dimension of layers
    heads: tuple[int, int] = (2, 4)  # of keys, of states
    dims: tuple[int, int] = (128, 128)  # K, V
    state_dtype: torch.dtype = torch.float32
    v_first: bool = True
    rows: int = 22
    fold_every: int = 15
    has_accepted: bool = True
    has_final: bool = False
    has_rounding: bool = False
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    def arguments(self, device: torch.device | str) -> dict[str, Any]:
        """A slot of each sequence and as many to write, then some of nobody; the last slot has no ring."""
        draw, make = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        (key_heads, heads), (K, V), layers = self.heads, self.dims, self.layers or 1
        slots = list(range(1, 2 * self.sequences + 3))
        draw.shuffle(slots)
        own, targets, size = slots[: self.sequences], slots[self.sequences : 2 * self.sequences], len(slots) + 2
        inner = (V, K) if self.v_first else (K, V)
        pool = torch.full((layers, size, heads, *inner), torch.nan, dtype=self.state_dtype)
        width = entry_width(key_heads, heads, K, V)
        ring = torch.full((layers, size - 1, self.rows, -(-width // 4) * 4 + 8), torch.nan)
        counts = torch.full((size,), -(2**31), dtype=torch.int32)
        computed, accepted = [], []
        most = most_tokens(self.rows, self.fold_every) if self.has_accepted else 1
        phase = draw.randrange(self.fold_every)
        for n, slot in enumerate(own):
            if n == 1:  # padding
                own[n] = NULL_SLOT
                computed.append(-(2**31))
                accepted.append(-7)
                continue
            written = draw.choice([0, 3, 40, 2**24, 2**31 - 200])
            tokens = 0 if n == 2 else draw.choice([0, 1, self.fold_every - 1, self.fold_every, draw.randint(0, 100)])
            computed.append(written + tokens)
            accepted.append(draw.randint(1, most))
            counts[slot] = written
            pool[:, slot] = torch.randn(layers, heads, *inner, generator=make).to(self.state_dtype)
            if n == 3:  # the slot without a ring: its state is copied where another slot is to be written
                own[n], counts[size - 1], computed[n] = size - 1, written, written
                pool[:, size - 1] = pool[:, slot]
                continue
            for layer in range(layers):
                of_layer = (phase + layer) % self.fold_every
                first = state_position(written, computed[n] - accepted[n], self.fold_every, of_layer)
                for position in range(first, computed[n]):
                    keys = torch.nn.functional.normalize(torch.randn(key_heads, K, generator=make), dim=-1).flatten()
                    entry = [keys, torch.randn(heads * V, generator=make), -torch.rand(heads, generator=make) / 4]
                    ring[layer, slot, position % self.rows, :width] = torch.cat(entry)
        if self.layers is None:
            pool, ring = pool[0], ring[0]
        indices = torch.tensor(own, dtype=self.index_dtype)
        final = torch.tensor([NULL_SLOT if n == 4 else slot for n, slot in enumerate(targets)], dtype=self.index_dtype)
        arguments = {
            "ssm_state": pool, "state_indices": indices, "ring": ring, "state_tokens": counts,
            "num_computed_tokens": torch.tensor(computed, dtype=torch.int32),
            "num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32) if self.has_accepted else None,
            "final_state_indices": final if self.has_final else None,
            "rounding_seed": torch.tensor([self.seed + 5]) if self.has_rounding else None,
        }  # fmt: skip
        found = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
        return found | {
            "num_k_heads": key_heads, "fold_every": self.fold_every, "fold_phase": phase, "state_v_first": self.v_first,
            "null_slot": NULL_SLOT,
        }  # fmt: skip


@dataclass(frozen=True)
class Trees:
    """What a call of `accept_draft_tree` is made from; trees are drawn."""

    lengths: tuple[int, ...] = (4, 1, 0, 4, 3, 2, 4)  # nodes of each tree; the fourth sequence is padding
    layers: int | None = 3
    rows: int = 22
    width: int = 200
    dim: int | None = 256  # channels; None: no windows
    conv_dtype: torch.dtype = torch.bfloat16
    channels_contiguous: bool = True
    conv_width: int = 4
    index_dtype: torch.dtype = torch.int32
    offsets_dtype: torch.dtype = torch.int32
    seed: int = 0

    def arguments(self, device: torch.device | str) -> dict[str, Any]:
        draw, make = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        count, layers, most = len(self.lengths), self.layers or 1, max([1, *self.lengths])
        size = count + 3
        slots = draw.sample(range(1, size), count)
        is_null = [n == 3 for n in range(count)]
        ring, windows = torch.randn(layers, size, self.rows, self.width, generator=make), None
        if self.dim is not None:
            columns = self.conv_width - 2 + most
            shape = (columns, self.dim) if self.channels_contiguous else (self.dim, columns)
            windows = torch.randn(layers, size, *shape, generator=make).to(self.conv_dtype)
            windows = windows.mT if self.channels_contiguous else windows
        if self.layers is None:
            ring, windows = ring[0], None if windows is None else windows[0]
        nodes = [draw.randrange(length) if length else -5 for length in self.lengths]
        computed = [draw.choice([0, 7, 21, 1000, 2**31 - 100]) for _ in self.lengths]
        arguments = {
            "ring": ring, "conv_state": windows,
            "state_indices": torch.tensor(
                [NULL_SLOT if null else s for s, null in zip(slots, is_null, strict=True)], dtype=self.index_dtype
            ),
            "parent_token": torch.tensor([draw.randint(-1, i - 1) for m in self.lengths for i in range(m)], dtype=torch.int32),
            "accepted_nodes": torch.tensor(nodes, dtype=torch.int32),
            "num_computed_tokens": torch.tensor(computed, dtype=torch.int32),
            "num_accepted_tokens": torch.tensor([-9 - n for n in range(count)], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, *accumulate(self.lengths)], dtype=self.offsets_dtype),
        }  # fmt: skip
        found = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
        return found | {"conv_width": self.conv_width, "null_slot": NULL_SLOT}
