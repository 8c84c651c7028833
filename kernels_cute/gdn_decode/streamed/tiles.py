"""A tile of a state in shared memory: 32 columns of V, K contiguous."""

from typing import Any, NamedTuple

from kernels_cute.common import ptx
from kernels_cute.gdn_decode.streamed.spec import Spec


class Tile(NamedTuple):
    """All Int32."""

    head: Any  # value head, of those of the key head
    first: Any  # first column in the head
    address: Any  # of its stage


def load_state(spec: Spec, address: Any) -> list[Any]:
    """The values of an access, float32."""
    if spec.vector == 4:
        return list(ptx.load_four(address))
    return [value for word in ptx.load_words(address) for value in ptx.unpack(spec.state_dtype, word)]
