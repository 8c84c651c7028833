"""Sequences over ranks for the GPU tests of context parallel, and how far two results may be apart.

What the states before a part still count for after it depends on the decay, so there are two kinds of gates. Strong ones are
the ordinary case: a part of a few hundred tokens forgets all, and an error in a part's transition P would not be seen. With weak
ones only the delta rule itself forgets, by a factor of about 1 - beta / K a token, and the states before the first part are as
large as what is added.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import gdn
import gdn.distributed
from gdn.distributed import composition, split_tokens
from gdn.distributed.composition import LEAST_SEGMENT
from gdn.ops.delta_rule import checks
from gdn.testing import compare

H, HV, D = 16, 32, 128
# Two outputs of kernels with 16-bit operands: each is within about 4e-3 of exact.
O_ERROR, STATE_ERROR = 1e-2, 8e-3


@dataclass(frozen=True)
class Case:
    """Sequences and their gates."""

    lengths: list[list[int]]  # [sequences][ranks]
    is_weak: bool = False
    least_segment: int = LEAST_SEGMENT
    segments: int = 1  # of a part, at these sizes
    heads: tuple[int, int] = (H, HV)


def cases(size: int) -> dict[str, Case]:
    """The cases for this number of ranks."""
    short = [300, 65, 130, 64][-size:]
    return {
        "one sequence": Case([split_tokens(9000, size)]),
        "several, some of them empty": Case(
            [[700] * size, [0] * (size - 1) + [130], [64, 1] + [0] * (size - 2), [0] * size]
        ),
        "one sequence, weak decay": Case([short], is_weak=True),
        "several, weak decay": Case([[200] * size, short, short[::-1], [64] * size], is_weak=True),
        "two segments": Case([split_tokens(8192 * size + 300, size)], segments=2),
        "two segments, weak decay": Case([short], is_weak=True, least_segment=32, segments=2),
        "many segments, weak decay": Case(
            [[400, 390, 512, 500][:size]], is_weak=True, least_segment=64, segments=6, heads=(4, 8)
        ),
    }  # fmt: skip


@contextmanager
def segmented(case: Case) -> Iterator[None]:
    """Cuts a part into segments as the case says."""
    with mock.patch.object(composition, "LEAST_SEGMENT", case.least_segment):
        yield


class Sequences:
    """The sequences of a case: tokens of all ranks and the states before them, the same on every process."""

    def __init__(
        self, case: Case, device: torch.device | str = "cuda", dtype: torch.dtype = torch.bfloat16, dim: int = D
    ) -> None:
        self.case, self.device, count = case, device, len(case.lengths)
        heads, states = case.heads
        self.totals = [sum(parts) for parts in case.lengths]
        self.slots = torch.arange(1, count + 1, device=device, dtype=torch.int32)

        def random(*shape: int, seed: int = 0) -> Tensor:
            return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))

        def tokens(seed: int, *shape: int) -> Tensor:
            return random(1, sum(self.totals), *shape, seed=seed).to(dtype)

        self.tokens = {
            "q": tokens(1, heads, dim), "k": tokens(2, heads, dim), "v": tokens(3, states, dim), "g": tokens(4, states) - 2,
            "beta": tokens(5, states),
        }  # fmt: skip
        self.pool = random(count + 2, states, dim, dim, seed=6) * (1.0 if case.is_weak else 0.1)  # a slot on either side
        bounds = (-9, -5) if case.is_weak else (-2, 1)
        flags = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel", "state_v_first")
        self.options: dict[str, Any] = {
            "A_log": torch.linspace(*bounds, states, device=device), "dt_bias": torch.zeros(states, device=device),
            "state_indices": self.slots, "output_final_state": True, **dict.fromkeys(flags, True),
        }  # fmt: skip
        self.weight = random(states * dim, 4, seed=7).to(dtype)
        self.windows = random(count + 2, 3, states * dim, seed=8).to(dtype).mT
        self._rows: dict[int, Tensor] = {}
        self._offsets: dict[int | None, Tensor] = {}

    def rows(self, rank: int) -> Tensor:
        """Places of a rank's tokens. Made once: a copy from the host's memory waits for the device."""
        if rank in self._rows:
            return self._rows[rank]
        found, start = [], 0
        for parts in self.case.lengths:
            first = start + sum(parts[:rank])
            found += range(first, first + parts[rank])
            start += sum(parts)
        self._rows[rank] = torch.tensor(found, dtype=torch.int64, device=self.device)
        return self._rows[rank]

    def offsets(self, rank: int | None = None) -> Tensor:
        """Offsets of a rank's tokens; None = of all."""
        if rank not in self._offsets:
            lengths = self.totals if rank is None else [parts[rank] for parts in self.case.lengths]
            self._offsets[rank] = torch.tensor([0, *lengths], device=self.device).cumsum(0).int()
        return self._offsets[rank]

    def num_segments(self, rank: int) -> int:
        q, v, (_, heads) = self.tokens["q"], self.tokens["v"], self.case.heads
        tokens = int(self.offsets(rank)[-1])
        shape = (len(self.totals), q.shape[2], q.shape[2], heads, q.shape[3], v.shape[3])
        with segmented(self.case):
            return composition.num_segments(checks.Sizes(1, tokens, *shape))

    def chunk(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """o and the pool, of one process that has all tokens."""
        pool = self.pool.clone()
        given = {**self.tokens, **self.options, **changes}
        o, _ = gdn.chunk_gated_delta_rule(**given, initial_state=pool, cu_seqlens=self.offsets())
        return o, pool

    def exact(self) -> tuple[Tensor, Tensor]:
        """o and the pool in float64."""
        return self.chunk(**{name: x.double() for name, x in self.tokens.items()}, backend="reference")

    def chunk_on(self, group: Any, **changes: Any) -> tuple[Tensor, Tensor]:
        """o of a rank's tokens, and its pool."""
        rows, pool = self.rows(group.rank()), self.pool.clone()
        mine = {**{name: x[:, rows] for name, x in self.tokens.items()}, **self.options, **changes}
        with segmented(self.case):
            o, state = gdn.distributed.chunk_gated_delta_rule(
                **mine, initial_state=pool, cu_seqlens=self.offsets(group.rank()), group=group, final_rank=None
            )
        assert state is pool
        return o, pool

    def conv(self) -> tuple[Tensor, Tensor]:
        """y and the windows, of one process that has all tokens."""
        x, windows = self.tokens["v"].flatten(2)[0], self.windows.clone()
        pooled: dict[str, Any] = {"conv_states": windows, "cache_indices": self.slots}
        return gdn.causal_conv1d_fn(x, self.weight, **pooled, query_start_loc=self.offsets()), windows

    def conv_on(self, group: Any) -> tuple[Tensor, Tensor]:
        """y of a rank's tokens, and its windows."""
        x, windows, rank = self.tokens["v"].flatten(2)[0], self.windows.clone(), group.rank()
        pooled: dict[str, Any] = {"conv_states": windows, "cache_indices": self.slots}
        y = gdn.distributed.causal_conv1d_fn(
            x[self.rows(rank)], self.weight, **pooled, query_start_loc=self.offsets(rank), group=group, final_rank=None
        )
        return y, windows


@contextmanager
def wrong_transitions() -> Iterator[None]:
    """Makes ranks compose states with every P transposed: what tests must find."""
    right = composition.Part.summaries

    def wrong(self: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        h, P = right(self, *arguments)
        return h, P.mT.contiguous()

    with mock.patch.object(composition.Part, "summaries", wrong):
        yield


def token_error(found: Tensor, wanted: Tensor) -> float:
    """Largest relative error of a head, over all tokens [1, T, heads, D]."""
    return compare.error(found[0].transpose(0, 1), wanted[0].transpose(0, 1), groups=1).l2


def state_error(found: Tensor, wanted: Tensor) -> float:
    """Largest relative error of a head of a slot [slots, heads, D, D]."""
    return compare.error(found, wanted, groups=2).l2
