"""A tile of a state in shared memory: 32 columns of V, K contiguous. Eight lanes, a team, share a column; four teams a warp."""

from typing import Any, NamedTuple

from kernels_cute.common import ptx
from kernels_cute.common.ring import TEAM
from kernels_cute.gdn_decode.streamed.sizes import DIM
from kernels_cute.gdn_decode.streamed.spec import Spec

TEAMS = 32 // TEAM  # columns that a warp reads at once
PER_LANE = DIM // TEAM  # K entries of a lane


class Tile(NamedTuple):
    """All Int32."""

    head: Any  # value head, of those of the key head
    first: Any  # first column in the head
    address: Any  # of its stage


def entry_at(spec: Spec, part: Any, entry: int) -> Any:
    """K of a lane's entry: in runs as long as an access of the state. part: the lane in its team."""
    return (entry // spec.vector * TEAM + part) * spec.vector + entry % spec.vector


def state_values(spec: Spec, tile: Tile, column: Any, part: Any) -> list[Any]:
    """The lane's entries of a column, float32."""
    row, found = tile.address + column * (DIM * spec.state_dtype.width // 8), []
    for first in range(0, PER_LANE, spec.vector):
        address = row + entry_at(spec, part, first) * (spec.state_dtype.width // 8)
        if spec.vector == 4:
            found += ptx.load_four(address)
        else:
            found += [value for word in ptx.load_words(address) for value in ptx.unpack(spec.state_dtype, word)]
    return found
