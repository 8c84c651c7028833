"""Tables of mbarriers: who arrives, how often, who waits. A kernel initialises its barriers from its table, a simulation of its
roles reads the same table, and DESIGN.md shows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MOST_ARRIVALS = (1 << 20) - 1  # of an mbarrier


@dataclass(frozen=True)
class Arrivals:
    """Arrivals of one role on a barrier, in each of its phases."""

    role: str
    per: str  # "thread", "warp" (one lane of each) or "role" (one lane)
    blocks: int = 1  # blocks of the cluster in which the role arrives
    what: str = ""  # what has happened by then

    def count(self, warps: int) -> int:
        return {"thread": 32 * warps, "warp": warps, "role": 1}[self.per] * self.blocks


@dataclass(frozen=True)
class Barrier:
    name: str  # field of the block's shared memory
    stages: int  # number of barriers
    arrivals: tuple[Arrivals, ...]
    waits: tuple[str, ...]  # roles
    # Arrivals instead of these on the barriers whose buffer another block of the cluster fills: all whose number is not the
    # block's rank.
    from_peer: tuple[Arrivals, ...] = ()


class BarrierTable:
    """The barriers of a block. warps: of each role."""

    def __init__(self, warps: Mapping[str, int], barriers: Sequence[Barrier]) -> None:
        self.warps, self.barriers = dict(warps), {barrier.name: barrier for barrier in barriers}
        for barrier in barriers:
            for role in (*barrier.waits, *(one.role for one in barrier.arrivals + barrier.from_peer)):
                if role not in self.warps:
                    raise ValueError(f"{barrier.name}: expected one of the roles {', '.join(self.warps)}, got {role!r}")
            for arrivals in filter(None, (barrier.arrivals, barrier.from_peer)):
                if not 0 < self._sum(arrivals) <= _MOST_ARRIVALS:
                    raise ValueError(f"{barrier.name}: expected 1 to {_MOST_ARRIVALS} arrivals, got {self._sum(arrivals)}")
        if len(self.barriers) != len(barriers):
            raise ValueError("barriers: expected one entry a name")

    def _sum(self, arrivals: Sequence[Arrivals]) -> int:
        return sum(one.count(self.warps[one.role]) for one in arrivals)

    def count(self, name: str, is_from_peer: bool = False) -> int:
        """Arrivals that end a phase."""
        barrier = self.barriers[name]
        return self._sum(barrier.from_peer if is_from_peer and barrier.from_peer else barrier.arrivals)

    def __str__(self) -> str:
        def text(arrivals: Sequence[Arrivals]) -> str:
            counted = [(one, f"{one.count(self.warps[one.role])} {one.role}") for one in arrivals]
            return "; ".join(f"{count}: {one.what}" if one.what else count for one, count in counted)

        lines = [f"{'barrier':<20}{'arrivals':<52}waits"]
        for barrier in self.barriers.values():
            name = f"{barrier.name}[{barrier.stages}]"
            lines.append(f"{name:<20}{text(barrier.arrivals):<52}{', '.join(barrier.waits)}".rstrip())
            if barrier.from_peer:
                lines.append(f"{'':<20}{'or ' + text(barrier.from_peer):<52}".rstrip())
        return "\n".join(lines)
