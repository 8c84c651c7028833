"""Calls of the fused decode step with a ring: those of `test_gdn_decode`, on sequences at any position (`replay.Member`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gdn.ops.delta_rule.problem import entry_width
from tests.gpu.framed import states, windows
from tests.gpu.replay import Member, Scene
from tests.gpu.test_gdn_decode import NULL, Case, make

Tensor = torch.Tensor


@dataclass(frozen=True)
class Step:
    """A call. Its fourth sequence is padding, as in every call of `test_gdn_decode`."""

    members: Sequence[Member]
    case: Case = Case()
    rows: int = 16
    fold_every: int = 15
    phase: int = 0
    has_drafts: bool = False  # num_accepted_tokens is given
    has_offsets: bool = True
    rounding_seed: int | None = None

    @property
    def sized(self) -> Case:
        """The case with the lengths of the sequences."""
        offsets = self.case.offsets_dtype or torch.int32
        lengths = tuple(member.tokens for member in self.members)
        return replace(self.case, lengths=lengths, spec=None, offsets_dtype=offsets if self.has_offsets else None)

    @property
    def scene(self) -> Scene:
        """The same sequences as the recurrent operator has them: which entries are live, and what folds."""
        (H, HV), fields = self.case.heads, {"rows": self.rows, "fold_every": self.fold_every, "phase": self.phase}
        return Scene(self.members, (H, H, HV), self.case.dims, has_drafts=self.has_drafts, **fields)  # type: ignore[arg-type]

    def arguments(self, device: torch.device) -> tuple[dict[str, Any], list[int]]:
        """Arguments of the operator, and its rows of padding; NaN, or counts out of range, where nothing is to be read."""
        case, scene = self.sized, self.scene
        arguments, ignored = make(case, torch.device("cpu"))
        draw = torch.Generator().manual_seed(1)
        (H, HV), (K, V) = case.heads, case.dims
        most = (self.rows + 1 - self.fold_every) // 2 if self.has_drafts else 1
        slots = arguments["state_indices"].tolist()
        size = max(slots) + 3  # the last one has no ring
        cpu = torch.device("cpu")
        conv = windows(size, case.channels, case.width - 2 + most, case.order, case.conv_dtype, cpu)
        pool = states(case, size, cpu)
        row = entry_width(H, HV, K, V)
        ring = torch.full((size - 1, self.rows, -(-row // 4) * 4 + 8), torch.nan)
        counts, computed = torch.full((size,), -(2**31), dtype=torch.int32), []
        for n, (slot, member) in enumerate(zip(slots, self.members, strict=True)):
            assert (slot == NULL) == member.is_null, "the fourth sequence is padding, and no other"
            computed.append(-(2**31) if member.is_null else member.p)
            if member.is_null or member.tokens == 0:
                ignored += [] if member.is_null else list(range(case.starts()[n], case.starts()[n + 1]))
                continue
            given = torch.randn(case.channels, case.width - 1, generator=draw)
            conv[slot, :, member.a - 1 : member.a - 2 + case.width] = given.to(case.dtype).to(case.conv_dtype)
            pool[slot] = torch.randn(pool.shape[1:], generator=draw).to(case.state_dtype)
            counts[slot] = member.p0
            for position in range(scene.first_live(member), member.p):
                keys = torch.nn.functional.normalize(torch.randn(H, K, generator=draw), dim=-1).flatten()
                entry = [keys, torch.randn(HV * V, generator=draw), -torch.randn(HV, generator=draw).exp() / 8]
                ring[slot, position % self.rows, :row] = torch.cat(entry)
        arguments |= {
            "conv_state": conv, "ssm_state": pool, "ring": ring, "state_tokens": counts, "fold_every": self.fold_every,
            "fold_phase": self.phase, "num_computed_tokens": torch.tensor(computed, dtype=torch.int32),
        }  # fmt: skip
        if self.has_drafts:
            accepted = [-7 if member.is_null else member.a for member in self.members]
            arguments["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
        if self.rounding_seed is not None:
            arguments["rounding_seed"] = torch.tensor([self.rounding_seed])
        return {name: moved(value, device) for name, value in arguments.items()}, ignored

    def written(self, slots: Sequence[int], shape: Sequence[int]) -> tuple[list[int], Tensor]:
        """Slots whose state a call writes, and a mask of the elements of the ring that it writes."""
        (H, HV), (K, V), scene = self.case.heads, self.case.dims, self.scene
        ring, row, folded = torch.zeros(*shape, dtype=torch.bool), entry_width(H, HV, K, V), []
        for slot, member in zip(slots, self.members, strict=True):
            if slot != NULL and member.tokens:
                folded += [slot] if scene.folds(member) else []
                for i in range(member.tokens):
                    ring[slot, (member.p + i) % self.rows, :row] = True
        return folded, ring


def moved(value: Any, device: torch.device) -> Any:
    """A tensor on the device with all the memory that it is part of; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    memory = torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0).to(device)
    return torch.as_strided(memory, value.shape, value.stride(), value.storage_offset())
