"""Sequences that decode by replay from a pool with reused slots, next to one token recurrence in float64 for each.

A `Walk` owns a pool, a ring and the counts of slots, on any device; its methods are the events in the life of a slot. The ring is
NaN at the start, and after an explicit fold.
"""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import Any

import torch

import gdn
from gdn.ops.delta_rule.problem import entry_width
from gdn.ops.delta_rule.tokens import Tokens

Tensor = torch.Tensor
CASES = ("layer", "slow", "near", "kept", "near kept", "cut", "underflow")  # those of the accuracy table, in its order


@dataclass
class Sequence:
    """One sequence: its slot, committed and last accepted tokens, and the exact state [HS, K, V]."""

    slot: int
    truth: Tensor
    case: str = "layer"
    tokens: int = 0
    accepted: int = 1
    outputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # found and exact, of committed tokens


@dataclass
class Shape:
    """Sizes of a walk."""

    heads: tuple[int, int, int] = (2, 2, 4)  # of q, k, v
    k_dim: int = 16
    v_dim: int = 16
    dtype: torch.dtype = torch.float32  # of q, k, v
    pool_dtype: torch.dtype | None = None  # None = float32, or float64 for float64 tokens
    most: int = 1  # tokens of a sequence in one call
    fold_every: int = 5
    fold_phase: int = 0
    spare_rows: int = 0
    slots: int = 8
    ring_slots: int | None = None  # None = all
    state_v_first: bool = True

    @property
    def num_heads(self) -> int:
        return max(self.heads[0], self.heads[2])

    @property
    def rows(self) -> int:
        return self.fold_every - 1 + 2 * self.most + self.spare_rows


class Walk:
    """Pools, rings and the sequences on them."""

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cpu", **options: Any) -> None:
        """options: of every decode call (backend, rounding_seed)."""
        self.shape, self.device, self.options = shape, device, options
        self.generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if shape.dtype == torch.float64 else torch.float32
        inner = (shape.v_dim, shape.k_dim) if shape.state_v_first else (shape.k_dim, shape.v_dim)
        pool = torch.randn(shape.slots, shape.num_heads, *inner, generator=self.generator)
        self.pool = pool.to(device=device, dtype=shape.pool_dtype or wide)
        width = entry_width(shape.heads[1], shape.num_heads, shape.k_dim, shape.v_dim)
        ring_slots = shape.slots if shape.ring_slots is None else shape.ring_slots
        ring = torch.full((ring_slots, shape.rows, -(-width // 4) * 4), torch.nan, dtype=wide)
        self.ring = ring.to(device)
        self.state_tokens = torch.full((shape.slots,), 77, dtype=torch.int32, device=device)  # of sequences that are gone

    # ------------------------------------------------------------------------------------------------------------ tokens

    def rows_of(self, cases: Sequences[str], lengths: Sequences[int]) -> dict[str, Tensor]:
        """q, k, v, g, beta of packed sequences."""
        shape, parts = self.shape, []
        for case, length in zip(cases, lengths, strict=True):
            parts.append(self._rows(case, length))
        names = ("q", "k", "v", "g", "beta")
        joined = {name: torch.cat([part[i] for part in parts])[None] for i, name in enumerate(names)}
        halves = {name: joined[name].to(shape.dtype) for name in ("q", "k", "v")}
        gates = {name: joined[name].to(self.ring.dtype) for name in ("g", "beta")}
        return {name: x.to(self.device) for name, x in (halves | gates).items()}

    def _rows(self, case: str, length: int) -> tuple[Tensor, ...]:
        shape, heads = self.shape, self.shape.num_heads

        def normal(*sizes: int) -> Tensor:
            return torch.randn(length, *sizes, generator=self.generator)

        def uniform() -> Tensor:
            return torch.rand(length, heads, generator=self.generator)

        q, k, v = normal(shape.heads[0], shape.k_dim), normal(shape.heads[1], shape.k_dim), normal(shape.heads[2], shape.v_dim)
        g, beta = -torch.exp(uniform() * 9.21 - 6.9), uniform()  # 0.001 to 10
        if "near" in case:
            k = 3 + k  # keys with a cosine of 0.9
        if case == "slow":
            g, beta = torch.full_like(g, -(2.0**-12)), torch.full_like(g, 2.0**-6)
        if case == "near":
            g, beta = torch.full_like(g, -0.001), torch.full_like(g, 0.5)
        if case == "kept":
            g, beta = torch.zeros_like(g), beta.round()
        if case == "near kept":
            g, beta = torch.zeros_like(g), torch.ones_like(g)
        if case == "cut":
            g = torch.where(uniform() < 0.05, -torch.inf, g)
        if case == "underflow":
            g = torch.where(uniform() < 0.1, -60 * uniform(), g)
        return q, k, v, g, beta

    def exact(self, rows: dict[str, Tensor], start: int, end: int, before: Tensor, parents: list[int] | None) -> tuple[Any, ...]:
        """Outputs of tokens start..end and the state after each, of the recurrence in float64."""
        wide = {name: x.cpu().double() for name, x in rows.items()}
        tokens = Tokens(*(wide[name] for name in ("q", "k", "v", "g", "beta")), None, True, False, None, None, False)
        q, k, v, g, beta = tokens.rows(0, start, end)
        outputs, states = [], []
        for i in range(end - start):
            parent = i - 1 if parents is None else parents[i]
            state = g[:, i].exp()[:, None, None] * (before if parent < 0 else states[parent])
            u = beta[:, i, None] * (v[:, i] - (k[:, i, None] @ state)[:, 0])
            state = state + k[:, i, :, None] * u[:, None]
            outputs.append((q[:, i, None] @ state)[:, 0])
            states.append(state)
        return outputs, states

    # ------------------------------------------------------------------------------------------------------------ events

    def start(self, slot: int, case: str = "layer", prompt: int = 3) -> Sequence:
        """A sequence whose prompt is prefilled into a slot, whatever was there."""
        one = Sequence(slot, torch.zeros(self.shape.num_heads, self.shape.k_dim, self.shape.v_dim).double(), case)
        self.prefill(one, prompt, is_first=True)
        return one

    def prefill(self, one: Sequence, length: int, *, is_first: bool = False, is_counted: bool = True) -> None:
        """A prompt chunk. is_counted False: the caller forgets to set the count."""
        rows = self.rows_of([one.case], [length])
        mask = torch.tensor([not is_first], device=self.device)
        options = {k: v for k, v in self.options.items() if k == "backend"}
        gdn.chunk_gated_delta_rule(
            **rows, initial_state=self.pool, use_qk_l2norm_in_kernel=True, state_v_first=self.shape.state_v_first,
            cu_seqlens=self.ints([0, length]), state_indices=self.ints([one.slot]), has_initial_state=mask, **options,
        )  # fmt: skip
        _, states = self.exact(rows, 0, length, one.truth, None)
        one.truth, one.tokens, one.accepted = states[-1], one.tokens + length, 1
        if is_counted:
            self.state_tokens[one.slot] = one.tokens

    def decode(
        self, sequences: Sequences[Sequence], lengths: Sequences[int] | None = None, *,
        parents: Sequences[list[int]] | None = None, padded: int = 0,
    ) -> Tensor:  # fmt: skip
        """A call of one token each, or of drafts or trees, of which a random number or path is accepted; returns o.

        padded: rows beyond the sequences, as in a captured graph.
        """
        shape = self.shape
        lengths = [1] * len(sequences) if lengths is None else lengths
        bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
        rows = self.rows_of([one.case for one in sequences], lengths)
        call: dict[str, Any] = {}
        for name, x in rows.items():
            rest = x.new_full((1, padded, *x.shape[2:]), torch.nan)
            rows[name] = torch.cat([x, rest], 1)
        slots = [one.slot for one in sequences] + [-1] * padded
        if shape.most > 1:
            call["num_accepted_tokens"] = self.ints([one.accepted for one in sequences] + [99] * padded)
        if parents is not None:
            call["parent_token"] = self.ints([node for tree in parents for node in tree] + [-1] * padded)
        o, _ = gdn.fused_recurrent_gated_delta_rule(
            **rows, initial_state=self.pool, cu_seqlens=self.ints(bounds + bounds[-1:] * padded),
            ssm_state_indices=self.ints(slots), use_qk_l2norm_in_kernel=True,
            **self.replay([one.tokens for one in sequences] + [-5] * padded), **call, **self.options,
        )  # fmt: skip
        paths = []
        for n, one in enumerate(sequences):
            if not lengths[n]:
                paths.append([])
                continue
            tree = None if parents is None else parents[n]
            outputs, states = self.exact(rows, bounds[n], bounds[n + 1], one.truth, tree)
            node = self.draw(lengths[n])
            path = list(range(node + 1)) if tree is None else _path(tree, node)
            one.outputs += [(o[0, bounds[n] + i].cpu().double(), outputs[i]) for i in path]
            one.truth = states[node]
            paths.append(path)
        self._commit(sequences, paths, bounds, parents)
        return o

    def _commit(
        self, sequences: Sequences[Sequence], paths: list[list[int]], bounds: list[int], parents: Sequences[list[int]] | None
    ) -> None:
        """Counts what was accepted; of trees the entries move."""
        if parents is not None:
            accepted = self.ints([one.accepted for one in sequences])
            gdn.accept_draft_tree(
                self.ring, None, self.ints([one.slot for one in sequences]), self.ints([i for tree in parents for i in tree]),
                self.ints([path[-1] if path else 0 for path in paths]), self.ints([one.tokens for one in sequences]), accepted,
                query_start_loc=self.ints(bounds), conv_width=4,
            )  # fmt: skip
            for path, count in zip(paths, accepted.tolist(), strict=True):
                assert not path or count == len(path)
        for one, path in zip(sequences, paths, strict=True):
            if path:
                one.tokens, one.accepted = one.tokens + len(path), len(path)

    def fold(self, sequences: Sequences[Sequence], into: Sequences[int] | None = None) -> None:
        """Explicit folds; those in place empty the ring, whose rows become NaN."""
        shape = self.shape
        accepted = self.ints([one.accepted for one in sequences]) if shape.most > 1 else None
        seed = {name: value for name, value in self.options.items() if name in ("rounding_seed", "backend")}
        gdn.fold_states(
            self.pool, self.ints([one.slot for one in sequences]), self.ring, self.state_tokens,
            self.ints([one.tokens for one in sequences]), num_k_heads=shape.heads[1], fold_every=shape.fold_every,
            fold_phase=shape.fold_phase, num_accepted_tokens=accepted, state_v_first=shape.state_v_first,
            final_state_indices=None if into is None else self.ints(list(into)), **seed,
        )  # fmt: skip
        for one in sequences:
            if into is None:
                self.ring[one.slot] = torch.nan

    def fork(self, one: Sequence, slot: int) -> Sequence:
        """A copy of a sequence in another slot."""
        for tensor in (self.pool, self.ring, self.state_tokens):
            tensor[slot] = tensor[one.slot].clone()
        return Sequence(slot, one.truth.clone(), one.case, one.tokens, one.accepted)

    # ------------------------------------------------------------------------------------------------------------- parts

    def replay(self, tokens: list[int]) -> dict[str, Any]:
        """The arguments of a decode call about its ring."""
        shape = self.shape
        return {
            "ring": self.ring, "state_tokens": self.state_tokens, "num_computed_tokens": self.ints(tokens),
            "fold_every": shape.fold_every, "fold_phase": shape.fold_phase, "state_v_first": shape.state_v_first,
        }  # fmt: skip

    def ints(self, values: Sequences[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))

    def draw_lengths(self, count: int, least: int = 0) -> list[int]:
        return [least + self.draw(self.shape.most + 1 - least) for _ in range(count)]

    def draw_trees(self, lengths: Sequences[int]) -> list[list[int]]:
        return [[self.draw(i + 1) - 1 for i in range(length)] for length in lengths]

    def state_of(self, slot: int) -> Tensor:
        """[HS, K, V] in float64, as it is in the pool."""
        state = self.pool[slot].cpu().double()
        return state.mT if self.shape.state_v_first else state


def _path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def error_of(one: Sequence) -> float:
    """|o - exact| / |exact| of all committed outputs of the worst head."""
    found, exact = (torch.stack(list(x)) for x in zip(*one.outputs, strict=True))
    return worst_head(found.transpose(0, 1), exact.transpose(0, 1))


def worst_head(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| of the worst of the first dimension; infinite for a NaN."""
    size = exact.flatten(1).norm(dim=1).clamp(min=1e-30)
    return float(torch.nan_to_num((found - exact).flatten(1).norm(dim=1) / size, nan=torch.inf).max())


def state_error(walk: Walk, one: Sequence, slot: int | None = None) -> float:
    return worst_head(walk.state_of(one.slot if slot is None else slot), one.truth)
